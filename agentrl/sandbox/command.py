"""Programs in a sandbox: any command, in one folder, with no network but one bridged server.

1. bubblewrap gives the command a file system of its own: system folders and named paths read-only, the folder, an empty
   home and an empty /tmp. Other processes, other files and the network are out of reach.
2. `inside/bridge.py` starts the command. It listens on 127.0.0.1 inside and forwards each connection to one Unix socket,
   so that the command reaches that server and nothing else.
3. The command ends with this process, at its deadline and with a cancelled call."""

import contextlib
import math
import os
import re
import shlex
import shutil
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Any

import anyio
from anyio.abc import ByteReceiveStream, ByteSendStream, Process

from agentrl.errors import SandboxFailure, SandboxUnavailable, SettingsError, raised_as, ungrouped
from agentrl.sandbox.inside import bridge
from agentrl.tasks import undone_by

SYSTEM_PATHS = (
    "/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/alternatives", "/etc/ssl/certs",
    "/etc/ssl/cert.pem", "/etc/ssl/openssl.cnf", "/etc/ld.so.cache",
)  # fmt: skip
_INSIDE, _FOLDER, _HOME = "/run/agentrl", "/workspace", "/home/agent"
_USER = "1000"  # the user inside: an unprivileged one, also if the caller is root
NOBODY = 65534
_REST_SECONDS = 2.0  # for the rest of the outputs
_TIMED_OUT = 124  # as of timeout(1)


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The end of a command. `exit_code`: exit status; 128 + N or -N after signal N, 124 if `timed_out`. `output`,
    `errors`: beginning of standard output, and of standard error. `stdout` and `stderr` are the same as text.
    `timed_out`: the command was killed at its time limit. `truncated`: an output was longer than its limit."""

    exit_code: int
    output: bytes
    errors: bytes
    timed_out: bool = False
    truncated: bool = False

    @property
    def stdout(self) -> str:
        return self.output.decode("utf-8", "replace")

    @property
    def stderr(self) -> str:
        return self.errors.decode("utf-8", "replace")


def split_command(command: str, values: Mapping[str, str]) -> list[str]:
    """Split a command as a shell does, and then put `values` in the places of their `{names}`. A value never becomes more
    than a part of one argument. Raises SettingsError: a quote is not closed, or there is no command."""
    with raised_as(SettingsError, f"the command {command!r:.200} cannot be read", ValueError):
        words = shlex.split(command)
    if not words:
        raise SettingsError("the command is empty")
    return [re.sub(r"{(\w+)}", lambda found: values.get(found[1], found[0]), word) for word in words]  # in one pass


def confined(*, tied: bool = True) -> list[str]:
    """Return the start of a bubblewrap command line: namespaces of its own, and an unprivileged user. `tied`: the command
    ends with this process, and has a session of its own. Raises SandboxUnavailable: bubblewrap is not installed."""
    if (binary := shutil.which("bwrap")) is None:
        raise SandboxUnavailable("the command bwrap is not installed (Debian, Ubuntu: apt install bubblewrap)")
    line = [binary, "--unshare-all", "--unshare-user", "--uid", _USER, "--gid", _USER, "--hostname", "sandbox"]
    return [*line, "--die-with-parent", "--new-session"] if tied else line


def bubblewrapped(
    words: Sequence[str], folder: Path, *, readable: Sequence[str] = (), bridged: tuple[Path, int] | None = None
) -> list[str]:
    """Return the command line that runs `words` in a sandbox. It can change `folder` alone, which is `/workspace`
    inside, and read `readable` under their absolute names. `bridged`: a Unix socket, and the port of 127.0.0.1 at which the
    command reaches it. Raises SandboxUnavailable: bubblewrap is not installed."""
    line = [*confined(), "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run", "--dir", _HOME]
    for path in SYSTEM_PATHS:
        if os.path.islink(path):
            line += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            line += ["--ro-bind", path, path]
    for name in (sys.base_prefix, *map(os.path.abspath, readable)):
        for path in dict.fromkeys((name, os.path.realpath(name))):  # a link: its target under both names
            if os.path.exists(path) and path not in SYSTEM_PATHS:
                line += ["--ro-bind", path, path]
    line += ["--bind", str(folder), _FOLDER, "--chdir", _FOLDER]
    if bridged is not None:
        socket, port = bridged
        line += ["--ro-bind", str(socket), f"{_INSIDE}/socket", "--ro-bind", bridge.__file__, f"{_INSIDE}/bridge.py"]
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        words = [python, "-I", "-S", f"{_INSIDE}/bridge.py", f"{_INSIDE}/socket", str(port), *words]
    return [*line, "--", *words]


def unprivileged(command: Sequence[str]) -> list[str]:
    """Return the command line that runs `command` as user 65534 if the caller is root. `Popen(user=...)` would copy the page
    tables of this process at each start: about 50 ms a GiB. Raises SandboxUnavailable: setpriv is not installed."""
    if os.geteuid():
        return list(command)
    if (program := shutil.which("setpriv")) is None:
        raise SandboxUnavailable("the command setpriv is not installed (package util-linux)")
    return [program, f"--reuid={NOBODY}", f"--regid={NOBODY}", "--clear-groups", "--", *command]


async def run_command(
    line: Sequence[str],
    environment: Mapping[str, str],
    folder: str | Path = "/",
    *,
    stdin: bytes | None = None,
    seconds: float = math.inf,
    most: int = 1 << 20,
    as_nobody: bool = False,
    inherited: Sequence[int] = (),
    kill_rest: bool = False,
    started: Callable[[], Coroutine[Any, Any, None]] | None = None,
    stop: Callable[[Process], Coroutine[Any, Any, None]] | None = None,
) -> CommandResult:
    """Run a command line in `folder` to its end, with no variables but those of `environment`; a cancelled call kills
    it. Raises SandboxUnavailable: the command cannot be started.

    Args:
        seconds: time limit; then the command is killed.
        most: number of bytes kept of each output. The rest is discarded.
        as_nobody: run the command as user 65534 if the caller is root.
        inherited: file descriptors that the command gets.
        kill_rest: when the command ends, kill the processes that it left running in its process group.
        started, stop: are called when the process exists, and before it is killed."""
    kept = bytearray(), bytearray()

    async def feed(stream: ByteSendStream, data: bytes) -> None:
        with contextlib.suppress(OSError, anyio.BrokenResourceError):  # the command may not read all
            await stream.send(data)
        await stream.aclose()

    async def read(stream: ByteReceiveStream, into: bytearray) -> None:
        async for chunk in stream:
            into += chunk[: most + 1 - len(into)]

    with raised_as(SandboxUnavailable, f"{line[0]} cannot be started", OSError, shown=": {.strerror}"):
        with anyio.CancelScope(shield=True):  # a cancelled start would leave its pipes open
            process = await anyio.open_process(
                unprivileged(line) if as_nobody else line, stdin=DEVNULL if stdin is None else PIPE, stdout=PIPE, stderr=PIPE,
                cwd=folder, env=dict(environment), start_new_session=True, pass_fds=inherited,
            )  # fmt: skip
    async with process:
        async with undone_by(partial(_kill, process, stop)):
            with ungrouped(), anyio.move_on_after(seconds) as limit:
                async with anyio.create_task_group() as tasks:
                    if started is not None:
                        tasks.start_soon(started)
                    if process.stdin is not None:
                        tasks.start_soon(feed, process.stdin, stdin or b"")
                    for stream, into in zip((process.stdout, process.stderr), kept, strict=True):
                        assert stream is not None
                        tasks.start_soon(read, stream, into)
                    await process.wait()
                    if kill_rest:
                        _kill_group(process)
                        # A process of another group may hold an output open.
                        tasks.cancel_scope.deadline = anyio.current_time() + _REST_SECONDS
        if timed_out := limit.cancelled_caught:
            await _kill(process, stop)
    output, errors = (bytes(each[:most]) for each in kept)
    code = _TIMED_OUT if timed_out else process.returncode or 0
    return CommandResult(code, output, errors, timed_out, truncated=max(map(len, kept)) > most)


async def call(*line: str, as_nobody: bool = False, seconds: float = math.inf) -> str:
    """Run a program of the host; returns its output's last line. Raises SandboxFailure: it failed, or took too long."""
    result = await run_command(line, os.environ, seconds=seconds, as_nobody=as_nobody)
    if result.exit_code:
        said = f"no answer within {seconds:g} s" if result.timed_out else result.stderr[-1000:].strip()
        raise SandboxFailure(f"{' '.join(line[:2])}: {said or f'exit status {result.exit_code}'}")
    return result.stdout.strip().rpartition("\n")[2]


async def _kill(process: Process, stop: Callable[[Process], Coroutine[Any, Any, None]] | None) -> None:
    with anyio.CancelScope(shield=True):
        try:
            if stop is not None:
                await stop(process)
        finally:
            _kill_group(process)
            await process.wait()


def _kill_group(process: Process) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
