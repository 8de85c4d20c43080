"""Thirty broken and eight sound environments, written before `agentrl check` could play (README.md beside them)."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.tiny import create

pytestmark = pytest.mark.slow
FOLDER = Path(__file__).parent / "environments"
CASES: dict[str, list[dict[str, Any]]] = yaml.safe_load((FOLDER / "cases.yaml").read_text())
MISSES = {miss["name"] for miss in yaml.safe_load((FOLDER / "misses.yaml").read_text()) or ()}
METHODS = ("reset", "step", "reward", "close")
SECONDS = 10.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    create(folder)
    return folder


def check(file: Path, case: dict[str, Any], model: Path, folder: Path) -> tuple[int, str, float]:
    """Return the exit status, the output about problems, and seconds (CPU seconds on a shared machine)."""
    arguments = [f"{file}:Env", str(model)]
    if rows := case.get("rows"):
        (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        label = ["--label-key", "label"] if any("label" in row for row in rows) else []
        arguments += ["--prompt-data", str(folder / "rows.jsonl"), *label]
    began, before = time.monotonic(), os.times()
    command = [sys.executable, "-m", "agentrl", "check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    now = os.times()
    processor = now.children_user + now.children_system - before.children_user - before.children_system
    seconds = time.monotonic() - began if os.getloadavg()[0] < 1.5 else processor
    output = done.stdout + done.stderr
    assert "Traceback" not in output
    lines = [line.strip() for line in output.splitlines() if re.match(r"\s*(problem|error:)", line)]
    return done.returncode, "\n".join(lines), seconds


def names(said: str, file: Path, where: str) -> bool:
    """Return true if the output names a function, by its name or by a line of it."""
    spans = {
        node.name: range(min([node.lineno, *(d.lineno for d in node.decorator_list)]), (node.end_lineno or 0) + 1)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    lines = [int(line) for line in re.findall(rf"{re.escape(file.name)}:(\d+)", said)]
    for name in where.split("|"):
        exact = rf"Env\.{name}\b|\b{name}\(\)|`{name}`" if name in METHODS else rf"\b{name}\b"
        if re.search(exact, said) or any(line in spans.get(name, ()) for line in lines):
            return True
    return False


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES["broken"]])
def test_a_broken_environment_is_named(case: dict[str, Any], model: Path, tmp_path: Path) -> None:
    file = FOLDER / f"{case['name']}.py"
    status, said, seconds = check(file, case, model, tmp_path)
    plain = said.replace(str(file), "").lower()
    missing = [words for words in case["expect"] if not any(word.lower() in plain for word in words.split("|"))]
    found = status in (1, 2) and not missing and names(said, file, case["where"])
    assert found is (case["name"] not in MISSES), f"{missing} and {case['where']} in:\n{said}"
    assert seconds < SECONDS


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in CASES["sound"]])
def test_a_sound_environment_has_no_problem(case: dict[str, Any], model: Path, tmp_path: Path) -> None:
    status, said, _ = check(FOLDER / "sound" / f"{case['name']}.py", case, model, tmp_path)
    assert (status, said) == (0, "")
