"""The embedded server as a real subprocess, for tests and benchmarks."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def embedded_server(model: str | Path, *arguments: str, log: Path | None = None) -> Iterator[str]:
    """Start `python -m agentrl.engine.embedded` on a free port; gives its URL; stopped at the end."""
    command = [sys.executable, "-m", "agentrl.engine.embedded", "--model-path", str(model), "--port", "0"]
    command += ["--threads", "1", "--die-with-parent", *arguments]
    stderr = log.open("wb") if log is not None else subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready on "), f"the server did not start: {line!r}, exit {process.wait(10)}"
        yield line.removeprefix("ready on ").strip()
    finally:
        process.terminate()
        process.wait(10)
