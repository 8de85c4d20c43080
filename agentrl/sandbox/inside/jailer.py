"""Watches one child: forks it, confines it, feeds it, and ends it.

1. The model's code never has a descriptor of the parent. It communicates with the jailer by its standard streams and
   one socket. On the socket, the jailer accepts one byte when the child is confined, and one byte during each request.
   Anything else ends the child. No byte that the code writes there reaches the parent.
2. Deadline, CPU time and output are checked here, outside the child, also between requests: the loop waits only in
   `poll`. The end of a child is SIGKILL, and a wait until it and its descendants have ended. Only then does the parent
   get the result.
3. If the parent closes the connection, the child is killed. If the jailer ends, the kernel kills the child."""

import contextlib
import os
import select
import signal
import socket
import time
from typing import Any, NoReturn

from agentrl.sandbox.inside import frames, kernel
from agentrl.sandbox.inside.child import Child, cpu_seconds
from agentrl.sandbox.inside.jail import Jail, enter_namespaces

_CHECK_SECONDS = 0.25
_IDLE_CHECK_SECONDS = 2.0
_CHUNK = 65536


def main(parent: socket.socket, jail: Jail) -> NoReturn:
    """Serve one child; ends the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.prctl("SET_PDEATHSIG", signal.SIGKILL)
    kernel.prctl("SET_CHILD_SUBREAPER", 1)  # orphans among its descendants become its children
    try:
        if jail.kind == "namespaces":
            enter_namespaces()
        os.chdir("/proc")  # still shows processes after the child mounts an empty folder over /proc
        child = Child(jail, parent)
    except OSError as error:
        fail(parent, str(error))
        os._exit(1)
    Supervisor(parent, child, jail).run()
    os._exit(0)


class Supervisor:
    """The jailer's loop. It serves one request at a time: one for a program, any number for a session."""

    def __init__(self, parent: socket.socket, child: Child, jail: Jail) -> None:
        self.parent, self.control, self.child, self.jail = parent.detach(), child.control.detach(), child, jail
        self.requests = frames.FrameDecoder()
        self.poll = select.poll()
        for descriptor in (self.parent, self.control, child.exited, child.stdout, child.stderr):
            self.poll.register(descriptor, select.POLLIN)
        for descriptor in (self.parent, self.control, child.stdin, child.stdout, child.stderr):
            os.set_blocking(descriptor, False)
        self.unsent: dict[int, memoryview] = {}
        self.confined = False
        self.deadline: float | None = None  # of the current request
        self.answer = ""
        self.cpu_limit, self.next_look = jail.cpu_seconds, 0.0
        self.output = {child.stdout: bytearray(), child.stderr: bytearray()}
        self.verdict = ""

    def run(self) -> None:
        """Run until the child has ended or the parent has closed the connection."""
        while not self.verdict:
            ready = dict(self.poll.poll(self._patience()))
            if self.parent in ready and not self._read_parent():
                self.child.kill()
                return
            for stream in self.output:
                if stream in ready:
                    self._read_output(stream)
            if self.control in ready:
                self._read_answer()
            for descriptor in [waiting for waiting in self.unsent if waiting in ready]:
                self._write(descriptor)
            if self.child.exited in ready:
                break
            self._check_limits()
        self._finish()

    def _patience(self) -> float:
        """Return the milliseconds until the next check of the limits."""
        if self.deadline is None:
            return 1000 * _IDLE_CHECK_SECONDS
        return 1000 * max(0.0, min(_CHECK_SECONDS, self.deadline - time.monotonic()))

    def _check_limits(self) -> None:
        now = time.monotonic()
        late = self.deadline is not None and now >= self.deadline
        if not late and now >= self.next_look:  # not at each wake-up, which one byte can cause
            self.next_look = now + _CHECK_SECONDS
            late = cpu_seconds(self.child.pid) > self.cpu_limit
        if late:
            self.verdict = self.verdict or "timeout"

    def _read_parent(self) -> bool:
        """Read a request; false if the parent has closed the connection."""
        if not (data := _read(self.parent)):
            return data is None
        self.requests.feed(data)
        if (request := self.requests.next()) is None or self.verdict:
            return True
        self.deadline = time.monotonic() + request["wall_seconds"]
        self.cpu_limit = cpu_seconds(self.child.pid) + self.jail.cpu_seconds
        if not self.jail.session:
            self._write(self.child.stdin, request["stdin"].encode("utf-8", "surrogateescape"))
        self._write(self.control, frames.encode({"code": request["code"]}))
        return True

    def _write(self, descriptor: int, data: bytes = b"") -> None:
        """Write the pending data of a descriptor without blocking. The rest is written when `poll` allows it."""
        rest = self.unsent.pop(descriptor, memoryview(b""))
        rest = memoryview(bytes(rest) + data) if data else rest
        try:
            while rest:
                rest = rest[os.write(descriptor, rest[:_CHUNK]) :]
        except BlockingIOError:
            self.unsent[descriptor] = rest
            self.poll.register(descriptor, select.POLLIN | select.POLLOUT)
            return
        except OSError:
            pass  # closed by its reader: seen elsewhere, if it matters
        self._forget(descriptor)
        if descriptor == self.child.stdin:
            os.close(descriptor)
        else:
            self.poll.register(descriptor, select.POLLIN)

    def _read_output(self, stream: int) -> bool:
        """Read the available output, up to the limit; false if there is no more for now."""
        if (data := _read(stream)) == b"":
            self._forget(stream)
        if not data:
            return False
        room = self.jail.output_bytes - sum(map(len, self.output.values()))
        self.output[stream] += data[:room]
        if len(data) > room:
            self.verdict = self.verdict or "output"
            return False
        return True

    def _read_answer(self) -> None:
        if (data := _read(self.control)) == b"":
            self._forget(self.control)
        if not data:
            return
        if not self.confined:
            self.confined = True
            self._tell({"ready": True} if data == frames.READY else {"failed": data.decode("utf-8", "replace")})
        elif self.deadline is None or self.answer or data not in frames.ANSWERS:
            self.verdict = self.verdict or "killed"
        else:
            self.answer = frames.ANSWERS[data]
            if self.jail.session:
                self._drain()
                if not self.verdict:
                    self._report(self.answer, None, ended=False)

    def _drain(self) -> None:
        for stream in self.output:
            while self._read_output(stream):
                pass

    def _finish(self) -> None:
        """End the child and its descendants if they still run, then report the result."""
        status, usage = self.child.kill()
        self._drain()
        os.set_blocking(self.parent, True)
        if self.deadline is None:
            self._tell({"gone": True})  # a request that is on its way was not begun
            return
        code = os.waitstatus_to_exitcode(status)
        if not self.verdict:
            self._read_answer()
        if not self.verdict:
            used = usage.ru_utime + usage.ru_stime
            if code < 0:
                self.verdict = "timeout" if used >= self.jail.cpu_seconds and not self.jail.session else "killed"
            elif self.jail.session or code:
                self.verdict = "memory" if self.answer == "memory" else "error"
            else:
                self.verdict = "ok"
        self._report(self.verdict, code, ended=True)

    def _forget(self, descriptor: int) -> None:
        """Stop polling a descriptor, if it is still polled."""
        with contextlib.suppress(KeyError):
            self.poll.unregister(descriptor)

    def _report(self, outcome: str, code: int | None, *, ended: bool) -> None:
        stdout, stderr = (bytes(buffer).decode("utf-8", "replace") for buffer in self.output.values())
        self.deadline, self.answer = None, ""
        self.cpu_limit = cpu_seconds(self.child.pid) + self.jail.cpu_seconds
        for buffer in self.output.values():
            buffer.clear()
        self._tell({"outcome": outcome, "returncode": code, "ended": ended, "stdout": stdout, "stderr": stderr})

    def _tell(self, message: dict[str, Any]) -> None:
        self._write(self.parent, frames.encode(message))


def fail(parent: socket.socket, reason: str) -> None:
    """Tell the parent that there will be no child."""
    with contextlib.suppress(OSError):  # the parent hung up
        parent.sendall(frames.encode({"failed": reason}))


def _read(descriptor: int) -> bytes | None:
    """Read the available bytes (the kernel drops attached descriptors); None if there are none, empty at the end."""
    try:
        return os.read(descriptor, _CHUNK)
    except BlockingIOError:
        return None
    except OSError:
        return b""
