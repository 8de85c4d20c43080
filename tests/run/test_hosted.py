"""`agentrl rollout` and `agentrl eval` with a hosted model (the shipped one by `agentrl serve`); then `agentrl sft`."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.buffer.reader import StoreReader
from agentrl.config import RunSettings
from agentrl.demo.data import write_train_and_test
from agentrl.dumps import read_groups
from agentrl.engine import commands
from agentrl.errors import SettingsError
from agentrl.observability.metrics import read_metrics
from agentrl.run.driver import open_folder
from agentrl.run.rollouts import LedgerRollouts
from agentrl.tiny import shipped
from tests.support.commands import in_this_process
from tests.support.embedded_server import embedded_server
from tests.support.warm import python

pytestmark = pytest.mark.timeout(900)

KEY = "sk-SEKRET-123456"
PLAYED = "--env agentrl.demo.task:CalculatorEnv --input-key prompt --label-key label --progress off"
GROUPS = "--prompt-data data/train.jsonl --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 48"
MODEL = f"--hf-checkpoint {shipped('calculator')} --embedded-threads 1"


@pytest.fixture(scope="module", autouse=True)
def _engines_start_at_once() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(commands, "sys", SimpleNamespace(executable=python()))
        yield


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(tmp_path_factory.mktemp("desk"))
    write_train_and_test(folder / "data", train_count=16, seed=1)
    return folder


@pytest.fixture(scope="module")
def hosted() -> Iterator[str]:
    with embedded_server(shipped("calculator"), "--api-key", KEY) as url:
        yield f"--engine openai --base-url {url}/v1 --hosted-model calculator"


def run(desk: Path, line: str, key: str = KEY) -> str:
    """Return the output of a command."""
    done = in_this_process(*line.split(), cwd=desk, OPENAI_API_KEY=key)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    return said


def refused(desk: Path, line: str, key: str = KEY) -> str:
    """Return the output of a command that fails."""
    done = in_this_process(*line.split(), cwd=desk, OPENAI_API_KEY=key)
    assert done.returncode != 0, done.stdout
    assert "Traceback" not in done.stderr
    return done.stderr


@pytest.fixture(scope="module")
def rollouts(desk: Path, hosted: str) -> str:
    """Return the output of two rollouts in `out`."""
    return run(desk, f"rollout {hosted} {PLAYED} {GROUPS} --num-rollout 2 --output-dir out")


def test_rewards_are_those_of_native_play_and_there_are_no_token_ids(desk: Path, rollouts: str) -> None:
    run(desk, f"rollout {MODEL} {PLAYED} {GROUPS} --num-rollout 2 --output-dir native")
    played, native = (
        [sample for n in range(2) for group in read_groups(desk / f"{name}/rollouts/{n}.jsonl") for sample in group]
        for name in ("out", "native")
    )
    # Seeds, prompts and weights are equal. But one token more or less can change the end of a turn.
    alike = [ours.reward == theirs.reward for ours, theirs in zip(played, native, strict=True)]
    assert sum(alike) >= len(alike) - 2
    assert 0 < sum(float(str(sample.reward)) for sample in played) < len(played)
    assert all(sample.hosted and not sample.tokens and not sample.response_length for sample in played)
    assert all(sample.tokens and not sample.hosted for sample in native)
    figures = list(read_metrics(desk / "out" / "rollouts" / "metrics.jsonl"))
    assert all(row["hosted/completion_tokens"] > 0 and row["rollout/turns"] >= 1 for row in figures)
    with StoreReader(desk / "out" / "rollouts" / "trajectories.sqlite") as reader:
        assert {row.turns > 0 for row in reader.query()} == {True}


def test_the_key_is_written_and_printed_nowhere(desk: Path, rollouts: str) -> None:
    assert "SEKRET" not in rollouts
    files = [path for path in (desk / "out").rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {"settings.json", "demonstrations.jsonl"}
    assert [path for path in files if b"SEKRET" in path.read_bytes()] == []


@pytest.mark.slow
def test_a_small_model_learns_the_conversations(desk: Path, rollouts: str) -> None:
    file = desk / "out" / "rollouts" / "demonstrations.jsonl"
    assert str(file.relative_to(desk)) in rollouts
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["rollout"] for row in rows} == {0, 1}
    assert {row["messages"][-1]["role"] for row in rows} == {"assistant"}
    assert {row["tools"][0]["function"]["name"] for row in rows} == {"calculator"}
    assert {row["reward"] for row in rows} == {0.0, 1.0}
    small = "--rollout-batch-size 4 --num-rollout 2 --backend local --device cpu --progress off --output-dir sft"
    run(desk, f"sft --hf-checkpoint {shipped('calculator')} --prompt-data {file} --lr 1e-3 {small}")
    losses = [row["train/loss"] for row in read_metrics(desk / "sft" / "metrics.jsonl")]
    assert len(losses) == 2
    assert (desk / "sft" / "model" / "model.safetensors").is_file()


def test_a_later_command_goes_on_and_keeps_good_conversations_only(desk: Path, hosted: str) -> None:
    line = f"rollout {hosted} {PLAYED} {GROUPS} --demonstration-min-reward 1 --output-dir good"
    file = desk / "good" / "rollouts" / "demonstrations.jsonl"
    run(desk, f"{line} --num-rollout 1")
    first = file.read_bytes()
    # A kill after the rollout, before it counts as done.
    file.write_bytes(first + first.replace(b'"rollout":0', b'"rollout":1') + b'{"messages":[{"role":"us')
    run(desk, f"{line} --num-rollout 2")
    assert file.read_bytes().startswith(first)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["reward"] for row in rows} == {1.0}
    dumped = [s for n in range(2) for group in read_groups(file.with_name(f"{n}.jsonl")) for s in group]
    assert sorted(row["index"] for row in rows) == sorted(s.index or 0 for s in dumped if s.reward == 1.0)


def test_an_evaluation_prints_its_figures(desk: Path, hosted: str) -> None:
    flags = "--eval-prompt-data dev data/test.jsonl@[:8] --eval-max-response-len 48 --output-dir eval"
    said = run(desk, f"eval {hosted} {PLAYED} {flags}")
    assert re.search(r"eval/dev/reward +0\.\d+\n", said)
    assert re.search(r"eval/dev/response_length +[1-9]", said)
    (row,) = read_metrics(desk / "eval" / "evaluation" / "evaluations.jsonl")
    assert re.fullmatch(r"calculator at http://127\.0\.0\.1:\d+/v1", row["checkpoint"])


def test_a_wrong_key_is_told_before_anything_is_played(desk: Path, hosted: str) -> None:
    said = refused(desk, f"rollout {hosted} {PLAYED} {GROUPS} --num-rollout 1 --output-dir wrong", key="sk-OTHER")
    assert "OPENAI_API_KEY (--hosted-api-key-env), which is set" in said
    assert "sk-OTHER" not in said


def test_rl_is_refused_by_the_settings_and_by_the_batch(desk: Path, hosted: str, rollouts: str) -> None:
    said = refused(desk, f"train {hosted} {PLAYED} {GROUPS} {MODEL} --output-dir rl")
    assert "--engine openai: RL trains on token ids and their log-probs" in said
    assert "agentrl sft" in said
    dump = "--load-debug-rollout-data out/rollouts --num-rollout 2 --backend local --device cpu --output-dir rl"
    assert "no token ids to train on" in refused(desk, f"train {MODEL} {PLAYED} {GROUPS} {dump}")


async def test_a_hosted_model_takes_no_weights(desk: Path, hosted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(desk)
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = RunSettings.from_cli(f"{hosted} {PLAYED} {GROUPS} --output-dir weights".split())
    with open_folder(settings, "rollout") as folder:
        async with LedgerRollouts.open(settings, folder, [], None, kind="rollout") as rollouts:
            with pytest.raises(SettingsError, match="a hosted model gives neither"):
                await rollouts.set_resident_memory(frozenset())
