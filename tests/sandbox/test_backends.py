"""The backend of a machine, the message if a backend is missing, and the files of Python that a sandbox shows."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentrl.errors import AgentRLError
from agentrl.sandbox import SandboxUnavailable, try_backends
from tests.sandbox.watch import BACKENDS, enter, open_box


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make an environment's packages below /tmp, where the sandbox has its own files."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="agentrl-test-") as folder:
        Path(folder).chmod(0o755)
        packages = Path(folder) / "site-packages"
        packages.mkdir()
        (packages / "loaded_late.py").write_text("ANSWER = 42")
        monkeypatch.syspath_prepend(str(packages))
        yield packages


@pytest.mark.parametrize("backend", BACKENDS)
async def test_an_environment_below_tmp_is_readable(backend: str, packages: Path) -> None:
    box = open_box(backend)
    try:
        await enter(box)
    except SandboxUnavailable as error:
        pytest.skip(str(error))
    try:
        ran = await box.run("import loaded_late; print(loaded_late.ANSWER)")
        assert (ran.stdout, ran.stderr) == ("42\n", "")
        if backend != "unsafe_subprocess":
            for folder in (packages, packages.parent):
                written = await box.run(f"open({str(folder / 'mine.py')!r}, 'w')")
                assert written.outcome == "error"
        if backend == "bubblewrap":
            own = await box.run("import tempfile; print(tempfile.NamedTemporaryFile().write(b'x'))")
            assert own.stdout == "1\n"
    finally:
        await box.__aexit__(None, None, None)


async def test_a_missing_bubblewrap_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxUnavailable, match=r"bwrap is not installed.*apt install bubblewrap"):
        async with open_box("bubblewrap"):
            raise AssertionError


async def test_a_bubblewrap_that_may_not_make_namespaces(monkeypatch: pytest.MonkeyPatch, public: Path) -> None:
    """A container without user namespaces has this effect on bubblewrap."""
    install(public, "#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    monkeypatch.setenv("PATH", str(public), prepend=os.pathsep)
    with pytest.raises(SandboxUnavailable, match="bubblewrap: bwrap: No permissions to create new namespace"):
        async with open_box("bubblewrap"):
            raise AssertionError
    try:
        async with open_box("auto") as box:
            assert box.backend == "landlock"
    except SandboxUnavailable as error:
        pytest.skip(str(error))


async def test_the_unsafe_backend_warns() -> None:
    with pytest.warns(UserWarning, match="this user's rights"):
        async with open_box("unsafe_subprocess"):
            pass


def test_trying_says_a_python_or_a_reason_for_each_backend() -> None:
    backends = try_backends()
    assert list(backends) == ["bubblewrap", "landlock"]
    assert all("python" in said if works else said for works, said in backends.values())
    assert issubclass(SandboxUnavailable, AgentRLError)


def install(folder: Path, script: str) -> None:
    """Install a command `bwrap` in a folder."""
    (folder / "bwrap").write_text(script)
    (folder / "bwrap").chmod(0o755)
