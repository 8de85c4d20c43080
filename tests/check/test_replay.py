"""Stored trajectories are replayed: equal under the same code, and different under other code."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from agentrl.buffer.reader import StoreReader
from agentrl.buffer.store import Kind, TrajectoryStore
from agentrl.chat import Chat
from agentrl.check.replay import fresh_sample, recorded_turns
from agentrl.cli.main import run
from agentrl.config import RunSettings
from agentrl.groups import Group
from agentrl.media import Image
from agentrl.runfolder import TRAJECTORIES
from agentrl.sample import Sample
from tests.check.test_play import checked
from tests.support.tiny_models import make_tokenizer

CHANGED = """
from tests.check.plays import Sound
from agentrl import tool
from agentrl.rm_hub import Grade


class Sound(Sound):
    @tool
    async def look(self, where: str, far: bool = False) -> str:
        \"\"\"Look.\"\"\"
        return "nothing"


def graded(args, sample):
    return 0.5


def always(response, label, metadata):
    return Grade(0.5, True)


def bonus(args, sample):
    return args.my_bonus
"""


@pytest.fixture(scope="module")
async def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a run's folder whose store holds the episodes that a check plays."""
    folder = tmp_path_factory.mktemp("run")
    make_tokenizer().save_pretrained(folder / "model")
    played = await checked("tests.check.plays:Sound", Chat(make_tokenizer()), seconds=60.0)
    groups = [e.samples for e in played.episodes[:8] if e.samples]
    with TrajectoryStore(folder / TRAJECTORIES, 1000) as store:
        store.add("train", "", 0, groups)
    settings = RunSettings.from_flat({"env": "tests.check.plays:Sound", "hf_checkpoint": str(folder / "model")})
    (folder / "settings.json").write_text(json.dumps(settings.shown()))
    (folder / "changed.py").write_text(CHANGED)
    return folder


def replayed(folder: Path, capsys: pytest.CaptureFixture[str], *more: str) -> str:
    assert run(["replay", str(folder), *more]) == 0
    return capsys.readouterr().out


def test_the_same_code_gives_the_same(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(folder, capsys)
    assert "8 trajectories: mean reward" in said
    assert "8 the same, 0 higher, 0 lower, 0 failed now" in said
    assert "0 went another way" in said


def test_another_grader_scores_what_was_played(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(folder, capsys, "--custom-rm-path", f"{folder}/changed.py:graded")
    assert ", now 0.5" in said
    assert "0 the same" in said
    assert "0 went another way" in said


def test_a_grader_that_a_flag_names_takes_the_place_of_those_of_run_and_rows(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    grader = {"custom_rm_path": f"{folder}/changed.py:bonus", "compat_options": {"my_bonus": 2.0}}
    settings = {"env": "tests.check.plays:Sound", "hf_checkpoint": str(folder / "model"), **grader}
    with StoreReader(folder / TRAJECTORIES) as reader:
        groups = [reader.group(row.key) for row in reader.query()]
    for sample in (sample for group in groups for sample in group):
        sample.metadata["rm_type"] = "random"
    (tmp_path / "rollouts").mkdir()
    with TrajectoryStore(tmp_path / "rollouts" / TRAJECTORIES, 1000) as store:
        store.add("rollout", "", 0, groups)
    shown = RunSettings.from_flat(settings).shown()
    (tmp_path / "rollouts" / "settings.json").write_text(json.dumps(shown))
    assert ", now 2\n" in replayed(tmp_path, capsys), "the run's own, with the settings that it reads"
    assert ", now 0.5\n" in replayed(tmp_path, capsys, "--rm-type", f"{folder}/changed.py:always")


def test_sets_of_an_evaluation_may_have_graders_of_their_own(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    with StoreReader(folder / TRAJECTORIES) as reader:
        groups = [reader.group(reader.query()[0].key)]
    with TrajectoryStore(tmp_path / TRAJECTORIES, 1000) as store:
        store.add("train", "", 0, groups)
        store.add("eval", "dev", 0, groups)
    settings = {"env": "tests.check.plays:Sound", "hf_checkpoint": str(folder / "model"), "eval_config": "eval.yaml"}
    (tmp_path / "settings.json").write_text(json.dumps(RunSettings.from_flat(settings).shown()))
    assert run(["replay", str(tmp_path)]) == 2
    assert "the sets of eval.yaml may have graders and environments of their own; leave them" in capsys.readouterr().err
    assert "1 trajectories" in replayed(tmp_path, capsys, "--kind", "train")
    assert "2 trajectories" in replayed(tmp_path, capsys, "--custom-rm-path", f"{folder}/changed.py:graded")


def run_of(folder: Path, kinds: Sequence[Kind], groups: list[Group], **changes: object) -> Path:
    """Make a run's folder whose store holds these groups, each kind's once."""
    folder.mkdir()
    with TrajectoryStore(folder / TRAJECTORIES, 1000) as store:
        for kind in kinds:
            store.add(kind, "dev" if kind == "eval" else "", 0, groups)
    (folder / "settings.json").write_text(json.dumps(RunSettings.from_flat(changes).shown()))
    return folder


def stored(folder: Path) -> list[Group]:
    with StoreReader(folder / TRAJECTORIES) as reader:
        return [reader.group(row.key) for row in reader.query()]


@pytest.mark.parametrize("limit", ["max_response_len", "max_context_len"])
def test_what_an_evaluation_played_is_replayed_with_its_limits(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, limit: str
) -> None:
    groups = stored(folder)
    short = 2 if limit == "max_response_len" else max(group[0].prompt_length for group in groups) + 2
    limits = {f"rollout_{limit}": short, f"eval_{limit}": 5000}
    settings = {"env": "tests.check.plays:Sound", "hf_checkpoint": str(folder / "model"), **limits}
    said = replayed(run_of(tmp_path / "run", ["eval"], groups, **settings), capsys)
    assert "8 the same, 0 higher, 0 lower, 0 failed now\n  0 stopped for another reason\n  0 went another way" in said
    said = replayed(run_of(tmp_path / "both", ["train", "eval"], groups[:1], **settings), capsys)
    assert "2 trajectories" in said
    assert "1 stopped for another reason" in said, "the training's own limit is the short one"


@pytest.mark.parametrize("names", [("first", "second"), ("second", "first"), ("second", "second")])
def test_two_environments_whose_rows_name_their_graders_are_replayed(
    folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path, names: tuple[str, str]
) -> None:
    """Each of the environments is graded only by its rows' graders, also if no row of the first is in store."""
    groups = stored(folder)[:2]
    for (sample, *_), env in zip(groups, names, strict=True):
        sample.metadata |= {"env": env, "rm_type": f"{folder}/changed.py:always"}
    plain = "agentrl:Environment"
    settings = {"env": {"first": plain, "second": plain}, "hf_checkpoint": str(folder / "model")}
    said = replayed(run_of(tmp_path / "run", ["train"], groups, **settings), capsys)
    assert "2 trajectories" in said
    assert ", now 0.5\n" in said
    assert ", 0 failed now" in said


def test_another_environment_says_from_where_it_is_another(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = replayed(folder, capsys, "--env", f"{folder}/changed.py:Sound")
    assert "8 went another way" in said, "the prompt shows another schema"
    assert "from token" in said


def test_what_cannot_be_replayed_is_refused(folder: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(["replay", str(tmp_path)]) == 2
    assert "no run here; give the --output-dir of a run" in capsys.readouterr().err
    assert run(["replay", str(folder.parent / "none")]) == 2
    assert (
        f"none: no run here; give the --output-dir of a run; {folder.parent} has {folder.name}"
        in capsys.readouterr().err
    )
    for damaged in ("[]", '{"train": []}'):
        (tmp_path / "settings.json").write_text(damaged)
        assert run(["replay", str(tmp_path)]) == 2
        assert "no trajectories" in capsys.readouterr().err
    assert run(["replay", str(folder), "--kind", "eval"]) == 2
    assert "no trajectories of kind eval" in capsys.readouterr().err


def test_a_replayed_sample_has_what_the_data_source_gave() -> None:
    image = Image("hash", b"data", 2, 3, "PNG")
    given = {"group_index": 3, "index": 7, "label": "a", "images": {image.hash: image}, "custom_rm_path": "mine:grade"}
    stored = Sample(**given, metadata={"own": 1, "failure": {"message": "x"}}, reward=1.0, train_metadata={"weight": 2})  # type: ignore[arg-type]
    stored.set_prompt_tokens([1])
    again = fresh_sample(stored, 0)
    assert again == Sample(**given, metadata={"own": 1}, train_metadata={"weight": 2})  # type: ignore[arg-type]


def test_a_turn_that_a_weight_update_interrupted_is_replayed_whole() -> None:
    sample = Sample()
    sample.set_prompt_tokens([1])
    sample.append_model([2, 3], [-1.0, -1.0], "1", turn=1)
    sample.append_model([4], [-1.0], "2", turn=1)
    sample.append_observation([5, 6], turn=1)
    sample.append_model([7], [-1.0], "2", turn=2)
    assert len(sample.segments) == 4
    assert recorded_turns([sample]) == [[2, 3, 4], [7]]
