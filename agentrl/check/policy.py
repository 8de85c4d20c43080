"""Policies that replace an engine: a script, a recording, a person at the terminal, a model behind a server."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import anyio
import click
import httpx

from agentrl.chat import Chat
from agentrl.check.script import Lines, Script, call_of, turn_of
from agentrl.engine.images import ImageInputs
from agentrl.engine.pause import FixedModel, PauseGate
from agentrl.engine.transport import Sink
from agentrl.engine.wire import FinishReason, Generation, SamplingParams
from agentrl.errors import EngineFailure, ModelFailure
from agentrl.rollout.context import Generator

VERSION = "0"
_SECONDS = 300.0  # seconds within which a server must answer


@dataclass(frozen=True, slots=True)
class Exchange:
    """One turn: the ids of the prompt, and the ids that the model wrote."""

    given: list[int]
    wrote: list[int]


class Policy(FixedModel, Generator):
    """Answers turn by turn with text, as token ids with log-probs."""

    def __init__(self, chat: Chat) -> None:
        self.chat, self.pause_gate = chat, PauseGate()
        self.asked: dict[str, list[Exchange]] = {}  # the turns so far, by session
        self.since = time.monotonic()  # time of the last answer; infinite while the policy writes
        # `waiting` is set at the turn that the policy never answers.
        self.waiting, self.answered = anyio.Event(), anyio.Event()

    async def write(self, session: str, turn: int, given: Sequence[int], most: int | None) -> tuple[list[int], bool]:
        """Return at most `most` ids of `turn` (from 1) after the prompt `given`; and false if they are truncated."""
        raise NotImplementedError

    def ids(self, text: str, *, ended: bool) -> tuple[list[int], bool]:
        """Return a text as a result of `write`, with an end token if `ended`."""
        return [*self.chat.encode(text), *(self.chat.stop_token_ids[:1] if ended else ())], ended

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: ImageInputs | None = None,
        sink: Sink = None,
    ) -> Generation:
        exchanges = self.asked.setdefault(session_id or "", [])
        self.since = math.inf
        ids, ended = await self.write(session_id or "", len(exchanges) + 1, input_ids, params.max_new_tokens)
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
    """Writes the turns of a script."""

    def __init__(self, chat: Chat, script: Script) -> None:
        super().__init__(chat)
        self.script = script

    async def write(self, session: str, turn: int, given: Sequence[int], most: int | None) -> tuple[list[int], bool]:
        script = self.script
        if turn == script.waits:
            self.waiting.set()
            await anyio.sleep_forever()
        if turn == script.holds:
            await self.pause()
            await anyio.sleep(0.01)
            await self.resume()
        return self.ids(script.turns[min(turn, len(script.turns)) - 1], ended=not script.cut)


class Recorded(Policy):
    """Writes stored trajectories again. `turns`, by sample `index`: the turns' ids, and false if truncated."""

    def __init__(self, chat: Chat, turns: Mapping[int, tuple[Sequence[list[int]], bool]]) -> None:
        super().__init__(chat)
        self._turns = {str(index): told for index, told in turns.items()}

    async def write(self, session: str, turn: int, given: Sequence[int], most: int | None) -> tuple[list[int], bool]:
        turns, ended = self._turns[session.split("-")[1]]
        if turn > len(turns):
            raise ModelFailure(
                f"the stored trajectory ended with turn {len(turns)}; the replay asks for one more", kind="no_turn"
            )
        return turns[turn - 1], ended or turn < len(turns)


class FromFile(Policy):
    """Writes the turns of an episode of a `--play` file."""

    def __init__(self, chat: Chat, tools: Sequence[dict[str, Any]], lines: Lines) -> None:
        super().__init__(chat)
        self._tools, self.lines, self.asked_for = tools, lines, 0

    async def write(self, session: str, turn: int, given: Sequence[int], most: int | None) -> tuple[list[int], bool]:
        turns, self.asked_for = self.lines.turns, turn
        if turn > len(turns):
            where = f"behind line {turns[-1][0]} the environment waits for turn {turn}"
            raise ModelFailure(f"{self.lines.name}: {where}, and the episode has no more", kind="no_turn")
        return self.ids(turn_of(self.chat, turns[turn - 1][1], self._tools), ended=True)

    def wrong(self, reward: float | None) -> Iterator[str]:
        """Yield the differences from the file: turns that were not requested, and another reward."""
        turns = self.lines.turns
        if self.asked_for < len(turns):
            yield f"{self.lines.name}: it ended with turn {self.asked_for}, before line {turns[self.asked_for][0]}"
        if self.lines.reward is None:
            return
        wanted, line = self.lines.reward
        if reward is None or not math.isclose(reward, wanted, abs_tol=1e-9):
            yield f"{self.lines.name}: line {line} expects reward {wanted:g}, the episode earned {reward}"


Live = Callable[[Chat, Sequence[dict[str, Any]]], Policy]
"""Makes the policy of one episode from the chat template and the schemas of the tools."""


class Person(Policy):
    """The person at the terminal, who sees the text that a model would see. A line is a turn. `!NAME {"city": "Oslo"}`
    is a tool call, which the chat template renders. `left`: the input has ended, which ends the session."""

    def __init__(self, chat: Chat, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(chat)
        self._tools, self._shown, self.left = tools, 0, False

    async def write(self, session: str, turn: int, given: Sequence[int], most: int | None) -> tuple[list[int], bool]:
        click.echo(self.chat.decode(given[self._shown :]), nl=False)
        self._shown = len(given)
        try:
            line = await anyio.to_thread.run_sync(self._typed, abandon_on_cancel=True)
        except click.Abort as error:
            self.left = True
            raise ModelFailure("the input has ended", kind="no_turn") from error
        return self.ids(turn_of(self.chat, line, self._tools), ended=True)

    def _typed(self) -> str:
        line: str = click.prompt("", prompt_suffix="", default="", show_default=False)
        try:
            call_of(line)
        except ValueError as error:
            click.echo(f"{error}; once more:")
            return self._typed()
        return line


class Endpoint(Policy):
    """The first model behind `URL/v1/completions`. It completes the prompt as the run's chat template renders it.
    `write` raises EngineFailure: the server does not answer in time, or not in OpenAI's form."""

    def __init__(self, chat: Chat, url: str) -> None:
        super().__init__(chat)
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1"

    async def write(self, session: str, turn: int, given: Sequence[int], most: int | None) -> tuple[list[int], bool]:
        prompt, stop = self.chat.decode(given), list(self.chat.report.stops)[:4]
        body = {"prompt": prompt, "stop": stop, "max_tokens": most, "temperature": 1.0}
        try:
            async with httpx.AsyncClient(timeout=_SECONDS) as client:
                models = (await client.get(f"{self._url}/models")).raise_for_status().json()["data"]
                answer = await client.post(f"{self._url}/completions", json={"model": models[0]["id"], **body})
                choice = answer.raise_for_status().json()["choices"][0]
                return self.ids(str(choice["text"]), ended=choice["finish_reason"] != "length")
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            raise EngineFailure(f"--model {self._url} gave no completion: {error!r:.300}; wrong address?") from error
