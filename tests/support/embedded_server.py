"""The embedded server as a real subprocess, for tests and benchmarks."""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl import parent_watchdog
from tests.support.warm import python


@contextmanager
def embedded_server(model: str | Path, *arguments: str, log: Path | None = None) -> Iterator[str]:
    """Start `agentrl serve` on a free port. Yields its URL. The server stops at the end, or when this process ends."""
    command = [sys.executable, "-I", "-S", parent_watchdog.__file__, str(os.getpid())]
    command += [python(), "-m", "agentrl", "serve", str(model), "--port", "0", "--threads", "1", *arguments]
    stderr = log.open("wb") if log is not None else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, start_new_session=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready on "), f"the server did not start: {line!r}, exit {process.wait(120)}"
        yield line.removeprefix("ready on ").strip()
    finally:
        process.terminate()
        process.wait(120)
