"""Hidden tests: they run on a copy of the agent's files, in a new sandbox, after the agent has ended.

1. The copy has regular `.py` files only: no links, no compiled files.
2. Python starts with `-I -S`: no `sitecustomize.py`, no environment variables. The copy is the last entry of `sys.path`,
   so its files do not replace modules of the standard library. pytest, and with it `conftest.py`, is not used.
3. The sandbox gets the calls of the tests, and returns `repr` of their values. Correct results never enter it, so a
   program that ends the runner early or prints its own result earns nothing.
"""

import json
import os
import shutil
import stat
import sys
import tempfile
from pathlib import Path

import anyio
from anyio import to_thread

from agentrl.sandbox.command import CommandResult, bubblewrapped, run_command
from examples.swe_small.tasks import Task

SECONDS, LARGEST, MOST = 20.0, 1 << 18, 200
PYTHON = f"{sys.base_prefix}/bin/python3"
_LIMITED = 'ulimit -t 20; ulimit -v 2000000; ulimit -f 40000; exec "$@"'
_RUNNER = """
import importlib, json, os, sys
out = os.dup(1)
os.dup2(2, 1)
sys.path.append(os.getcwd())
name, calls = sys.argv[1], json.loads(sys.argv[2])
found = []
module = importlib.import_module(name)
for call in calls:
    try:
        found.append(repr(eval(call, dict(vars(module)))))
    except Exception as error:
        found.append(type(error).__name__)
os.write(out, json.dumps(found).encode())
"""


async def run_inside(words: list[str], folder: Path, seconds: float = SECONDS) -> CommandResult | None:
    """Run `words` in a sandbox that can change `folder` alone, with the standard library and no network; None: it did
    not end within `seconds`. Processes that it started end with it."""
    variables = {"PATH": f"{sys.base_prefix}/bin:/usr/bin:/bin", "HOME": "/home/agent", "LANG": "C.UTF-8"}
    line = bubblewrapped(["/bin/sh", "-c", _LIMITED, "sh", *words], folder)
    with anyio.move_on_after(seconds):
        return await run_command(line, variables, folder, most=1 << 16)
    return None


async def grade(task: Task, folder: Path) -> float:
    """Return 1.0 if all hidden tests pass on a copy of `folder`, else 0.0."""
    copy = Path(tempfile.mkdtemp(prefix="agentrl-swe-"))
    try:
        await to_thread.run_sync(copy_sources, folder, copy)
        name = task.module.removesuffix(".py").replace("/", ".")
        words = [PYTHON, "-I", "-S", "-B", "-c", _RUNNER, name, json.dumps(task.calls)]
        result = await run_inside(words, copy)
    finally:
        with anyio.CancelScope(shield=True):
            await to_thread.run_sync(shutil.rmtree, copy, True)
    try:
        return float(result is not None and json.loads(result.stdout) == list(task.expected))
    except ValueError:
        return 0.0


def copy_sources(source: Path, target: Path) -> None:
    """Copy the first 200 regular `.py` files of at most 256 KiB; links are not followed."""
    copied = 0
    for folder, names, files in os.walk(source):
        names.sort()
        for name in sorted(files):
            path = Path(folder, name)
            seen = path.lstat()
            if copied < MOST and name.endswith(".py") and stat.S_ISREG(seen.st_mode) and seen.st_size <= LARGEST:
                copied += 1
                place = target / path.relative_to(source)
                place.parent.mkdir(parents=True, exist_ok=True)
                place.write_bytes(path.read_bytes())
