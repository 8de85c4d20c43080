"""Everything that generating needs in one process: chat, client, environment, data, ledger and loop.

Used inside the rollout worker's actor, and directly by `agentrl rollout` and `agentrl eval`, which need no Ray.
"""

from collections.abc import Awaitable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from anyio import to_thread

from agentrl.buffer.dump import save_rollout
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.queue import GroupQueue
from agentrl.buffer.states import Recovery
from agentrl.config import RunSettings
from agentrl.config.model_info import read_model_info
from agentrl.data.user_source import load_source
from agentrl.engine import EngineClient
from agentrl.envs import Environment
from agentrl.errors import EnvFailure, SettingsError
from agentrl.rm_hub import GraderRunner
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.evaluate import EvalResult, evaluate
from agentrl.rollout.failures import guarded
from agentrl.rollout.loop import RolloutLoop, RolloutResult, TrajectoryRunner
from agentrl.rollout.rewards import Grader
from agentrl.run.evalsets import EvalSet, eval_sets
from agentrl.run.preflight import Plugins, load_chat


class RolloutSession:
    """Open with `open`, close with `close`; in between `rollout` and `evaluate`."""

    def __init__(self, settings: RunSettings, run_folder: Path, engine_urls: Sequence[str]) -> None:
        self.settings, self.run_folder, self.engine_urls = settings, run_folder, engine_urls
        self._stack = AsyncExitStack()
        self.client: EngineClient
        self.feed: GroupQueue
        self.runner: TrajectoryRunner
        self._evals: list[EvalSet] = []

    async def open(self) -> None:
        """Load the chat template, open the data and the ledger, connect to the engines, set up the environment."""
        s, args = self.settings, self.settings.args
        rollout = s.rollout
        chat, self._plugins = load_chat(s), Plugins.load(rollout)
        environment = self._plugins.environment
        self._evals = eval_sets(s)
        self.client = await self._stack.enter_async_context(EngineClient(self.engine_urls, s.engine))
        length = rollout.rollout_max_context_len or await self._engine_context_length()
        context = RolloutContext(rollout, args, chat, self.client, length, environment)
        graders = await self._stack.enter_async_context(
            GraderRunner(s.rm_hub, preload=[rollout.rm_type] if rollout.rm_type else [])
        )
        grader = Grader(rollout, args, self._plugins.reward, graders)
        self.runner = TrajectoryRunner(context, grader, self._plugins.generate)
        if environment is not None:
            for source in environment.tool_sources():
                self._stack.push_async_callback(source.close)
                await self._hook(environment, source.open(), "tools")
            await self._hook(environment, environment.setup(args), "setup")
            self._stack.push_async_callback(self._teardown, environment)

    async def _teardown(self, environment: type[Environment]) -> None:
        await self._hook(environment, environment.teardown(), "teardown")

    async def _hook(self, environment: type[Environment], call: Awaitable[None], name: str) -> None:
        what, timeout = f"{environment.__name__}.{name}", self.settings.cluster.start_timeout
        await guarded(call, what=what, timeout=timeout, failure=EnvFailure)

    async def _engine_context_length(self) -> int:
        """The least of what the engines, the settings and the model's config say."""
        said = [info.get("context_length") for info in await self.client.server_info()]
        model = read_model_info(self.settings.train.hf_checkpoint)
        said += [self.settings.engine.engine_context_length, model.context_length if model else None]
        known = [length for length in said if isinstance(length, int) and length > 0]
        if not known:
            raise SettingsError("neither engine nor model says its context length; set --rollout-max-context-len")
        return min(known)

    def open_feed(self, checkpoint_step: int | None) -> Recovery:
        """Open data and ledger, and put the ledger back to what the loaded checkpoint proves.

        Args:
            checkpoint_step: the last rollout that the checkpoint covers; None for a fresh start.
        """
        ledger = self._stack.enter_context(
            Ledger(self.run_folder / "ledger.sqlite", keep=self.settings.buffer.ledger_keep)
        )
        self.feed = GroupQueue(load_source(self.settings.data, self.settings.args), ledger, checkpoint_step)
        self._loop = RolloutLoop(self.runner, self.feed, self._plugins.group_filter)
        return self.feed.recovery

    async def rollout(self, rollout_id: int) -> RolloutResult:
        """Generate one rollout, groups of an earlier life included, and dump it if asked to."""
        count = self.settings.rollout.rollout_batch_size
        done = await to_thread.run_sync(self.feed.next_batch, count, rollout_id)
        result = await self._loop.run(rollout_id, done=done)
        result.groups = await to_thread.run_sync(self.feed.next_batch, count, rollout_id)
        if template := self.settings.observability.save_debug_rollout_data:
            save_rollout(template, rollout_id, result.groups)
        return result

    async def evaluate(self, step: int) -> dict[str, float]:
        """Evaluate on every set; the samples go to `<run>/eval/<set>/<step>.jsonl`."""
        metrics: dict[str, float] = {}
        for held_out in self._evals:
            result: EvalResult = await evaluate(self.runner, held_out.name, held_out.groups())
            save_rollout(str(self.run_folder / "eval" / held_out.name), step, result.groups)
            metrics.update({f"eval/{held_out.name}/{name}": value for name, value in result.metrics.items()})
        return metrics

    async def close(self) -> None:
        """Close what `open` opened."""
        await self._stack.aclose()
