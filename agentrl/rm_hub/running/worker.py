"""The processes in which graders run: `python -P worker.py CONTROL_FD PARENT_PID MEMORY_MB PATH...`.

1. One *nursery* loads graders and forks a *worker* from itself in a few milliseconds whenever the pool wants one, so
   that killing a worker costs little, and loading a library never counts against an answer's deadline.
2. It talks to the pool over a socket of packets: `load` names, `fork` with the socket that the worker shall serve (the
   answer carries a pidfd: a signal sent by it can hit no other process), `ended` asks how a worker ended.
3. A worker is in a session of its own with a limit on memory and no core dumps. Whatever it has started is killed when
   it ends. Nursery and workers die with the process that started them, however that one ends (Linux).
4. Run by file path without the script's folder on the module path: the folder's `math.py` is not Python's. Nothing of
   the user's main module is imported.
"""

import contextlib
import ctypes
import gc
import json
import os
import resource
import select
import signal
import socket
import sys
from typing import Any

PR_SET_PDEATHSIG = 1
PACKET = 1 << 16
NICE = 5
"""Graders give way to the event loop that feeds them, where both want one core."""
_KEEP_ENDED = 256


class Nursery:
    """Loads graders, forks workers and buries them."""

    def __init__(self, control: socket.socket, memory_mb: int) -> None:
        self.control, self.memory_mb = control, memory_mb
        self.children: dict[int, int] = {}
        self.ended: dict[int, int] = {}

    def serve(self) -> None:
        """Answer the pool until it hangs up; then end every worker."""
        while True:
            poll = select.poll()
            for watched in (self.control.fileno(), *self.children):
                poll.register(watched, select.POLLIN)
            ready = [fd for fd, _ in poll.poll()]
            for pidfd in ready:
                if pidfd in self.children:
                    self._bury(pidfd)
            if self.control.fileno() in ready and not self._answer():
                break
        for pidfd in list(self.children):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            self._bury(pidfd)

    def _answer(self) -> bool:
        packet, fds, _, _ = socket.recv_fds(self.control, PACKET, 1)
        if not packet:
            return False
        order = json.loads(packet)
        match order["do"]:
            case "load":
                self._say(load(order["names"]))
            case "fork":
                self._fork(fds[0])
            case "ended":
                for pidfd in [fd for fd, pid in self.children.items() if pid == order["pid"]]:
                    self._bury(pidfd)
                self._say({"status": self.ended.pop(order["pid"], -signal.SIGKILL)})
        return True

    def _say(self, message: dict[str, Any], *fds: int) -> None:
        socket.send_fds(self.control, [json.dumps(message).encode()], fds)

    def _fork(self, serving: int) -> None:
        parent = os.getpid()
        # What is there is there for good: the workers' collectors need not look at it, nor copy its pages.
        gc.collect()
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            try:
                self.control.close()
                for pidfd in self.children:
                    os.close(pidfd)
                prepare(parent, self.memory_mb)
                work(socket.socket(fileno=serving))
            finally:
                os._exit(1)
        os.close(serving)
        pidfd = os.pidfd_open(pid)
        self.children[pidfd] = pid
        self._say({"pid": pid}, pidfd)

    def _bury(self, pidfd: int) -> None:
        """Wait for an ended worker, after killing what it left behind: until then nobody else can have its number."""
        pid = self.children.pop(pidfd)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        with contextlib.suppress(ProcessLookupError):  # one that ended early had no session of its own yet
            os.killpg(pid, signal.SIGKILL)
        self.ended[pid] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        os.close(pidfd)
        if len(self.ended) > _KEEP_ENDED:
            del self.ended[next(iter(self.ended))]


def load(names: list[str]) -> dict[str, Any]:
    """Import graders; says which could not be, and why."""
    from agentrl.rm_hub.registry import find

    failed = {}
    for name in names:
        try:
            find(name).load()
        except Exception as error:  # noqa: BLE001 - a module may raise anything; the pool raises it again, typed
            failed[name] = f"{type(error).__name__}: {error}"[:1000]
    return {"failed": failed}


def die_with(parent: int) -> None:
    """Ask the kernel for SIGKILL when the parent ends; end at once if it has."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent:
        os._exit(0)


def prepare(parent: int, memory_mb: int) -> None:
    """Make the forked process a worker; `memory_mb` comes on top of what is mapped already."""
    os.setsid()
    os.nice(NICE)
    die_with(parent)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with open("/proc/self/statm") as statm:
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    limit = mapped + memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def work(connection: socket.socket) -> None:
    """Grade requests until the pool hangs up."""
    from agentrl.errors import AgentRLError, GraderFailure
    from agentrl.rm_hub.registry import grade
    from agentrl.rm_hub.running import frames

    with connection.makefile("rb") as lines:
        while True:
            try:
                job = frames.read_request(lines)
                outcome: Any = grade(job["rm_type"], job["response"], job["label"], job["metadata"])
            except StopIteration:
                os._exit(0)  # the pool hung up
            except MemoryError:
                outcome = GraderFailure(
                    "the grader ran out of memory; --grader-memory-mb sets the limit", kind="grader_out_of_memory"
                )
            except GraderFailure as failure:
                outcome = failure
            except (AgentRLError, ValueError) as error:
                outcome = GraderFailure(f"{type(error).__name__}: {error}", kind="grader_bad_input")
            connection.sendall(frames.reply(outcome))


def main() -> None:
    control, parent, memory_mb = map(int, sys.argv[1:4])
    die_with(parent)
    sys.path[:] = sys.argv[4:]
    Nursery(socket.socket(fileno=control), memory_mb).serve()
    os._exit(0)  # nothing is left to be cleaned up, and the pool waits


if __name__ == "__main__":
    main()
