"""Escapes from the sandbox: no attempt may succeed, also judged from the host's side.

Each test runs for every safe backend and, if started by root, for root and for an unprivileged user.
"""

import contextlib
import fcntl
import json
import os
import socket
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox import programs
from tests.sandbox.host import ROOT, SECRET, Host
from tests.sandbox.watch import processes_called


def attempts(host: Host, body: str, **values: object) -> set[str]:
    """Return the names of the attempts that succeeded."""
    result = host.run(programs.program(body, **values))
    assert result.ok, result
    assert SECRET not in result.stdout
    return set(json.loads(result.stdout.splitlines()[-1]))


def alone(host: Host) -> bool:
    """Return true if the backend gives the program no files and no processes of its own."""
    return host.backend == "landlock"


@pytest.fixture
def open_folder(host: Host) -> Iterator[Path]:
    """Make a folder of the host's user that everybody can reach."""
    import tempfile

    with tempfile.TemporaryDirectory(prefix="agentrl-canary-") as name:
        os.chmod(name, 0o777)
        folder = Path(name)
        (folder / "canary").write_text(SECRET)
        (folder / "canary").chmod(0o666)
        for path in (folder, folder / "canary"):
            if os.geteuid() == 0:
                os.chown(path, host.user, host.user)
        yield folder


@pytest.fixture
def victim(host: Host) -> Iterator["subprocess.Popen[bytes]"]:
    """Start a process of the host's user that must survive unharmed."""
    user = host.user if os.geteuid() == 0 else None
    process = subprocess.Popen(
        ["/bin/sleep", "1000"], user=user, group=user, extra_groups=None if user is None else [], start_new_session=True
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def test_no_network_and_no_names(host: Host, open_folder: Path) -> None:
    name, path = f"agentrl-{os.getpid()}", str(open_folder / "socket")
    with contextlib.ExitStack() as stack:
        tcp = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        abstract = stack.enter_context(socket.socket(socket.AF_UNIX))
        abstract.bind(f"\0{name}")
        ordinary = stack.enter_context(socket.socket(socket.AF_UNIX))
        ordinary.bind(path)
        os.chmod(path, 0o777)
        port = tcp.getsockname()[1]
        listeners = (tcp, abstract, ordinary)
        for listener in listeners:
            listener.listen()
            listener.setblocking(False)
        assert attempts(host, programs.NETWORK, tcp=port, name=name, path=path) == set()
        for listener in listeners:
            with pytest.raises(BlockingIOError):
                listener.accept()


def test_no_files_of_the_host(host: Host, open_folder: Path) -> None:
    canary = open_folder / "canary"
    before = canary.stat()
    paths = [
        str(canary), "/etc/shadow", "/etc/passwd", "/etc/hosts", "/root", "/home", "/var/log", "/boot",
        str(ROOT / "README.md"), str(ROOT / "agentrl"), str(Path.home()), "/usr/bin/env", "/run",
    ]  # fmt: skip
    folders = [str(open_folder), "/", "/usr/lib", "/var/tmp", "/etc", os.path.dirname(os.__file__), "/dev", "/run"]
    got = attempts(host, programs.FILES, paths=paths, folders=folders, secret=SECRET)
    assert got == set()
    after = canary.stat()
    assert canary.read_text() == SECRET
    assert (after.st_mode, after.st_uid, after.st_mtime_ns) == (before.st_mode, before.st_uid, before.st_mtime_ns)
    assert os.listdir(open_folder) == ["canary"]


def test_no_proc_and_no_sys(host: Host) -> None:
    core_pattern = Path("/proc/sys/kernel/core_pattern").read_text()
    assert attempts(host, programs.PROC, parent=host.pid) == set()
    assert Path("/proc/sys/kernel/core_pattern").read_text() == core_pattern


def test_no_devices(host: Host) -> None:
    assert attempts(host, programs.DEVICES, machine_changes=False) == set()


def test_no_mounts_and_no_nested_namespaces(host: Host) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    assert attempts(host, programs.MOUNTS, numbers=programs.numbers()) == set()
    assert Path("/proc/self/mountinfo").read_text() == before


def test_dangerous_system_calls_are_refused(host: Host) -> None:
    assert attempts(host, programs.KERNEL, numbers=programs.numbers(), refused=programs.REFUSED) == set()


def test_no_signal_reaches_another_process(host: Host, victim: "subprocess.Popen[bytes]") -> None:
    before = standing(victim.pid)
    targets = [victim.pid, host.pid, os.getpid()]
    assert attempts(host, programs.SIGNALS, targets=targets, numbers=programs.numbers()) == set()
    assert victim.poll() is None
    assert standing(victim.pid) == before


def test_no_question_about_another_process_is_answered(host: Host, victim: "subprocess.Popen[bytes]") -> None:
    assert attempts(host, programs.QUESTIONS, targets=[victim.pid, host.pid, os.getpid()]) == set()


def test_its_sockets_carry_bytes_alone(host: Host) -> None:
    assert attempts(host, programs.CHANNEL) == set()


def test_a_lock_in_the_sandbox_is_invisible_outside(host: Host) -> None:
    """On a file of the library, which all sandboxes and the host read."""
    locks = """
import fcntl, os, struct
file = open(os.__file__)
fcntl.flock(file, fcntl.LOCK_EX)
for command in (6, 37):
    fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_RDLCK, 0, 0, 10, 0))
print(os.__file__)
"""
    locked = host.cell("locks", locks)
    assert locked.ok, locked
    with open(locked.stdout.strip(), "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        asked = fcntl.fcntl(file, fcntl.F_GETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, 0, 0, 10, 0))
    assert struct.unpack("hhqqi4x", asked)[0] == fcntl.F_UNLCK


def test_no_privileges_by_setuid(host: Host) -> None:
    assert attempts(host, programs.SETUID, own_files=not alone(host)) == set()


def test_no_inherited_descriptors(host: Host) -> None:
    code = """
import os, stat
kinds = {}
for number in range(1024):
    try:
        kinds[number] = stat.S_IFMT(os.fstat(number).st_mode)
    except OSError:
        pass
fifo, pair = 0o010000, 0o140000
assert kinds == {0: fifo, 1: fifo, 2: fifo, 3: pair}, kinds
"""
    result = host.run(code)
    assert result.ok, result


def test_nothing_survives_a_call(host: Host) -> None:
    code = """
import ctypes, os, time
made = []
for path in ("/tmp/left", "/dev/shm/left", "left"):
    try:
        open(path, "w").close()
        made.append(path)
    except OSError:
        pass
try:
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            ctypes.CDLL(None).prctl(15, b"escapee", 0, 0, 0)
            time.sleep(1000)
        os._exit(0)
except PermissionError:
    pass
print(made)
"""
    first = host.run(code)
    assert first.ok, first
    assert (first.stdout == "[]\n") == alone(host)
    assert processes_called("escapee") == 0
    second = host.run("import os\nprint([p for p in ('/tmp/left', '/dev/shm/left', 'left') if os.path.exists(p)])")
    assert second.stdout == "[]\n"
    assert not Path("/tmp/left").exists()
    assert not Path("/dev/shm/left").exists()


def test_another_session_cannot_be_read(host: Host) -> None:
    hidden = "sesame-4711"
    host.cell("victim", f"secret = {hidden[:6]!r} + {hidden[6:]!r}\nimport os")
    host.cell("victim", "try:\n    open('/tmp/secret', 'w').write(secret)\nexcept OSError:\n    pass")
    spy = """
import gc, os, sys
found = [o for o in gc.get_objects() if isinstance(o, dict) and "secret" in o]
files = []
for folder in ("/tmp", "/dev/shm", "/proc", "."):
    try:
        files += [f for f in os.listdir(folder) if f.isdigit() or f == "secret"]
    except OSError:
        pass
alive = []
for pid in range(2, 4000):
    try:
        os.kill(pid, 0)
        alive.append(pid)
    except OSError:
        pass
print(found, files, "secret" in globals(), [p for p in alive if p != os.getpid()])
"""
    for result in (host.cell("spy", spy), host.run(spy)):
        assert result.stdout == "[] [] False []\n", result
    assert host.cell("victim", "secret").stdout == f"'{hidden}'\n"


def test_fork_bomb(host: Host) -> None:
    code = """
import os, sys, time
count = 0
while count < 1000:
    try:
        if os.fork() == 0:
            time.sleep(1000)
        count += 1
    except OSError:
        break
print(count)
"""
    result = host.run(code)
    assert result.ok, result
    assert int(result.stdout) == 0 if alone(host) else 0 < int(result.stdout) <= 8


def test_thread_bomb(host: Host) -> None:
    code = """
import threading, time
threading.stack_size(32768)
count = 0
try:
    while count < 1000:
        threading.Thread(target=time.sleep, args=(1000,), daemon=True).start()
        count += 1
except RuntimeError:
    pass
print(count)
"""
    result = host.run(code)
    assert result.ok, result
    # Without a separate user id, the count includes other processes of the user.
    assert int(result.stdout) <= 8 + 50


@pytest.mark.slow
def test_wild_fork_bomb_is_killed_at_the_deadline(host: Host) -> None:
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert host.run(code, timeout=1.0).outcome == "timeout"
    assert host.run("print(1)").ok


def test_memory_bomb(host: Host) -> None:
    assert host.run("x = bytearray(1 << 30)").outcome == "memory"
    grown = host.run("x = []\nwhile True:\n    x.append(bytearray(1 << 20))")
    assert grown.outcome in ("memory", "killed")
    assert host.run("x = bytearray(100 << 20); print(len(x))").ok


def test_disk_filling(host: Host) -> None:
    code = """
import os
written = files = 0
for index, place in enumerate(("/tmp", "/dev/shm", ".", "/var/tmp")):
    for number in range(40 * index, 40 * index + 40):
        try:
            with open(f"{place}/{number}", "wb", buffering=0) as file:
                files += 1
                for _ in range(100):
                    written += file.write(bytes(1 << 20))
        except OSError:
            pass
    for number in range(5000):
        try:
            open(f"{place}/small{index}-{number}", "w").close()
            files += 1
        except OSError:
            break
print(written >> 20, files)
"""
    result = host.run(code)
    assert result.ok, result
    megabytes, files = map(int, result.stdout.split())
    if alone(host):
        assert (megabytes, files) == (0, 0)
    else:
        assert 8 <= megabytes <= 16
        assert files <= 2000


def test_file_size(host: Host) -> None:
    if alone(host):
        pytest.skip("landlock has no files to write")
    code = """
import errno
try:
    with open("/tmp/big", "wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
except OSError as error:
    print(file.name and __import__("os").path.getsize("/tmp/big") >> 20, error.errno == errno.EFBIG)
"""
    assert host.run(code).stdout == "8 True\n"


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_endless_output(host: Host, stream: str) -> None:
    result = host.run(f"import sys\nwhile True: sys.{stream}.write('x' * 10000)")
    assert result.outcome == "output"
    assert len(result.stdout + result.stderr) == 65536


def test_crashes(host: Host) -> None:
    assert host.run("import ctypes; ctypes.string_at(0)").outcome == "killed"
    assert host.run("import os; os.abort()").outcome in ("killed", "error")
    deep = host.run("def f(): f()\nf()")
    assert deep.outcome == "error"
    assert "RecursionError" in deep.stderr
    assert not list(Path.cwd().glob("core*"))


def standing(pid: int) -> tuple[object, ...]:
    """Return whether a process is stopped, its priority, processors and limits."""
    stopped = Path(f"/proc/{pid}/stat").read_text().split()[2] in "Tt"
    limits = Path(f"/proc/{pid}/limits").read_text()
    return stopped, os.getpriority(os.PRIO_PROCESS, pid), os.sched_getaffinity(pid), limits
