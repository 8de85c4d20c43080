"""A whole run in one process: the built-in engine without sockets, Megatron in a thread, and no Ray."""

import os
import pty
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from agentrl.config import RunSettings
from agentrl.errors import CheckpointError, SettingsError
from agentrl.observability.progress import Progress
from agentrl.run.local import LocalTrainer
from agentrl.run.protocols import Batch, Found
from agentrl.run.training import RankInfo
from tests.support.audit import audit_ledger
from tests.support.runs import Run, RunKit, check_looked_at

pytestmark = pytest.mark.timeout(900)

STOPPING = """
from agentrl import Environment


class Stopping(Environment):
    async def step(self, turn):
        if turn.sample.index == 0:
            breakpoint()
        return await super().step(turn)

    async def reward(self, sample):
        return float(sample.index % 2)
"""

TORN = """
from agentrl import Environment


class Torn(Environment):
    async def reward(self, sample):
        return float(sample.index % 2)

    @classmethod
    async def teardown(cls):
        raise OSError("nothing to tear down")
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    kit = RunKit.make(Path(tmp_path_factory.mktemp("kit")))
    (kit.folder / "stopping.py").write_text(STOPPING)
    return kit


def test_a_run_in_one_process_trains_agrees_with_its_engine_and_resumes(kit: RunKit) -> None:
    changes = {"backend": "local", "num_steps_per_rollout": 2, "save_interval": 1}
    first = kit.start(kit.arguments("local", **changes, num_rollout=2), forked=True)
    assert first.wait() == 0, first.output
    assert "Ray" not in first.output
    again = kit.start(kit.arguments("local", **changes), forked=True)
    assert again.wait() == 0, again.output
    rows = again.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-4 and row["train/grad_norm"] > 0 for row in rows)
    result = audit_ledger(again.folder / "ledger.sqlite", through_step=2, groups_per_step=4)
    assert result.ok, result.problems
    assert (again.folder / "model" / "model.safetensors").is_file()
    check_looked_at(again, steps=3, groups=4)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["local", "ray"])
def test_a_run_that_trains_an_adapter_agrees_with_its_engine_and_resumes(kit: RunKit, backend: str) -> None:
    changes = {"backend": backend, "train_backend": "fsdp", "lora_rank": 2, "lr": 1e-2, "save_interval": 1}
    for rollouts in (2, 4):
        run = kit.start(kit.arguments(f"adapter-{backend}", **changes, num_rollout=rollouts))
        assert run.wait() == 0, run.output
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-4 and row["train/grad_norm"] > 0 for row in rows)
    assert (run.folder / "model" / "adapter" / "adapter_model.safetensors").is_file()


@pytest.mark.slow
def test_a_prolonged_run_says_what_becomes_of_its_learning_rate(kit: RunKit) -> None:
    def started(num_rollout: int, **changes: object) -> Run:
        run = kit.start(
            kit.arguments("longer", backend="local", num_rollout=num_rollout, lr_decay_style="linear", **changes)
        )
        run.wait()
        return run

    assert started(2).metrics()[-1]["train/lr"] > 0
    refused = started(4)
    assert re.search("changes until optimizer step 2, .* from 0 to .* --lr-decay-iters 2 to keep", refused.output)
    assert started(3, lr_decay_iters=2).metrics()[-1]["train/lr"] == 0
    longer = started(4, lr_decay_iters=8)
    assert [row["step"] for row in longer.metrics()] == [0, 1, 2, 3]
    assert longer.metrics()[-1]["train/lr"] > 0


@pytest.mark.parametrize(
    ("flags", "staleness"),
    [
        pytest.param({"max_staleness": 2, "update_weights_interval": 2}, 2, id="asynchronous", marks=pytest.mark.slow),
        pytest.param(
            {"partial_rollout": True, "max_staleness": 1, "over_sampling_batch_size": 6},
            1,
            id="partial rollouts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": True, "over_sampling_batch_size": 6},
            0,
            id="partial rollouts, masked",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_forms_of_a_run_stay_within_their_staleness_and_lose_no_token(
    kit: RunKit, flags: dict[str, object], staleness: int
) -> None:
    run = kit.start(kit.arguments(f"form{staleness}", backend="local", num_rollout=5, **flags))
    assert run.wait() == 0, run.output
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(5))
    assert max(row["staleness/max"] for row in rows) == staleness
    for row in rows:
        dropped = sum(value for name, value in row.items() if name.startswith("tokens/dropped/"))
        assert row["tokens/generated"] == row["tokens/trained"] + row["tokens/waiting"] + dropped
    result = audit_ledger(run.folder / "ledger.sqlite", through_step=4, groups_per_step=4)
    assert result.ok, result.problems


@pytest.mark.slow
def test_a_breakpoint_in_step_stops_in_the_users_code(kit: RunKit) -> None:
    arguments = kit.arguments("stopping", env="stopping.py:Stopping", backend="local", num_rollout=1)
    terminal, theirs = pty.openpty()
    command = [sys.executable, "-m", "agentrl", "train", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    run = subprocess.Popen(
        command, cwd=kit.folder, env=environment, stdin=theirs, stdout=theirs, stderr=theirs, close_fds=True
    )
    os.close(theirs)
    said = read_until(terminal, b"(Pdb)")
    assert b"stopping.py" in said
    os.write(terminal, b"p 'turn ' + str(turn.index)\n")
    assert b"turn 1" in read_until(terminal, b"(Pdb)")
    os.write(terminal, b"continue\n")
    assert b"the model is in" in read_until(terminal, b"the model is in")
    assert run.wait() == 0
    os.close(terminal)


def read_until(terminal: int, mark: bytes, timeout: float = 120) -> bytes:
    said, deadline = b"", time.monotonic() + timeout
    while mark not in said:
        assert time.monotonic() < deadline, said.decode(errors="replace")
        said += os.read(terminal, 4096)
    return said


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_while_steps_run_ends_it_within_seconds(kit: RunKit, number: signal.Signals, code: int) -> None:
    run = kit.start(kit.arguments(f"stopped-{code}", backend="local", num_rollout=1000))
    run.until(lambda: "rollout 2/" in run.output)
    run.process.send_signal(number)
    assert run.wait() == code, run.output
    assert "Traceback" not in run.output
    assert "never awaited" not in run.output


@pytest.mark.slow
def test_a_teardown_that_fails_is_said_and_the_model_is_there(kit: RunKit) -> None:
    (kit.folder / "torn.py").write_text(TORN)
    arguments = kit.arguments("torn", env="torn.py:Torn", backend="local", num_rollout=1)
    run = kit.start(arguments)
    assert run.wait() == 2, run.output
    assert "error: Torn.teardown raised OSError: nothing to tear down" in run.output
    again = kit.start(arguments)
    assert again.wait() == 0, again.output
    assert "starting once more" not in again.output


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"actor_num_gpus_per_node": 2}, "one trainer process, and 2 were asked for"),
        ({"rollout_num_gpus": 2}, "one built-in engine, and --rollout-num-gpus is 2"),
        ({"engine_port_base": 9000}, "--engine-port-base 9000 has no effect"),
        ({"ray_address": "auto"}, "--ray-address auto has no effect"),
        ({"critic_num_nodes": 1}, "--critic-num-nodes 1 has no effect with --backend local, which is one process"),
        ({"train_threads": 1, "embedded_threads": 2}, "share one number of threads"),
        ({"update_weight_mode": "broadcast"}, "sends weights by disk"),
    ],
)
def test_settings_for_several_processes_are_refused(changes: dict[str, object], said: str, tmp_path: Path) -> None:
    enough = {"hf_checkpoint": str(tmp_path), "data_source_path": "source.py:Source", "backend": "local"}
    with pytest.raises(SettingsError, match=said):
        RunSettings.from_flat({**enough, **changes}).check_complete("train")


def test_what_follows_from_one_process_is_filled_in() -> None:
    settings = RunSettings.from_flat({"backend": "local", "embedded_threads": 3})
    assert settings.cluster.update_weight_mode == "disk"
    assert settings.train.train_threads == 3
    assert "update_weight_mode" not in settings.given()
    assert settings.replace(backend="ray").cluster.update_weight_mode == "broadcast"


class Backend:
    """A train backend that only records its calls, all of them in one thread."""

    def __init__(self, fails: str = "") -> None:
        self.log: list[object] = []
        self.threads: set[str] = set()
        self.fails = fails

    def note(self, *entry: object) -> None:
        self.log.append(entry)
        self.threads.add(threading.current_thread().name)
        if entry[0] == self.fails:
            raise CheckpointError(f"{self.fails} failed")

    def start(self, settings: RunSettings, where: RankInfo) -> "Backend":
        self.note("start", where.rank, where.world_size)
        return self

    def load(self, path: Path) -> None:
        self.note("load", path)

    def train(self, payload: object, steps: int) -> dict[str, float]:
        self.note("train", payload, steps)
        return {"loss": 0.25}

    def details(self) -> dict[str, object]:
        self.note("details")
        return {}

    def save(self, path: Path, step: int) -> None:
        self.note("save", path, step)

    def save_hf(self, path: Path, *, served: bool = False) -> None:
        self.note("save_hf", path)

    def close(self) -> None:
        self.note("close")


@pytest.mark.parametrize("resume", [None, Found(Path("checkpoints/rollout_000003"), 3)])
async def test_the_trainer_goes_on_from_the_checkpoint_in_its_own_thread(
    monkeypatch: pytest.MonkeyPatch, resume: Found | None
) -> None:
    backend, settings = Backend(), RunSettings.from_flat({"backend": "local", "progress": "off"})
    monkeypatch.setattr("agentrl.run.local.start_backend", backend.start)
    with Progress(settings.observability, total=1) as progress:
        async with LocalTrainer.open(settings, resume, progress) as trainer:
            assert await trainer.train(Batch("payload", (0,), {}), 8) == {"loss": 0.25}
            await trainer.save(Path("new"), 4)
            await trainer.save_hf(Path("model"))
    assert backend.log == [
        ("start", 0, 1),
        *([("load", resume.path)] if resume else []),
        *(("train", "payload", 8), ("save", Path("new"), 4), ("save_hf", Path("model")), ("close",)),
    ]
    assert [name.startswith("trainer") for name in backend.threads] == [True]


async def test_a_checkpoint_that_cannot_be_loaded_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, settings = Backend(fails="load"), RunSettings.from_flat({"backend": "local", "progress": "off"})
    monkeypatch.setattr("agentrl.run.local.start_backend", backend.start)
    with Progress(settings.observability, total=1) as progress, pytest.raises(CheckpointError, match="load failed"):
        async with LocalTrainer.open(settings, Found(Path("broken"), 3), progress):
            raise AssertionError("it would train from the first weights")
    assert backend.log[-1] == ("close",)
