"""Groups of samples as compact bytes and back, without pickle.

1. Layout: Zstandard of [4-byte little-endian header length][JSON header][raw arrays]; the header names each array's
   sample, field, dtype and length in order.
2. The arrays of `Sample.to_arrays` are stored as raw arrays (log-probs as float32), the rest as JSON. A value that JSON
   cannot carry (an image object, a NaN) raises an error that names the field. Tuples and arrays become lists, dates
   become text.
3. Images and routing hardly compress, so they follow the compressed part as they are. Each image of the group is stored
   once. Expert indices are uint8 if all are below 256, else int16. Such groups begin with `_LONG` and the lengths of
   the first two parts. `split_group` removes the routing."""

from __future__ import annotations

import io
import json
import math
import struct
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import zstandard

from agentrl.errors import SampleError, raised_as
from agentrl.media import Image
from agentrl.rowfiles import dump_json
from agentrl.sample import Sample

_VERSION = 2
_ROUTING, _LONG, _SIZES = "rollout_routed_experts", b"L", struct.Struct("<QQ")
"""The array that is stored uncompressed, and the first byte of a group with uncompressed parts."""
_ZLIB = b"x"  # first byte of a group that agentrl 0.1 compressed
_DAMAGED: tuple[type[Exception], ...] = (zstandard.ZstdError, zlib.error, struct.error, ArithmeticError, LookupError)
_DAMAGED += (AttributeError, SyntaxError, TypeError, ValueError)
"""The errors that damaged bytes raise while they are read."""


def encode_group(samples: Sequence[Sample]) -> bytes:
    """Return the bytes of one group. Raises SampleError: a field has a value that JSON cannot carry."""
    rests, arrays, large = list[Any](), list[Any](), list[Any]()
    raw, routing, images = list[bytes](), list[bytes](), dict[str, Image]()
    for number, sample in enumerate(samples):
        parts, rest = sample.to_arrays()
        rests.append(rest)
        for name, values in parts.items():
            if routes := name == _ROUTING and values.size > 0:
                values = values.astype(np.uint8 if values.max() < 256 else np.int16)
            (large if routes else arrays).append([number, name, values.dtype.str, list(values.shape)])
            (routing if routes else raw).append(values.tobytes())
        images |= sample.images
        rest["images"] = list(sample.images)
    if _refusal(rests):
        for sample, (field, value) in (
            (s, item) for s, rest in zip(samples, rests, strict=True) for item in rest.items()
        ):
            if error := _refusal([{"": value}]):
                remedy = "keep only finite numbers, text, lists and objects with text keys in a sample"
                raise SampleError(f"sample index={sample.index}: field {field!r} cannot be stored: {error}; {remedy}")
    listed = {"large": large, "images": [[i.hash, i.width, i.height, i.form, len(i.data)] for i in images.values()]}
    header = _dump({"version": _VERSION, "rest": rests, "arrays": arrays, **{k: v for k, v in listed.items() if v}})
    whole = b"".join([struct.pack("<I", len(header)), header, *raw])
    small = zstandard.ZstdCompressor(level=1, write_checksum=True).compress(whole)
    return _joined(small, b"".join(image.data for image in images.values()), b"".join(routing))


def _joined(small: bytes, images: bytes, routing: bytes) -> bytes:
    if not (images or routing):
        return small
    return b"".join([_LONG, _SIZES.pack(len(small), len(images)), small, images, routing])


def _parts(data: bytes) -> tuple[bytes, bytes, bytes]:
    """Return the compressed part of a group's bytes, its images and its routing."""
    if data[:1] != _LONG:
        return data, b"", b""
    sizes = _SIZES.unpack_from(data, 1) if len(data) > 1 + _SIZES.size else (len(data), 0)
    start = 1 + _SIZES.size
    middle, end = start + sizes[0], start + sum(sizes)
    if end > len(data):
        raise SampleError("stored group is damaged: its images or its routing are missing")
    return data[start:middle], data[middle:end], data[end:]


def _plain(small: bytes) -> bytes:
    """Return the decompressed part of a group. Raises ValueError, ZstdError or zlib.error: it is damaged."""
    if small[:1] == _ZLIB:
        return zlib.decompress(small)
    stream = zstandard.ZstdDecompressor().decompressobj()
    plain = stream.decompress(small)
    if not stream.eof or stream.unused_data:
        raise ValueError(f"{len(small)} bytes are not the whole compressed part")
    return plain


def split_group(data: bytes) -> tuple[bytes, bytes]:
    """Return the bytes of a group without its routing, and the routing, empty if there is none. `decode_group` also
    reads a group without its routing. Raises SampleError: the bytes are damaged."""
    small, images, routing = _parts(data)
    return _joined(small, images, b""), routing


def decode_group(data: bytes, what: str = "stored group", *, compact: bool = False) -> list[Sample]:
    """Decode a group, with samples as `Sample.compact` makes them if asked; messages call it `what`. Raises SampleError: the bytes are damaged or of another version."""
    try:
        small, pictures, routing = _parts(data)
        plain = _plain(small)
        (size,) = struct.unpack_from("<I", plain)
        header: dict[str, Any] = orjson.loads(plain[4 : 4 + size])
        if header["version"] != _VERSION:
            raise SampleError(f"stored group has layout version {header['version']}; this program reads {_VERSION}")
        if "exact" in header:
            header = json.loads(plain[4 : 4 + size])
        arrays: list[dict[str, Any]] = [{} for _ in header["rest"]]
        large = header.get("large", ()) if routing else ()
        for raw, at, listed in ((plain, 4 + size, header["arrays"]), (routing, 0, large)):
            for number, name, dtype, shape in listed:
                numbers = np.frombuffer(raw, dtype=np.dtype(dtype), count=math.prod(shape), offset=at)
                arrays[number][name] = numbers.reshape(shape)
                at += numbers.nbytes
        images, at = dict[str, Image](), 0
        for name, width, height, form, length in header.get("images", ()):
            images[name] = Image(name, pictures[at : (at := at + length)], width, height, form)
        samples = []
        for own, rest in zip(arrays, header["rest"], strict=True):
            held = {name: images[name] for name in rest.pop("images", ())}
            samples.append(Sample.from_arrays(own, rest, compact=compact))
            samples[-1].images = held
        return samples
    except SampleError as error:
        raise SampleError(f"{what} is damaged: {error}") from error
    except _DAMAGED as error:
        raise SampleError(f"{what} is damaged: {type(error).__name__}: {error}") from error


def read_texts(data: bytes, what: str = "stored group") -> list[str]:
    """Return prompt and response of each sample without decoding arrays. Raises SampleError: the bytes are damaged."""
    shown = ": {0.__class__.__name__}: {0}"
    with raised_as(SampleError, f"{what} is damaged", *_DAMAGED, shown=shown):
        small = _parts(data)[0]
        stream = io.BytesIO(_plain(small)) if small[:1] == _ZLIB else zstandard.ZstdDecompressor().stream_reader(small)
        (size,) = struct.unpack("<I", stream.read(4))
        header = orjson.loads(stream.read(size))
        return [f"{rest['prompt']}\n{rest['response']}" for rest in header["rest"]]


def _dump(header: dict[str, Any]) -> bytes:
    """Return JSON, with a mark if an integer has more than 64 bits, which orjson would read as a float."""
    return dump_json(header, {**header, "exact": True})


def _refusal(rests: list[Any]) -> str:
    """Return why JSON cannot carry a value, or would change it; "" if it can."""
    try:
        _dump({"": rests})  # nested as deeply as in the header
        json.dumps(rests, allow_nan=False, default=lambda v: v.tolist() if hasattr(v, "tolist") else str(v))
    except (TypeError, ValueError) as error:
        return str(error) or type(error).__name__
    return ""
