"""Starts a zygote under one backend, and requests children from the zygote."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import IO, Any, Literal

import anyio
import anyio.to_thread

from agentrl.errors import SandboxFailure, SandboxUnavailable, raised_as
from agentrl.sandbox import bootstrap
from agentrl.sandbox.command import confined, unprivileged
from agentrl.sandbox.inside import kernel
from agentrl.sandbox.interpreter import Interpreter, find_interpreter
from agentrl.sandbox.limits import SandboxLimits
from agentrl.sandbox.process import Process
from agentrl.tasks import undone_by

Backend = Literal["bubblewrap", "landlock", "unsafe_subprocess"]
SAFE_BACKENDS: tuple[Backend, ...] = ("bubblewrap", "landlock")
_KINDS = {"bubblewrap": "namespaces", "landlock": "landlock", "unsafe_subprocess": "none"}
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LOGNAME": "sandbox",
    "LANG": "C.UTF-8",
    # One thread each: calls run in parallel, and a forked child cannot inherit threads.
    **dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1"),
}


@dataclass
class Zygote:
    """A running zygote."""

    backend: Backend
    interpreter: Interpreter
    process: subprocess.Popen[bytes]
    control: socket.socket
    folder: str
    errors: IO[bytes] = field(repr=False)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def spawn(self, limits: SandboxLimits, *, session: bool) -> Process:
        """Request a child, which is usable after `ready`. Raises SandboxFailure: the zygote has ended. BlockingIOError:
        too many requests wait; try again when `control` is writable."""
        jail = {"kind": _KINDS[self.backend], "folder": self.folder, "readable": self.interpreter.readable}
        message = {"jail": {**asdict(limits), **jail, "session": session}}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            socket.send_fds(self.control, [json.dumps(message).encode()], [theirs.fileno()])
        except OSError as error:
            ours.close()
            if isinstance(error, BlockingIOError):
                raise
            raise SandboxFailure(f"the sandbox's first process is gone: {error}") from error
        finally:
            theirs.close()
        return Process(ours)

    def close(self) -> None:
        """End the zygote and its children. Blocks until they have ended (milliseconds)."""
        self.control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.errors.close()
        if self.backend == "unsafe_subprocess":
            shutil.rmtree(self.folder, ignore_errors=True)


async def start_zygote(backend: Backend, preload: tuple[str, ...], *, deadline: float = 60.0) -> Zygote:
    """Start a zygote and wait until its libraries are loaded. Raises SandboxUnavailable: the zygote cannot start."""
    zygote = await anyio.to_thread.run_sync(_start, backend, preload)
    async with undone_by(partial(anyio.to_thread.run_sync, zygote.close)):
        with anyio.move_on_after(deadline) as limit:
            await anyio.wait_readable(zygote.control)
            if broken := _answer(zygote)["broken"]:
                place = zygote.interpreter.executable
                raise SandboxUnavailable(f"preload: {', '.join(broken)}; it must be importable in {place}")
        if limit.cancelled_caught:
            raise SandboxUnavailable(f"loading {', '.join(preload)} in the sandbox took more than {deadline:g} s")
    return zygote


def _answer(zygote: Zygote) -> dict[str, Any]:
    data = b""
    with suppress(OSError):
        data = zygote.control.recv(1 << 16)
    if not data:
        zygote.process.wait(5)
        zygote.errors.seek(0)
        lines = zygote.errors.read(4000).decode("utf-8", "replace").strip().splitlines()
        raise SandboxUnavailable(lines[-1] if lines else f"it ended with status {zygote.process.returncode}")
    return dict(json.loads(data))


def _start(backend: Backend, preload: tuple[str, ...]) -> Zygote:
    if not sys.platform.startswith("linux"):
        raise SandboxUnavailable(f"it needs Linux; this is {sys.platform}")
    root = os.geteuid() == 0
    interpreter = find_interpreter(by_others=root and backend != "unsafe_subprocess")
    before = _bubblewrap(interpreter) if backend == "bubblewrap" else []
    settings = {"site": interpreter.site, "preload": preload, "own_users": root and backend == "landlock"}
    with ExitStack() as given, ExitStack() as kept:
        if (folder := {"bubblewrap": "/tmp", "landlock": "/"}.get(backend)) is None:
            folder = tempfile.mkdtemp(prefix="agentrl-unsafe-")
            kept.callback(shutil.rmtree, folder, ignore_errors=True)
            settings["to_remove"] = folder
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        kept.enter_context(ours)
        given.enter_context(theirs)
        source = given.enter_context(tempfile.TemporaryFile())
        source.write(json.dumps({"modules": bootstrap.modules(), "settings": settings}).encode())
        source.seek(0)
        lifeline = kernel.process_descriptor(os.getpid())
        given.callback(os.close, lifeline)
        errors = kept.enter_context(tempfile.TemporaryFile())
        inherited = (theirs.fileno(), lifeline, source.fileno())
        python = [interpreter.executable, "-I", "-S", "-B", "-X", "utf8", "-c", bootstrap.SCRIPT]
        command = [*before, *python, *map(str, inherited)]
        command = unprivileged(command) if before else command
        with raised_as(SandboxUnavailable, f"{command[0]} cannot be started", OSError, shown=": {.strerror}"):
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors, env=_ENVIRONMENT, cwd="/",
                pass_fds=inherited, start_new_session=True,
            )  # fmt: skip
        ours.setblocking(False)
        kept.pop_all()
    return Zygote(backend, interpreter, process, ours, folder, errors)


def _bubblewrap(interpreter: Interpreter) -> list[str]:
    """Return the command line of bubblewrap: a file view with only the files that Python needs, and no network."""
    command = confined(tied=False)  # the zygote ends by itself, see `Zygote.close`
    for path in interpreter.readable:
        if os.path.islink(path) and path in ("/lib", "/lib64", "/lib32"):
            command += ["--symlink", os.readlink(path), path]
        else:
            command += ["--ro-bind", path, path]
    for device in ("null", "zero", "urandom", "random"):
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    command += ["--symlink", "/tmp", "/dev/shm", "--proc", "/proc", "--dir", "/tmp", "--remount-ro", "/"]
    return [*command, "--chdir", "/", "--"]
