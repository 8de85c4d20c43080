"""Programs in a sandbox: any command, in one folder, with no network but one bridged server.

1. bubblewrap gives the command a file system of its own: system folders and named paths read-only, the folder, an empty
   home and an empty /tmp. Other processes, other files and the network are out of reach.
2. `inside/bridge.py` starts the command. It listens on 127.0.0.1 inside and forwards each connection to one Unix socket,
   so that the command reaches that server and nothing else.
3. The command ends with this process, at its deadline and with a cancelled call.
"""

import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from subprocess import DEVNULL, PIPE

import anyio
from anyio.abc import ByteReceiveStream

from agentrl.errors import SettingsError
from agentrl.sandbox.inside import bridge
from agentrl.sandbox.limits import SandboxUnavailable

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/lib32", "/etc/alternatives", "/etc/ssl", "/etc/ld.so.cache")
_INSIDE, _FOLDER, _HOME = "/run/agentrl", "/workspace", "/home/agent"
_USER = "1000"
"""The user inside: an unprivileged one, also if the caller is root."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The end of a command: its exit status and the beginning of its output, as text."""

    exit_code: int
    stdout: str
    stderr: str


def split_command(command: str, values: Mapping[str, str]) -> list[str]:
    """Split a command as a shell does, and then put `values` in the places of their `{names}`. A value never becomes more
    than a part of one argument. Raises SettingsError: a quote is not closed, or there is no command."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise SettingsError(f"the command {command!r:.200} cannot be read: {error}") from None
    if not words:
        raise SettingsError("the command is empty")
    for name, value in values.items():
        words = [word.replace(f"{{{name}}}", value) for word in words]
    return words


def bubblewrapped(
    words: Sequence[str], folder: Path, *, readable: Sequence[str] = (), bridged: tuple[Path, int] | None = None
) -> list[str]:
    """Return the command line that runs `words` in a sandbox. It can change `folder` alone, which is `/workspace`
    inside, and read `readable` under their own names. `bridged`: a Unix socket, and the port of 127.0.0.1 at which the
    command reaches it. Raises SandboxUnavailable: bubblewrap is not installed."""
    binary = shutil.which("bwrap")
    if binary is None:
        raise SandboxUnavailable("the command bwrap is not installed (Debian, Ubuntu: apt install bubblewrap)")
    line = [binary, "--unshare-all", "--die-with-parent", "--new-session", "--hostname", "sandbox"]
    line += ["--unshare-user", "--uid", _USER, "--gid", _USER]
    line += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/run", "--dir", _HOME]
    for path in dict.fromkeys((*_SYSTEM, sys.base_prefix, *readable)):
        if os.path.islink(path):
            line += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            line += ["--ro-bind", path, path]
    line += ["--bind", str(folder), _FOLDER, "--chdir", _FOLDER]
    if bridged is not None:
        socket, port = bridged
        line += ["--ro-bind", str(socket), f"{_INSIDE}/socket", "--ro-bind", bridge.__file__, f"{_INSIDE}/bridge.py"]
        python = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
        words = [python, "-I", "-S", f"{_INSIDE}/bridge.py", f"{_INSIDE}/socket", str(port), *words]
    return [*line, "--", *words]


async def run_command(
    line: Sequence[str], environment: Mapping[str, str], folder: Path, *, most: int = 1 << 20
) -> CommandResult:
    """Run a command line in `folder` to its end, with no variables but those of `environment`; a cancelled call kills
    it. Of each output the first `most` bytes are kept. Raises SandboxUnavailable: the command cannot be started."""
    kept = [bytearray(), bytearray()]

    async def read(stream: ByteReceiveStream, into: bytearray) -> None:
        async for chunk in stream:
            into += chunk[: most - len(into)]

    try:
        process = await anyio.open_process(
            line, stdin=DEVNULL, stdout=PIPE, stderr=PIPE, cwd=folder, env=dict(environment), start_new_session=True
        )
    except OSError as error:
        raise SandboxUnavailable(f"{line[0]} cannot be started: {error.strerror}") from error
    async with process:
        try:
            async with anyio.create_task_group() as tasks:
                for stream, into in zip((process.stdout, process.stderr), kept, strict=True):
                    assert stream is not None
                    tasks.start_soon(read, stream, into)
                await process.wait()
        except BaseException:
            _kill(process.pid)
            raise
    return CommandResult(process.returncode or 0, *(bytes(each).decode("utf-8", "replace") for each in kept))


def _kill(group: int) -> None:
    import signal

    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
