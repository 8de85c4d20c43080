"""The driver with parts that only record: the calls, their order, and their numbers."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from agentrl.config import RunSettings
from agentrl.errors import AgentRLError, DataError, TrainError
from agentrl.observability.metrics import MetricsLogger, read_metrics
from agentrl.observability.progress import Progress
from agentrl.run.driver import Driver, cadence, open_folder
from agentrl.run.protocols import Batch, ComponentLost, Components, Rollouts, Trainer, WeightTransfer
from agentrl.runfolder import METRICS


class Notes(Rollouts, Trainer, WeightTransfer):
    """All three parts; `log` records the calls."""

    def __init__(self, groups: int = 99, fail_at: str = "", error: Exception | None = None) -> None:
        self.log: list[str] = []
        self.versions: list[int] = []
        self.groups, self.fail_at, self.error = groups, fail_at, error
        self.polls_before_saved = 0

    def _note(self, text: str) -> None:
        self.log.append(text)
        if text == self.fail_at and self.error is not None:
            raise self.error

    async def next_batch(self, step: int) -> Batch | None:
        self._note(f"batch {step}")
        return (
            Batch(f"payload {step}", (2 * step, 2 * step + 1), {"rollout/reward": 0.5}) if step < self.groups else None
        )

    async def trained(self, group_ids: Sequence[int], step: int, details: Any = None) -> None:
        assert details == (None if self.log[-1].startswith("train ") else "details")
        self._note(f"trained {list(group_ids)} at {step}")

    async def saving(self) -> None:
        self._note("saving")

    async def checkpointed(self, step: int) -> None:
        self._note(f"checkpointed {step}")

    async def evaluate(self, done: int) -> Mapping[str, float]:
        self._note(f"evaluate {done}")
        return {"eval/set/reward": 1.0}

    async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
        self._note(f"train {batch.payload} at {step}")
        return {"loss": 0.25}

    async def details(self) -> Any:
        self._note("details")
        return "details"

    async def save(self, path: Path, step: int) -> None:
        path.mkdir(parents=True)
        self._note(f"save {path.name} {step}")

    async def saved(self, *, wait: bool) -> bool:
        self.polls_before_saved -= 1
        return wait or self.polls_before_saved < 0

    async def save_hf(self, path: Path, *, served: bool = False) -> None:
        self._note(f"export {path.name}")

    async def updated(self, version: int) -> None:
        assert self.log[-1] == f"send {version}"
        self.versions.append(version)

    async def set_resident_memory(self, memory: frozenset[str]) -> None:
        self._note(f"engines keep {sorted(memory)}")

    async def offload(self) -> None:
        self._note("trainer away")

    async def onload(self) -> None:
        self._note("trainer back")

    async def send(self, version: int) -> None:
        self._note(f"send {version}")

    async def lost(self) -> bool:
        return False


def settings(folder: Path, **changes: object) -> RunSettings:
    flat = {"output_dir": str(folder), "num_rollout": 2, "progress": "off", "use_tensorboard": False, **changes}
    return RunSettings.from_flat(flat)


async def drive(
    s: RunSettings,
    notes: Notes,
    first: int = 0,
    *,
    engines: bool = True,
    eval_weights: WeightTransfer | None = None,
) -> list[str]:
    with (
        open_folder(s) as folder,
        MetricsLogger(s.observability, folder.path) as logger,
        Progress(s.observability, total=2) as progress,
    ):
        parts = Components(notes, notes, notes if engines else None, eval_weights)
        await Driver(s, parts, folder, logger, progress).run(first)
    return notes.log


async def test_a_run_from_its_first_weights_to_its_model(tmp_path: Path) -> None:
    s = settings(tmp_path, eval_prompt_data=("set", "x.jsonl"), eval_interval=2, global_batch_size=64)
    notes = Notes()
    assert await drive(s, notes) == [
        *("send 0", "evaluate 0"),
        *("batch 0", "train payload 0 at 0", "details", "trained [0, 1] at 0", "send 1"),
        *("batch 1", "train payload 1 at 1", "details", "trained [2, 3] at 1", "send 2"),
        *("evaluate 2", "saving", "save rollout_000001 1", "checkpointed 1", "export model"),
    ]
    assert notes.versions == [0, 1, 2]
    rows = list(read_metrics(tmp_path / METRICS))
    assert [row["step"] for row in rows] == [-1, 0, 1, 1]
    assert rows[1]["train/loss"] == 0.25
    assert rows[1]["rollout/reward"] == 0.5
    assert 0 <= rows[1]["perf/train_seconds"] <= rows[1]["perf/step_seconds"]
    waited, whole = rows[1]["perf/wait_seconds"], rows[1]["perf/step_seconds"]
    assert rows[1]["perf/wait_time_ratio"] == pytest.approx(waited / whole)
    assert rows[3]["eval/set/reward"] == 1.0


async def test_trainer_and_engines_take_turns_on_shared_devices(tmp_path: Path) -> None:
    s = settings(tmp_path, colocate=True, eval_prompt_data=("set", "x.jsonl"), eval_interval=1, save_interval=1)
    engines, trainer = ("trainer away", "engines keep ['kv_cache', 'weights']"), "trainer back"
    sending, training = ("engines keep ['weights']", trainer), ("engines keep []", trainer)
    trained = (*training, "train payload 0 at 0", "details", "trained [0, 1] at 0")
    assert (await drive(s, Notes()))[:25] == [
        *(*sending, "send 0", *engines, "evaluate 0", "batch 0", *trained),
        *(*sending, "send 1", *engines, "evaluate 1", *sending, "saving", "save rollout_000000 0", "checkpointed 0"),
        *engines,
    ]
    assert next(iter(read_metrics(tmp_path / METRICS)))["step"] == -1
    only_engines = await drive(settings(tmp_path / "b", colocate=True, offload_train=False), Notes())
    assert not [entry for entry in only_engines if entry.startswith("trainer")]
    only_trainer = await drive(settings(tmp_path / "c", colocate=True, offload_rollout=False), Notes())
    assert not [entry for entry in only_trainer if entry.startswith("engines")]
    assert trainer in only_trainer
    assert not [entry for entry in await drive(settings(tmp_path / "d"), Notes()) if "engines" in entry]


class Slow(Notes):
    """The first evaluation ends when the second rollout has been trained; `eval_weights` records its own sends."""

    async def evaluate(self, done: int) -> Mapping[str, float]:
        found = await super().evaluate(done)
        if done == 1:
            with anyio.fail_after(60):
                while "train payload 1 at 1" not in self.log:
                    await anyio.lowlevel.checkpoint()
            self._note("evaluated 1")
        return found


class Own(Notes):
    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    async def send(self, version: int) -> None:
        self.log.append(f"send {version} to eval")


async def test_training_continues_during_an_evaluation_which_a_checkpoint_waits_for(tmp_path: Path) -> None:
    form = {"eval_prompt_data": ("set", "x.jsonl"), "eval_interval": 1, "eval_while_training": True}
    s = settings(tmp_path, engine_groups={"eval": 1}, global_batch_size=64, save_interval=2, **form)
    notes = Slow()
    log = await drive(s, notes, eval_weights=Own(notes.log))
    assert [line for line in log if "eval" in line] == [
        *("send 0 to eval", "evaluate 0", "send 1 to eval", "evaluate 1", "evaluated 1"),
        *("send 2 to eval", "evaluate 2"),
    ]
    assert log.index("train payload 1 at 1") < log.index("evaluated 1") < log.index("saving")
    assert log.index("evaluate 2") < log.index("saving")
    evaluated = [row["step"] for row in read_metrics(tmp_path / METRICS) if "eval/set/reward" in row]
    assert evaluated == [-1, 0, 1]


@pytest.mark.parametrize(
    ("found", "warned"), [([0.6, 0.8, 0.6, 0.8], 0), ([0.9, 0.6, 0.5, 0.4], 1), ([0.7, 0.7, 0.7, 0.7], 0)]
)
async def test_two_steps_of_distant_probabilities_are_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: list[float], warned: int
) -> None:
    class Apart(Notes):
        async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
            return {**await super().train(batch, step), "mismatch_ess": found[step]}

    said: list[str] = []
    monkeypatch.setattr(Progress, "note", lambda self, text: said.append(text))
    evaluated: dict[str, Any] = {"eval_prompt_data": ("set", "x.jsonl"), "eval_interval": 1}
    for form in ({}, evaluated):  # evaluations are logged between the steps
        said.clear()
        await drive(settings(tmp_path / str(len(form)), num_rollout=4, keep_trajectories=0, **form), Apart())
        assert len([text for text in said if "mismatch_ess" in text]) == warned


async def test_data_that_ends_and_a_dump_without_engines(tmp_path: Path) -> None:
    assert (await drive(settings(tmp_path / "a"), Notes(groups=1)))[-6:] == [
        "send 1",
        "batch 1",
        "saving",
        "save rollout_000000 0",
        "checkpointed 0",
        "export model",
    ]
    dumped = await drive(settings(tmp_path / "b", eval_interval=1), Notes(), engines=False)
    assert not [entry for entry in dumped if entry.startswith(("send", "evaluate"))]


async def test_data_that_ends_is_said_and_too_little_for_one_batch_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setattr(Progress, "note", lambda self, text: said.append(text))
    await drive(settings(tmp_path / "a"), Notes(groups=1))
    assert "the data has ended after 1 rollout, before another full batch" in said
    with pytest.raises(DataError, match="before the first batch was full"):
        await drive(settings(tmp_path / "b"), Notes(groups=0))


async def test_the_trainer_is_not_asked_for_what_is_not_kept(tmp_path: Path) -> None:
    assert "details" not in await drive(settings(tmp_path, keep_trajectories=0), Notes())


async def test_old_checkpoints_go(tmp_path: Path) -> None:
    aside = {"rollout_000001_good", "rollout_000009", "rollout_best"}
    for name in aside:
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    await drive(settings(tmp_path, num_rollout=4, save_interval=1, keep_checkpoints=2), Notes())
    assert {p.name for p in (tmp_path / "checkpoints").iterdir()} == {"rollout_000002", "rollout_000003"} | aside


async def test_old_checkpoints_that_cannot_be_removed_end_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(path: Path) -> None:
        raise OSError("Directory not empty")

    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "rollout_000000").touch()  # no checkpoint: it is not counted, and stays
    monkeypatch.setattr(shutil, "rmtree", busy)
    await drive(settings(tmp_path, num_rollout=4, save_interval=2, keep_checkpoints=1), Notes())
    found = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert found == ["rollout_000000", "rollout_000001", "rollout_000003"]
    assert "rollout_000001 cannot be removed (Directory not empty)" in caplog.text


async def test_a_checkpoint_in_the_background_counts_when_it_is_complete(tmp_path: Path) -> None:
    notes = Notes()
    notes.polls_before_saved = 3  # after the save, after the next training, and after the one after that
    s = settings(tmp_path, num_rollout=5, save_interval=3, keep_checkpoints=1, async_save=True)
    log = [entry for entry in await drive(s, notes) if entry.startswith(("train ", "save ", "checkpointed", "export"))]
    assert log == [
        *(f"train payload {step} at {step}" for step in range(3)),
        "save rollout_000002 2",
        *("train payload 3 at 3", "train payload 4 at 4"),
        *("checkpointed 2", "save rollout_000004 4", "checkpointed 4", "export model"),
    ]
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["rollout_000004"]


async def test_the_model_is_written_before_each_checkpoint_so_that_no_resume_skips_it(tmp_path: Path) -> None:
    s = settings(tmp_path, save_interval=1, save_hf=str(tmp_path / "hf_{rollout_id:03d}"))
    written = [entry for entry in await drive(s, Notes()) if entry.startswith(("export", "save"))]
    assert written == [
        "export hf_000",
        "save rollout_000000 0",
        "export hf_001",
        "save rollout_000001 1",
        "export model",
    ]


async def test_a_step_that_failed_is_not_recorded_as_trained(tmp_path: Path) -> None:
    notes = Notes(fail_at="train payload 0 at 0", error=TrainError("the loss is nan"))
    with pytest.raises(TrainError, match="the loss is nan"):
        await drive(settings(tmp_path), notes)
    assert notes.log == ["send 0", "batch 0", "train payload 0 at 0"]


@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("send 1", "the weight update"),
        ("batch 1", "generating rollout 1"),
        ("train payload 1 at 1", "the training of rollout 1"),
        ("trained [0, 1] at 0", "recording the training"),
        ("save rollout_000001 1", "saving the checkpoint"),
        ("export model", "writing the model"),
    ],
)
async def test_a_part_that_is_lost_is_named_by_what_was_waited_for(tmp_path: Path, where: str, what: str) -> None:
    with pytest.raises(AgentRLError, match=f"{what} failed: a process of the run died"):
        await drive(settings(tmp_path), Notes(fail_at=where, error=ComponentLost("a process of the run died")))


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("rollout_timeout", "generating rollout 0 took longer than 0.05 s"),
        ("train_timeout", "the training of rollout 0 took longer than 0.05 s"),
        ("weight_sync_timeout", "the weight update took longer than 0.05 s"),
    ],
)
async def test_every_wait_has_its_own_deadline(tmp_path: Path, limit: str, message: str) -> None:
    class Hanging(Notes):
        async def next_batch(self, step: int) -> Batch | None:
            if limit == "rollout_timeout":
                await anyio.sleep_forever()
            return await super().next_batch(step)

        async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
            if limit == "train_timeout":
                await anyio.sleep_forever()
            return await super().train(batch, step)

        async def send(self, version: int) -> None:
            if limit == "weight_sync_timeout":
                await anyio.sleep_forever()
            await super().send(version)

    with pytest.raises(AgentRLError, match=message):
        await drive(settings(tmp_path, **{limit: 0.05}), Hanging())


def test_the_cadence_is_that_of_the_settings() -> None:
    s = RunSettings.from_flat(
        {
            "num_rollout": 7,
            "update_weights_interval": 2,
            "max_staleness": 1,
            "eval_interval": 3,
            "eval_prompt_data": ("a", "b"),
            "save_interval": 4,
        }
    )
    found = cadence(s)
    assert (found.steps, found.send, found.evaluate, found.evaluate_first, found.save) == (7, 2, 3, True, 4)
    assert not cadence(s.replace(eval_before_train=False)).evaluate_first
    assert cadence(s, engines=False).evaluate is None


class Restarted(Notes):
    """Engines that lose their weights before the second batch."""

    has = True

    async def next_batch(self, step: int) -> Batch | None:
        self.has = step != 1
        while not self.has:
            await anyio.lowlevel.checkpoint()
        return await super().next_batch(step)

    async def send(self, version: int) -> None:
        await super().send(version)
        self.has = True

    async def lost(self) -> bool:
        return not self.has


async def test_weights_that_are_sent_again_have_the_version_of_the_trainer(tmp_path: Path) -> None:
    notes = Restarted()
    often = {"update_weights_interval": 2, "max_staleness": 1, "engine_probe_interval": 0.001}
    log = await drive(settings(tmp_path, **often), notes)
    assert [line for line in log if line.startswith("send")][:2] == ["send 0", "send 1"]
    assert notes.versions[:2] == [0, 1]


async def test_engines_that_were_all_started_again_get_the_weights_once_more(tmp_path: Path) -> None:
    log = await drive(settings(tmp_path, engine_probe_interval=0.001, colocate=True), Restarted())
    again = [
        "engines keep ['weights']",
        "trainer back",
        "send 1",
        "trainer away",
        "engines keep ['kv_cache', 'weights']",
    ]
    at = log.index("batch 1")
    assert log[at - 5 : at] == again
    assert log[at - 10 : at - 5] == again, "once by the schedule, once more since they had lost them"
