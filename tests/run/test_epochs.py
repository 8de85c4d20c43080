"""`--num-epoch` sets the number of rollouts."""

from pathlib import Path

import pytest

from agentrl.buffer.ledger import Ledger
from agentrl.config import RunSettings
from agentrl.errors import DataError, SettingsError
from agentrl.run.autoconfig import whole_epochs
from agentrl.run.driver import open_folder
from tests.buffer.make import finished


@pytest.fixture
def data(tmp_path: Path) -> Path:
    (tmp_path / "p.jsonl").write_text('{"input": "a"}\n' * 10)
    return tmp_path / "p.jsonl"


@pytest.mark.parametrize(
    ("line", "rollouts"),
    [
        ("--num-epoch 3", 7),
        ("--num-epoch 300", 750),
        ("--num-epoch 3 --num-rollout 2", 2),
        ("--num-epoch 3 --num-rollout 20", 20),
        ("--num-epoch 3 --data-source-path a:b", 100),
        ("", 100),
        ("--sft-turns all --loss-type sft_loss", 2),
        ("--sft-turns all --loss-type sft_loss --num-rollout 9", 9),
    ],
)
def test_whole_batches_of_the_epochs(data: Path, line: str, rollouts: int) -> None:
    flags = f"--prompt-data {data} --rollout-batch-size 4 {line}".split()
    assert whole_epochs(RunSettings.from_cli(flags)).rollout.num_rollout == rollouts


def test_rollouts_without_a_trainer_have_a_last_batch_that_is_not_full(data: Path) -> None:
    for size, rollouts in ((4, 3), (5, 2), (31, 1)):
        flags = f"--prompt-data {data} --rollout-batch-size {size} --num-epoch 1".split()
        assert whole_epochs(RunSettings.from_cli(flags), "rollout").rollout.num_rollout == rollouts


def test_epochs_with_batches_of_another_size_need_a_number_of_rollouts(data: Path, tmp_path: Path) -> None:
    flags = f"--output-dir {tmp_path / 'run'} --prompt-data {data} --num-epoch 1 --rollout-batch-size".split()
    with open_folder(RunSettings.from_cli([*flags, "2"])):
        pass
    assert whole_epochs(RunSettings.from_cli([*flags, "5"])).rollout.num_rollout == 2, "no group is finished"
    with Ledger(tmp_path / "run" / "ledger.sqlite") as ledger:
        ledger.lease_new(1, 0, lambda group_id: (0, group_id))
        ledger.complete(0, finished(0))
    assert whole_epochs(RunSettings.from_cli([*flags, "2"])).rollout.num_rollout == 5
    with pytest.raises(SettingsError, match=r"--rollout-batch-size 2 -> 5: .*; give --num-rollout, too"):
        whole_epochs(RunSettings.from_cli([*flags, "5"]))
    assert whole_epochs(RunSettings.from_cli([*flags, "5", "--num-rollout", "2"])).rollout.num_rollout == 2


def test_an_environments_own_prompts_have_no_epochs() -> None:
    assert whole_epochs(RunSettings.from_cli(["--num-epoch", "2"])).rollout.num_rollout == 100


@pytest.mark.parametrize("more", [[], ["--num-rollout", "3"]])
def test_epochs_that_fill_no_batch_are_refused(data: Path, more: list[str]) -> None:
    flags = ["--prompt-data", str(data), "--rollout-batch-size", "31", "--num-epoch", "3", *more]
    with pytest.raises(DataError, match="has 10 rows, and --num-epoch 3 does not fill one batch"):
        whole_epochs(RunSettings.from_cli(flags))
