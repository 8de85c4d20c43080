"""The bytes between a grader pool and its worker processes.

1. Every message is lines of JSON. A request is one line and then the answer's text in lines of at most `CHUNK`
   characters, so that no step of sending a long answer holds up an event loop. A reply is one line.
2. Text is UTF-8 in which lone surrogates pass, both ways: models write them, and they come back as they were.
3. Nothing is pickled: neither side can be made to run code by what it is sent. Tuples arrive as lists, and keys of
   mappings as text.
"""

import json
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Any

from agentrl.errors import GraderFailure
from agentrl.rm_hub.grade import Grade
from agentrl.sample import RECORDED

CHUNK = 1 << 17
MAX_REST = 2_000_000
"""Most bytes of label and metadata together."""


def request(
    rm_type: str, response: str, label: Any, metadata: Mapping[str, Any], *, conversation: bool = False
) -> Iterator[bytes]:
    """The lines of a request, to be sent in order. Metadata that is no JSON stays behind, and what a rollout recorded.

    Args:
        conversation: whether `metadata["messages"]` is sent, too.

    Raises:
        GraderFailure: at once, where the label is no JSON, or there is too much of it.
    """
    if not _plain(label):
        raise GraderFailure(
            f"--rm-type {rm_type}: the label must be plain JSON (text, numbers, lists, mappings), "
            f"got {type(label).__name__}",
            kind="grader_bad_label",
        )
    dropped = RECORDED - {"messages"} if conversation else RECORDED
    rest = {str(name): value for name, value in metadata.items() if name not in dropped and _plain(value)}
    starts = range(0, max(1, len(response)), CHUNK)
    head = _line({"rm_type": rm_type, "label": label, "metadata": rest, "chunks": len(starts)})
    if len(head) > MAX_REST:
        raise GraderFailure(
            f"--rm-type {rm_type}: label and metadata hold more than {MAX_REST:,} bytes; "
            "keep only what the grader reads in the metadata",
            kind="grader_too_large",
        )
    text = (_line(response[start : start + CHUNK]) for start in starts)
    return chain([head + next(text)], text)


def read_request(lines: Iterator[bytes]) -> dict[str, Any]:
    """The other end: `rm_type`, `label`, `metadata`, and `response` put together.

    Raises:
        StopIteration: there are no more lines.
    """
    job: dict[str, Any] = _value(next(lines))
    text = [next(lines) for _ in range(job.pop("chunks"))]
    return job | {"response": "".join(map(_value, text))}


def reply(outcome: Grade | GraderFailure) -> bytes:
    """The line that answers a request."""
    if isinstance(outcome, GraderFailure):
        return _line({"failure": str(outcome), "kind": outcome.kind})
    return _line(outcome.as_dict())


def read_reply(line: bytes) -> Grade | GraderFailure:
    """The grade or failure in a reply."""
    told = _value(line)
    return GraderFailure(told["failure"], kind=told["kind"]) if "failure" in told else Grade(**told)


def _line(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def _value(line: bytes) -> Any:
    return json.loads(line.decode("utf-8", "surrogatepass"))


def _plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True
