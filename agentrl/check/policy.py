"""Policies that stand where an engine does."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import anyio

from agentrl.chat import Chat
from agentrl.check.script import Script
from agentrl.engine.hold import Hold
from agentrl.engine.wire import FinishReason, Generation, SamplingParams
from agentrl.errors import ModelFailure
from agentrl.rollout.context import Generator

VERSION = "0"


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn: the ids that the model was given, and those that it wrote."""

    given: list[int]
    wrote: list[int]


@dataclass(frozen=True, slots=True)
class Asked:
    """What a policy is asked: the ids of `turn` (from 1) behind the prompt `given`, at most `most` of them."""

    session: str
    turn: int
    given: Sequence[int]
    most: int | None


class Policy(Generator):
    """Answers turn by turn with text, as token ids with log-probs.

    Attributes:
        asked: the turns so far, by session.
        since: when it last answered (`time.monotonic`); later than anything while it writes.
        waiting: set when it was asked for the turn that it never answers.
    """

    def __init__(self, chat: Chat) -> None:
        self.chat, self._held = chat, Hold()
        self.asked: dict[str, list[Exchange]] = {}
        self.since = time.monotonic()
        self.waiting, self.answered = anyio.Event(), anyio.Event()

    @property
    def held(self) -> Hold:
        return self._held

    async def hold(self) -> None:
        self._held.close(between_rollouts=True)

    async def release(self) -> None:
        self._held.open()

    async def write(self, asked: Asked) -> tuple[list[int], bool]:
        """The ids of a turn, and whether it ended by itself."""
        raise NotImplementedError

    def ids(self, text: str, *, ended: bool) -> tuple[list[int], bool]:
        """A text as an answer of `write`; with an end token if it ended by itself."""
        return [*self.chat.encode(text), *(self.chat.stop_token_ids[:1] if ended else ())], ended

    async def generate(
        self, input_ids: Sequence[int], params: SamplingParams, *, session_id: str | None = None
    ) -> Generation:
        exchanges = self.asked.setdefault(session_id or "", [])
        self.since = math.inf
        asked = Asked(session_id or "", len(exchanges) + 1, input_ids, params.max_new_tokens)
        ids, ended = await self.write(asked)
        if not ids or len(ids) > (params.max_new_tokens or len(ids)):
            ids, ended = ids[: params.max_new_tokens] or [0], False
        exchanges.append(Exchange(list(input_ids), ids))
        self.since = time.monotonic()
        self.answered.set()
        return Generation(
            ids=list(ids),
            log_probs=[-1.0] * len(ids),
            text=self.chat.decode(ids, skip_special_tokens=True),
            finish_reason=FinishReason("stop", ids[-1]) if ended else FinishReason("length"),
            weight_version=VERSION,
            weight_versions=((VERSION, 0, len(ids)),),
            prompt_tokens=len(input_ids),
            cached_tokens=0,
            meta_info={},
        )


class Scripted(Policy):
    """Writes what a script says."""

    def __init__(self, chat: Chat, script: Script) -> None:
        super().__init__(chat)
        self.script = script

    async def write(self, asked: Asked) -> tuple[list[int], bool]:
        script, turn = self.script, asked.turn
        if turn == script.waits:
            self.waiting.set()
            await anyio.sleep_forever()
        if turn == script.holds:
            await self.hold()
            await anyio.sleep(0.01)
            await self.release()
        return self.ids(script.turns[min(turn, len(script.turns)) - 1], ended=not script.cut)


class Recorded(Policy):
    """Writes what trajectories of a group have in store, by the samples' `index`.

    Args:
        turns: the ids of each turn, and whether the last one ended by itself.
    """

    def __init__(self, chat: Chat, turns: Mapping[int, tuple[Sequence[list[int]], bool]]) -> None:
        super().__init__(chat)
        self._turns = {str(index): told for index, told in turns.items()}

    async def write(self, asked: Asked) -> tuple[list[int], bool]:
        turns, ended = self._turns[asked.session.split("-")[1]]
        if asked.turn > len(turns):
            raise ModelFailure(f"it ended with turn {len(turns)} then, and would go on now", kind="no_turn")
        return turns[asked.turn - 1], ended or asked.turn < len(turns)
