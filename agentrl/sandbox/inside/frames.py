"""Messages between the processes of the sandbox.

1. Between the parent and a jailer, and from the jailer to the confined process: a length (4 bytes, big-endian) and a
   JSON object. Who writes these is trusted.
2. From a confined process to its jailer: single bytes, `READY` once, then one of `ANSWERS` for each request. There is
   nothing in them to parse, to forge or to hoard: whatever else the model's code writes there ends its process."""

import json
import struct
from typing import Any

HEADER = struct.Struct(">I")
LARGEST = 64 * 1024 * 1024
READY = b"r"
ANSWERS = {b"o": "ok", b"e": "error", b"m": "memory"}


def encode(message: dict[str, Any]) -> bytes:
    """A message as bytes; lone surrogates in its texts survive."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Collects bytes and gives the messages that they complete."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        self._buffer += data

    def next(self) -> dict[str, Any] | None:
        if len(self._buffer) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        message: dict[str, Any] = json.loads(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return message
