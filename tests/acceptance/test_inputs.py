"""Sixty command lines with beginners' mistakes. Each answer must say what is wrong, where, and what to do.

The cases and their criteria are in `inputs/README.md`. Cases that play something are `slow`. A case without a good
answer is in `misses.yaml` with its present output, and is expected to fail.
"""

import importlib.util
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.cli.main import run

HERE = Path(__file__).parent / "inputs"
TABLE = yaml.safe_load((HERE / "cases.yaml").read_text())
CASES: list[dict[str, Any]] = TABLE["cases"]
MISSES: dict[str, dict[str, str]] = yaml.safe_load((HERE / "misses.yaml").read_text())
PLAYS = ("rollout",)
"""Commands that start an engine."""


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the model that `agentrl init` makes."""
    folder = tmp_path_factory.mktemp("tiny") / "model"
    assert run(["init", str(folder)]) == 0
    return folder


def cases() -> Iterator[Any]:
    for case in CASES:
        marks = [pytest.mark.slow] if case["command"][0] in PLAYS or "before" in case else []
        if importlib.util.find_spec("agentrl.compat") is None and re.search(
            "slime|Megatron|recomputation", case["name"]
        ):
            marks.append(pytest.mark.skip(reason="needs agentrl.compat"))
        if missed := MISSES.get(case["name"]):
            marks.append(pytest.mark.xfail(reason=missed["printed"], strict=True))
        yield pytest.param(case, id=case["name"], marks=marks)


def lay_out(case: Mapping[str, Any], folder: Path, model: Path) -> None:
    """Write the files that the case needs into its folder."""
    for name, text in {**TABLE["shared"], **case.get("files", {})}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text.replace("{model}", str(model)))
    for name in case.get("folders", ()):
        (folder / name).mkdir()
    if copy := case.get("model"):
        to = folder / copy["to"]
        shutil.copytree(model, to, ignore=shutil.ignore_patterns(*copy.get("without", ())))
        for name, size in copy.get("cut", {}).items():
            (to / name).write_bytes((to / name).read_bytes()[:size])


def lacks(case: Mapping[str, Any], said: str, code: int) -> list[str]:
    """Return what the answer lacks."""
    text = " ".join(said.lower().split())
    codes = case["code"] if isinstance(case["code"], list) else [case["code"]]
    short = [] if code in codes else [f"exit status {code}, expected {codes}"]
    short += [
        f"says {word!r}" for word in map(str, case["says"]) if not any(w in text for w in word.lower().split("|"))
    ]
    remedies = [str(word).lower() for word in case["remedy"]]
    short += [] if any(word in text for word in remedies) else [f"one of {remedies}"]
    return short + [f"never {word!r}" for word in map(str, case.get("never", ())) if word.lower() in text]


def answered(said: str) -> str:
    """Return the command's output without the settings that a dry run lists."""
    return "\n".join(line for line in said.splitlines() if not re.match(r"\s*[a-z_0-9]+ = ", line))


@pytest.mark.parametrize("case", cases())
def test_a_wrong_input_is_answered(
    case: Mapping[str, Any],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    if (module := case.get("absent")) and importlib.util.find_spec(module) is not None:
        pytest.skip(f"{module} is installed")
    monkeypatch.chdir(tmp_path)
    lay_out(case, tmp_path, model)
    kept = {name: (tmp_path / name).read_bytes() for name in case.get("keeps", ())}
    if before := case.get("before"):
        assert run(_words(before, model)) == 0
    capfd.readouterr()
    code = run(_words(case["command"], model))
    printed = capfd.readouterr()
    said = f"{printed.out}\n{printed.err}"
    assert lacks(case, answered(said), code) == [], said
    assert {name: (tmp_path / name).read_bytes() for name in kept} == kept


def _words(command: Sequence[str], model: Path) -> list[str]:
    return [word.replace("{model}", str(model)) for word in command]


def test_misses_name_cases() -> None:
    assert set(MISSES) <= {case["name"] for case in CASES}
