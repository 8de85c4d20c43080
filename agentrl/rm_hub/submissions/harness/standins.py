"""The tests' view of the submission: stand-ins that forward operations to its process. Its code follows `values`.

1. Comparisons with plain data run here, with this process's builtins. No object of the submission's own class equals a
   number or text, whatever its `__eq__` returns. Such an object gets operands only if the tests use its class by name:
   then its operators are part of the task. Otherwise it would get the expected value and could call that value right.
   For the same reason it gets no arguments of methods that plain data has too.
2. An object whose class extends a plain type is that plain data. Only attributes that the type lacks are requested.
3. Attributes by which libraries read an object's memory (`__array_interface__` and others) are never requested."""

import builtins
import operator
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

_ASKED = ("next", "str", "repr", "enter", "exit", "setattr")
_OF_DATA = ("len", "iter", "bool", "hash", "int", "float", "abs", "neg", "pos", "reversed")
_ITEMS = ("getitem", "setitem", "delitem")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor", "and", "or")
_DATA: tuple[Any, ...] = (str, bytes, int, float, complex, tuple, frozenset, range, types.MappingProxyType)
_METHODS_OF_DATA = {name for kind in _DATA for name in dir(kind) if name[0] != "_"} | {"pop", "setdefault"}
"""Methods of plain data that return something. A method that only changes data gets its arguments."""
_DESCRIBING = {f"__{name}__" for name in ("name", "qualname", "annotations", "slots", "mro", "bases", "members")}


@dataclass
class Held:
    """The object behind a stand-in. `data`: its handle. `form`: `class`, `callable` or `object`. `kind`: its class."""

    ask: Callable[..., Any]  # sends a request to the submission's side: `ask(operation, stand-in, *args, **named)`
    classes: set[str]  # classes of the submission that the tests have used by name
    data: list[Any]
    form: str
    kind: str
    plain: Any = None  # the plain value, if its class extends a plain type
    given: bool = False
    """True if every submission has the object: under a name, or made by a class that the tests used by name."""
    untold: str = ""  # the name of a method that must not get arguments, or ""

    @property
    def used(self) -> bool:
        """Return true if the object's operators are part of the task. `Solution` only holds functions."""
        return self.kind in self.classes and self.kind != "Solution"

    @property
    def is_data(self) -> bool:
        """Return true if the object counts as the plain data in it."""
        return self.plain is not None and not self.used


class Remote:
    """Stand-in for an object of the submission."""

    def __init__(self, held: Held) -> None:
        vars(self)["_agentrl"] = held

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """The class of the plain data in the object, for `isinstance`."""
        return Remote if (plain := held(self).plain) is None else type(plain)

    def __getattr__(self, name: str) -> Any:
        if name[:2] == name[-2:] == "__" and name not in _DESCRIBING:
            raise AttributeError(name)
        if (mine := held(self)).is_data and hasattr(mine.plain, name):
            return getattr(mine.plain, name)
        value = mine.ask("getattr", self, name)
        if is_remote(value) and name in _METHODS_OF_DATA and not (mine.given or mine.used):
            held(value).untold = name
        return value

    def __call__(self, /, *args: Any, **named: Any) -> Any:
        if (mine := held(self)).untold and (args or named):
            raise TypeError(f"{mine.untold} with arguments, of an object of a class that the tests do not use")
        return mine.ask("call", self, *args, **named)

    def __eq__(self, other: Any) -> bool:
        mine, theirs = held(self), held(other) if is_remote(other) else None
        if theirs and (mine.used or theirs.used):
            return bool(mine.ask("eq", self, other))
        if mine.plain is not None:
            return bool(mine.plain == (theirs.plain if theirs else other))
        return theirs is not None and mine.data[:2] == theirs.data[:2]

    def __contains__(self, item: Any) -> bool:
        if (mine := held(self)).plain is not None:
            return item in mine.plain
        if mine.used:
            return bool(mine.ask("contains", self, item))
        return any(item == own for own in self)  # type: ignore[attr-defined]


def held(remote: Any) -> Held:
    found: Held = vars(remote)["_agentrl"]
    return found


def is_remote(value: Any) -> bool:
    """Return true if the value is a stand-in, whatever its `__class__`."""
    return type(value) is Remote


def _forward(name: str) -> Callable[..., Any]:
    return lambda self, /, *args: held(self).ask(name, self, *args)


def _of_data(name: str) -> Callable[..., Any]:
    here = getattr(builtins, name, None) or getattr(operator, name)

    def method(self: Remote, *args: Any) -> Any:
        return here(mine.plain, *args) if (mine := held(self)).is_data else mine.ask(name, self, *args)

    return method


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
            # The object would get the expected value, and could return that the difference is zero.
            raise TypeError(f"{name} of {type(other).__name__} and an object of a class that the tests do not use")
        return mine.ask(("r" if reverse else "") + function.__name__, self, other)

    return method


for _name in _ASKED:
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in (*_OF_DATA, *_ITEMS):
    setattr(Remote, f"__{_name}__", _of_data(_name))
Remote.__doc__ = property(lambda self: held(self).ask("getattr", self, "__doc__"))  # type: ignore[assignment]
for _name in ("isinstance", "issubclass"):
    setattr(Remote, f"__{_name[2:]}check__", _checking(_name))  # __instancecheck__ and __subclasscheck__
for _name in ("lt", "le", "gt", "ge", *_ARITHMETIC):
    setattr(Remote, f"__{_name}__", _with_operand(_name))
for _name in _ARITHMETIC:
    setattr(Remote, f"__r{_name}__", _with_operand(_name, reverse=True))
