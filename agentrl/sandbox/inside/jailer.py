"""Watches one child: forks it, confines it, feeds it, and ends it.

1. The model's code never holds a descriptor of the parent's. It talks to the jailer by its standard streams and one
   socket, on which the jailer accepts tiny messages only; anything else ends a session.
2. Deadline, CPU time and output are watched here, outside the child. The end is SIGKILL and a wait until the child
   and all that it started are gone; only then does the parent hear the result.
3. If the parent hangs up, the child is killed. If the jailer dies, the kernel kills the child.
"""

import contextlib
import os
import resource
import select
import signal
import socket
import sys
import time
from typing import Any, NoReturn

from agentrl.sandbox.inside import frames, kernel, runner
from agentrl.sandbox.inside.jail import Jail, confine, enter_namespaces

_CHECK_SECONDS = 0.25
_IDLE_CHECK_SECONDS = 2.0
_CHUNK = 65536


def main(parent: socket.socket, jail: Jail) -> NoReturn:
    """Serve one child; ends the process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    kernel.die_with_parent(signal.SIGKILL)
    kernel.become_subreaper()
    try:
        if jail.kind == "namespaces":
            enter_namespaces()
        child = Child(jail, parent)
    except OSError as error:
        _tell(parent, {"failed": str(error)})
        os._exit(1)
    Supervisor(parent, child, jail).run()
    os._exit(0)


class Child:
    """The confined process and our ends of its streams."""

    def __init__(self, jail: Jail, parent: socket.socket) -> None:
        stdin_read, self.stdin = os.pipe()
        self.stdout, stdout_write = os.pipe()
        self.stderr, stderr_write = os.pipe()
        self.control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self.pid = os.fork()
        if self.pid == 0:
            parent.close()
            if jail.session:
                stdin_read = os.open("/dev/null", os.O_RDONLY)
            _become_child(jail, (stdin_read, stdout_write, stderr_write), theirs)
        for descriptor in (stdin_read, stdout_write, stderr_write):
            os.close(descriptor)
        theirs.close()
        self.exited = kernel.process_descriptor(self.pid)
        for descriptor in (self.stdin, self.stdout, self.stderr):
            os.set_blocking(descriptor, False)
        self.control.setblocking(False)

    def cpu_seconds(self) -> float:
        """CPU time of the process, all its threads."""
        try:
            return time.clock_gettime((~self.pid << 3) | 2)
        except OSError:
            return 0.0

    def kill(self) -> tuple[int, resource.struct_rusage]:
        """End it and everything it started; returns its wait status and what it used."""
        os.kill(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        _kill_orphans()
        return status, usage


class Supervisor:
    """The jailer's loop. One request at a time; a program's child serves one, a session's any number."""

    def __init__(self, parent: socket.socket, child: Child, jail: Jail) -> None:
        self.parent, self.child, self.jail = parent, child, jail
        self.requests = frames.Decoder()
        self.reports = frames.Decoder(frames.LARGEST_FROM_CHILD)
        self.poll = select.poll()
        for descriptor in (parent.fileno(), child.exited, child.control.fileno(), child.stdout, child.stderr):
            self.poll.register(descriptor, select.POLLIN)
        self.current: dict[str, Any] | None = None
        self.report: dict[str, Any] | None = None
        self.deadline = 0.0
        self.cpu_limit = jail.cpu_seconds
        self.output = {child.stdout: bytearray(), child.stderr: bytearray()}
        self.stdin = memoryview(b"")
        self.verdict: str | None = None

    def run(self) -> None:
        """Until the child has ended or the parent hung up."""
        while self.verdict is None:
            ready = dict(self.poll.poll(self._patience()))
            if self.parent.fileno() in ready and not self._read_parent():
                self.child.kill()
                return
            for stream in self.output:
                if stream in ready:
                    self._read_output(stream)
            if self.child.control.fileno() in ready:
                self._read_report()
            if self.child.stdin in ready:
                self._write_stdin()
            if self.child.exited in ready:
                break
            self._check_limits()
        self._finish()

    def _patience(self) -> float:
        """Milliseconds until the next look at the limits."""
        if self.current is None:
            return 1000 * _IDLE_CHECK_SECONDS
        return 1000 * max(0.0, min(_CHECK_SECONDS, self.deadline - time.monotonic()))

    def _check_limits(self) -> None:
        late = self.current is not None and time.monotonic() >= self.deadline
        if late or self.child.cpu_seconds() > self.cpu_limit:
            self.verdict = self.verdict or "timeout"

    def _read_parent(self) -> bool:
        """Take a request; False if the parent hung up."""
        data = self.parent.recv(_CHUNK)
        if not data:
            return False
        self.requests.feed(data)
        request = self.requests.next()
        if request is None or self.verdict is not None:
            return True
        self.current = request
        self.deadline = time.monotonic() + request["wall_seconds"]
        self.cpu_limit = self.child.cpu_seconds() + self.jail.cpu_seconds
        if not self.jail.session:
            self.stdin = memoryview(request.pop("stdin").encode("utf-8", "surrogateescape"))
            self._write_stdin()
        self._send_code(frames.encode({"id": request["id"], "code": request["code"]}))
        return True

    def _send_code(self, data: bytes) -> None:
        """The child may be busy with something else and not read: that ends at the deadline, or at once if it is gone."""
        view = memoryview(data)
        while view:
            try:
                view = view[self.child.control.send(view) :]
            except BlockingIOError:
                wait = self.deadline - time.monotonic()
                if wait <= 0 or not select.select([], [self.child.control], [], wait)[1]:
                    self.verdict = "timeout"
                    return
            except OSError:
                return  # closed by the code, or it ended: seen as the end of the process, or as the deadline

    def _write_stdin(self) -> None:
        try:
            while self.stdin:
                self.stdin = self.stdin[os.write(self.child.stdin, self.stdin[:_CHUNK]) :]
        except BlockingIOError:
            self.poll.register(self.child.stdin, select.POLLOUT)
            return
        except BrokenPipeError:
            self.stdin = memoryview(b"")
        if self.child.stdin >= 0:
            self._forget(self.child.stdin)
            os.close(self.child.stdin)
            self.child.stdin = -1

    def _read_output(self, stream: int) -> bool:
        """Take what is there, up to the limit; False when there is no more for now."""
        try:
            data = os.read(stream, _CHUNK)
        except BlockingIOError:
            return False
        if not data:
            self._forget(stream)
            return False
        room = self.jail.output_bytes - sum(map(len, self.output.values()))
        self.output[stream] += data[:room]
        if len(data) > room:
            self.verdict = self.verdict or "output"
            return False
        return True

    def _read_report(self) -> None:
        try:
            data = self.child.control.recv(_CHUNK)
        except OSError:
            data = b""
        if not data:
            self._forget(self.child.control.fileno())
            return
        try:
            self.reports.feed(data)
            while (report := self.reports.next()) is not None:
                self._take(report)
        except frames.BadFrame:
            self.verdict = self.verdict or "killed"

    def _take(self, report: dict[str, Any]) -> None:
        if "ready" in report or "failed" in report:
            _tell(self.parent, {key: str(report[key])[:500] for key in ("ready", "failed") if key in report})
        elif not self.jail.session:
            self.report = report
        elif self.current is not None and report.get("done") == self.current["id"]:
            self._drain()
            if self.verdict is None:
                failed = bool(report.get("status"))
                outcome = ("memory" if report.get("memory") is True else "error") if failed else "ok"
                self._answer(outcome, None, ended=False)

    def _drain(self) -> None:
        for stream in self.output:
            while self._read_output(stream):
                pass

    def _finish(self) -> None:
        """The child has ended or must: make sure that nothing of it remains, then say what came of it."""
        status, usage = self.child.kill()
        self._drain()
        if self.current is None:
            _tell(self.parent, {"gone": True})  # a request on its way here was not begun
            return
        code = os.waitstatus_to_exitcode(status)
        outcome = self.verdict
        if outcome is None:
            self._read_report()
            self.verdict = None  # a program that ended is not blamed for what it wrote last
            used = usage.ru_utime + usage.ru_stime
            if code < 0:
                outcome = "timeout" if used >= self.jail.cpu_seconds and not self.jail.session else "killed"
            elif self.jail.session or code:
                outcome = "memory" if self.report is not None and self.report.get("memory") is True else "error"
            else:
                outcome = "ok"
        self._answer(outcome, code, ended=True)

    def _forget(self, descriptor: int) -> None:
        """Watch a stream no more, whether or not it was still watched."""
        with contextlib.suppress(KeyError):
            self.poll.unregister(descriptor)

    def _answer(self, outcome: str, code: int | None, *, ended: bool) -> None:
        assert self.current is not None
        stdout, stderr = (bytes(buffer).decode("utf-8", "replace") for buffer in self.output.values())
        message = {"id": self.current["id"], "outcome": outcome, "returncode": code, "ended": ended}
        self.current = None
        self.cpu_limit = self.child.cpu_seconds() + self.jail.cpu_seconds
        for buffer in self.output.values():
            buffer.clear()
        _tell(self.parent, {**message, "stdout": stdout, "stderr": stderr})


def _become_child(jail: Jail, streams: tuple[int, int, int], control: socket.socket) -> NoReturn:
    try:
        os.setsid()
        moved = os.dup(control.fileno())
        while moved < 4:
            moved = os.dup(moved)
        for position, descriptor in enumerate(streams):
            os.dup2(descriptor, position, inheritable=True)
        os.dup2(moved, 3, inheritable=False)
        control.detach()
        os.closerange(4, 1 << 20)
        channel = socket.socket(fileno=3)
        try:
            confine(jail)
            runner.reseed()
        except OSError as error:
            channel.sendall(frames.encode({"failed": f"{error.strerror or error}"}))
            os._exit(1)
        for name in [name for name in sys.modules if name.partition(".")[0] == "agentrl"]:
            del sys.modules[name]
        channel.sendall(frames.encode({"ready": True}))
        runner.serve(channel, session=jail.session)
    finally:
        os._exit(1)


def _kill_orphans() -> None:
    """Kill what the child left behind and the kernel handed to us (no namespace did it), until nothing is left."""
    while True:
        try:
            if os.waitpid(-1, os.WNOHANG)[0]:
                continue
        except ChildProcessError:
            return
        for pid in _children():
            os.kill(pid, signal.SIGKILL)
        os.waitpid(-1, 0)


def _children() -> list[int]:
    """Our living descendants that have us as parent."""
    found = []
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open(f"/proc/{name}/stat", encoding="utf-8", errors="replace") as file:
                parent = int(file.read().rpartition(")")[2].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == os.getpid():
            found.append(int(name))
    return found


def _tell(parent: socket.socket, message: dict[str, Any]) -> None:
    with contextlib.suppress(OSError):  # the parent hung up; the loop sees it too
        parent.sendall(frames.encode(message))
