"""`agentrl rollout` and `agentrl eval` with the same folder again: no existing file is overwritten."""

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from agentrl.buffer.ledger import Ledger
from agentrl.buffer.reader import StoreReader
from agentrl.cli import main
from agentrl.cli.eval import command
from agentrl.config import RunSettings
from agentrl.data.prompts import PromptData
from agentrl.data.settings import DataSettings
from agentrl.dumps import read_groups
from agentrl.errors import DataError, SettingsError
from agentrl.media import Image
from agentrl.observability.metrics import read_metrics
from agentrl.run.driver import open_folder
from agentrl.run.offline import RecordedConversations, _without_eval_group
from agentrl.run.resuming import refuse_others
from agentrl.sample import Sample, Status
from tests.buffer.make import finished
from tests.support.runs import Run, RunKit
from tests.support.vision import picture

pytestmark = pytest.mark.timeout(900)

OFFLINE: dict[str, object] = {"lr": None, "train_threads": None, "device": None}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")), prompts=10)


def ran(kit: RunKit, name: str, **settings: object) -> Run:
    output = str(settings.pop("output_dir", name))
    run = kit.start(kit.arguments(output, **OFFLINE, **settings), name)
    run.wait()
    return run


@pytest.mark.slow
def test_rollouts_go_on_where_they_were_and_are_never_overwritten(
    kit: RunKit, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    first = ran(kit, "rollout", num_rollout=1)
    folder = first.folder / "rollouts"
    made = (folder / "0.jsonl").read_bytes()
    more = ran(kit, "rollout", num_rollout=9, num_epoch=1)
    assert "12 samples added" in more.output, more.output
    assert (folder / "0.jsonl").read_bytes() == made
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2]
    dumped = [group for n in range(3) for group in read_groups(folder / f"{n}.jsonl")]
    assert sorted(group[0].group_index or 0 for group in dumped) == list(range(10))
    assert not (folder / "3.jsonl").exists()
    with StoreReader(folder / "trajectories.sqlite") as reader:
        assert [(part.kind, part.trajectories, part.last) for part in reader.kinds()] == [("rollout", 20, 2)]
        assert sorted({row.group_index or 0 for row in reader.query()}) == list(range(10))
    there = {file: file.read_bytes() for file in folder.glob("*.json*")}
    monkeypatch.chdir(kit.folder)
    # A command that starts no engine needs no separate process.
    changed = kit.arguments("rollout", **OFFLINE, num_rollout=9, n_samples_per_prompt=4, rollout_temperature=0.5)
    assert main.run(["rollout", *changed]) == 2
    said = capsys.readouterr().err
    assert "--n-samples-per-prompt 2 -> 4, --rollout-temperature 1.0 -> 0.5" in said
    assert "choose another --output-dir" in said
    assert {file: file.read_bytes() for file in folder.glob("*.json*")} == there, "not touched"
    assert main.run(["rollout", *kit.arguments("rollout", **OFFLINE, num_rollout=2)]) == 0
    assert "holds 3 rollouts, and --num-rollout is 2: nothing left to do" in capsys.readouterr().err


@pytest.mark.slow
def test_each_evaluation_is_kept_with_its_figures(kit: RunKit) -> None:
    chosen: dict[str, object] = {
        "eval_prompt_data": ("dev", "prompts.jsonl@[0:4]"),
        "num_rollout": None,
        "rollout_batch_size": None,
    }
    chosen |= {"engine_groups": "eval=127.0.0.1:9", "eval_while_training": True}  # of a training run: left out
    for tokens in (8, 12):
        run = ran(kit, "eval", **chosen, eval_max_response_len=tokens, n_samples_per_prompt=None)
        assert run.process.returncode == 0, run.output
        assert "--engine-groups eval is left out" in run.output
    assert "/evaluation@1, for --compare" in run.output
    rows = list(read_metrics(run.folder / "evaluation" / "evaluations.jsonl"))
    assert [(row["step"], row["set"], row["checkpoint"]) for row in rows] == [(n, "dev", "model") for n in (0, 1)]
    compared = CliRunner().invoke(command, ["--compare", f"{run.folder}@0", f"{run.folder}@1"])
    assert re.search(r"dev, 4 prompts.*response tokens +\S+ +\S+ +\+[1-4]", compared.output, re.DOTALL)


def test_dumps_of_an_unknown_run_are_not_written_over(tmp_path: Path) -> None:
    settings = RunSettings.from_flat({"output_dir": str(tmp_path)})
    refuse_others(settings)
    (tmp_path / "rollouts").mkdir()
    refuse_others(settings)
    (tmp_path / "rollouts" / "0.jsonl").touch()
    with pytest.raises(
        SettingsError, match=r"0\.jsonl exists, and settings\.json .* is missing; choose another --output-dir"
    ):
        refuse_others(settings)


def test_how_far_and_how_many_at_once_is_no_other_setting(tmp_path: Path) -> None:
    given = {"output_dir": str(tmp_path)}
    with open_folder(RunSettings.from_flat(given), "rollout"):
        pass
    refuse_others(RunSettings.from_flat({**given, "num_rollout": 7, "rollout_max_concurrency": 7, "lr": 1.0}))
    with Ledger(tmp_path / "rollouts" / "ledger.sqlite") as ledger:
        refuse_others(RunSettings.from_flat({**given, "rollout_top_p": 0.5}))  # no group was finished
        ledger.lease_new(1, 0, lambda group_id: (0, group_id))
        ledger.complete(0, finished(0))
    with pytest.raises(SettingsError, match=r"--rollout-top-p 1\.0 -> 0\.5; choose another --output-dir, or go on"):
        refuse_others(RunSettings.from_flat({**given, "rollout_top_p": 0.5}))


def test_demonstrations_have_their_images_and_large_numbers(tmp_path: Path) -> None:
    image = Image.from_bytes(picture(30, 20, 0))
    content = [
        {"type": "image", "image": f"sha256:{image.hash}", "width": 30, "height": 20},
        {"type": "text", "text": "?"},
    ]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"n": 1 << 70}}}
    messages = [{"role": "user", "content": content}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    sample = Sample(reward=1.0, status=Status.COMPLETED, metadata={"messages": messages}, images={image.hash: image})
    RecordedConversations(tmp_path / "d.jsonl", 0).add(0, [[sample]])
    row = PromptData(str(tmp_path / "d.jsonl"), DataSettings(input_key="messages", sft_turns="all"))[0]
    assert [each.data for each in row.images.values()] == [image.data]


def test_rows_that_a_user_added_to_the_demonstrations_stay(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_bytes(b'{"messages": []}\n{"rollout": 0}\n{"rollout": 1}\n')
    RecordedConversations(tmp_path / "d.jsonl", 1)
    assert (tmp_path / "d.jsonl").read_bytes() == b'{"messages": []}\n{"rollout": 0}\n'
    (tmp_path / "d.jsonl").write_bytes(b"[1]\n")
    with pytest.raises(DataError, match=r"d\.jsonl cannot be read"):
        RecordedConversations(tmp_path / "d.jsonl", 1)


def test_engines_for_evaluations_during_training_are_left_out() -> None:
    given = RunSettings.from_flat({"engine_groups": {"eval": 2, "judge": 1}})
    settings, notes = _without_eval_group(given, [])
    assert (settings.engine.engine_groups, len(notes)) == ({"judge": 1}, 1)
