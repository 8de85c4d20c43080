"""A gateway over HTTP with a scripted engine, for unmodified clients and agents."""

import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from agentrl.chat import Chat
from agentrl.engine.wire import FinishReason, SamplingParams
from agentrl.gateway.server import Gateway
from agentrl.gateway.sessions import Session
from agentrl.sample import Sample
from tests.gateway.acceptance_engine import Audit, LoggingEngine, hermes, tree_faults
from tests.support.chats import make_chat

CONTEXT = 200_000
Script = Callable[[int, str], str | Exception]
"""Returns the model's turn, or the engine's failure, for the number of earlier turns and the prompt's text."""


class ScriptedEngine(LoggingEngine):
    """Answers by a script, in ids that the tokenizer would not choose."""

    def _ids(self, said: str, rng: random.Random, params: SamplingParams) -> tuple[list[int], FinishReason]:
        ids: list[int] = []
        while said:
            step = rng.randint(1, 12)
            ids += self.chat.encode(said[:step])
            said = said[step:]
        stop = self.chat.stop_token_ids[0]
        return [*ids, stop], FinishReason("stop", stop)


@dataclass(frozen=True)
class Played:
    """The result of a session."""

    samples: list[Sample]
    turns: int
    roots: int
    reasons: Counter[str]
    counts: dict[str, int]
    nodes: list[dict[str, Any]]


@dataclass(frozen=True)
class Live:
    """A served gateway."""

    gateway: Gateway
    engine: ScriptedEngine

    def open(self) -> Session:
        """Open a session."""
        return self.gateway.open(Sample(index=0, rollout_id=0), SamplingParams())

    def close(self, session: Session) -> Played:
        """Close a session. Each sampled token must train where it was sampled, or be dropped for a reason."""
        tree, audit = session.tree.shown(), Audit(self.engine.log)
        samples = self.gateway.close(session.token, 1.0)
        for sample in samples:
            audit.add(sample)
        assert audit.wrong + tree_faults(tree, session.figures(), samples) == []
        assert sum(len(turn.ids) for turn in self.engine.log) == session.counts["sampled"]
        reasons = Counter(node["reason"] for node in tree["nodes"])
        return Played(samples, len(tree["nodes"]), len(tree["roots"]), reasons, session.figures(), tree["nodes"])


@asynccontextmanager
async def live(
    script: Script, template: str = "qwen3", *, context_length: int = CONTEXT, cut: "Cut | None" = None
) -> AsyncIterator[Live]:
    """Serve a gateway whose model follows a script, and whose connections `cut` cuts."""
    chat: Chat = make_chat(template)

    def speech(rng: random.Random, prompt: list[int], params: SamplingParams) -> str | Exception:
        text = chat.decode(prompt)
        return script(text.count("<|im_start|>assistant") - 1, text)

    engine = ScriptedEngine(chat, speech)
    gateway = Gateway(chat, engine, context_length=context_length)
    if cut is not None:
        cut.app, gateway.agent_app = gateway.agent_app, cut  # type: ignore[assignment]
    async with gateway.serving():
        yield Live(gateway, engine)


@dataclass
class Cut:
    """An ASGI application that cuts the connection of one answer after the answer's first bytes.

    Attributes:
        at: number of the answer to cut: 0 is the first answer to a POST with status 200.
        seen: the gateway notices the cut; otherwise the rest of the answer is lost in transit.
        answers: number of answers so far.
    """

    at: int
    seen: bool
    app: ASGIApp | None = None
    answers: int = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        assert self.app is not None
        bodies, cutting = 0, False

        async def sent(message: Message) -> None:
            nonlocal bodies, cutting
            if message["type"] == "http.response.start":
                if scope["method"] == "POST" and message["status"] == 200:
                    cutting, self.answers = self.answers == self.at, self.answers + 1
            elif cutting:
                bodies += 1
                if bodies > 1 and self.seen:
                    raise ConnectionResetError
                if bodies > 1:
                    return
                message = {**message, "more_body": True}
            await send(message)

        await self.app(scope, receive, sent)
        if cutting:
            raise ConnectionResetError


def calls_then(tool: str, last: str = "done", **arguments: Any) -> Script:
    """Call a tool that runs `echo` three times, then give the last word."""

    def script(turn: int, prompt: str) -> str:
        if turn >= 3:
            return last
        return hermes(f"I look, {turn}.", "", [(tool, {"command": f"echo {turn}", **arguments})])

    return script
