"""Groups of samples as compact bytes and back, without pickle.

1. Layout: zlib of [4-byte little-endian header length][JSON header][raw arrays]; the header names each array's
   sample, field, dtype and length in order.
2. What `Sample.to_arrays` splits off travels as raw arrays (log-probs as float32), the rest as JSON; a value that JSON
   cannot carry exactly enough to train from (an image object, a NaN) is an error that names the field, never a silent
   change.
3. Routing follows the zlib part as it is, since numbers of experts hardly compress: uint8 if all are below 256, else
   int16. Such bytes begin with `_ROUTED`. `split_group` takes them apart.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson

from agentrl.errors import SampleError
from agentrl.sample import Sample

_VERSION = 2
_ROUTING, _ROUTED = "rollout_routed_experts", b"R"
"""The array that is stored apart, and the first byte of a group that has one; zlib's is another."""


def encode_group(samples: Sequence[Sample]) -> bytes:
    """Bytes of one group. Raises SampleError: a field holds something that JSON cannot carry."""
    rests: list[Any] = []
    arrays: list[Any] = []
    large: list[Any] = []
    raw, routing = list[bytes](), list[bytes]()
    for number, sample in enumerate(samples):
        parts, rest = sample.to_arrays()
        rests.append(rest)
        for name, values in parts.items():
            if routes := name == _ROUTING and values.size > 0:
                values = values.astype(np.uint8 if values.max() < 256 else np.int16)
            (large if routes else arrays).append([number, name, values.dtype.str, list(values.shape)])
            (routing if routes else raw).append(values.tobytes())
        for field, value in rest.items():
            _check(value, f"sample index={sample.index}: field {field!r}")
    header = _dump({"version": _VERSION, "rest": rests, "arrays": arrays, **({"large": large} if large else {})})
    small = zlib.compress(b"".join([struct.pack("<I", len(header)), header, *raw]), 1)
    return b"".join([_ROUTED, struct.pack("<Q", len(small)), small, *routing]) if large else small


def split_group(data: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of a group without its routing, which `decode_group` reads too, and the routing; empty if the
    group has none. Raises SampleError: the bytes are damaged."""
    if data[:1] != _ROUTED:
        return data, b""
    if len(data) < 9 or len(data) <= 9 + (size := struct.unpack_from("<Q", data, 1)[0]):
        raise SampleError("stored group is damaged: its routing is missing")
    return data[9 : 9 + size], data[9 + size :]


def decode_group(data: bytes, what: str = "stored group") -> list[Sample]:
    """The inverse of `encode_group`; `what` is its name in messages. Raises SampleError: the bytes are damaged or of
    another version."""
    try:
        small, routing = split_group(data)
        plain = zlib.decompress(small)
        (size,) = struct.unpack_from("<I", plain)
        header: dict[str, Any] = orjson.loads(plain[4 : 4 + size])
        if header["version"] != _VERSION:
            raise SampleError(f"stored group has layout version {header['version']}; this program reads {_VERSION}")
        if "exact" in header:
            header = json.loads(plain[4 : 4 + size])
        arrays: list[dict[str, Any]] = [{} for _ in header["rest"]]
        large = header.get("large", ()) if routing else ()
        for raw, at, listed in ((plain, 4 + size, header["arrays"]), (routing, 0, large)):
            for number, name, dtype, shape in listed:  # a number where written by earlier releases
                numbers = np.frombuffer(raw, dtype=np.dtype(dtype), count=int(np.prod(shape)), offset=at)
                arrays[number][name] = numbers.reshape(shape)
                at += numbers.nbytes
        return [Sample.from_arrays(a, r) for a, r in zip(arrays, header["rest"], strict=True)]
    except SampleError as error:
        raise SampleError(f"{what} is damaged: {error}") from error
    except (zlib.error, struct.error, ArithmeticError, LookupError, SyntaxError, TypeError, ValueError) as error:
        raise SampleError(f"{what} is damaged: {type(error).__name__}: {error}") from error


def read_texts(data: bytes, what: str = "stored group") -> list[str]:
    """The text of each sample of a group, prompt and response, without decoding its numbers. Raises SampleError: the
    bytes are damaged."""
    try:
        stream = zlib.decompressobj()
        (size,) = struct.unpack("<I", stream.decompress(split_group(data)[0], 4))
        header = orjson.loads(stream.decompress(stream.unconsumed_tail, size))
        return [f"{rest['prompt']}\n{rest['response']}" for rest in header["rest"]]
    except (zlib.error, struct.error, LookupError, TypeError, ValueError) as error:
        raise SampleError(f"{what} is damaged: {type(error).__name__}: {error}") from error


def _dump(header: dict[str, Any]) -> bytes:
    """orjson's bytes; where an integer has more than 64 bits, which orjson would read as a float, json's, marked so."""
    try:
        return orjson.dumps(header, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError as error:
        if "64-bit" not in str(error):
            raise
        text = json.dumps({**header, "exact": True})
        if json.loads(text) != {**header, "exact": True}:
            raise  # not only an integer: a tuple, a key that is no text
        return text.encode()


def _check(value: Any, where: str) -> None:
    """Refuse what JSON cannot carry, or would change."""
    try:
        _dump({"": [{"": value}]})  # as deep as it lies in the header
        json.dumps(value, allow_nan=False, default=str)
    except (TypeError, ValueError) as error:
        raise SampleError(
            f"{where} cannot be stored: {error}; keep only finite numbers, text, lists and objects with text keys in a sample"
        ) from error
