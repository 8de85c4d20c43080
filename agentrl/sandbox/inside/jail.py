"""The child confines itself before it reads the model's code. Any step that fails ends the child: fail closed.

Three ways, by `Jail.kind`:

- `namespaces`: inside bubblewrap's file view. The child has its own user, process and mount namespaces. It is process 1
  there, so the kernel kills its descendants when it ends. It can write only to a small temporary file system.
- `landlock`: no namespaces. It may read the interpreter's files and nothing else, write nothing, start nothing,
  signal no process. If the zygote is root, the child takes an unprivileged user id that no other call has.
- `none`: limits only. For `unsafe_subprocess`."""

import contextlib
import os
import platform
import resource
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.sandbox.inside import filters, kernel

WORK_FOLDER = "/tmp"
_MB = 1024 * 1024
_DESCRIPTORS = 128


@dataclass(frozen=True)
class Jail:
    """Confinement of one child; `user` is the id to take (landlock as root), `readable` the paths allowed by landlock."""

    kind: str
    readable: Sequence[str]
    folder: str
    user: int | None
    wall_seconds: float
    cpu_seconds: float
    memory_mb: int
    processes: int
    file_mb: int
    disk_mb: int
    output_bytes: int
    session: bool


def enter_namespaces() -> None:
    """Enter new namespaces, as the jailer. Its next fork is process 1 of the new process namespace."""
    user, group = os.getuid(), os.getgid()
    kernel.unshare(kernel.CLONE_NEWUSER | kernel.CLONE_NEWPID | kernel.CLONE_NEWNS)
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{user} {user} 1")
    _write("/proc/self/gid_map", f"{group} {group} 1")


def confine(jail: Jail) -> None:
    """Confine this process, the child. No step can be undone."""
    machine = platform.machine()
    _write("/proc/self/oom_score_adj", "1000")  # if memory runs out, the kernel should kill this process first
    with open("/proc/self/statm", encoding="ascii") as file:
        space = int(file.read().split()[0]) * resource.getpagesize()  # address space in use
    if jail.kind == "namespaces":
        flags = kernel.MS_NOSUID | kernel.MS_NODEV | kernel.MS_NOEXEC
        _make_work_folder(jail, flags)
        kernel.mount_tmpfs("/proc", "size=4k,nr_inodes=1,mode=0555", flags | kernel.MS_RDONLY)
    os.chdir(jail.folder)
    tasks = _tasks_of_user(os.getuid()) if jail.kind != "namespaces" and jail.user is None else 1
    if jail.user is not None:
        os.setgroups([])
        os.setresgid(jail.user, jail.user, jail.user)
        os.setresuid(jail.user, jail.user, jail.user)
    _limit(jail, space, tasks)
    if jail.kind == "none":
        kernel.prctl("SET_PDEATHSIG", signal.SIGKILL)
        return
    kernel.drop_capabilities(machine)
    kernel.prctl("SET_NO_NEW_PRIVS", 1)  # setuid programs give no rights any more
    kernel.prctl("SET_DUMPABLE", 0)  # no core dump, and no access by others of the same user
    kernel.prctl("SET_PDEATHSIG", signal.SIGKILL)
    if jail.kind == "landlock":
        kernel.restrict_files(_rules(jail.readable))
    kernel.filter_calls(filters.build(machine, own_view=jail.kind == "namespaces", pid=os.getpid()))


def _make_work_folder(jail: Jail, flags: int) -> None:
    """Mount an empty file system over the work folder. Files there that Python needs are mounted again, read-only."""
    inside = [path for path in jail.readable if path.startswith(f"{WORK_FOLDER}/")]
    needed = {path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in inside}
    kernel.mount_tmpfs(WORK_FOLDER, f"size={jail.disk_mb}m,nr_inodes={64 * jail.disk_mb},mode=0777", flags)
    folders = {"/".join(path.split("/")[:3]) for path in needed if path.count("/") > 2}
    for folder in folders:
        os.mkdir(folder)
        kernel.mount_tmpfs(folder, "size=64k,mode=0755", flags)
    for path, handle in needed.items():
        source = f"/proc/self/fd/{handle}"
        if os.path.isdir(source):
            os.makedirs(path, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(path), exist_ok=True)
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o444))
        kernel.bind(source, path)
        os.close(handle)
    for folder in folders:
        kernel.make_read_only(folder, flags)


def _rules(readable: Sequence[str]) -> dict[str, int]:
    rules = dict.fromkeys(readable, kernel.LANDLOCK_READ_FILE | kernel.LANDLOCK_READ_DIR)
    rules |= dict.fromkeys(("/dev/urandom", "/dev/random", "/dev/zero"), kernel.LANDLOCK_READ_FILE)
    return rules | {"/dev/null": kernel.LANDLOCK_READ_FILE | kernel.LANDLOCK_WRITE_FILE}


def _limit(jail: Jail, space: int, tasks: int) -> None:
    def limit(what: int, value: int) -> None:
        _, most = resource.getrlimit(what)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(what, (value, value))

    # Memory that the preloaded libraries map does not count for the code.
    limit(resource.RLIMIT_AS, space + jail.memory_mb * _MB)
    limit(resource.RLIMIT_FSIZE, jail.file_mb * _MB)
    limit(resource.RLIMIT_CORE, 0)
    limit(resource.RLIMIT_NOFILE, _DESCRIPTORS)
    limit(resource.RLIMIT_NPROC, jail.processes + tasks)
    limit(resource.RLIMIT_MEMLOCK, 0)
    limit(resource.RLIMIT_MSGQUEUE, 0)
    limit(resource.RLIMIT_SIGPENDING, 64)
    if not jail.session:  # a session's budget is per run; the jailer checks it
        limit(resource.RLIMIT_CPU, max(1, -int(-jail.cpu_seconds // 1)))


def _tasks_of_user(user: int) -> int:
    """Count the threads that the user runs on this machine, as the kernel does for RLIMIT_NPROC."""
    total = 0
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):  # the process ended meanwhile
            if os.stat(f"/proc/{name}").st_uid == user:
                total += len(os.listdir(f"/proc/{name}/task"))
    return total


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as file:
        file.write(text)
