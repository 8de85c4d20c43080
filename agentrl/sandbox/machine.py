"""Machines: each has its own file system for one trajectory, and runs commands in it.

`BubblewrapMachine` needs bubblewrap, `ContainerMachine` Docker or Podman. Both keep the contract of `Machine`:

1. A command ends with all processes that it started. Nothing runs between two commands.
2. A command reaches no file of the host, and no network except with `network=True`.
3. A machine ends with `close` and with this process, also if this process is killed."""

import io
import shlex
import tarfile
from abc import ABC, abstractmethod
from pathlib import Path
from subprocess import DEVNULL, PIPE
from typing import Self

import anyio
import anyio.to_thread
from anyio.abc import Process

from agentrl.errors import SandboxFailure, SandboxUnavailable
from agentrl.sandbox.command import CommandResult
from agentrl.sandbox.limits import MachineLimits
from agentrl.tasks import undone_by

DEFAULT_LIMITS = MachineLimits()
SHELL = ("/bin/sh", "-c", 'IFS= read -r command; eval "$(printf %b "$command")"')
"""Runs the command in the first line of its standard input. The rest is the command's standard input."""
_LARGEST_FILE = 64 << 20


class Machine(ABC):
    """A computer for one trajectory. Use it with `async with`, or call `close`.

    async with await BubblewrapMachine.start(workdir="/app") as machine:
        await machine.write("/app/a.py", b"print(6 * 7)")
        (await machine.run("python3 a.py")).stdout  # "42\\n"
    """

    def __init__(self, limits: MachineLimits) -> None:
        self.limits = limits
        self._guard: Process | None = None
        self._turn = anyio.Lock()
        self._running = anyio.CancelScope()
        self._closed = False

    @classmethod
    @abstractmethod
    async def refusal(cls) -> str:
        """Return why this machine does not work here; "" if it does."""

    @classmethod
    async def start(
        cls, image: str = "", *, limits: MachineLimits = DEFAULT_LIMITS, network: bool = False, workdir: str = ""
    ) -> Self:
        """Start a machine. Raises SandboxUnavailable or SandboxFailure: it cannot start. `image`: a folder or an image,
        as the implementation says, or a result of `snapshot`. `workdir`: commands start there; it is created."""
        machine = cls(limits)
        async with undone_by(machine.close):
            await machine._open(image, network, workdir)
            if (first := await machine.run(":")).exit_code:
                raise SandboxUnavailable(first.stderr.strip() or f"a first command ended with status {first.exit_code}")
        return machine

    @abstractmethod
    async def _open(self, image: str, network: bool, workdir: str) -> None:
        """Make the machine, after `_guard`, which also removes an unfinished machine."""

    @abstractmethod
    async def snapshot(self) -> str:
        """Save the file system as an image, from which `start` restores it until `delete`. Raises SandboxFailure."""

    @classmethod
    @abstractmethod
    async def delete(cls, image: str) -> None:
        """Delete a result of `snapshot`."""

    @abstractmethod
    async def _execute(self, stdin: bytes, seconds: float, most: int) -> CommandResult:
        """Run `SHELL`; keep `most` bytes of each output. No process is left, also if the call is cancelled."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the command that runs, and remove the machine."""
        self._closed = True
        self._running.cancel()
        with anyio.CancelScope(shield=True):
            async with self._turn:
                if self._guard is not None:
                    await self._guard.aclose()

    async def run(
        self, command: str, *, timeout: float | None = None, input: bytes = b"", most: int = 0
    ) -> CommandResult:
        """Run a command with `/bin/sh`. Concurrent calls run one after another. Raises SandboxFailure: the machine
        failed; the command may have run or not. Raises SandboxUnavailable: the machine is closed. `timeout`: seconds,
        at most `limits.seconds`. `most`: bytes kept of each output; 0: `limits.output_bytes`."""
        line = command.replace("\\", "\\\\").replace("\n", "\\n").replace("\0", "").encode("utf-8", "replace")
        seconds = self.limits.seconds if timeout is None else min(timeout, self.limits.seconds)
        async with self._turn:
            if self._closed:
                raise SandboxUnavailable("the machine is closed")
            with anyio.CancelScope() as self._running:
                return await self._execute(line + b"\n" + input, seconds, most or self.limits.output_bytes)
            raise SandboxFailure("the machine was closed while it ran a command")

    async def read(self, path: str) -> bytes:
        """Return the content of a file. Raises OSError: the file cannot be read, or is larger than 64 MiB."""
        return await self._must(f"cat -- {shlex.quote(path)}")

    async def write(self, path: str, data: bytes) -> None:
        """Write a file atomically; parents are created, and an old file's mode is kept. Raises OSError: it cannot be written."""
        place = f'file={shlex.quote(path)} && folder=$(dirname -- "$file") && mkdir -p -- "$folder"'
        mode = 'mode=$(stat -Lc %a -- "$file" 2>/dev/null || echo 644)'
        new = 'new=$(mktemp -p "$folder") && cat > "$new" && chmod "$mode" -- "$new" && mv -fT -- "$new" "$file"'
        await self._must(f"{place} && {mode} && {new}", data)

    async def upload(self, folder: Path, path: str) -> None:
        """Copy a host folder's content into the machine's folder `path`; links in the folder stay links. Raises OSError."""
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as archive:
            await anyio.to_thread.run_sync(archive.add, f"{folder}/", ".")  # the slash: also of a folder that is a link
        await self._must(f"mkdir -p -- {shlex.quote(path)} && tar -xof - -C {shlex.quote(path)}", packed.getvalue())

    async def _must(self, command: str, input: bytes = b"") -> bytes:
        result = await self.run(command, input=input, most=_LARGEST_FILE)
        if result.exit_code or result.truncated:
            raise OSError(result.stderr.strip() or f"{command}: exit status {result.exit_code}, or more than 64 MiB")
        return result.output


async def start_guard(script: str, *arguments: str) -> Process:
    """Start a process that runs a shell script when it is closed or this process ends. `arguments` are $1, $2, ..."""
    line = ["/bin/sh", "-c", f"cat; {script}", "guard", *arguments]
    with anyio.CancelScope(shield=True):
        process = await anyio.open_process(line, stdin=PIPE, stdout=DEVNULL, stderr=DEVNULL, start_new_session=True)
    return process  # noqa: RET504
