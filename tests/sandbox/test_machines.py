"""The contract of machines: for every implementation, also with programs that try to escape."""

import contextlib
import functools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.sandbox import SandboxFailure, SandboxUnavailable
from agentrl.sandbox.bubblewrap_machine import BubblewrapMachine
from agentrl.sandbox.container_machine import ContainerMachine
from agentrl.sandbox.interpreter import find_interpreter
from agentrl.sandbox.limits import MachineLimits
from agentrl.sandbox.machine import Machine
from tests.sandbox import programs
from tests.sandbox.host import OTHER_USER, ROOT, SECRET
from tests.sandbox.watch import processes_called, until
from tests.support.nightly import nightly

IMAGE = os.environ.get("AGENTRL_TEST_IMAGE", "docker.io/library/python:3.11-slim")
LIMITS = MachineLimits(seconds=60, memory_mb=512, processes=20, file_mb=8, output_bytes=100_000)
PROGRAMS = [
    "sh",
    "bash",
    "cat",
    "mkdir",
    "mv",
    "mktemp",
    "stat",
    "chmod",
    "dirname",
    "tar",
    "sleep",
    "ls",
    "touch",
    "head",
    "rm",
    "ln",
    "readlink",
    "yes",
    "true",
    "id",
    "setsid",
    "sort",
    "grep",
]
Start = Callable[..., Awaitable[Machine]]


@pytest.fixture(scope="session")
def root_files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a small root file system: a shell, a few programs, and their libraries."""
    root = tmp_path_factory.mktemp("root")
    (root / "usr" / "bin").mkdir(parents=True)
    libraries: set[str] = set()
    for name in PROGRAMS:
        found = shutil.which(name, path="/usr/bin:/bin")
        assert found is not None
        shutil.copy(found, root / "usr" / "bin" / name)
        said = subprocess.run(["ldd", found], capture_output=True, text=True).stdout
        libraries |= {word for word in said.split() if word.startswith("/") and os.path.isfile(word)}
    (root / "bin").symlink_to("usr/bin")
    for library in libraries:
        target = root / library[1:]
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, target)
    (root / "etc").mkdir()
    (root / "tmp").mkdir(mode=0o777)
    return root


@functools.cache
def refusal(kind: type[Machine]) -> str:
    return anyio.run(kind.refusal)


def image_of(request: pytest.FixtureRequest) -> str:
    kind = request.param if hasattr(request, "param") else request.node.callspec.params["start"]
    if kind == "bubblewrap-folder":
        return str(request.getfixturevalue("root_files"))
    return IMAGE if kind == "container" else ""


@pytest.fixture(params=["bubblewrap", "bubblewrap-folder", "container"])
def start(request: pytest.FixtureRequest) -> Start:
    """Start a machine of each kind; a kind that does not work here is skipped by name."""
    kind: type[Machine] = ContainerMachine if request.param == "container" else BubblewrapMachine
    if reason := refusal(kind):
        pytest.skip(f"{request.param}: {reason}")
    image = image_of(request)

    async def started(image: str = image, **options: Any) -> Machine:
        return await kind.start(image, **{"limits": LIMITS, "workdir": "/app", **options})

    return started


@pytest.fixture
def place(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Set the folder of temporary files during a test, which every user can reach."""
    with tempfile.TemporaryDirectory(prefix="agentrl-test-") as name:
        Path(name).chmod(0o711)
        monkeypatch.setattr(tempfile, "tempdir", name)
        yield Path(name)


@pytest.fixture
async def machine(start: Start) -> Any:
    async with await start() as opened:
        yield opened


@pytest.fixture
def python(machine: Machine, request: pytest.FixtureRequest) -> Callable[..., Awaitable[str]]:
    """Run a Python program in the machine. Returns its output."""
    if request.node.callspec.params["start"] == "bubblewrap-folder":
        pytest.skip("the small root file system has no Python")

    async def run(code: str, **options: Any) -> str:
        result = await machine.run("python3 -", input=code.encode(), **options)
        assert result.exit_code == 0, result
        return result.stdout

    return run


@pytest.fixture
def canary() -> Iterator[Path]:
    """Make a folder with a file, in a place that everybody can reach."""
    with tempfile.TemporaryDirectory(prefix="agentrl-canary-") as name:
        folder = Path(name)
        folder.chmod(0o777)
        (folder / "canary").write_text(SECRET)
        (folder / "canary").chmod(0o666)
        yield folder
        assert os.listdir(folder) == ["canary"]
        assert (folder / "canary").read_text() == SECRET


def named(name: str) -> str:
    """Return a command that never ends, with a name that the host can find."""
    return f"ln -sf /bin/sleep /tmp/{name} && exec /tmp/{name} 1000"


async def test_a_command_runs_in_the_working_folder(machine: Machine) -> None:
    result = await machine.run("pwd; echo wrong >&2; exit 3")
    assert (result.exit_code, result.stdout, result.stderr) == (3, "/app\n", "wrong\n")
    assert not result.timed_out
    assert not result.truncated


@pytest.mark.parametrize(
    "text", nightly(["a\\nb", "a\nb", "'\"`$x", "%s %d", "\\\\0101", "é\t€", "  two  spaces  ", "", "-n"], 9)
)
async def test_a_command_is_taken_literally(machine: Machine, text: str) -> None:
    quoted = text.replace("'", "'\\''")
    assert (await machine.run(f"printf '%s|' '{quoted}'\n# a comment\nprintf x")).stdout == f"{text}|x"


async def test_input_is_the_standard_input(machine: Machine) -> None:
    data = bytes(range(256)) * 2000
    assert (await machine.run("cat > copy", input=data)).exit_code == 0
    assert await machine.read("/app/copy") == data
    assert (await machine.run("true", input=data)).exit_code == 0
    assert (await machine.run("cat")).stdout == ""


async def test_files_stay_and_are_written_whole(machine: Machine) -> None:
    for path, data in (
        ("/app/deep/er/a b", b"\0\n\\n"),
        ("/tmp/-x", b""),
        ("relative", b"1"),
        ("/app/deep/er/a b", b"2"),
    ):
        await machine.write(path, data)
        assert await machine.read(path) == data
    assert (await machine.run("ls deep/er /app")).stdout == "/app:\ndeep\nrelative\n\ndeep/er:\na b\n"
    for path in ("/app/absent", "/app/deep"):
        with pytest.raises(OSError, match="absent|deep"):
            await machine.read(path)
    with pytest.raises(OSError, match="deep"):
        await machine.write("/app/deep", b"")


async def test_a_file_that_is_written_again_keeps_its_permissions(machine: Machine) -> None:
    await machine.write("/app/run.sh", b"echo old")
    assert (await machine.run("ls -l run.sh")).stdout.startswith("-rw-r--r--")
    await machine.run("chmod 750 run.sh")
    await machine.write("/app/run.sh", b"echo new")
    assert (await machine.run("./run.sh; ls -l run.sh")).stdout.startswith("new\n-rwxr-x---")


async def test_a_folder_is_uploaded_with_its_links(machine: Machine, tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "run.sh").write_text("echo ran")
    (tmp_path / "sub" / "run.sh").chmod(0o755)
    (tmp_path / "link").symlink_to("/etc/shadow")
    await machine.upload(tmp_path, "/app/new")
    (tmp_path / "to").symlink_to(tmp_path / "sub")
    await machine.upload(tmp_path / "to", "/app/linked")
    assert (await machine.run("new/sub/run.sh; readlink new/link; linked/run.sh")).stdout == "ran\n/etc/shadow\nran\n"
    with pytest.raises(OSError, match="absent"):
        await machine.upload(tmp_path / "absent", "/app")


async def test_output_is_bounded(machine: Machine) -> None:
    result = await machine.run("head -c 3000000 /dev/zero; yes | head -c 3000000 >&2; echo end")
    assert (len(result.output), len(result.errors), result.truncated) == (100_000, 100_000, True)


async def test_a_command_ends_at_its_time_limit(machine: Machine) -> None:
    for timeout in (0.5, 5, 50):  # on a busy machine, a command may begin late
        result = await machine.run(f"echo begun; {named('overdue')}", timeout=timeout)
        if result.stdout:
            break
    assert (result.exit_code, result.stdout, result.timed_out) == (124, "begun\n", True)
    assert processes_called("overdue") == 0
    assert (await machine.run("ls /tmp")).stdout == "overdue\n"
    assert (await machine.run("true", timeout=0)).timed_out


async def test_no_process_outlives_its_command(machine: Machine) -> None:
    assert (
        await machine.run(f"(setsid sh -c '{named('survivor')}' > /dev/null 2>&1 < /dev/null &); sleep 0.1")
    ).exit_code == 0
    assert processes_called("survivor") == 0


async def test_a_cancelled_command_ends_at_once(machine: Machine) -> None:
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(machine.run, named("cancelled"))
        await until(lambda: processes_called("cancelled") == 1)
        tasks.cancel_scope.cancel()
    assert processes_called("cancelled") == 0
    assert (await machine.run("echo on")).stdout == "on\n"


async def test_close_ends_the_command(start: Start) -> None:
    machine = await start()
    failures = []

    async def run() -> None:
        try:
            await machine.run(named("closed"))
        except SandboxFailure as failure:
            failures.append(failure)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(run)
        await until(lambda: processes_called("closed") == 1)
        await machine.close()
        assert processes_called("closed") == 0
    assert "closed" in str(failures[0])
    with pytest.raises(SandboxUnavailable, match="closed"):
        await machine.run("true")
    await machine.close()


async def test_commands_at_once_run_one_after_another(machine: Machine) -> None:
    async with anyio.create_task_group() as tasks:
        for _ in range(5):
            tasks.start_soon(machine.run, "[ ! -e busy ] && touch busy && sleep 0.02 && rm busy && echo x >> done")
    assert await machine.read("/app/done") == b"x\n" * 5


async def test_without_its_shell_a_machine_runs_nothing(machine: Machine) -> None:
    if (await machine.run("rm /bin/sh")).exit_code:
        pytest.skip("programs are read-only")
    result = await machine.run("true")
    assert result.exit_code
    assert "/bin/sh" in result.stderr
    with pytest.raises(OSError, match="/bin/sh"):
        await machine.read("/etc/hosts")


async def test_a_snapshot_restores_the_files(start: Start, machine: Machine) -> None:
    await machine.run("mkdir -p deep; echo one > deep/file; ln -s deep link; chmod 700 deep/file")
    image = await machine.snapshot()
    await machine.run("echo two > deep/file; rm link")
    async with await start(image) as first, await start(image) as second:
        await first.run("echo three > deep/file")
        assert (await second.run("cat link/file; ls -l deep/file | head -c 10")).stdout == "one\n-rwx------"
        assert (await machine.run("cat deep/file")).stdout == "two\n"
    await type(machine).delete(image)
    with pytest.raises((SandboxUnavailable, SandboxFailure)):
        await start(image)


async def test_no_network(machine: Machine, python: Callable[..., Awaitable[str]]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as tcp, socket.socket(socket.AF_UNIX) as abstract:
        name = f"agentrl-{os.getpid()}"
        abstract.bind(f"\0{name}")
        abstract.listen()
        port = tcp.getsockname()[1]
        body = (
            "attempt('tcp', lambda: socket.create_connection(('127.0.0.1', port), timeout=2))\n"
            "attempt('abstract', lambda: socket.socket(socket.AF_UNIX).connect(chr(0) + name))\n"
            "attempt('dns', lambda: socket.getaddrinfo('example.com', 80))\n"
            "attempt('interfaces', lambda: set(dict(socket.if_nameindex()).values()) != {'lo'})\n"
        )
        assert json.loads(await python(programs.program(body, port=port, name=name))) == []


async def test_a_network_if_allowed() -> None:
    if reason := refusal(BubblewrapMachine):
        pytest.skip(reason)
    with socket.create_server(("127.0.0.1", 0)) as server:
        code = f"import socket; socket.create_connection(('127.0.0.1', {server.getsockname()[1]}), timeout=20)"
        async with await BubblewrapMachine.start(network=True) as machine:
            assert (await machine.run(f'python3 -c "{code}"')).exit_code == 0


async def test_no_files_of_the_host(machine: Machine, python: Callable[..., Awaitable[str]], canary: Path) -> None:
    paths = [str(canary / "canary"), str(canary), str(ROOT / "README.md")]
    said = await python(programs.program(programs.FILES, paths=paths, folders=[str(canary)], secret=SECRET))
    # It may make files of these names in its own /tmp; the fixture checks the host's.
    succeeded = [name for name in json.loads(said.splitlines()[-1]) if "canary" not in name or name.startswith("read")]
    assert succeeded == []
    read = f"env; cat /proc/*/environ; for process in /proc/*; do cat $process/root{canary}/canary; done"
    assert SECRET not in (await machine.run(read)).stdout


async def test_the_system_folders_are_read_only() -> None:
    if reason := refusal(BubblewrapMachine):
        pytest.skip(reason)
    async with await BubblewrapMachine.start() as machine:
        for folder in ("/", "/usr", "/usr/bin", "/etc", "/etc/ssl", "/dev", "/proc", "/sys", "/lib"):
            assert (await machine.run(f"touch {folder}/escaped")).exit_code, folder
        assert (await machine.run("rm /bin; mv /etc /tmp; umount /usr; chmod 777 /usr")).exit_code


async def test_links_do_not_lead_out(machine: Machine, canary: Path, tmp_path: Path) -> None:
    """The host follows no link of the machine."""
    target = canary / "canary"
    await machine.run(f"ln -s {target} file; ln -s {canary} folder; mkdir -p /tests; ln -s {canary} /tests/inside")
    for path in ("file", "folder/canary"):
        with pytest.raises(OSError, match="No such file"):
            await machine.read(f"/app/{path}")
    await machine.write("/app/file", b"mine")
    (tmp_path / "canary").write_text("mine")
    for folder in ("/app/folder", "/tests/inside"):
        with contextlib.suppress(OSError):
            await machine.upload(tmp_path, folder)
        with contextlib.suppress(OSError):
            await machine.write(f"{folder}/escaped", b"mine")


async def test_a_hostile_snapshot_writes_nothing_outside(start: Start, machine: Machine, canary: Path) -> None:
    links = (
        f"[ -w / ] && for name in etc usr app home tmp var dev proc run; do rm -rf /$name; ln -s {canary} /$name; done"
    )
    await machine.run(f"rm -rf /app/* /home/agent; ln -s {canary} /home/agent; {links}", timeout=20)
    image = await machine.snapshot()
    with contextlib.suppress(SandboxUnavailable, SandboxFailure):
        await (await start(image)).close()
    await type(machine).delete(image)


async def test_no_signal_reaches_another_process(machine: Machine, python: Callable[..., Awaitable[str]]) -> None:
    user = OTHER_USER if os.geteuid() == 0 else None
    victim = subprocess.Popen(["/bin/sleep", "1000"], user=user, start_new_session=True)  # noqa: ASYNC220
    body = (
        "import resource\nfor pid in pids:\n"
        "    attempt(f'kill {pid}', lambda: os.kill(pid, 9))\n"
        "    attempt(f'group {pid}', lambda: os.killpg(pid, 19))\n"
        "    attempt(f'renice {pid}', lambda: os.setpriority(os.PRIO_PROCESS, pid, 19))\n"
        "    attempt(f'limit {pid}', lambda: resource.prlimit(pid, 7, (0, 0)))\n"
        "    attempt(f'see {pid}', lambda: os.listdir(f'/proc/{pid}'))\n"
    )
    try:
        assert json.loads(await python(programs.program(body, pids=[victim.pid, os.getpid()]))) == []
        await machine.run("kill -9 -1")
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


async def test_kernel_settings_stay(machine: Machine) -> None:
    settings = [Path(f"/proc/sys/{name}") for name in ("kernel/core_pattern", "kernel/panic", "vm/overcommit_memory")]
    before = [path.read_text() for path in settings]
    for path in (*settings, "/proc/sysrq-trigger", "/sys/kernel/uevent_helper"):
        assert (await machine.run(f"cat {path} > value; cat value > {path}")).exit_code, path
    assert [path.read_text() for path in settings] == before


async def test_no_inherited_descriptors(machine: Machine) -> None:
    # The fourth is the folder that `ls` reads.
    assert (await machine.run("ls /proc/self/fd | sort -n")).stdout.split() == ["0", "1", "2", "3"]


async def test_mounts_stay_inside(machine: Machine, python: Callable[..., Awaitable[str]]) -> None:
    before = Path("/proc/self/mountinfo").read_text()
    await python(programs.program(programs.MOUNTS, numbers=programs.numbers()))
    assert Path("/proc/self/mountinfo").read_text() == before
    assert (await machine.run("true")).exit_code == 0


async def test_a_fork_bomb_is_bounded(python: Callable[..., Awaitable[str]]) -> None:
    code = (
        "import os, time\ncount = 0\nwhile count < 1000:\n    try:\n        if os.fork() == 0:\n            time.sleep(1000)\n"
        "        count += 1\n    except OSError:\n        break\nprint(count)"
    )
    assert 5 <= int(await python(code)) <= LIMITS.processes


async def test_a_wild_fork_bomb_ends_at_the_time_limit(machine: Machine) -> None:
    bomb = "ln -sf /bin/sh /tmp/bomb; b() { while true; do /tmp/bomb -c 'sleep 0.01' & done; }; (b & b & b &); exec sleep 1000"
    result = await machine.run(bomb, timeout=0.5)
    assert result.timed_out
    assert processes_called("bomb") == 0
    assert (await machine.run("echo on")).stdout == "on\n"


async def test_memory_is_bounded(machine: Machine, python: Callable[..., Awaitable[str]]) -> None:
    assert (await python("x = bytearray(100 << 20); print(len(x))")).strip() == str(100 << 20)
    result = await machine.run("python3 -", input=b"x = bytearray(1 << 30)\nprint(len(x))")
    assert result.exit_code not in (0, 124)
    shared = b"import mmap\nx = mmap.mmap(-1, 1 << 30)\nx.write(bytes(1 << 30))"
    assert (await machine.run("python3 -", input=shared)).exit_code not in (0, 124)


async def test_the_size_of_a_file_is_bounded(machine: Machine) -> None:
    for folder in ("/app", "/tmp", "/dev/shm"):
        assert (await machine.run(f"head -c 20000000 /dev/zero > {folder}/big")).exit_code, folder
        assert (await machine.run(f"head -c 20000000 {folder}/big | wc -c || true")).exit_code == 0


async def test_limits_cannot_be_lifted(python: Callable[..., Awaitable[str]]) -> None:
    body = (
        "import resource\nfor name in ('FSIZE', 'CORE'):\n"
        "    attempt(name, lambda: resource.setrlimit(getattr(resource, 'RLIMIT_' + name), (-1, -1)))\n"
    )
    assert json.loads(await python(programs.program(body))) == []


_KILLED = """
import sys, anyio
from agentrl.sandbox.bubblewrap_machine import BubblewrapMachine
from agentrl.sandbox.container_machine import ContainerMachine
async def main():
    kind = ContainerMachine if sys.argv[1] == "container" else BubblewrapMachine
    async with await kind.start(sys.argv[2]) as machine:
        print("started", flush=True)
        await machine.run(sys.argv[3])
anyio.run(main)
"""


async def test_it_ends_with_a_killed_owner(start: Start, request: pytest.FixtureRequest, place: Path) -> None:
    kind, image = request.node.callspec.params["start"], image_of(request)
    line, before = [sys.executable, "-c", _KILLED, kind, image, named("orphan")], traces(place)
    owner = subprocess.Popen(line, env={**os.environ, "TMPDIR": str(place)}, cwd=ROOT)  # noqa: ASYNC220
    try:
        await until(lambda: processes_called("orphan") == 1 or owner.poll() is not None)
        assert owner.poll() is None
    finally:
        owner.kill()
        owner.wait()
    await until(lambda: processes_called("orphan") == 0 and traces(place) == before)


def traces(place: Path) -> tuple[object, ...]:
    """Return everything that a leak would change: children, processes of machines, mounts, open files, folders."""
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            commands.append(path.read_text())
    machines = [command for command in commands if f"{place}/agentrl-machine-" in command]
    mounts = Path("/proc/self/mountinfo").read_text().splitlines()
    return (
        children,
        machines,
        [mount for mount in mounts if "/storage/overlay " not in mount],  # Podman's, which comes and goes
        len(os.listdir("/proc/self/fd")),
        os.listdir(place),
    )


@pytest.mark.slow
async def test_100_starts_leak_nothing(start: Start, place: Path) -> None:
    await (await start()).close()
    before = traces(place)

    async def play(number: int) -> None:
        async with limit:
            machine = await start()
            assert (await machine.run(f"(sleep 1000 &); echo {number} > file; cat file")).stdout == f"{number}\n"
            with anyio.move_on_after(0.01 * (number % 5)):
                await machine.run("sleep 1000")
            await machine.close()

    limit = anyio.CapacityLimiter(4)
    async with anyio.create_task_group() as tasks:
        for number in range(100):
            tasks.start_soon(play, number)
    await until(lambda: traces(place) == before)


@pytest.mark.parametrize("seconds", [0.0, 0.002, 0.01, 0.02, 0.04])
async def test_a_cancelled_start_leaks_nothing(start: Start, place: Path, seconds: float) -> None:
    before = traces(place)
    with anyio.move_on_after(seconds):
        async with await start():
            await anyio.sleep_forever()
    await until(lambda: traces(place) == before)


async def test_limits_that_cannot_be_set_are_named(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason := refusal(BubblewrapMachine):
        pytest.skip(reason)
    (place / "prlimit").write_text("#!/bin/sh\necho not permitted >&2; exit 1\n")
    (place / "prlimit").chmod(0o755)
    monkeypatch.setenv("PATH", f"{place}{os.pathsep}{os.environ['PATH']}")
    before = traces(place)
    with pytest.raises(SandboxFailure, match="prlimit.*: not permitted"):
        await BubblewrapMachine.start()
    await until(lambda: traces(place) == before)


async def test_a_start_that_fails_leaks_nothing(start: Start, place: Path) -> None:
    before = traces(place)
    with pytest.raises((SandboxUnavailable, SandboxFailure)):
        await start("/absent/image")
    await until(lambda: traces(place) == before)


def test_an_ordinary_user_may_start_machines() -> None:
    if os.geteuid() != 0 or refusal(BubblewrapMachine):
        pytest.skip("needs root, to become another user, and bubblewrap")
    code = (
        "import anyio, os\nfrom agentrl.sandbox.bubblewrap_machine import BubblewrapMachine as Machine\n"
        "from agentrl.sandbox.limits import MachineLimits\nasync def main():\n"
        "    async with await Machine.start(workdir='/app', limits=MachineLimits(processes=5)) as machine:\n"
        "        await machine.run('mkdir -p locked/x; chmod 0 locked')\n"
        "        print(os.getuid(), await machine.run('id -u; for i in 1 2 3 4 5 6 7 8 9; do sleep 1 & done'))\n"
        "        folder = machine._folder\n    print(folder.exists())\nanyio.run(main)"
    )
    interpreter = find_interpreter(by_others=True)
    path = os.pathsep.join([str(ROOT), *interpreter.site])
    done = subprocess.run(
        [interpreter.executable, "-c", code], env={"PATH": os.environ["PATH"], "PYTHONPATH": path}, cwd="/",
        capture_output=True, text=True, user=OTHER_USER, group=OTHER_USER, extra_groups=[],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{OTHER_USER} CommandResult(exit_code=2, output=b'1000\\n'")
    assert "Cannot fork" in done.stdout
    assert done.stdout.endswith("False\n")


FAKE = """#!/bin/sh
# A stand-in for faults of the service alone: $FAULT is the word of the command line that fails, and how.
echo "$@" >> "$CALLS"
[ "$1" = "${FAULT%:*}" ] && case "${FAULT#*:}" in
    hang) exec sleep 1000 ;;
    fail) echo "Error response from daemon: out of space" >&2; exit 1 ;;
    slow) until grep -q ^stop "$CALLS"; do sleep 0.01; done; echo started >> "$CALLS"; exit 137 ;;
esac
case "$1" in
    version) echo 28.2 ;;
    inspect) echo "0 " ;;
    start) exec /bin/sh -c 'IFS= read -r command; eval "$(printf %b "$command")"' ;;
esac
"""


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Callable[[], list[str]]]:
    """Put a `docker` with a fault on the path, and a failing `podman`. Returns a function to get `docker`'s calls."""
    for name, script in (("docker", FAKE), ("podman", "#!/bin/sh\nexit 1\n")):
        (tmp_path / name).write_text(script)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))

    def broken(fault: str) -> Callable[[], list[str]]:
        monkeypatch.setenv("FAULT", fault)
        return lambda: (tmp_path / "calls").read_text().splitlines()

    return broken


@pytest.mark.parametrize("fault", ["create:fail", "start:fail"])
async def test_a_container_that_cannot_start_is_removed(service: Any, fault: str) -> None:
    calls = service(fault)
    with pytest.raises(SandboxFailure, match="out of space"):
        await ContainerMachine.start("image")
    assert calls()[-1].startswith("rm --force --volumes agentrl-")


async def test_a_service_that_fails_later_is_no_result_of_the_command(service: Any) -> None:
    calls = service("")
    async with await ContainerMachine.start("image") as machine:
        assert (await machine.run("echo on")).stdout == "on\n"
        service("start:fail")
        with pytest.raises(SandboxFailure, match="out of space"):
            await machine.run("echo on")
        service("stop:fail")
        with pytest.raises(SandboxFailure, match="stop"):
            await machine.run("sleep 1000", timeout=0.05)
    assert calls()[-1].startswith("rm --force")


async def test_a_container_is_removed_at_a_second_attempt(service: Any) -> None:
    calls = service("rm:fail")
    await (await ContainerMachine.start("image")).close()
    assert [call.split()[0] for call in calls()] == ["version", "image", "create", "start", "rm", "rm", "rm"]


async def test_a_service_that_hangs_is_given_up(service: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    service("version:hang")
    monkeypatch.setattr("agentrl.sandbox.container_machine._ANSWER_SECONDS", 0.05)
    assert "docker version: no answer within 0.05 s" in await ContainerMachine.refusal()
    with pytest.raises(SandboxUnavailable, match="no answer"):
        await ContainerMachine.start("image")


async def test_a_cancelled_start_ends_by_itself_and_removes_its_container(service: Any) -> None:
    calls = service("start:slow")
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(ContainerMachine.start, "image")
        await until(lambda: Path(os.environ["CALLS"]).exists() and "start" in {call.split()[0] for call in calls()})
        tasks.cancel_scope.cancel()
    steps = dict.fromkeys(call.split()[0] for call in calls())
    assert list(steps) == ["version", "image", "create", "start", "stop", "started", "rm"]
