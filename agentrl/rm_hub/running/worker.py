"""The process in which graders run, and the bytes between it and the pool.

1. A request is a line of JSON, then the answer in UTF-8. A reply is a line of JSON. Models write lone
   surrogates; both directions keep them. Tuples arrive as lists, and keys of mappings as text.
2. Nothing is pickled: received bytes cannot make either side run code.
3. A worker has its own session, a memory limit and no core dumps. It ends with the process that started it, however
   that process ends (Linux). The user's main module is not imported."""

import ctypes
import json
import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from typing import IO, Any

from agentrl.errors import AgentRLError, GraderFailure
from agentrl.rm_hub.grade import Grade, Metadata
from agentrl.rm_hub.registry import find, grade
from agentrl.sample import RECORDED

PR_SET_PDEATHSIG = 1
NICE = 5  # gives the event loop priority if it and a grader want the same core
MAX_REST = 2_000_000  # maximum bytes of label and metadata together


def request(rm_type: str, response: str, label: Any, metadata: Metadata, *, conversation: bool) -> list[bytes]:
    """Encode a request as pieces to send in order. Drops metadata that is not JSON or that a rollout recorded, except
    `messages` with `conversation`. Raises GraderFailure: the label is not JSON, or label and metadata are too large."""
    if not _plain(label):
        expected = f"plain JSON (text, numbers, lists, mappings), got {type(label).__name__}"
        raise GraderFailure(f"--rm-type {rm_type}: the label must be {expected}", kind="grader_bad_label")
    dropped = RECORDED - {"messages"} if conversation else RECORDED
    rest = {str(name): value for name, value in metadata.items() if name not in dropped and _plain(value)}
    body = response.encode("utf-8", "surrogatepass")
    head = line({"rm_type": rm_type, "label": label, "metadata": rest, "bytes": len(body)})
    if len(head) > MAX_REST:
        large = f"label and metadata hold more than {MAX_REST:,} bytes; keep only what the grader reads in the metadata"
        raise GraderFailure(f"--rm-type {rm_type}: {large}", kind="grader_too_large")
    return [head, body]


def read_request(stream: IO[bytes]) -> dict[str, Any] | None:
    """Decode a request: `rm_type`, `response`, `label` and `metadata`; None if the pool closed the connection."""
    if not (head := stream.readline()):
        return None
    job: dict[str, Any] = value(head)
    return job | {"response": stream.read(job.pop("bytes")).decode("utf-8", "surrogatepass")}


def reply(outcome: Grade | GraderFailure) -> bytes:
    if isinstance(outcome, GraderFailure):
        return line({"failure": str(outcome), "kind": outcome.kind})
    return line(outcome.as_dict())


def read_reply(data: bytes) -> Grade | GraderFailure:
    told = value(data)
    return GraderFailure(told["failure"], kind=told["kind"]) if "failure" in told else Grade(**told)


def line(content: Any) -> bytes:
    return json.dumps(content, ensure_ascii=False).encode("utf-8", "surrogatepass") + b"\n"


def value(data: bytes) -> Any:
    return json.loads(data.decode("utf-8", "surrogatepass"))


def _plain(content: Any) -> bool:
    try:
        json.dumps(content)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def load(names: Sequence[str]) -> dict[str, str]:
    """Import graders. Return the reasons of failed imports by the grader's name."""
    failed = {}
    for name in names:
        try:
            find(name).load()
        except Exception as error:  # noqa: BLE001 - a module may raise anything; the pool raises it again, typed
            failed[name] = f"{type(error).__name__}: {error}"[:1000]
    return failed


def prepare(parent: int) -> None:
    """Tie the process to its parent: the kernel sends SIGKILL when the parent ends."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        os._exit(0)
    os.nice(NICE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(fd: int, parent: int, memory_mb: int, names: Sequence[str]) -> None:
    """Load graders, report the failures, and grade requests until the pool closes the connection."""
    prepare(parent)
    connection = socket.socket(fileno=fd)
    connection.sendall(line(load(names)))
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped + memory_mb * 2**20  # in addition to the memory of the graders' libraries
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    with connection.makefile("rb") as stream:
        while True:
            try:
                if (job := read_request(stream)) is None:
                    os._exit(0)
                outcome: Any = grade(**job)
            except MemoryError:
                said = "the grader ran out of memory; --grader-memory-mb sets the limit"
                outcome = GraderFailure(said, kind="grader_out_of_memory")
            except GraderFailure as failure:
                outcome = failure
            except (AgentRLError, ValueError) as error:
                outcome = GraderFailure(f"{type(error).__name__}: {error}", kind="grader_bad_input")
            connection.sendall(reply(outcome))
