"""Groups of samples as compact bytes and back, without pickle.

1. Layout: zlib of [4-byte little-endian header length][JSON header][raw arrays]; the header names each array's
   sample, field, dtype and length in order.
2. What `Sample.to_arrays` splits off travels as raw arrays (log-probs as float32), the rest as JSON; a value that JSON
   cannot carry exactly enough to train from (an image object, a NaN) is an error that names the field, never a silent
   change.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from agentrl.errors import SampleError
from agentrl.sample import Sample

_VERSION = 2


def encode_group(samples: Sequence[Sample]) -> bytes:
    """Bytes of one group.

    Raises:
        SampleError: a field holds something that JSON cannot carry.
    """
    rests, arrays, raw = [], [], []
    for number, sample in enumerate(samples):
        parts, rest = sample.to_arrays()
        rests.append(rest)
        for name, values in parts.items():
            arrays.append([number, name, values.dtype.str, len(values)])
            raw.append(values.tobytes())
    try:
        header = orjson.dumps({"version": _VERSION, "rest": rests, "arrays": arrays}, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        raise _blame(rests, error) from error
    for rest in rests:
        _refuse_nan(rest, f"sample index={rest['index']}")
    return zlib.compress(b"".join([struct.pack("<I", len(header)), header, *raw]), 1)


def decode_group(data: bytes) -> list[Sample]:
    """The inverse of `encode_group`.

    Raises:
        SampleError: the bytes are damaged or of another version.
    """
    try:
        plain = zlib.decompress(data)
        (size,) = struct.unpack_from("<I", plain)
        header: dict[str, Any] = orjson.loads(plain[4 : 4 + size])
        if header["version"] != _VERSION:
            raise SampleError(f"stored group has layout version {header['version']}; this program reads {_VERSION}")
        arrays: list[dict[str, Any]] = [{} for _ in header["rest"]]
        at = 4 + size
        for number, name, dtype, length in header["arrays"]:
            arrays[number][name] = np.frombuffer(plain, dtype=np.dtype(dtype), count=length, offset=at)
            at += arrays[number][name].nbytes
        return [Sample.from_arrays(a, r) for a, r in zip(arrays, header["rest"], strict=True)]
    except (zlib.error, struct.error, orjson.JSONDecodeError, KeyError, ValueError) as error:
        if isinstance(error, SampleError):
            raise
        raise SampleError(f"stored group of {len(data)} bytes is damaged: {error}") from error


def _blame(rests: Sequence[dict[str, Any]], error: TypeError) -> SampleError:
    for rest in rests:
        for name, value in rest.items():
            try:
                orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
            except TypeError as why:
                return SampleError(
                    f"sample index={rest['index']}: field {name!r} cannot be stored: {why}; "
                    "keep only numbers, text, lists and objects with text keys in a sample"
                )
    return SampleError(f"a sample cannot be stored: {error}")


def _refuse_nan(value: Any, where: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise SampleError(f"{where}: holds {value}, which cannot be stored; use a finite number or None")
    if isinstance(value, dict):
        for key, item in value.items():
            _refuse_nan(item, f"{where} field {key!r}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            _refuse_nan(item, where)
