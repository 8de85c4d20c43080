"""The commands of README's tour, in a venv with only the built wheel."""

import os
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.test_packaging import built as built
from tests.test_docs import ROOT, blocks, lines, write_files

LEFT_OUT = {"source", "make", "cd", "pip", "git"}
"""Commands of a clone or of a shell alone."""


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_command_of_the_tour_works_the_first_time(built: Path, tmp_path: Path) -> None:
    venv, work = tmp_path / "venv", tmp_path / "work"
    work.mkdir()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    wheel = next(built.glob("*.whl"))
    started = time.monotonic()
    for command in (
        [sys.executable, "-m", "venv", str(venv)],
        [
            str(venv / "bin/python"),
            "-m",
            "pip",
            "install",
            "--quiet",
            f"{wheel}[train,view]",
            "-c",
            str(ROOT / "constraints.txt"),
        ],
    ):
        subprocess.run(command, check=True, timeout=1800, env=env)
    seconds = [("pip install", time.monotonic() - started)]
    write_files(ROOT / "README.md", work)
    row = re.search(r'\{"input": "How many people live in Oslo\?".*?\}', (ROOT / "README.md").read_text())
    assert row is not None
    (work / "train.jsonl").write_text(f"{row[0]}\n" * 8)
    env["PATH"] = f"{venv / 'bin'}{os.pathsep}{env['PATH']}"
    tour = next(
        code for code in blocks(ROOT / "README.md", "bash") if "agentrl init" in code and "agentrl train" in code
    )
    for words in lines(tour):
        if words[0] in LEFT_OUT:
            continue
        started = time.monotonic()
        if words[:2] == ["agentrl", "view"]:
            serves([*words, "--port", "0", "--no-browser"], work, env)
        else:
            done = subprocess.run(words, cwd=work, env=env, capture_output=True, text=True, timeout=1200)
            assert done.returncode == 0, (shlex.join(words), done.stdout[-2000:], done.stderr[-2000:])
        seconds.append((shlex.join(words), time.monotonic() - started))
    assert len(seconds) > 5
    print(*(f"{took:7.1f} s  {line}" for line, took in seconds), sep="\n")  # noqa: T201


def serves(words: list[str], folder: Path, env: dict[str, str]) -> None:
    """Start a server and end it once it reports that it is ready."""
    with subprocess.Popen(
        words, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        said = ""
        for line in process.stdout:
            said += line
            if "http://127.0.0.1" in line:
                break
        process.terminate()
        assert "http://127.0.0.1" in said, said
