"""A run for the viewer, `agentrl view` of it as users start it, and Chromium."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING

import pytest

from tests.support.viewed import write_run
from tests.support.warm import python

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

_PATIENCE = 30_000
"""Timeout in milliseconds, for a busy machine."""
_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two runs in a folder."""
    folder = tmp_path_factory.mktemp("runs")
    write_run(folder / "first")
    write_run(folder / "second", steps=2)
    return folder


@pytest.fixture(scope="session")
def address(runs: Path) -> Iterator[str]:
    """Return the address of their `agentrl view`."""
    with viewed(runs, None) as found:
        yield found


@pytest.fixture(scope="session")
def shared(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """Return address and token of a viewer on all addresses. Its later output may not contain the token."""
    log = tmp_path_factory.mktemp("log") / "stderr"
    with log.open("w") as stderr, viewed(runs, stderr, "--host", "0.0.0.0") as found:
        url, _, token = found.replace("0.0.0.0", "127.0.0.1").partition("/?token=")
        yield url, token
    assert token not in log.read_text()


@contextmanager
def viewed(runs: Path, stderr: IO[str] | None, *flags: str) -> Iterator[str]:
    """Yield the printed address of a started `agentrl view`."""
    command = [python(), "-m", "agentrl", "view", str(runs), "--port", "0", "--no-browser", *flags]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True) as server:
        assert server.stdout is not None
        yield server.stdout.readline().split()[3]
        server.terminate()
        assert server.stdout.read() == ""
        server.wait(120)


@pytest.fixture(scope="session")
def chromium() -> "Iterator[Browser]":
    """Start the distribution's browser."""
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=_PATIENCE)
    found = next(filter(None, map(shutil.which, _NAMES)), None)
    if found is None:
        pytest.fail(f"none of {', '.join(_NAMES)} is on PATH; install one: apt install chromium")
    with sync_playwright() as playwright:
        sandbox = os.geteuid() != 0  # Chromium has none for root
        browser = playwright.chromium.launch(executable_path=found, chromium_sandbox=sandbox)
        yield browser
        browser.close()


@pytest.fixture
def page(chromium: "Browser", address: str) -> "Iterator[Page]":
    """Open a page that may load only from the viewer. Any other request, and any error in the page, fails the test."""
    context = chromium.new_context(base_url=address, viewport={"width": 1300, "height": 900})
    wrong: list[str] = []
    local = (address, "data:", "blob:")
    context.on("request", lambda request: None if request.url.startswith(local) else wrong.append(request.url))
    page = context.new_page()
    page.set_default_timeout(_PATIENCE)
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("console", lambda message: wrong.append(message.text) if message.type == "error" else None)
    yield page
    context.close()
    assert wrong == []
