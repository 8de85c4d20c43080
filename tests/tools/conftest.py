"""The sandbox's hosts: every safe backend, as this user and, where this is root, as an unprivileged one."""

import os
import shutil
from collections.abc import Iterator

import pytest

from agentrl.tools.sandbox import SandboxLimits
from tests.tools.sandbox_host import OTHER_USER, Host, HostUnavailable, open_host

USERS = [0, OTHER_USER] if os.geteuid() == 0 else [os.geteuid()]
LIMITS = SandboxLimits(wall_seconds=20, cpu_seconds=10, memory_mb=256, processes=8, file_mb=8, disk_mb=16)


@pytest.fixture(
    scope="module",
    params=[(backend, user) for backend in ("bubblewrap", "landlock") for user in USERS],
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
