"""A scripted engine for fault injection: it answers with prepared texts, failures or delays, and counts calls.

Only failures that a real engine produces at its own pleasure are scripted; the rest of the tests use a real server.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import anyio

from agentrl import Environment
from agentrl.chat import Chat
from agentrl.engine.wire import FinishReason, Generation, SamplingParams
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.filters import GroupFilter
from agentrl.rollout.functions import GenerateFunction, RewardFunction
from agentrl.rollout.group import GroupPlayer, RolloutStats
from agentrl.rollout.rewards import Grader
from agentrl.rollout.runner import RolloutRunner
from agentrl.rollout.settings import RolloutSettings
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
        self.cancelled = 0

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        rid: str | None = None,
        session_id: str | None = None,
        deadline: float | None = None,
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
    return RolloutContext(own, args, chat, engine, context_length, environment)


class Store:
    """An in-memory store that remembers every group's fate (the real ledger has its own tests)."""

    def __init__(self, groups: int = 1000, size: int = 2) -> None:
        self.left, self.size, self.next = groups, size, 0
        self.fate: dict[int, str] = {}
        self.kept: dict[int, Sequence[Sample]] = {}
        self.steps: list[int] = []

    def lease(self, n: int, step: int) -> list[list[Sample]]:
        given = []
        for _ in range(min(n, self.left)):
            at, self.next, self.left = self.next, self.next + 1, self.left - 1
            given.append([Sample(group_index=at, index=at * self.size + i, prompt=f"q{at}") for i in range(self.size)])
            self.fate[at] = "leased"
            self.steps.append(step)
        return given

    def complete(self, group_id: int, samples: Sequence[Sample]) -> None:
        self.fate[group_id] = "completed"
        self.kept[group_id] = samples

    def drop(self, group_id: int, reason: str) -> None:
        self.fate[group_id] = f"dropped:{reason}"

    def release(self, group_id: int, reason: str) -> None:
        self.fate[group_id] = "released"


@dataclass(frozen=True)
class Played:
    """What one fill of a runner left: the kept groups by number, and the counts."""

    groups: list[list[Sample]]
    stats: RolloutStats


@dataclass
class OneBatch:
    """A runner for one batch at a time."""

    player: GroupPlayer
    store: Store
    group_filter: GroupFilter | None = None

    async def run(self, step: int, have: int = 0) -> Played:
        async with RolloutRunner.running(self.player, self.store, self.group_filter) as runner:
            stats = await runner.fill(step, have)
        return Played([list(self.store.kept[number]) for number in sorted(self.store.kept)], stats)


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
    **settings: Any,
) -> tuple[OneBatch, ScriptedEngine]:
    settings = {"rollout_batch_size": 3, "n_samples_per_prompt": 2, **settings}
    engine = ScriptedEngine(chat, replies)
    context = make_context(chat, engine, environment, **settings)
    function = None if generate is None else GenerateFunction.of(generate, "my generate")
    grading = None if reward is None else RewardFunction.of(reward, "my reward", group=context.settings.group_rm)
    player = GroupPlayer(context, Grader(context.settings, context.args, grading), function)
    return OneBatch(player, store or Store(), group_filter), engine
