"""The bytes between a grader pool and its worker processes.

1. A frame is a 4-byte length and that many bytes. A request is a frame of JSON and then the answer's text in frames of
   at most `CHUNK` characters, so that no step of sending a long answer holds up an event loop. A reply is one frame.
2. Text is UTF-8 in which lone surrogates pass, both ways: models write them, and they come back as they were.
3. Nothing is pickled: neither side can be made to run code by what it is sent. Tuples arrive as lists, and keys of
   mappings as text.
"""

import json
import struct
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.errors import GraderFailure
from agentrl.rm_hub.grade import Grade

CHUNK = 1 << 17
MAX_REST = 2_000_000
"""Most characters of label and metadata together, about."""
MAX_FRAME = 64_000_000

_LENGTH = struct.Struct("!I")

BOOKKEEPING = frozenset({"counters", "step_rewards", "grade", "failure", "close_failure"})
"""What the rollout notes on a sample for itself: graders in a process do not get it, nor conversations they do not read."""


def request(
    rm_type: str,
    response: str,
    label: Any,
    metadata: Mapping[str, Any],
    *,
    needs: tuple[str, ...] = (),
    conversation: bool = False,
) -> Iterator[bytes]:
    """The pieces of a request, to be sent in order.

    Metadata that is no JSON stays behind, unless the grader needs it.

    Raises:
        GraderFailure: at once, where the label or a needed field is no JSON, or there is too much of it.
    """
    dropped = BOOKKEEPING if conversation else BOOKKEEPING | {"messages"}
    rest = {name: value for name, value in metadata.items() if name not in dropped}
    if weight((label, rest)) > MAX_REST:
        raise GraderFailure(
            f"--rm-type {rm_type}: label and metadata hold more than {MAX_REST:,} characters; "
            "keep only what the grader reads in the metadata",
            kind="grader_too_large",
        )
    starts = range(0, max(1, len(response)), CHUNK)
    head = _head({"rm_type": rm_type, "label": label, "metadata": rest, "chunks": len(starts)}, needs)

    def pieces() -> Iterator[bytes]:
        for start in starts:
            text = frame(_bytes(response[start : start + CHUNK]))
            yield text if start else head + text

    return pieces()


def read_request(read: Callable[[int], bytes]) -> dict[str, Any]:
    """The other end: `rm_type`, `label`, `metadata`, and `response` put together."""
    job: dict[str, Any] = json.loads(_text(read_frame(read)))
    job["response"] = "".join(_text(read_frame(read)) for _ in range(job.pop("chunks")))
    return job


def reply(outcome: Grade | GraderFailure) -> bytes:
    """The frame that answers a request."""
    if isinstance(outcome, GraderFailure):
        told: dict[str, Any] = {"failure": str(outcome), "kind": outcome.kind}
    else:
        told = {name: getattr(outcome, name) for name in ("score", "correct", "extracted", "reason")}
        told["parts"] = dict(outcome.parts)
    return frame(_bytes(json.dumps(told, ensure_ascii=False)))


def read_reply(data: bytes) -> Grade | GraderFailure:
    """The grade or failure in a reply's frame."""
    told = json.loads(_text(data))
    if "failure" in told:
        return GraderFailure(told["failure"], kind=told["kind"])
    return Grade(**told)


def frame(data: bytes) -> bytes:
    """`data` with its length before it."""
    return _LENGTH.pack(len(data)) + data


def read_frame(read: Callable[[int], bytes]) -> bytes:
    """One frame from a blocking `read` that returns exactly as many bytes as asked for."""
    return read(frame_length(read(_LENGTH.size)))


def frame_length(prefix: bytes) -> int:
    """The length that a frame's first four bytes say."""
    length: int = _LENGTH.unpack(prefix)[0]
    if length > MAX_FRAME:
        raise ValueError(f"a frame of {length} bytes; at most {MAX_FRAME}")
    return length


def weight(value: Any) -> int:
    """About how many characters `value` has as JSON; the count ends once it is beyond `MAX_REST`."""
    total, left = 0, [value]
    while left and total <= MAX_REST:
        item = left.pop()
        total += 1
        if isinstance(item, (str, bytes)):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3
        elif isinstance(item, Mapping):
            left.extend(item)
            left.extend(item.values())
        elif isinstance(item, (list, tuple)):
            left.extend(item)
    return total


def _head(job: dict[str, Any], needs: tuple[str, ...]) -> bytes:
    """The JSON of a request. All of it is plain in the usual case; only else is each field tried for itself."""
    try:
        return frame(_bytes(json.dumps(job, ensure_ascii=False)))
    except _NOT_JSON:
        metadata = job["metadata"]
        read = {
            "the label": job["label"],
            **{f"metadata {name!r}": metadata[name] for name in needs if name in metadata},
        }
        for what, value in read.items():
            if not _encodes(value):
                raise GraderFailure(
                    f"--rm-type {job['rm_type']}: {what} must be plain JSON (text, numbers, lists, mappings), "
                    f"got {type(value).__name__}",
                    kind="grader_bad_label" if what == "the label" else "grader_bad_metadata",
                ) from None
        plain = {str(name): value for name, value in metadata.items() if _encodes(value)}
        return frame(_bytes(json.dumps({**job, "metadata": plain}, ensure_ascii=False)))


_NOT_JSON = (TypeError, ValueError, RecursionError)


def _encodes(value: Any) -> bool:
    try:
        json.dumps(value)
    except _NOT_JSON:
        return False
    return True


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")
