"""Command lines that run in the tests' process, and the cost of a Python process."""

from __future__ import annotations

import contextlib
import io
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import run


def in_this_process(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `agentrl ARGS` without a new process. Returns its exit code and its output."""
    out, err = io.StringIO(), io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        for name, value in {"COLUMNS": "100", **environment}.items():
            patch.setenv(name, value)
        if cwd is not None:
            patch.chdir(cwd)
        patch.setattr(sys, "path", sys.path.copy())
        code = run(list(args))
    return subprocess.CompletedProcess(args, code, out.getvalue(), err.getvalue())


def processor_seconds(*args: str) -> float:
    """Return the least CPU time of three runs of `python ARGS`. Compare it only with that of another command."""
    found = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(found)
