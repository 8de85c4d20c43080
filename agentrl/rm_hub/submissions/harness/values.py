"""Encodes values as JSON between two sandboxes that do not trust each other. Plain data is passed by value, everything
else by handle. Only exact types are plain data: an object of another class cannot pose as a number. Functions pass from
the tests to the answer, never back. Imports are from the standard library: the code is sent as text."""

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

_SEQUENCES: dict[str, Any] = {"l": list, "t": tuple, "s": set, "z": frozenset, "q": collections.deque}
_TEXTS: dict[str, tuple[Any, Callable[[Any], str], Callable[[str], Any]]] = {
    "i": (int, hex, lambda text: int(text, 16)),
    "f": (float, repr, float),
    "b": (bytes, bytes.hex, bytes.fromhex),
    "B": (bytearray, bytearray.hex, bytearray.fromhex),
    "c": (complex, repr, complex),
    "D": (decimal.Decimal, str, decimal.Decimal),
    "F": (fractions.Fraction, str, fractions.Fraction),
    "T": (datetime.datetime, datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    "Td": (datetime.date, datetime.date.isoformat, datetime.date.fromisoformat),
}
_PARTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "r": (range, ("start", "stop", "step")),
    "S": (slice, ("start", "stop", "step")),
    "Tt": (datetime.timedelta, ("days", "seconds", "microseconds")),
}
_TAGS: dict[type, str] = {kind: tag for tag, kind in _SEQUENCES.items()}
_TAGS |= {kind[0]: tag for table in (_TEXTS, _PARTS) for tag, kind in table.items()}
_MAPPINGS: dict[str, Any] = {"d": dict, "C": collections.Counter, "O": collections.OrderedDict}
_TAGS |= {kind: tag for tag, kind in _MAPPINGS.items()}
EMPTY: dict[int, Any] = {}  # empty containers that came from the other side, by id
_ARRAYS = "biufcU"  # kinds of arrays that travel by value: numbers and text
_PLAIN_BASES: tuple[Any, ...] = (bool, int, float, str, bytes, list, tuple, dict, set, frozenset)


class NotPlain(TypeError):
    """A value cannot be passed. `own` is true if the tests define its class."""

    own = False


def encode(value: Any, by_handle: Callable[[Any], Any]) -> Any:
    """Encode `value` as JSON. `by_handle` encodes values that are not plain data, or raises `NotPlain`."""
    kind, numpy = type(value), sys.modules.get("numpy")
    if value is None or kind is bool or kind is str:
        return value
    if (kind is int and abs(value) < 1 << 62) or (kind is float and math.isfinite(value)):
        return value
    tag = _TAGS.get(kind)
    if tag in _SEQUENCES:
        return [tag, *(encode(item, by_handle) for item in value)]
    if tag in _TEXTS:
        return [tag, _TEXTS[tag][1](value)]
    if tag in _PARTS:
        return [tag, *(encode(getattr(value, name), by_handle) for name in _PARTS[tag][1])]
    if tag in _MAPPINGS or kind is collections.defaultdict:
        pairs = [[encode(k, by_handle), encode(v, by_handle)] for k, v in value.items()]
        return [tag, *pairs] if tag else ["e", encode(value.default_factory, by_handle), *pairs]
    if numpy is not None and kind is numpy.ndarray and value.dtype.kind in _ARRAYS:
        return ["n", value.dtype.str, list(value.shape), [encode(item, by_handle) for item in value.ravel().tolist()]]
    if numpy is not None and issubclass(kind, numpy.generic) and kind.__module__ == "numpy":
        return encode(value.item(), by_handle)
    return by_handle(value)


def base_value(value: Any) -> Any:
    """Return the plain value of an object whose class extends a plain type (a Counter, a named tuple), else None."""
    for base in _PLAIN_BASES:
        if isinstance(value, base) and type(value) is not base:
            return base.__new__(base, value) if base in (int, float, str, bytes) else base(value)
    return None


def decode(data: Any, from_handle: Callable[[list[Any]], Any]) -> Any:
    """Decode a result of `encode`. `from_handle` decodes the results of `by_handle`."""
    if not isinstance(data, list):
        return data
    tag, *rest = data
    if tag in _SEQUENCES:
        return _noted(_SEQUENCES[tag]([decode(item, from_handle) for item in rest]))
    if tag in _TEXTS:
        return _TEXTS[tag][2](rest[0])
    if tag in _PARTS:
        return _PARTS[tag][0](*(decode(part, from_handle) for part in rest))
    if tag in _MAPPINGS:
        return _MAPPINGS[tag]({decode(k, from_handle): decode(v, from_handle) for k, v in rest})
    if tag == "e":
        return collections.defaultdict(decode(rest[0], from_handle), decode(["d", *rest[1:]], from_handle))
    if tag == "n":
        numpy = importlib.import_module("numpy")
        if (kind := numpy.dtype(rest[0])).kind not in _ARRAYS:
            raise NotPlain(f"an array of {kind}")
        return numpy.array(_noted([decode(item, from_handle) for item in rest[2]]), dtype=kind).reshape(rest[1])
    return from_handle(data)


def _noted(made: Any) -> Any:
    return made if made else EMPTY.setdefault(id(made), made)


def encode_function(value: Any, own: dict[str, Any], given: dict[str, Any], encode_one: Callable[[Any], Any]) -> Any:
    """Encode a function of a test or a library. `own` has the tests' global names, `given` those of the answer."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if isinstance(value, types.FunctionType) and value.__globals__ is own:
        known = given | own
        names = {n: known[n] for n in _names(value.__code__) if n in known and known[n] is not value}
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        code = base64.b64encode(marshal.dumps(value.__code__)).decode()
        return ["fn", code, name, encode_one(value.__defaults__), encode_one(cells), encode_one(names)]
    if isinstance(value, types.ModuleType):
        return ["mo", value.__name__]
    if isinstance(value, types.MethodDescriptorType):
        return ["bi", value.__objclass__.__module__, name]
    if module in sys.stdlib_module_names and "." not in name and not name.startswith("<"):
        return ["bi", module, name]
    refused = NotPlain(f"a {type(value).__name__} cannot be handed to the answer's code")
    refused.own = type(value).__module__ == own["__name__"]
    raise refused


def decode_function(data: list[Any], decode_one: Callable[[Any], Any]) -> Any:
    if data[0] == "mo":
        return importlib.import_module(data[1])
    if data[0] == "bi":
        return operator.attrgetter(data[2])(importlib.import_module(data[1]))
    code, defaults, cells = marshal.loads(base64.b64decode(data[1])), decode_one(data[3]), decode_one(data[4])
    names = {"__builtins__": builtins, **decode_one(data[5])}
    made = types.FunctionType(code, names, data[2], defaults, tuple(map(types.CellType, cells)) or None)
    names.setdefault(data[2], made)
    return made


def _names(code: types.CodeType) -> set[str]:
    return set(code.co_names).union(*(_names(const) for const in code.co_consts if isinstance(const, types.CodeType)))
