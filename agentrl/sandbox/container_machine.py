"""`ContainerMachine`: a container of Docker or Podman, through its command line."""

import os
import re
import secrets

import anyio
from anyio.abc import Process

from agentrl.errors import SandboxFailure, SandboxUnavailable
from agentrl.sandbox.command import CommandResult, call, run_command
from agentrl.sandbox.machine import SHELL, Machine, start_guard

_ANSWER_SECONDS = 120.0
_REMOVE = 'for attempt in 1 2 3; do "$1" rm --force --volumes "$2" && exit; done'
"""Tries again, because Podman may refuse while the container ends."""
_NO_SHELL = re.compile(f"[\"'`]{SHELL[0]}[\"'`]")  # matches the service's error if an earlier command removed the shell


class ContainerMachine(Machine):
    """A machine of Docker or Podman: a container is the file system, and each command is one start of the container.
    `image` is an image with `/bin/sh`, or a folder with a Dockerfile for one. Containers have the label `agentrl`."""

    _command: str
    _name: str

    @classmethod
    async def refusal(cls) -> str:
        """Ask the service of each installed command for its version."""
        return (await _find())[1]

    async def _open(self, image: str, network: bool, workdir: str) -> None:
        self._command, refusal = await _find()
        if refusal or not image:
            raise SandboxUnavailable(refusal or "a container needs an image: a name, or a folder with a Dockerfile")
        image = await self._image(image)
        self._name = f"agentrl-{secrets.token_hex(8)}"
        size, file = f"{self.limits.memory_mb}m", f"fsize={self.limits.file_mb << 20}"
        options = ["--memory", size, "--memory-swap", size, "--ulimit", file, "--ulimit", "core=0"]
        options += ["--pids-limit", str(self.limits.processes), "--network", "bridge" if network else "none"]
        options += ["--security-opt", "no-new-privileges", "--label", "agentrl", "--interactive", "--pull", "never"]
        options += ["--log-driver", "none"]  # a log would fill the host's disk
        options += ["--stop-timeout", "0"]  # Podman would wait 10 s, also in `rm --force`
        script = f'mkdir -p -- "$0" && cd -- "$0" || exit; {SHELL[2]}' if workdir else SHELL[2]
        entry = ("--entrypoint", SHELL[0], image, SHELL[1], script, workdir)
        self._guard = await start_guard(_REMOVE, self._command, self._name)
        with anyio.CancelScope(shield=True):  # if cancelled, the service would make the container after its removal
            await _ask(self._command, "create", "--name", self._name, *options, *entry)

    async def snapshot(self) -> str:
        async with self._turn:
            return await _ask(self._command, "commit", self._name)

    @classmethod
    async def delete(cls, image: str) -> None:
        await _ask((await _find())[0], "rmi", "--force", image)

    async def _image(self, image: str) -> str:
        """Return an image that exists; build or pull the image first if necessary."""
        if await anyio.Path(image).is_dir():
            return await call(self._command, "build", "--quiet", image)
        try:
            await _ask(self._command, "image", "inspect", image)
        except SandboxFailure:
            await call(self._command, "pull", "--quiet", image)
        return image

    async def _execute(self, stdin: bytes, seconds: float, most: int) -> CommandResult:
        line = [self._command, "start", "--attach", "--interactive", self._name]
        result = await run_command(line, os.environ, stdin=stdin, seconds=seconds, most=most, stop=self._stop)
        if result.exit_code and not result.timed_out:  # from the command, or from a start that failed
            state = await _ask(self._command, "inspect", "--format", "{{.State.ExitCode}} {{.State.Error}}", self._name)
            code, _, error = state.partition(" ")
            said = error or result.stderr[-1000:].strip()
            if (error or code != str(result.exit_code)) and not _NO_SHELL.search(said):
                raise SandboxFailure(f"{self._command} start: {said}")
        return result

    async def _stop(self, process: Process) -> None:
        """Stop the container until its starting `process` ends. Podman, if killed at a start, would leave processes."""
        with anyio.move_on_after(_ANSWER_SECONDS):
            while process.returncode is None:
                await _ask(self._command, "stop", self._name)
                for stream in filter(None, (process.stdout, process.stderr)):
                    with anyio.move_on_after(0.1):
                        async for _ in stream:  # a full pipe would delay the end
                            pass


async def _find() -> tuple[str, str]:
    """Return the command whose service answers, and ""; if none answers, "" and the reasons."""
    refusals = []
    for name in ("docker", "podman"):
        try:
            await _ask(name, "version", "--format", "{{.Server.Version}}")
            return name, ""
        except (SandboxFailure, SandboxUnavailable) as error:
            refusals.append(str(error))
    return "", "; ".join(refusals)


async def _ask(*line: str) -> str:
    return await call(*line, seconds=_ANSWER_SECONDS)
