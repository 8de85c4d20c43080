"""Environments, functions, sources and tutorials of the documentation, in real runs."""

import re
import shutil
import sys
from pathlib import Path

import pytest

from agentrl.cli.main import run
from tests.support.runs import WAITING, RunKit
from tests.test_docs import ROOT, blocks, write_files

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

OWN = {
    "custom_generate_function_path": "my_loop.py",
    "custom_rm_path": "my_reward.py:shorter",
    "data_source_path": "source.py:Squares",
    "dynamic_sampling_filter_path": "filters.py:not_too_easy",
    "buffer_filter_path": "buffers.py:newest_first",
    "tool_call_parser": "parsers.py:arrows",
    "advantage_estimator": "mine.py:shorter_is_better",
    "loss_type": "custom_loss",
    "custom_loss_function_path": "mine.py:squared",
    "custom_pg_loss_reducer_function_path": "mine.py:per_group",
    "env": None,
}


def train(kit: RunKit, **settings: object) -> list[dict[str, float]]:
    """Return metrics of a short run in one process, on prompts that are not in a file."""
    short = {"num_rollout": 2, "rollout_batch_size": 2, "rollout_max_response_len": 8, "backend": "local"}
    given: dict[str, object] = {**short, "prompt_data": None, "label_key": None, **settings}
    run = kit.start(kit.arguments("run", **given))
    assert run.wait() == 0, run.output
    assert [name for row in run.metrics() for name in row if not documented(name)] == []
    return run.metrics()


def documented(name: str) -> bool:
    """Return true if the page of metrics names the metric or its prefix; a user's loss has its own names."""
    page = (ROOT / "docs/metrics.md").read_text()
    named = [re.sub(r"\\?<[^>]*>", ".+", re.escape(code)) for code in re.findall(r"`([^`\n]+)`", page)]
    return any(re.fullmatch(pattern, name) for pattern in named if pattern != "train/.+") or name == "train/log_ratio"


def test_everything_of_ones_own_together(tmp_path: Path) -> None:
    kit = RunKit.make(tmp_path)
    for page in ("algorithms", "own-loop", "data", "parsers"):
        write_files(ROOT / f"docs/{page}.md", tmp_path)
    metrics = train(kit, **OWN)
    assert [row["rollout/groups"] for row in metrics] == [2, 2]
    assert all("train/log_ratio" in row and row["rollout/turns"] == 2 for row in metrics)


def test_an_environment_that_came_from_verifiers(tmp_path: Path) -> None:
    kit = RunKit.make(tmp_path)
    write_files(ROOT / "docs/coming-from.md", tmp_path)
    write_files(ROOT / "docs/algorithms.md", tmp_path)
    given = {"env": "guessing.py:Guessing", "dynamic_sampling_filter_path": "filters.py:judged_turns"}
    metrics = train(kit, **{**WAITING, **given}, turn_credit="returns")
    assert max(row["rollout/turns"] for row in metrics) > 2
    assert all(row["rollout/reward"] < 0 for row in metrics)


def test_a_group_function_gives_each_sample_its_own_conversation(tmp_path: Path) -> None:
    kit = RunKit.make(tmp_path)
    write_files(ROOT / "docs/own-loop.md", tmp_path)
    given = {"custom_generate_function_path": "my_group.py", "custom_rm_path": "my_reward.py:shorter", "env": None}
    metrics = train(kit, **given, prompt_data="prompts.jsonl", label_key="label")
    assert [row["rollout/groups"] for row in metrics] == [2, 2]


@pytest.fixture
def tutorial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make an empty folder with a tiny model, where the commands of a tutorial start."""
    monkeypatch.chdir(tmp_path)
    assert run(["init", "--skilled", "./model"]) == 0
    return tmp_path


@pytest.mark.skipif(shutil.which("bwrap") is None, reason="bwrap is not installed")
def test_the_agent_of_the_tutorial_plays(tutorial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = ROOT / "docs/gateway.md"
    write_files(page, tutorial)
    (tutorial / "tasks.jsonl").write_text(blocks(page, "jsonl")[0])
    command = f"{sys.executable} {tutorial}/my_agent.py {{prompt}}"
    assert run(["check", "--config", "agent.yaml", "--agent", command, "--agent-readable", "."]) == 0
    assert "sample: 86 + 17 tokens, 17 train" in capsys.readouterr().out


def test_the_moves_of_the_tutorial_cross_the_lake(tutorial: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("gymnasium", reason="the extra gymnasium is not installed")
    page = ROOT / "docs/ecosystem.md"
    write_files(page, tutorial)
    (moves,) = [code for code in blocks(page, "text") if code.startswith("# moves.txt")]
    (tutorial / "moves.txt").write_text(moves)
    assert run(["check", "--config", "lake.yaml", "--play", "moves.txt"]) == 0
    assert "2 of 2 played with 8 turns: no problem" in capsys.readouterr().out


def test_the_answers_of_the_tutorial_are_graded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    page = ROOT / "docs/graders.md"
    Path("answers.jsonl").write_text(blocks(page, "jsonl")[0])
    assert run(["grade", "--rm-type", "math", "answers.jsonl", "--explain", "2"]) == 0
    shown = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    assert shown == blocks(page, "text")[0].splitlines()
