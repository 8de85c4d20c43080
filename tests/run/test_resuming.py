"""A run that resumes with other settings reports them. With other prompts it is refused before any process starts."""

from pathlib import Path

import pytest

from agentrl.buffer.ledger import Ledger
from agentrl.config import RunSettings
from agentrl.data.source import RolloutDataSource
from agentrl.errors import CheckpointError, SettingsError
from agentrl.observability.metrics import read_metrics
from agentrl.observability.progress import Progress
from agentrl.run.driver import _train, open_folder
from agentrl.run.local import start
from agentrl.run.preflight import resumed
from agentrl.run.resuming import changed, check_prompts, evaluations_in, refuse_others, write_evaluation
from agentrl.runfolder import EVALUATIONS, LEDGER, SETTINGS
from agentrl.train.checkpoints import writing
from tests.buffer.make import finished


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for rows in (3, 4):
        Path(f"{rows}.jsonl").write_text('{"input": "a"}\n' * rows)


def build(line: str = "") -> RunSettings:
    return RunSettings.from_cli(f"--output-dir run --prompt-data 3.jsonl {line}".split())


def began(line: str = "") -> None:
    """Make the folder that a run with these settings leaves."""
    with open_folder(build(line)), Ledger(Path("run", LEDGER)) as ledger:
        ledger.bind(RolloutDataSource(build(line).args).identity())


def checkpoint(path: str, step: int) -> None:
    manifest = {"step": step, "stepped": True, "layout": {}, "model": {}, "optimizer": {}}
    with writing(Path(path), manifest, leader=True, barrier=lambda: None):
        pass


def test_changed_settings_are_told_with_both_values() -> None:
    assert changed(build()) == []
    began("--lr 1e-6")
    assert changed(build("--num-rollout 7 --progress off --lr 1e-6")) == []
    assert changed(build("--lr 1e-3 --rollout-batch-size 4")) == [
        "--rollout-batch-size 16 -> 4",
        "--global-batch-size 128 -> 32 (not given)",
        "--lr 1e-06 -> 0.001",
    ]


def test_rollouts_go_on_with_other_evaluations_but_not_with_other_options_of_the_hosted_model() -> None:
    hosted = "--engine openai --base-url http://a/v1 --hosted-model m --hosted-options"
    with open_folder(build(f"{hosted} reasoning_effort=low"), "rollout"):
        pass
    refuse_others(build(f"{hosted} reasoning_effort=low --eval-temperature 0.3"))
    with pytest.raises(SettingsError, match="--hosted-options reasoning_effort=low -> reasoning_effort=high"):
        refuse_others(build(f"{hosted} reasoning_effort=high"))


@pytest.mark.parametrize("damaged", ["[1]", '{"train": 3}', "{", ""])
def test_settings_that_cannot_be_read_are_named(damaged: str) -> None:
    began()
    Path("run", SETTINGS).write_text(damaged)
    with pytest.raises(SettingsError, match=r"run/settings\.json: the settings of the run cannot be read"):
        changed(build())


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--prompt-data 4.jsonl", "prompt_rows was 3 and is 4"),
        ("--rollout-shuffle", "rollout_shuffle was false and is true"),
        ("--env a:B", "prompt_rows was 3 and is none"),
    ],
)
def test_other_prompts_are_refused(line: str, said: str) -> None:
    settings = RunSettings.from_cli(["--output-dir", "run", *line.split()]) if "env" in line else build(line)
    check_prompts(settings)
    began()
    check_prompts(build("--lr 1"))
    with pytest.raises(SettingsError, match=said):
        check_prompts(settings)


def test_rows_in_another_order_or_with_other_contents_are_refused() -> None:
    rows = [f'{{"input": "{n}"}}\n' for n in range(100)]
    Path("3.jsonl").write_text("".join(rows))
    began()
    Path("3.jsonl").write_text("".join(rows[::-1]))
    check_prompts(build())  # no group is finished yet
    began()
    with Ledger(Path("run", LEDGER)) as ledger:
        ledger.lease_new(1, 0, lambda group_id: (0, group_id))
        ledger.complete(0, finished(0))
    check_prompts(build())
    for other in (rows, [*rows[1:], rows[0]], ['{"input": "x"}\n', *rows[-2::-1]]):
        Path("3.jsonl").write_text("".join(other))
        with pytest.raises(SettingsError, match="prompt_digest was"):
            check_prompts(build())


def test_a_source_of_ones_own_and_a_dump_have_no_such_numbers() -> None:
    began()
    check_prompts(build("--data-source-path a:b --prompt-data 4.jsonl"))
    check_prompts(build("--load-debug-rollout-data d --prompt-data 4.jsonl"))


def test_an_evaluation_that_was_cut_does_not_spoil_the_next() -> None:
    folder = Path()
    write_evaluation(folder, 0, "model", "dev", {"reward": 0.5})
    file = folder / EVALUATIONS
    file.write_bytes(file.read_bytes() + b'{"time": 17, "step": 1, "se')  # by a full disk
    assert evaluations_in(folder) == 1
    write_evaluation(folder, 1, "model", "dev", {"reward": 0.75})
    assert [(row["step"], row["metrics"]["reward"]) for row in read_metrics(file)] == [(0, 0.5), (1, 0.75)]


def test_a_run_whose_checkpoints_are_gone_does_not_begin_again() -> None:
    began()
    assert resumed(build()) is None
    with Ledger(Path("run", LEDGER)) as ledger:
        ledger.checkpointed(2)
    with pytest.raises(
        CheckpointError, match=r"no checkpoint in .*new, .* in --output-dir run has trained 3 rollouts; give"
    ):
        resumed(build("--save new"))
    checkpoint("old/rollout_000002", 2)
    found = resumed(build("--save new --load old"))
    assert found is not None
    assert found.step == 2
    assert resumed(build("--output-dir other")) is None


def test_a_damaged_folder_that_is_not_read_stops_no_run() -> None:
    checkpoint("run/checkpoints/b", 1)
    checkpoint("base/c", 7)
    Path("base/c/manifest.json").write_text("{")
    found = resumed(build("--load base/c"))
    assert found is not None
    assert found.step == 1


def test_a_checkpoint_of_the_run_that_is_not_the_newest_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for name, step in (("run/checkpoints/a", 0), ("run/checkpoints/b", 1), ("base/c", 7)):
        checkpoint(name, step)
    with pytest.raises(
        CheckpointError, match="--load run/checkpoints/a: the run goes on from its newest checkpoint .*b;"
    ):
        resumed(build("--load run/checkpoints/a"))
    branch = resumed(build("--load run/checkpoints/a --output-dir branch"))
    assert branch is not None
    assert branch.step == 0
    for load, noted in (("base", True), ("run/checkpoints", False), ("run/checkpoints/b", False)):
        settings = build(f"--num-rollout 2 --load {load}")
        with open_folder(settings) as folder, Progress(settings.observability, total=2) as progress:
            folder.model.mkdir(exist_ok=True)
            for file in ("config.json", "model.safetensors"):
                (folder.model / file).touch()
            folder.wrote_model_of(folder.checkpoint(0).parent / "b")
            _train(settings, folder, progress, start)
        said = capsys.readouterr().err
        assert ("base/c is not read: the run goes on from its own checkpoint" in said) == noted
