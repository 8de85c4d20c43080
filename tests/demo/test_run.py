"""The demo's settings and how it reads results; the run itself is in `make demo`."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.buffer.store import TrajectoryStore
from agentrl.config import RunSettings
from agentrl.demo.example import held_out, run_example
from agentrl.demo.run import DEMO
from agentrl.errors import DataError, SettingsError
from agentrl.sample import Sample
from agentrl.tiny import shipped
from tests.buffer.make import finished


def test_settings_are_complete(tmp_path: Path) -> None:
    settings = RunSettings.from_cli(DEMO.argv(tmp_path / "run", shipped(str(DEMO.model)), 3))
    settings.check_complete("train")
    asked = (tmp_path / "run/data/train.jsonl").read_text().splitlines()
    assert len(asked) >= settings.rollout.num_rollout * settings.rollout.rollout_batch_size
    assert settings.train.num_steps_per_rollout == 1
    assert settings.algorithm.eps_clip_high == 0.28
    assert settings.rollout.rollout_seed == settings.train.seed == 3


def test_scores_are_read_in_order(tmp_path: Path) -> None:
    rows = [
        {"step": -1, "eval/held_out/reward": 0.25},
        {"step": 0, "loss": 1.0},
        {"step": 9, "eval/held_out/reward": 0.9},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert held_out(tmp_path, "reward") == [0.25, 0.9]
    (tmp_path / "metrics.jsonl").write_text(json.dumps(rows[0]) + "\n")
    with pytest.raises(DataError, match="found it 1 times"):
        held_out(tmp_path, "reward")


def test_learned_needs_a_gain_and_a_level() -> None:
    def learned(*success: float) -> bool:
        return DEMO.learned(success)

    assert learned(0.3, 0.9)
    assert not learned(0.3, 0.7)
    assert not learned(0.85, 0.9)


def test_a_used_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="not empty"):
        run_example(DEMO, tmp_path, say=print)


WITHOUT = [
    (["--no-eval-before-train"], "leave out --no-eval-before-train"),
    (["--skip-eval-before-train"], "slime: --skip-eval-before-train"),
    (["--eval-config", "mine.yaml"], "call one of the evaluation sets held_out, got mine"),
    (["--config", "bare.yaml"], "give --eval-interval"),
]


@pytest.mark.parametrize(("flags", "message"), WITHOUT)
def test_a_run_without_an_evaluation_before_or_after_training_is_refused(
    flags: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bare.yaml").write_text("num_rollout: 1\n")
    Path("data.jsonl").write_text('{"prompt": "What is 1+1?", "label": "2"}\n')
    Path("mine.yaml").write_text("eval: {datasets: [{name: mine, path: data.jsonl}]}\n")
    Path("held_out.yaml").write_text("eval: {datasets: [{name: held_out, path: data.jsonl}]}\n")
    example = replace(DEMO, write_data=lambda folder, seed: (Path("data.jsonl"), Path("held_out.yaml")))
    with pytest.raises(SettingsError, match=f"success before and after training: .*{message}"):
        run_example(example, tmp_path / "run", flags=flags, say=print)


def test_a_run_that_failed_names_phrases_and_mistakes_of_its_last_evaluation(tmp_path: Path) -> None:
    """Two problems have one phrase, one has another. An earlier evaluation with other mistakes does not count."""

    def asked(number: int, question: str, reward: float) -> list[Sample]:
        said = [{"role": "user", "content": question}, {"role": "assistant", "content": "<answer>1</answer>"}]
        group = finished(number, n=1)
        group[0].reward, group[0].metadata["messages"] = reward, said
        return group

    with TrajectoryStore(tmp_path / "trajectories.sqlite", 1000) as store:
        store.add("eval", "held_out", 0, [asked(0, "Compute 10*17.", 0.0)])
        last = [("How much is 10*17?", 0.0), ("How much is 10*24?", 1.0), ("Compute 10*17.", 1.0)]
        store.add("eval", "held_out", 20, [asked(at, *of) for at, of in enumerate(last, 1)])
    assert DEMO.mistakes(tmp_path) == [
        "mistakes in the last evaluation, of 3 problems:",
        "  'How much is {}?': 1 of 2 failed: 1 answer without a call",
    ]
