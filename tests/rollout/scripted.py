"""A scripted engine for fault injection: it answers with prepared texts, failures or delays, and counts calls.

Only failures that a real engine produces at its own pleasure are scripted; the rest of the tests use a real server.
"""

from collections.abc import Callable, Sequence
from typing import Any

import anyio

from agentrl.chat import Chat
from agentrl.engine.wire import FinishReason, Generation, SamplingParams
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.settings import RolloutSettings

Reply = str | Exception | Callable[[], Any]


class ScriptedEngine:
    """Answers the n-th request of a session with the n-th reply (the last one repeats)."""

    def __init__(self, chat: Chat, replies: Sequence[Reply] | Callable[[str], Sequence[Reply]]) -> None:
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
