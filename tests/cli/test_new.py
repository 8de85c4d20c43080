"""`agentrl new` and `agentrl init`: the written files run without changes, and no existing file is overwritten."""

import os
import subprocess
from pathlib import Path

import pytest

from agentrl.cli.main import run
from agentrl.config import RunSettings
from agentrl.run.preflight import preflight
from tests.support.checkout import import_path
from tests.support.tiny_models import make_tiny_model
from tests.support.warm import python


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_folder_may_be_called_like_a_word_of_the_template(here: Path) -> None:
    assert run(["new", "my_CLASS"]) == 0
    assert "from my_CLASS import PEOPLE, MyClass" in (here / "my_CLASS" / "test_my_CLASS.py").read_text()


def test_a_new_project_passes_its_tests_check_and_preflight(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(["new", "maze-runner"]) == 0
    monkeypatch.chdir(here / "maze-runner")
    command = [python(), "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert "3 passed" in done.stdout, done.stdout + done.stderr
    play = Path("play.txt").read_text()
    Path("play.txt").write_text(play.replace("expect reward 0", "expect reward 1"))
    again = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": import_path()},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "play.txt line 7: line 8 expects reward 1, the episode earned 0.0" in again.stdout, "pytest plays the file"
    make_tiny_model(Path("model"))
    assert run(["check", "maze_runner.py:MazeRunner"]) == 0
    preflight(RunSettings.from_file("run.yaml").check_complete("train"), "train")
    readme = Path("README.md").read_text()
    assert "agentrl check maze_runner.py:MazeRunner" in readme
    assert not set(["MODULE", "CLASS"]) & set(readme.split())


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("2048", "begin it with a letter"),
        ("class", "becomes a Python module's"),
        ("calendar", "no name of Python's"),
        ("sample", "or agentrl's"),
        ("_1", "begin it"),
        ("full", "is there and not empty"),
    ],
)
def test_a_project_that_cannot_be_is_refused(
    path: str, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "full").mkdir()
    (here / "full" / "mine.txt").write_text("")
    assert run(["new", path]) == 2
    assert said in capsys.readouterr().err
    assert sorted(item.name for item in here.rglob("*")) == ["full", "mine.txt"]


def test_a_skilled_model_has_its_own_shape(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--skilled", "--layers", "9", "model"]) == 2
    assert "leave out --layers" in capsys.readouterr().err
