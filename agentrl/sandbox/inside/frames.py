"""Messages between the processes of the sandbox.

1. Between the parent and a jailer, and from the jailer to the confined process: a length (4 bytes, big-endian) and a
   JSON object. The senders are trusted.
2. From a confined process to its jailer: single bytes, `READY` once, then one of `ANSWERS` for each request. They
   need no parser and have no content to forge. If the model's code writes anything else, its process is ended."""

import json
import struct
from typing import Any

HEADER = struct.Struct(">I")
LARGEST = 64 * 1024 * 1024
READY = b"r"
ANSWERS = {b"o": "ok", b"e": "error", b"m": "memory"}


def encode(message: dict[str, Any]) -> bytes:
    """Return a message as bytes; lone surrogates in its texts are kept."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


class FrameDecoder:
    """Decoder that collects bytes and returns complete messages."""

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
