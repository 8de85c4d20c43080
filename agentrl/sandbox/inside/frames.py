"""Messages between the processes of the sandbox: a length (4 bytes, big-endian) and a JSON object.

Whoever reads from a process that runs the model's code reads small frames only, and takes whatever is not such a
frame for `BadFrame`: never pickle, never an unbounded buffer.
"""

import json
import struct
from typing import Any

HEADER = struct.Struct(">I")
LARGEST = 64 * 1024 * 1024
LARGEST_FROM_CHILD = 4096


class BadFrame(Exception):
    """The bytes are no message."""


def encode(message: dict[str, Any]) -> bytes:
    """A message as bytes; lone surrogates in its texts survive."""
    body = json.dumps(message).encode("ascii")
    return HEADER.pack(len(body)) + body


class Decoder:
    """Collects bytes and gives the messages that they complete."""

    def __init__(self, largest: int = LARGEST) -> None:
        self._buffer = bytearray()
        self._largest = largest

    def feed(self, data: bytes) -> None:
        """Add what was read."""
        self._buffer += data

    def next(self) -> dict[str, Any] | None:
        """The next complete message, or None.

        Raises:
            BadFrame: too long, or no JSON object.
        """
        if len(self._buffer) < HEADER.size:
            return None
        (length,) = HEADER.unpack_from(self._buffer)
        if length > self._largest:
            raise BadFrame(f"a message of {length} bytes; at most {self._largest} are taken")
        end = HEADER.size + length
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        try:
            message = json.loads(body)
        except (ValueError, RecursionError) as error:
            raise BadFrame(f"not JSON: {error}") from error
        if not isinstance(message, dict):
            raise BadFrame(f"expected a JSON object, got {type(message).__name__}")
        return message
