"""What clients of the router said before: exact ids of their texts, and which session a conversation goes on in.

1. A text that goes on from an earlier prompt or answer begins with the ids that were used or sampled there, never with
   other ids of the same text; only what is new is encoded.
2. An answer whose end token is not in its text is known without that token too: a client writes it itself, or not.
3. A conversation takes its session along: who goes on from an answer has the engine that holds its prefix. Who says the
   same again, or goes on from where somebody else went on already, gets another one.
"""

from __future__ import annotations

import uuid
from array import array
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from agentrl.engine.prefixes import Prefixes
from agentrl.engine.wire import Generation

ROOM = 1 << 26
"""Characters of all prompts and answers that are remembered, shared beginnings counted once."""

Encode = Callable[[str, bool], Awaitable[list[int]]]
Decode = Callable[[Sequence[int]], str]


@dataclass(slots=True, eq=False)
class Piece:
    """Ids behind those of `before`; `log_probs` where a model sampled them, by weights of `versions`."""

    before: Piece | None
    ids: array[int]
    log_probs: array[float] | None = None
    versions: tuple[tuple[str, int, int], ...] = ()
    session: str | None = None

    def pieces(self) -> Iterator[Piece]:
        """All pieces, the last first."""
        piece: Piece | None = self
        while piece is not None:
            yield piece
            piece = piece.before

    def all_ids(self) -> list[int]:
        """The ids from the start."""
        return [id_ for piece in reversed(list(self.pieces())) for id_ in piece.ids]


def session_of(found: tuple[int, Piece] | None, length: int) -> str:
    """The session for a key of `length` characters of which `found` is known."""
    session = None
    if found and found[0] < length:
        session, found[1].session = found[1].session, None
    return session or uuid.uuid4().hex


class Memory:
    """Of one tokenizer: `decode(ids)` shows special tokens, and so does `encode(text, whether it is a beginning)`.

    Who asks brings `encode`, because long texts are encoded beside the event loop; all else is to run on it.
    """

    def __init__(self, decode: Decode) -> None:
        self._decode = decode
        self._texts: Prefixes[str, Piece] = Prefixes("", ROOM)

    async def prompt(self, text: str, encode: Encode) -> tuple[Piece, str]:
        """The ids of a text, and its session."""
        found = self._texts.find(text)
        session = session_of(found, len(text))
        piece = await _reach(text, found, encode)
        piece.session = session
        self._texts.put(text, piece)
        return piece, session

    def answered(self, text: str, prompt: Piece, got: Generation, session: str) -> None:
        """`got` came to the prompt `text`."""
        ids, whole = got.ids, text + got.text
        stop = got.finish_reason.matched if got.finish_reason.type == "stop" else None
        if isinstance(stop, str) and not got.text.endswith(stop):  # the ids have it
            whole = text + self._decode(ids)
            if not whole.startswith(text + got.text):
                return
        piece, hidden = prompt, 0
        if isinstance(stop, int) and ids and ids[-1] == stop and not got.text.endswith(self._decode([stop])):
            hidden = 1
        for start, end in ((0, len(ids) - hidden), (len(ids) - hidden, len(ids))):
            if start < end:
                spans = tuple(
                    (v, max(a, start) - start, min(b, end) - start)
                    for v, a, b in got.weight_versions
                    if a < end and b > start
                )
                piece = Piece(piece, array("i", ids[start:end]), array("d", got.log_probs[start:end]), spans, session)
                whole += self._decode(ids[start:]) if start and hidden else ""
                self._texts.put(whole, piece)

    async def retrieve(self, text: str, encode: Encode) -> dict[str, Any]:
        """Ids of a text with a mask of the sampled ones, their log-probs (0 elsewhere) and the versions of their weights."""
        tokens: list[int] = []
        mask: list[int] = []
        log_probs: list[float] = []
        spans = []
        for piece in reversed(list((await _reach(text, self._texts.find(text), encode)).pieces())):
            spans += [{"version": v, "start": len(tokens) + a, "end": len(tokens) + b} for v, a, b in piece.versions]
            tokens += piece.ids
            mask += [int(piece.log_probs is not None)] * len(piece.ids)
            log_probs += piece.log_probs or [0.0] * len(piece.ids)
        return {
            "tokens": tokens,
            "response": text,
            "loss_mask": mask,
            "token_length": len(tokens),
            "loss_mask_length": len(mask),
            "rollout_logp": log_probs,
            "weight_versions": spans,
        }


class Followed:
    """Sessions of clients that send ids."""

    def __init__(self) -> None:
        self._seen: Prefixes[bytes, Piece] = Prefixes(b"", ROOM)

    def session(self, ids: Sequence[int]) -> str:
        """The session that these ids go on in."""
        key = orjson.dumps(ids)[1:-1] + b","
        session = session_of(self._seen.find(key), len(key))
        self.answered(ids, session)
        return session

    def answered(self, ids: Sequence[int], session: str) -> None:
        """Whoever goes on from these ids belongs there."""
        self._seen.put(orjson.dumps(ids)[1:-1] + b",", Piece(None, array("i"), session=session))


async def _reach(text: str, found: tuple[int, Piece] | None, encode: Encode) -> Piece:
    """The piece that ends `text`, of which `found` is known."""
    length, known = found or (0, None)
    if known is not None and length == len(text):
        return known
    return Piece(known, array("i", await encode(text[length:], known is None)))
