"""Cache of the exact token ids of the texts that router clients send, and of the session of each conversation.

1. If a text continues an earlier prompt or answer, the known part keeps its earlier ids. Only the rest is encoded.
2. A request that continues an answer gets that answer's session. A repeated or forked conversation gets a new session.
3. Texts are in a radix tree, so a lookup costs about as much as reading. The least recently used text is evicted."""

from __future__ import annotations

import uuid
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import orjson

from agentrl.engine.wire import Generation


@dataclass(slots=True, eq=False)
class Piece:
    """Ids that follow the ids of `before`. `log_probs` is None unless a model sampled the ids."""

    before: Piece | None = None
    ids: array[int] = field(default_factory=lambda: array("i"))
    log_probs: array[float] | None = None
    session: str | None = None

    def chain(self) -> list[Piece]:
        pieces = [self]
        while pieces[-1].before is not None:
            pieces.append(pieces[-1].before)
        return pieces[::-1]

    def all_ids(self) -> list[int]:
        return list(chain.from_iterable(piece.ids for piece in self.chain()))


@dataclass(slots=True, eq=False)
class _Node:
    edge: str = ""
    parent: _Node | None = None
    children: dict[str, _Node] = field(default_factory=dict)
    piece: Piece | None = None


def _differs(edge: str, text: str, at: int, length: int) -> bool:
    return not text.startswith(edge[:length], at)


class PrefixTree:
    """A radix tree of pieces. `size` is the number of characters of all edges, `room` its maximum."""

    def __init__(self, room: int) -> None:
        self.size, self._room, self._root = 0, room, _Node()
        self._recent: OrderedDict[_Node, None] = OrderedDict()

    def find(self, text: str) -> tuple[int, Piece | None]:
        """Return length and piece of the longest known prefix of `text`, `text` itself included."""
        node, at, length, piece = self._root, 0, 0, None
        while (child := node.children.get(text[at : at + 1])) is not None and text.startswith(child.edge, at):
            node, at = child, at + len(child.edge)
            if node.piece is not None:
                length, piece = at, node.piece
                self._recent.move_to_end(node)
        return length, piece

    def put(self, text: str, piece: Piece) -> None:
        """Store `piece` for `text`, in place of an earlier piece. Evicts other texts if the tree is full."""
        node, at = self._root, 0
        while at < len(text):
            if (child := node.children.get(text[at])) is None:
                child = node.children[text[at]] = _Node(text[at:], node)
                self.size += len(child.edge)
            elif not text.startswith(child.edge, at):
                edge = child.edge
                shared = bisect_left(range(1, len(edge)), True, key=partial(_differs, edge, text, at))
                middle = node.children[text[at]] = _Node(edge[:shared], node)
                child.edge, child.parent = edge[shared:], middle
                middle.children[child.edge[0]] = child
                child = middle
            node, at = child, at + len(child.edge)
        node.piece = piece
        self._recent[node] = None
        self._recent.move_to_end(node)
        while self.size > self._room:
            self._forget(self._recent.popitem(last=False)[0])

    def _forget(self, node: _Node) -> None:
        node.piece = None
        while node.parent is not None and node.piece is None and not node.children:
            del node.parent.children[node.edge[0]]
            self.size -= len(node.edge)
            node = node.parent


class PrefixCache:
    """Cache for use on the event loop only. `tokenizer` (of the `tokenizers` library) encodes and decodes texts."""

    def __init__(self, room: int = 1 << 26) -> None:
        self.tokenizer: Any = None
        self._known = PrefixTree(room)

    def listed(self, said: Sequence[Any], session: str | None = None) -> str:
        """Return the session of a client that sends ids or messages; a given `session` is remembered."""
        key = f"\0{orjson.dumps(said)[1:-1].decode()},"
        session = session or self._follow(key)[2]
        self._known.put(key, Piece(session=session))
        return session

    async def text(self, text: str, aside: Callable[..., Awaitable[list[int]]]) -> tuple[Piece, str]:
        """Return the last piece of `text`, and the session. `aside` calls the tokenizer, which may be slow."""
        length, piece, session = self._follow(text)
        if piece is None or length < len(text):
            piece = Piece(piece, array("i", await aside(self._encode, text[length:], piece is None)))
        piece.session = piece.session or session
        self._known.put(text, piece)
        return piece, session

    def answered(self, text: str, piece: Piece, got: Generation, session: str) -> None:
        """Store the answer `got` to the prompt `text`, whose last piece is `piece`."""
        matched, shown, cut = got.finish_reason.matched, got.text, len(got.ids)
        end = self._decode([matched]) if isinstance(matched, int) else matched or ""
        if not shown.endswith(end) and isinstance(matched, int):
            cut -= 1
        elif not shown.endswith(end):
            shown = self._decode(got.ids)  # the ids include the stop string, so the text must too
        for start, stop, said in ((0, cut, shown), (cut, len(got.ids), shown + end)):
            if start < stop:
                piece = Piece(piece, array("i", got.ids[start:stop]), array("d", got.log_probs[start:stop]), session)
                if said:  # an empty answer must not replace the prompt's own piece
                    self._known.put(text + said, piece)

    def _follow(self, key: str) -> tuple[int, Piece | None, str]:
        length, piece = self._known.find(key)
        session = None
        if piece is not None and length < len(key):
            session, piece.session = piece.session, None
        return length, piece, session or uuid.uuid4().hex

    def _encode(self, text: str, whole: bool) -> list[int]:
        # A batch of one, because the batch method lets other threads run.
        return list(self.tokenizer.encode_batch_fast([text], add_special_tokens=whole)[0].ids)

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))
