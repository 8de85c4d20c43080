"""Open sandboxes, and their hosts: every safe backend, as this user and, if this is root, as an unprivileged user."""

import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from agentrl.sandbox import Sandbox, SandboxLimits, SandboxUnavailable
from tests.sandbox.host import OTHER_USER, Host, HostUnavailable, open_host
from tests.sandbox.watch import BACKENDS, enter, open_box

USERS = [0, OTHER_USER] if os.geteuid() == 0 else [os.geteuid()]
HOSTS = [(backend, user) for backend in ("bubblewrap", "landlock") for user in USERS]
LIMITS = SandboxLimits(wall_seconds=20, cpu_seconds=10, memory_mb=256, processes=8, file_mb=8, disk_mb=16)


@pytest.fixture(
    scope="module",
    params=[pytest.param(host, marks=[] if host[1] == USERS[-1] else [pytest.mark.slow]) for host in HOSTS],
    ids=lambda param: f"{param[0]}-{'root' if param[1] == 0 else 'user'}",
)
def host(request: pytest.FixtureRequest) -> Iterator[Host]:
    backend, user = request.param
    if backend == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    try:
        with open_host(backend, user, LIMITS) as opened:
            yield opened
    except HostUnavailable as reason:
        pytest.skip(f"{backend} does not work on this machine: {reason}")


@pytest.fixture(params=BACKENDS)
async def box(request: pytest.FixtureRequest) -> AsyncIterator[Sandbox]:
    if request.param == "bubblewrap" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is not installed")
    opened = open_box(request.param)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONWARNINGS", "ignore")
        try:
            await enter(opened)
        except SandboxUnavailable as error:
            pytest.skip(str(error))
    yield opened
    await opened.__aexit__(None, None, None)


@pytest.fixture
async def safe() -> AsyncIterator[Sandbox]:
    """Yield a sandbox with any safe backend of this machine."""
    try:
        async with open_box("auto") as opened:
            yield opened
    except SandboxUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def public() -> Iterator[Path]:
    """Make a folder that every user can read."""
    with tempfile.TemporaryDirectory(prefix="agentrl-test-") as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)
