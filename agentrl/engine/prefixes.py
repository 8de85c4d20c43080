"""A radix tree: what is known of the longest beginning of a text (or of bytes) that was put in before.

Looking up compares whole edges at once, so its cost is that of reading the key. Of what was not looked up for longest, the
oldest is forgotten when the edges have more than `room` characters.
"""

from collections import OrderedDict
from typing import AnyStr, Generic, TypeVar

V = TypeVar("V")


class _Node(Generic[AnyStr, V]):
    __slots__ = ("children", "edge", "parent", "value")

    def __init__(self, edge: AnyStr, parent: "_Node[AnyStr, V] | None") -> None:
        self.edge: AnyStr = edge
        self.parent: _Node[AnyStr, V] | None = parent
        self.children: dict[AnyStr, _Node[AnyStr, V]] = {}
        self.value: V | None = None


class Prefixes(Generic[AnyStr, V]):
    """Values under keys that are all `str` or all `bytes`; `size` is how many characters its edges have."""

    def __init__(self, empty: AnyStr, room: int) -> None:
        self._root: _Node[AnyStr, V] = _Node(empty, None)
        self._room, self.size = room, 0
        self._recent: OrderedDict[_Node[AnyStr, V], None] = OrderedDict()

    def find(self, key: AnyStr) -> tuple[int, V] | None:
        """Length and value of the longest key that `key` begins with, `key` itself included."""
        node, at, found = self._root, 0, None
        while (child := node.children.get(key[at : at + 1])) is not None and key.startswith(child.edge, at):
            node, at = child, at + len(child.edge)
            if node.value is not None:
                found = at, node.value
                self._recent.move_to_end(node)
        return found

    def put(self, key: AnyStr, value: V) -> None:
        """Keep `value` under `key`, in place of what was there."""
        node, at = self._root, 0
        while at < len(key):
            first = key[at : at + 1]
            child = node.children.get(first)
            if child is None:
                child = node.children[first] = _Node(key[at:], node)
                self.size += len(key) - at
            elif not key.startswith(child.edge, at):
                child = self._split(child, _common(child.edge, key, at))
            node, at = child, at + len(child.edge)
        node.value = value
        self._recent[node] = None
        self._recent.move_to_end(node)
        while self.size > self._room:
            self._forget(self._recent.popitem(last=False)[0])

    def _split(self, child: _Node[AnyStr, V], length: int) -> _Node[AnyStr, V]:
        """A node in the middle of the edge to `child`."""
        parent = child.parent
        assert parent is not None
        middle = parent.children[child.edge[:1]] = _Node(child.edge[:length], parent)
        child.edge, child.parent = child.edge[length:], middle
        middle.children[child.edge[:1]] = child
        return middle

    def _forget(self, node: _Node[AnyStr, V]) -> None:
        node.value = None
        while (parent := node.parent) is not None and node.value is None and not node.children:
            del parent.children[node.edge[:1]]
            self.size -= len(node.edge)
            node = parent


def _common(edge: AnyStr, key: AnyStr, at: int) -> int:
    """How many characters of `edge` are those of `key` from `at` on."""
    low, high = 0, len(edge)
    while low < high:
        middle = (low + high + 1) // 2
        if key.startswith(edge[:middle], at):
            low = middle
        else:
            high = middle - 1
    return low
