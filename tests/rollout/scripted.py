"""A scripted engine for fault injection: it answers with prepared texts, failures or delays, and counts calls.

Only failures that a real engine produces unpredictably are scripted; the rest of the tests use a real server.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Any

import anyio

from agentrl import Environment
from agentrl.chat import Chat
from agentrl.engine.pause import PauseGate
from agentrl.engine.transport import Sink
from agentrl.engine.wire import FinishReason, Generation, SamplingParams
from agentrl.envs import Environments
from agentrl.groups import GroupStore, Kept
from agentrl.rollout.context import RolloutContext, Scorer
from agentrl.rollout.coordinator import Rollout, RolloutCoordinator
from agentrl.rollout.filters import GroupFilter, named_filter
from agentrl.rollout.functions import GenerateFunction, RewardFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import RolloutSettings
from agentrl.rollout.worker import RolloutWorker
from agentrl.sample import Sample

END = "<|im_end|>"

Reply = str | Exception | Callable[[], Any]
Replies = Sequence[Reply] | Callable[[str], Sequence[Reply]]
UserFunction = Callable[..., object]


class ScriptedEngine:
    """Answers the n-th request of a session with the n-th reply (the last one repeats)."""

    def __init__(self, chat: Chat, replies: Replies) -> None:
        self.chat, self.replies = chat, replies
        self.calls: list[tuple[str, list[int]]] = []
        self.turns: dict[str, int] = {}
        self.cancelled = self.tokens = self.version = 0
        self.pause_gate = PauseGate()

    async def pause(self) -> None:
        self.pause_gate.close(between_rollouts=True)

    async def resume(self) -> None:
        self.pause_gate.open()

    def updated(self, version: int) -> None:
        self.version = version

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        images: Any = None,
        deadline: float | None = None,
        sink: Sink = None,
    ) -> Generation:
        key = session_id or ""
        self.calls.append((key, list(input_ids)))
        turn = self.turns.get(key, 0)
        self.turns[key] = turn + 1
        replies = self.replies(key) if callable(self.replies) else self.replies
        reply = replies[min(turn, len(replies) - 1)]
        if isinstance(reply, Exception):
            raise reply
        if callable(reply):
            try:
                reply = await reply()
            except anyio.get_cancelled_exc_class():
                self.cancelled += 1
                raise
        ids = self.chat.encode(reply)
        finish = FinishReason("stop", ids[-1])
        if len(ids) > (params.max_new_tokens or len(ids)):
            ids, finish = ids[: params.max_new_tokens], FinishReason("length")
        self.tokens += len(ids)
        version = "3"
        return Generation(
            ids=ids,
            log_probs=[-0.25] * len(ids),
            text=reply,
            finish_reason=finish,
            weight_version=version,
            weight_versions=((version, 0, len(ids)),),
            prompt_tokens=len(input_ids),
            cached_tokens=0,
            meta_info={},
        )


def make_context(
    chat: Chat, engine: ScriptedEngine, environment: Any = None, context_length: int = 2048, **settings: Any
) -> RolloutContext:
    from agentrl.config import Args

    own = RolloutSettings(**settings)
    args = Args({**own.model_dump(), "prompt_data": None})
    environments = Environments.alone(environment, args) if environment else None
    return RolloutContext(own, args, chat, engine, context_length, environments)


class Store:
    """An in-memory store that records what became of every group (the real ledger has its own tests)."""

    def __init__(self, groups: int = 1000, size: int = 2) -> None:
        self.left, self.size, self.next = groups, size, 0
        self.fate: dict[int, str] = {}
        self.released: dict[int, str] = {}
        self.completed: dict[int, list[Sample]] = {}
        self.rewards: dict[int, Sequence[float]] = {}
        self.versions: dict[int, int] = {}
        self.leases: list[int] = []
        self.batches: dict[int, list[int]] = {}

    def lease(self, n: int, version: int) -> list[list[Sample]]:
        given = [at for at, fate in self.fate.items() if fate == "released"][:n]
        while len(given) < n and self.left:
            given.append(self.next)
            self.next, self.left = self.next + 1, self.left - 1
        for at in given:
            self.fate[at], self.versions[at] = "leased", version
            self.leases.append(version)
        return [
            [Sample(group_index=at, index=at * self.size + i, prompt=f"q{at}") for i in range(self.size)]
            for at in given
        ]

    def insert_external(self, groups: Sequence[list[Sample]], version: int) -> list[int]:
        raise NotImplementedError

    def complete(
        self, group_id: int, samples: Sequence[Sample], data: bytes | None = None, rewards: Sequence[float] = ()
    ) -> None:
        self.fate[group_id] = "completed"
        self.completed[group_id], self.rewards[group_id] = list(samples), rewards

    def drop(self, group_id: int, reason: str, samples: Sequence[Sample] = (), rewards: Sequence[float] = ()) -> None:
        self.fate[group_id], self.rewards[group_id] = f"dropped:{reason}", rewards

    def release(self, group_id: int, reason: str) -> None:
        self.fate[group_id], self.released[group_id] = "released", reason

    def kept(self, step: int) -> Kept:
        free = self._free()
        tokens = sum(sample.trained_tokens for at in free for sample in self.completed[at])
        return Kept(Counter(self.versions[at] for at in free), tokens)

    def expire(self, oldest: int, reason: str, again: bool) -> Kept:
        expired, tokens = [at for at in self._free() if self.versions[at] < oldest], 0
        for at in expired:
            tokens += sum(sample.trained_tokens for sample in self.completed.pop(at))
            self.fate[at] = "released" if again else f"dropped:{reason}"
        return Kept(Counter(self.versions[at] for at in expired), tokens)

    def next_batch(self, n: int, step: int) -> list[list[Sample]]:
        if step not in self.batches:
            self.batches[step] = sorted(self._free(), key=lambda at: self.versions[at])[:n]
        return [self.completed[at] for at in self.batches[step]]

    def _free(self) -> list[int]:
        taken = {at for batch in self.batches.values() for at in batch}
        return [at for at in self.completed if at not in taken]


_store: type[GroupStore] = Store


@dataclass
class OneBatch:
    """A coordinator for one batch at a time, with a worker in this process."""

    player: GroupPlayer
    store: Store
    group_filter: GroupFilter | None = None

    def running(self, store: GroupStore | None = None) -> AbstractAsyncContextManager[RolloutCoordinator]:
        name = "" if self.group_filter is None else named_filter(self.group_filter)
        worker = RolloutWorker(self.player, self.group_filter)
        return RolloutCoordinator.running(worker, store or self.store, self.player.context.settings, name)

    async def run(self, step: int) -> Rollout:
        async with self.running() as coordinator:
            return await coordinator.batch(step)


class EchoEnv(Environment):
    async def reward(self, sample: Sample) -> float:
        return float((sample.index or 0) % 2)


def build(
    chat: Chat,
    replies: Replies,
    *,
    environment: type[Environment] | None = EchoEnv,
    generate: UserFunction | None = None,
    reward: UserFunction | None = None,
    group_filter: Callable[[Any, list[Sample]], Any] | None = None,
    store: Store | None = None,
    teacher: Scorer | None = None,
    **settings: Any,
) -> tuple[OneBatch, ScriptedEngine]:
    settings = {"rollout_batch_size": 3, "n_samples_per_prompt": 2, **settings}
    engine = ScriptedEngine(chat, replies)
    context = replace(make_context(chat, engine, environment, **settings), teacher=teacher)
    function = None if generate is None else GenerateFunction.of(generate, "my generate")
    grading = None if reward is None else RewardFunction.of(reward, "my reward", group=context.settings.group_rm)
    player = GroupPlayer(context, Grader(context.settings, context.args, grading), function)
    return OneBatch(player, store or Store(), group_filter), engine
