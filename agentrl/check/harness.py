"""The setup that plays episodes: a run's own agent loop, environment and graders, without an engine."""

import asyncio
import gc
import inspect
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import anyio

import agentrl
from agentrl.chat import Chat
from agentrl.check.policy import Policy
from agentrl.clock import library
from agentrl.config import RunSettings
from agentrl.config.model_info import read_model_info
from agentrl.data.prompts import PromptRow
from agentrl.data.source import number_group
from agentrl.data.user_source import load_source
from agentrl.envs import ALONE, Environment, EnvSpec
from agentrl.envs.load import SCHEMES
from agentrl.errors import AgentRLError, Blame, SettingsError
from agentrl.groups import Group
from agentrl.rm_hub import GraderRunner
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.environment import set_up
from agentrl.rollout.functions import RewardFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import UNGRADED, Grader
from agentrl.rollout.settings import FailureAction, RolloutSettings
from agentrl.run.preflight import FirstRows, Plugins, check_graded
from agentrl.sample import Sample

_ROWS, _DRAWN = 3, 64
_ROOM = 1 << 20  # context length if neither settings nor model give it
_STOPPING = 2.0  # seconds within which a cancelled episode must end


@dataclass(slots=True)
class Episode:
    """One group that was played, and its end."""

    name: str  # what the policy did
    policy: Policy
    samples: Group = field(default_factory=list)  # the finished samples; their failures are in `metadata["failure"]`
    error: AgentRLError | None = None  # an error that ended the whole episode
    stuck: str = ""  # the line at which the episode made no more progress
    lost: str = ""  # the same line, if the episode did not end when it was cancelled

    @property
    def failures(self) -> list[str]:
        """The messages of all failures, as a run reports them."""
        said = [sample.metadata["failure"]["message"] for sample in self.samples if "failure" in sample.metadata]
        said += [sample.metadata["close_failure"] for sample in self.samples if "close_failure" in sample.metadata]
        return [*said, *([str(self.error)] if self.error else [])]


@dataclass(frozen=True)
class Harness:
    """The setup that plays episodes; made by `opened`."""

    settings: RunSettings
    chat: Chat
    plugins: Plugins
    grader: Grader
    kind: type[Environment] | None  # the environment's class; None if a generate function plays
    path: str  # its name in `--env`
    rows: Sequence[Sample]  # samples to play, each the first of its group
    made_up: bool  # true if the settings name no prompts, and `rows` are invented
    ungraded: str  # the reason why nothing grades, and every reward is 0; "" if something does
    patience: float  # seconds that environment and grader may take between two turns

    @classmethod
    @asynccontextmanager
    async def opened(
        cls, settings: RunSettings, chat: Chat, patience: float, given: Sequence[Sample] = (), most: int | None = None
    ) -> "AsyncIterator[list[Harness]]":
        """Load the user's code, start graders and set up; yield a harness for each environment. `given`: samples to
        play; default: the first prompts. `most`: maximum rows of each environment; default: a few."""
        plugins, rollout, stages = Plugins.load(settings), settings.rollout, []
        several = isinstance(settings.rollout.env, dict)  # the rows of one may come late in the data
        drawn, made_up = (list(given), False) if given else first_rows(settings, 500 if several else most)
        async with AsyncExitStack() as stack:
            graders = await stack.enter_async_context(GraderRunner(settings.rm_hub))
            entries: Mapping[str, EnvSpec] = plugins.environments or {}
            await stack.enter_async_context(set_up(list(entries.values()), settings.cluster.start_timeout))
            for name in entries if plugins.generate is None else [ALONE]:
                own = [sample for sample in drawn if name == ALONE or sample.metadata.get("env") == name]
                path = rollout.env[name] if isinstance(rollout.env, dict) else rollout.env or "agentrl:Environment"
                rows = own[: most or _ROWS] or [replace(_invented(path), metadata={"env": name})]
                ungraded = ""
                try:
                    row = PromptRow(0, rows[0].prompt, rows[0].label, rows[0].metadata)
                    check_graded(settings, FirstRows(plugins, {name: row}))
                except SettingsError as error:
                    ungraded = str(error)
                reward = RewardFunction.load(UNGRADED, group=False) if ungraded else plugins.reward
                grader = Grader(rollout, settings.args, reward, graders)
                kind = entries[name].kind if plugins.generate is None else None
                shown = (made_up or not own) and bool(rows[0].prompt)
                stages.append(cls(settings, chat, plugins, grader, kind, path, rows, shown, ungraded, patience))
            yield stages

    @property
    def tools(self) -> list[dict[str, Any]]:
        """Schemas of the tools that the policy may call on the first row."""
        own = [tool.schema for tool in self.kind.declared_tools()] if self.kind else []
        return own or self.rows[0].metadata.get("tools") or []

    @property
    def user(self) -> str:
        generate = self.plugins.generate
        return generate.name if generate else self.kind.__name__ if self.kind else "the environment"

    def player(self, policy: Policy, *, evaluation: bool = False) -> GroupPlayer:
        """Return a group player for one policy, which keeps failed samples instead of retries or an error."""
        rollout, kept = self.settings.rollout, dict.fromkeys(Blame, FailureAction.KEEP_MASKED)
        lengths = [f"max_{what}_len" for what in ("prompt", "context") if evaluation]
        own = {f"rollout_{n}": most for n in lengths if (most := getattr(rollout, f"eval_{n}")) is not None}
        rollout = rollout.model_copy(update={"failure_policy": kept, **own})
        room = context_room(rollout, self.settings.train.hf_checkpoint, _ROOM)
        context = RolloutContext(rollout, self.settings.args, self.chat, policy, room, self.plugins.environments)
        return GroupPlayer(context, replace(self.grader, settings=rollout), self.plugins.generate)

    async def play(self, name: str, policy: Policy, row: int = 0, size: int = 1, cancelled: str = "") -> Episode:
        """Play one group of `size` samples of a row. `cancelled`: cancel the episode, "waiting": at the turn that the
        policy never answers, "answered": after the policy's first answer."""
        episode, group = Episode(name, policy), number_group([deepcopy(self.rows[row]) for _ in range(size)], row, size)
        player, scope = self.player(policy), anyio.CancelScope()

        async def run() -> None:
            with scope:
                episode.samples = await player.group(group, evaluation=False)

        task = asyncio.create_task(run())
        if cancelled:
            await self._until(task, policy.waiting if cancelled == "waiting" else policy.answered)
            scope.cancel()
        await self._end(episode, task, scope)
        return episode

    async def _until(self, task: "asyncio.Task[None]", event: anyio.Event) -> None:
        """Return when the event is set, the episode has ended, or `patience` seconds have passed."""
        waiter = asyncio.create_task(event.wait())
        await asyncio.wait([task, waiter], timeout=self.patience, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        for _ in range(3):  # lets the episode enter the environment's code
            await asyncio.sleep(0)

    async def _end(self, episode: Episode, task: "asyncio.Task[None]", scope: anyio.CancelScope) -> None:
        """Wait for the episode; cancel it if it makes no progress, and abandon it if it does not end then."""
        began = time.monotonic()
        while not task.done() and not scope.cancel_called:
            if time.monotonic() - max(began, episode.policy.since) > self.patience:
                episode.stuck = users_line() or "what is played"
                scope.cancel()
            else:
                await asyncio.wait([task], timeout=0.05)
        await asyncio.wait([task], timeout=_STOPPING)
        if not task.done():
            episode.lost = users_line() or "what is played"
        elif isinstance(error := task.exception(), AgentRLError):
            episode.error = error
        elif error is not None:
            raise error


def _invented(env: object) -> Sample:
    """Return the sample of a check without data. A library's environment makes the prompt, so this one is empty, as in a run."""
    if isinstance(env, str) and env.partition(":")[0] in SCHEMES:
        return Sample()
    return Sample(prompt=[{"role": "user", "content": "What is 40 plus 2?"}], label="42")


def context_room(rollout: RolloutSettings, checkpoint: str | None, otherwise: int) -> int:
    """Return the context length, less than the model's by one as in a run. `otherwise`: if the model does not give it."""
    model = read_model_info(checkpoint)
    most = (model.context_length if model and model.context_length else otherwise) - 1
    return min(rollout.rollout_max_context_len or most, most)


def first_rows(settings: RunSettings, most: int | None = None) -> tuple[list[Sample], bool]:
    """Return the first prompts of the data, and false; without data an invented or empty one, and true."""
    if settings.data.prompt_data is None and settings.data.data_source_path is None:
        return [_invented(settings.rollout.env)] * (most or 1), True
    source, wanted = load_source(settings.data, settings.args), max(_DRAWN, most or 0)
    return [group[0] for group in source.get_samples(min(wanted, len(source) or wanted))], False


_OWN = str(Path(agentrl.__file__).parent)
_DEMO = str(Path(_OWN, "demo"))


def users_code(where: str) -> bool:
    """Return true if a file is neither Python's nor a package's nor agentrl's own, except the demo's."""
    return not library(where) and (not where.startswith(_OWN) or where.startswith(_DEMO))


def users_line() -> str:
    """Return the user's code that a task awaits or a thread runs, as `FUNCTION, in FUNCTION (FILE:LINE)`; "" if there is
    none. The calling task and thread are left out."""
    current = asyncio.current_task()
    stacks = [_awaited(task) for task in asyncio.all_tasks() if task is not current]
    stacks += [_called(frame) for ident, frame in sys._current_frames().items() if ident != threading.get_ident()]
    for stack in stacks:
        if own := [place for place in stack if users_code(place[0])]:
            file, line, name = own[-1]
            return (f"{own[0][2]}, in " if len(own) > 1 else "") + f"{name} ({file}:{line})"
    return ""


def _awaited(task: "asyncio.Task[Any]") -> list[tuple[str, int, str]]:
    """Return files, lines and functions of the coroutines that a task is in, outermost first."""
    found, at = [], cast(Any, task.get_coro())
    while at is not None:
        if not hasattr(at, "cr_frame"):  # a step of an asynchronous generator does not name the generator
            at = next(filter(inspect.isasyncgen, gc.get_referents(at)), None)
        if (frame := getattr(at, "cr_frame", None) or getattr(at, "ag_frame", None)) is None:
            break
        found.append((frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_qualname))
        at = getattr(at, "cr_await", None) or getattr(at, "ag_await", None)
    return found


def _called(frame: Any) -> list[tuple[str, int, str]]:
    return [(f.f_code.co_filename, line, f.f_code.co_qualname) for f, line in traceback.walk_stack(frame)][::-1]
