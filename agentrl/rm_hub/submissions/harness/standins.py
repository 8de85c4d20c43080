"""What the tests hold of the submission: stand-ins that ask for what they are asked. Runs after `values`.

1. Comparisons with plain data happen here, with this process's own builtins: an object of the submission's own class
   is equal to no number or text, whatever its `__eq__` says. It is told an operand only if it is of a class that the
   tests themselves have used by its name, so that its operators are part of the task.
2. What libraries look up to read an object's memory (`__array_interface__` and the like) is asked of nobody.
"""

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ASKED = ("len", "iter", "next", "bool", "str", "repr", "hash", "int", "float", "abs", "neg", "pos", "reversed")
_ASKED_WITH = ("getitem", "setitem", "delitem", "enter", "exit")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor", "and", "or")
_DESCRIBING = {f"__{name}__" for name in ("name", "qualname", "annotations", "slots", "mro", "bases", "members")}


@dataclass
class Held:
    """What a stand-in stands for, by its handle `data`: a `class`, `callable` or `object` whose class's name is `kind`."""

    ask: Callable[..., Any]
    """Has the submission's side do something: `ask(what, stand-in, *args, **named)`."""
    classes: set[str]
    """Those of the submission that the tests have used by name."""
    data: list[Any]
    form: str
    kind: str
    plain: Any = None
    """What an object of a subclass of a plain type holds."""
    given: bool = False
    """Whether every submission has it: a name of its own, or an object of a class that the tests used by name."""

    @property
    def used(self) -> bool:
        """Return true if its operators are part of the task; `Solution` only holds functions."""
        return self.kind in self.classes and self.kind != "Solution"


class Remote:
    """Stands for an object of the submission."""

    def __init__(self, held: Held) -> None:
        vars(self)["_agentrl"] = held

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of the plain data which it holds, for `isinstance`."""
        return Remote if (plain := held(self).plain) is None else type(plain)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == name[-2:] == "__" and name not in _DESCRIBING:
            raise AttributeError(name)
        return held(self).ask("getattr", self, name)

    def __eq__(self, other: Any) -> bool:
        mine, theirs = held(self), held(other) if is_remote(other) else None
        if theirs and (mine.used or theirs.used):
            return bool(mine.ask("eq", self, other))
        if mine.plain is not None:
            return bool(mine.plain == (theirs.plain if theirs else other))
        return theirs is not None and mine.data[:2] == theirs.data[:2]

    def __contains__(self, item: Any) -> bool:
        mine = held(self)
        if mine.plain is not None:
            return item in mine.plain
        if mine.used:
            return bool(mine.ask("contains", self, item))
        return any(item == own for own in self)  # type: ignore[attr-defined]


def held(remote: Any) -> Held:
    """What a stand-in stands for."""
    found: Held = vars(remote)["_agentrl"]
    return found


def is_remote(value: Any) -> bool:
    """Return true if it is a stand-in, whatever class it shows."""
    return type(value) is Remote


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, /, *args, **named: held(self).ask(name, self, *args, **named)


def _checking(name: str) -> Callable[[Remote, Any], bool]:
    return lambda self, other: is_remote(other) and bool(held(self).ask("r" + name, self, other))


def _with_operand(name: str, *, reverse: bool = False) -> Callable[[Remote, Any], Any]:
    function = getattr(operator, name + "_" if name in ("and", "or") else name)

    def method(self: Remote, other: Any) -> Any:
        mine, theirs = held(self), held(other) if is_remote(other) else None
        if mine.plain is not None:
            operands = (mine.plain, theirs.plain if theirs else other)
            return function(*(operands[::-1] if reverse else operands))
        if not mine.used and not (theirs and theirs.used):
            # It would be told the expected value, and could say that the difference is nothing.
            raise TypeError(f"{name} of {type(other).__name__} and an object of a class that the tests do not use")
        return mine.ask(("r" if reverse else "") + function.__name__, self, other)

    return method


for _name in (*_ASKED, *_ASKED_WITH, "call", "setattr"):
    setattr(Remote, f"__{_name}__", _forward(_name))
Remote.__doc__ = property(lambda self: held(self).ask("getattr", self, "__doc__"))  # type: ignore[assignment]
for _name in ("isinstance", "issubclass"):
    setattr(Remote, f"__{_name[2:]}check__", _checking(_name))  # __instancecheck__ and __subclasscheck__
for _name in ("lt", "le", "gt", "ge", *_ARITHMETIC):
    setattr(Remote, f"__{_name}__", _with_operand(_name))
for _name in _ARITHMETIC:
    setattr(Remote, f"__r{_name}__", _with_operand(_name, reverse=True))
