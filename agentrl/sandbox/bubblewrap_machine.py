"""`BubblewrapMachine`: a folder of the host as a machine's file system."""

import contextlib
import json
import os
import secrets
import signal
import tempfile
from contextlib import ExitStack
from functools import partial
from pathlib import Path

import anyio
import anyio.to_thread

from agentrl.errors import SandboxFailure, SandboxUnavailable
from agentrl.sandbox.command import NOBODY, SYSTEM_PATHS, CommandResult, call, confined, run_command
from agentrl.sandbox.machine import SHELL, Machine, start_guard
from agentrl.tasks import undone_by

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_ENVIRONMENT = {"PATH": _PATH, "HOME": "/home/agent", "USER": "agent", "LOGNAME": "agent", "LANG": "C.UTF-8"}
_WRITABLE = ("app", "home", "logs", "opt", "root", "run", "solution", "srv", "tests", "tmp", "var", "workspace")
_ETC = {
    "passwd": "root:x:0:0::/root:/bin/sh\nagent:x:1000:1000::/home/agent:/bin/sh\n",
    "hosts": "127.0.0.1 localhost sandbox\n",
    "resolv.conf": "",
}
_HOST = "host:"
_REMOVE = 'rm -rf -- "$1" || { chmod -R u+rwX -- "$1"; rm -rf -- "$1"; }'


class BubblewrapMachine(Machine):
    """A machine of bubblewrap: a folder is the file system, and namespaces of the kernel confine the commands. `image`
    is a folder with a root file system, which is copied. Without an image, the machine has the host's system folders,
    read-only; /app, /home, /tmp and other usual folders are its own and writable. Commands run as an unprivileged user.
    If the caller is root, this is user 65534 of the host."""

    _folder: Path
    _host: bool
    _line: list[str]

    @classmethod
    async def refusal(cls) -> str:
        try:
            await (await cls.start()).close()
            return ""
        except (SandboxUnavailable, SandboxFailure) as error:
            return str(error)

    async def _open(self, image: str, network: bool, workdir: str) -> None:
        line = confined()
        self._host = not image or image.startswith(_HOST)
        self._folder = Path(tempfile.gettempdir(), f"agentrl-machine-{secrets.token_hex(8)}")
        self._guard = await start_guard(_REMOVE, str(self._folder))
        line += [*await self._make(image.removeprefix(_HOST), workdir), "--dir", _ENVIRONMENT["HOME"]]
        line += ["--dir", workdir, "--chdir", workdir] if workdir else []
        line += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"] if network else []
        self._line = line

    async def snapshot(self) -> str:
        """See `Machine.snapshot`. The image is a folder among the system's temporary files."""
        folder = tempfile.mkdtemp(prefix="agentrl-snapshot-")
        async with undone_by(partial(self.delete, folder)), self._turn:
            await call("cp", "-a", "--reflink=auto", f"{self._folder}/files/.", folder)
        return _HOST + folder if self._host else folder

    @classmethod
    async def delete(cls, image: str) -> None:
        await call("/bin/sh", "-c", _REMOVE, "delete", image.removeprefix(_HOST))

    async def _make(self, image: str, workdir: str) -> list[str]:
        """Make the machine's folder. Returns bubblewrap's options that mount it."""
        root, shared = self._folder / "files", self._folder / "shm"
        for folder in (self._folder, root, shared):
            folder.mkdir(mode=0o700)
        if image:
            await call("cp", "-a", "--reflink=auto", f"{image}/.", str(root))
        line = await anyio.to_thread.run_sync(_with_system, root, workdir) if self._host else ["--bind", str(root), "/"]
        if os.geteuid() == 0:
            await call("chown", "-hR", f"{NOBODY}:{NOBODY}", str(self._folder))
        return [*line, "--proc", "/proc", "--dev", "/dev", "--bind", str(shared), "/dev/shm", "--remount-ro", "/dev"]

    async def _execute(self, stdin: bytes, seconds: float, most: int) -> CommandResult:
        (info, info_inside), (block_inside, block) = os.pipe(), os.pipe()
        first: list[int] = []
        problems = ["bubblewrap did not start"]
        with ExitStack() as files, ExitStack() as given:
            for stack, file in ((files, info), (files, block), (given, info_inside), (given, block_inside)):
                stack.callback(os.close, file)

            async def confine() -> None:
                """Set the limits of the first process inside, which waits for the limits."""
                given.close()
                with anyio.CancelScope(shield=True):
                    if pid := await anyio.to_thread.run_sync(_first_process, info):
                        try:
                            first.append(os.pidfd_open(pid))
                            files.callback(os.close, first[0])
                            await self._limit(pid)
                            os.write(block, b"x")
                            problems.clear()
                        except (ProcessLookupError, SandboxFailure) as error:
                            problems.append(str(error))
                            _kill(first)

            inherited = (info_inside, block_inside)
            line = [*self._line, "--info-fd", str(info_inside), "--block-fd", str(block_inside), "--", *SHELL]
            try:
                result = await run_command(  # the limit on processes does not apply to root
                    line, _ENVIRONMENT, stdin=stdin, seconds=seconds, most=most, as_nobody=True, inherited=inherited, started=confine
                )  # fmt: skip
            finally:
                _kill(first)
                with anyio.CancelScope(shield=True):
                    for process in first:  # once it has ended, the kernel has ended all others in its namespace
                        await anyio.wait_readable(process)
        if problems:
            raise SandboxFailure(result.stderr.strip() or problems[-1])
        return result

    async def _limit(self, pid: int) -> None:
        """Limit a process from outside: only processes of its namespace count, and nothing inside can lift the limits."""
        processes = self.limits.processes + 2  # bubblewrap's own process, and the shell
        limits = {"nproc": processes, "as": self.limits.memory_mb << 20, "fsize": self.limits.file_mb << 20, "core": 0}
        options = (f"--{name}={value}:{value}" for name, value in limits.items())
        await call("prlimit", f"--pid={pid}", *options, as_nobody=True)


def _with_system(root: Path, workdir: str) -> list[str]:
    """Complete a file system that gets the host's system folders. Returns bubblewrap's options that mount it."""
    for name in (*_WRITABLE, *workdir.split("/")[1:2], "etc", "proc", "dev"):
        (root / name).mkdir(exist_ok=True)
    for name, text in _ETC.items():
        (root / "etc" / name).write_text(text)
    system: list[str] = []
    for path in filter(os.path.exists, SYSTEM_PATHS):
        inside = root / path[1:]
        inside.parent.mkdir(parents=True, exist_ok=True)
        if not os.path.islink(path):
            inside.mkdir(exist_ok=True) if os.path.isdir(path) else inside.touch()
            system += ["--ro-bind", path, path]
        elif not inside.is_symlink():
            inside.symlink_to(os.readlink(path))
    own = [name for name in sorted(os.listdir(root)) if f"/{name}" not in (*SYSTEM_PATHS, "/etc", "/proc", "/dev")]
    writable = [option for name in own for option in ("--bind", f"{root}/{name}", f"/{name}")]
    return ["--ro-bind", str(root), "/", *writable, *system]


def _kill(processes: list[int]) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(process, signal.SIGKILL)


def _first_process(info: int) -> int:
    """Return the first process of bubblewrap's namespace, marked to be killed first at OOM; 0 if bubblewrap failed."""
    with open(info, "rb", closefd=False) as file:
        said = file.read()
    pid = int(json.loads(said)["child-pid"]) if said else 0
    with contextlib.suppress(OSError):
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000", encoding="ascii")
    return pid
