"""Values as JSON between two sandboxes that do not trust each other. Standard library only: sent as text.

Plain data travels by value, everything else by handle. Only exact types are plain: an object of a class of its own
cannot pose as a number. Functions travel from the tests to the answer, never back.
"""

import base64
import builtins
import collections
import datetime
import decimal
import fractions
import importlib
import marshal
import math
import operator
import sys
import types
from collections.abc import Callable
from typing import Any

_SEQUENCES: dict[type, str] = {list: "l", tuple: "t", set: "s", frozenset: "z", collections.deque: "q"}
_MAKE: dict[str, Callable[[Any], Any]] = {tag: kind for kind, tag in _SEQUENCES.items()}
_PLAIN_BASES: tuple[Any, ...] = (bool, int, float, str, bytes, list, tuple, dict, set, frozenset)


class NotPlain(TypeError):
    """A value that cannot travel."""


def encode(value: Any, by_handle: Callable[[Any], Any]) -> Any:
    """A JSON value for `value`; `by_handle` encodes what is no plain data, or raises `NotPlain`."""
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value
    if kind is int:
        return value if abs(value) < 1 << 62 else ["i", hex(value)]
    if kind is float:
        return value if math.isfinite(value) else ["f", repr(value)]
    if kind in _SEQUENCES:
        return [_SEQUENCES[kind], *(encode(item, by_handle) for item in value)]
    if kind is dict:
        return ["d", *([encode(k, by_handle), encode(v, by_handle)] for k, v in value.items())]
    if kind is bytes or kind is bytearray:
        return ["b" if kind is bytes else "B", value.hex()]
    if kind is complex:
        return ["c", encode(value.real, by_handle), encode(value.imag, by_handle)]
    if kind is range:
        return ["r", value.start, value.stop, value.step]
    if kind is slice:
        return ["S", *(encode(end, by_handle) for end in (value.start, value.stop, value.step))]
    if kind is decimal.Decimal:
        return ["D", str(value)]
    if kind is fractions.Fraction:
        return ["F", hex(value.numerator), hex(value.denominator)]
    if kind is datetime.datetime or kind is datetime.date:
        return ["T", kind.__name__, value.isoformat()]
    if kind is datetime.timedelta:
        return ["T", "timedelta", value.days, value.seconds, value.microseconds]
    numpy = sys.modules.get("numpy")
    if numpy is not None and kind is numpy.ndarray and value.dtype.kind in "biufc":
        return ["n", value.dtype.str, list(value.shape), [encode(item, by_handle) for item in value.ravel().tolist()]]
    if numpy is not None and issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
        return encode(value.item(), by_handle)
    return by_handle(value)


def base_value(value: Any) -> Any:
    """What an object of a subclass of a plain type holds (a Counter, a named tuple), else None."""
    for base in _PLAIN_BASES:
        if isinstance(value, base) and type(value) is not base:
            return base.__new__(base, value) if base in (int, float, str, bytes) else base(value)
    return None


def decode(data: Any, from_handle: Callable[[list[Any]], Any]) -> Any:
    """The inverse of `encode`; `from_handle` gets what `by_handle` gave."""
    if not isinstance(data, list):
        return data
    tag, rest = data[0], data[1:]
    if tag in _MAKE:
        return _MAKE[tag]([decode(item, from_handle) for item in rest])
    match tag:
        case "i":
            return int(rest[0], 16)
        case "f":
            return float(rest[0])
        case "d":
            return {decode(k, from_handle): decode(v, from_handle) for k, v in rest}
        case "b":
            return bytes.fromhex(rest[0])
        case "B":
            return bytearray.fromhex(rest[0])
        case "c":
            return complex(decode(rest[0], from_handle), decode(rest[1], from_handle))
        case "r":
            return range(*rest)
        case "S":
            return slice(*(decode(end, from_handle) for end in rest))
        case "D":
            return decimal.Decimal(rest[0])
        case "F":
            return fractions.Fraction(int(rest[0], 16), int(rest[1], 16))
        case "T":
            kind = {"date": datetime.date, "datetime": datetime.datetime}.get(rest[0])
            return kind.fromisoformat(rest[1]) if kind else datetime.timedelta(*rest[1:])
        case "n":
            numpy = importlib.import_module("numpy")
            flat = [decode(item, from_handle) for item in rest[2]]
            return numpy.array(flat, dtype=numpy.dtype(rest[0])).reshape(rest[1])
    return from_handle(data)


def encode_function(value: Any, known: dict[str, Any], encode_one: Callable[[Any], Any]) -> Any:
    """A test's own function or a library's, for the answer's side; `known` are the test's global names."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(value, types.FunctionType) and value.__globals__ is known:
        code = value.__code__
        names = {n: known[n] for n in _names(code) if n in known and known[n] is not value}
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts = [encode_one(value.__defaults__), encode_one(cells), encode_one(names)]
        return ["fn", base64.b64encode(marshal.dumps(code)).decode(), name, *parts]
    if isinstance(value, types.ModuleType):
        return ["mo", value.__name__]
    if isinstance(value, types.MethodDescriptorType):
        return ["bi", value.__objclass__.__module__, name]
    if module in sys.stdlib_module_names and "." not in name and not name.startswith("<"):
        return ["bi", module, name]
    raise NotPlain(f"a {type(value).__name__} cannot be handed to the answer's code")


def decode_function(data: list[Any], decode_one: Callable[[Any], Any]) -> Any:
    """The inverse of `encode_function`."""
    if data[0] == "mo":
        return importlib.import_module(data[1])
    if data[0] == "bi":
        return operator.attrgetter(data[2])(importlib.import_module(data[1]))
    cells = tuple(types.CellType(item) for item in decode_one(data[4]))
    names = {"__builtins__": builtins, **decode_one(data[5])}
    made = types.FunctionType(
        marshal.loads(base64.b64decode(data[1])), names, data[2], decode_one(data[3]), cells or None
    )
    names.setdefault(data[2], made)
    return made


def _names(code: types.CodeType) -> set[str]:
    inner = (_names(const) for const in code.co_consts if isinstance(const, types.CodeType))
    return set(code.co_names).union(*inner)
