"""The confined process. Its jailer forks it, has the other ends of its streams, and ends it with all descendants."""

import contextlib
import os
import resource
import signal
import socket
import sys
import time
from typing import NoReturn

from agentrl.sandbox.inside import frames, kernel, runner
from agentrl.sandbox.inside.jail import Jail, confine


class Child:
    """The confined process, and the jailer's ends of its streams."""

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

    def kill(self) -> tuple[int, resource.struct_rusage]:
        """End the child and all its descendants; return its wait status and resource usage."""
        os.kill(self.pid, signal.SIGKILL)
        _, status, usage = os.wait4(self.pid, 0)
        _kill_orphans()
        return status, usage


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
            channel.sendall(f"{error.strerror or error}".encode())
            os._exit(1)
        for name in [name for name in sys.modules if name.partition(".")[0] == "agentrl"]:
            del sys.modules[name]
        channel.sendall(frames.READY)
        runner.serve(channel, session=jail.session)
    finally:
        os._exit(1)


def _kill_orphans() -> None:
    """Kill descendants of the child that are now our children, until none is left. A namespace kills its own."""
    with contextlib.suppress(ChildProcessError):
        while True:
            for pid in _children(os.getpid()):
                os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process, and of descendants that run or were waited for; 0 if it has ended."""
    total = 0.0
    with contextlib.suppress(OSError):  # the process ended meanwhile
        total = time.clock_gettime((~pid << 3) | 2)
        with open(f"{pid}/stat", "rb") as file:
            waited_for = file.read().rpartition(b")")[2].split()[13:15]
        total += sum(map(int, waited_for)) / os.sysconf("SC_CLK_TCK")
    return total + sum(map(cpu_seconds, _children(pid)))


def _children(pid: int) -> list[int]:
    """Return the processes that a process started and did not wait for. The working folder is /proc."""
    found: list[int] = []
    with contextlib.suppress(OSError):  # the process ended meanwhile
        for task in os.listdir(f"{pid}/task"):
            with open(f"{pid}/task/{task}/children", "rb") as file:
                found += map(int, file.read().split())
    return found
