"""`agentrl train` with real Ray, real Megatron and a real engine; killed, interrupted and resumed."""

import random
import re
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

from tests.support.audit import audit_ledger
from tests.support.nightly import nightly, weekly
from tests.support.runs import Run, RunKit, check_looked_at, still_running

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")))


@pytest.mark.parametrize("mode", nightly(["broadcast", "disk"], 1))
def test_a_run_trains_agrees_with_its_engine_and_leaves_nothing_running(kit: RunKit, mode: str) -> None:
    arguments = kit.arguments(f"plain-{mode}", update_weight_mode=mode, num_steps_per_rollout=2)
    run = kit.start(arguments)
    run.until(run.processes)
    processes = run.processes()
    assert run.wait() == 0, run.output
    assert still_running(processes) == []
    _says_what_it_starts(run.output)
    _check_trained(run, rollouts=3)
    _starts_nothing_again(kit, arguments, rollouts=3)


@pytest.mark.slow
def test_engines_load_copies_that_differences_brought_up_to_date(kit: RunKit) -> None:
    near = kit.folder / "near"
    arguments = kit.arguments("deltas", update_weight_mode="disk", update_weight_local_checkpoint_dir=str(near))
    run = kit.start(arguments)
    assert run.wait() == 0, run.output
    _check_trained(run, rollouts=3)
    newest = next((run.folder / "weights").iterdir())
    assert (newest / "delta" / "index.json").is_file()
    copies = [path for path in near.glob("*/*") if path.name.startswith(f"{newest.name}-")]
    assert len(copies) == 1
    for file in newest.glob("*.*"):
        assert (copies[0] / file.name).read_bytes() == file.read_bytes()
    assert "the whole version is copied" not in run.output


def _check_trained(run: Run, rollouts: int) -> None:
    """Check that every group is trained once, trainer and engine agree, and all outputs exist."""
    rows = run.metrics()
    assert [row["step"] for row in rows] == list(range(rollouts))
    for row in rows:
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-4
        assert row["train/grad_norm"] > 0
    result = audit_ledger(run.folder / "ledger.sqlite", through_step=rollouts - 1, groups_per_step=4)
    assert result.ok, result.problems
    assert result.trained_by_step == dict.fromkeys(range(rollouts), 4)
    assert (run.folder / "model" / "model.safetensors").is_file()
    check_looked_at(run, steps=rollouts, groups=4)


def _says_what_it_starts(output: str) -> None:
    """Check that every phase of the start prints a line, in order, and that each line gives the time it took."""
    said = [line.partition("] ")[2] for line in output.splitlines()]
    phases = [
        "starting Ray",
        "loading the model into 1 engine, starting 1 trainer process",
        "first rollout",
    ]
    assert [line for line in said if line in phases] == phases, output
    for name in ("settings, model and data checked", "Ray is up", "1 engine ready", "1 trainer process ready"):
        assert any(re.fullmatch(rf"{name}  time [0-9.]+s", line) for line in said), output


def _starts_nothing_again(kit: RunKit, arguments: list[str], rollouts: int) -> None:
    started = kit.folder / arguments[arguments.index("--output-dir") + 1] / "processes.json"
    before = started.read_bytes()
    again = kit.start(arguments, forked=True)
    assert again.wait() == 0, again.output
    assert f") covers {rollouts} rollouts, and --num-rollout is {rollouts}; to go on" in again.output
    assert f"the model is in {again.folder / 'model'}" in again.output
    assert "Ray" not in again.output
    assert started.read_bytes() == before


@pytest.mark.slow
def test_a_missing_model_of_a_finished_run_is_written(kit: RunKit) -> None:
    arguments = kit.arguments("finished", num_rollout=1)
    first = kit.start(arguments)
    assert first.wait() == 0, first.output
    shutil.rmtree(first.folder / "model")
    again = kit.start(arguments)
    assert again.wait() == 0, again.output
    assert "starting once more" in again.output
    assert (first.folder / "model" / "model.safetensors").is_file()
    assert len(again.metrics()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("role", weekly(["trainer", "driver"], 1))
def test_killed_and_resumed_trains_every_group_once(kit: RunKit, role: str) -> None:
    changes = {"num_steps_per_rollout": 2, "engine_absence_timeout": 20, "train_env_vars": "SEEN_BY_TRAINER=yes"}
    arguments = kit.arguments(f"killed-{role}", num_rollout=4, save_interval=1, **changes)
    run = kit.start(arguments)
    run.until(lambda: len(run.metrics()) >= 2 and run.processes())
    time.sleep(random.Random(role).uniform(0, 1))  # the random moment is the injected fault
    processes = run.processes()
    run.kill(role)
    assert run.wait() != 0
    assert still_running(processes) == []
    if role != "driver":
        assert "error:" in run.output
        assert "Traceback" not in run.output
    _says_what_it_starts(run.output)
    again = kit.start(arguments)
    again.until(again.processes)
    processes = again.processes()
    assert psutil.Process(processes["trainer"][0]).environ()["SEEN_BY_TRAINER"] == "yes"
    assert again.wait() == 0, again.output
    assert still_running(processes) == []
    assert (again.folder / "logs/trainer-0.log").is_file()
    _check_trained(again, rollouts=4)
    _starts_nothing_again(kit, arguments, rollouts=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    weekly(
        [
            {"tensor_model_parallel_size": 2, "sequence_parallel": True},
            {"use_distributed_optimizer": True, "rollout_num_gpus": 2},
            {"pipeline_model_parallel_size": 2, "update_weight_mode": "disk"},
            {"context_parallel_size": 2},
        ],
        2,
    ),
)
def test_two_trainer_processes_agree_with_the_engines(kit: RunKit, layout: dict[str, object]) -> None:
    run = kit.start(kit.arguments("-".join(layout), actor_num_gpus_per_node=2, **layout))
    assert run.wait() == 0, run.output
    assert len(run.metrics()) == 3
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 1e-4 for row in run.metrics())


@pytest.mark.slow
def test_a_critic_learns_the_same_on_processes_of_its_own(kit: RunKit) -> None:
    """On Ray beside the actor and apart, and resumed in the other place. Rollouts are the same: so are numbers."""
    ppo = {
        "advantage_estimator": "ppo",
        "kl_coef": 0.1,
        "lambd": 0.9,
        "critic_lr": "1e-3",
        "num_critic_only_steps": 1,
        "num_steps_per_rollout": 2,
        "save_debug_rollout_data": None,
    }
    first = kit.start(kit.arguments("ppo", **{**ppo, "save_debug_rollout_data": "ppo/dump_{rollout_id}.jsonl"}))
    assert first.wait() == 0, first.output
    replay = {**ppo, "load_debug_rollout_data": "ppo/dump_{rollout_id}.jsonl", "env": None, "prompt_data": None}
    apart = kit.start(kit.arguments("apart", **replay, critic_num_gpus_per_node=2, num_rollout=2))
    assert apart.wait() == 0, apart.output
    assert "3 trainer processes ready" in apart.output
    again = kit.start(kit.arguments("apart", **replay))
    assert again.wait() == 0, again.output
    want, got = first.metrics(), again.metrics()
    assert [row["step"] for row in got] == [0, 1, 2]
    for ours, theirs in zip(got, want, strict=True):
        for key in ("loss", "grad_norm", "value_loss", "critic/grad_norm", "critic/lr", "critic/explained_variance"):
            assert (f"train/{key}" in ours) == (f"train/{key}" in theirs), key
            if f"train/{key}" in ours:
                assert ours[f"train/{key}"] == pytest.approx(theirs[f"train/{key}"], rel=1e-4, abs=1e-6), key
    assert "train/loss" not in got[0]
    assert got[1]["train/loss"] != 0
    other = kit.start(kit.arguments("apart", num_rollout=4))
    assert other.wait() != 0
    assert "it holds a critic, and this run has none" in other.output


@pytest.mark.slow
def test_ctrl_c_ends_the_run_and_leaves_nothing_running(kit: RunKit) -> None:
    run = kit.start(kit.arguments("interrupted", num_rollout=1000))
    run.until(lambda: run.metrics() and run.processes())
    processes = run.processes()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert run.output.splitlines()[-1] == "interrupted; the same command goes on from what was kept"
    assert still_running(processes) == []
    assert "Traceback" not in run.output


@pytest.mark.slow
def test_supervised_training_on_a_users_samples_needs_no_log_probs(kit: RunKit) -> None:
    (kit.folder / "lesson.py").write_text(
        "async def generate(args, sample, sampling_params):\n"
        "    sample.tokens, sample.response_length, sample.reward = [5, 6, 7, 8, 9], 2, 0.0\n"
        "    return sample\n"
    )
    changes = {"env": None, "custom_generate_function_path": "lesson.py:generate", "loss_type": "sft_loss"}
    run = kit.start(kit.arguments("lesson", num_rollout=1, **changes))
    assert run.wait() == 0, run.output
    assert run.metrics()[-1]["train/nll"] > 0


def evaluated(rows: list[dict[str, float]]) -> list[float]:
    return [row["step"] for row in rows if any(name.startswith("eval/") for name in row)]


@pytest.mark.slow
def test_the_last_model_is_evaluated_off_the_interval_too(kit: RunKit) -> None:
    sets = {"eval_prompt_data": "prompts.jsonl@[0:2]", "eval_interval": 2}
    run = kit.start(kit.arguments("evaluated", **sets))
    assert run.wait() == 0, run.output
    assert evaluated(run.metrics()) == [-1, 1, 2]


@pytest.mark.slow
@pytest.mark.parametrize("moment", ["Ray is up", "rollout 1/"])
def test_sigterm_ends_like_ctrl_c_and_the_terminal_has_none_of_rays_words(kit: RunKit, moment: str) -> None:
    run = kit.start(kit.arguments(f"terminated-{moment[:3].lower()}", num_rollout=1000))
    run.until(lambda: moment in run.output)
    processes = run.processes()
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert still_running(processes) == []
    assert run.output.splitlines()[-1] == "terminated"
    assert "SIGTERM" not in run.output
    assert "Traceback" not in run.output
    assert "PC: @" not in run.output


@pytest.mark.slow
def test_data_that_ends_ends_the_run_well_also_when_started_again(kit: RunKit) -> None:
    sets = {"eval_prompt_data": "prompts.jsonl@[0:2]", "eval_interval": 5}
    arguments = kit.arguments("ended", prompt_data="prompts.jsonl@[0:9]", num_epoch=1, num_rollout=5, **sets)
    first = kit.start(arguments)
    assert first.wait() == 0, first.output
    assert [row["step"] for row in first.metrics() if "train/loss" in row] == [0, 1]
    assert evaluated(first.metrics()) == [-1, 1]
    assert (first.folder / "model" / "model.safetensors").is_file()
    again = kit.start(arguments)
    assert again.wait() == 0, again.output
    assert evaluated(again.metrics()) == [-1, 1]
    result = audit_ledger(first.folder / "ledger.sqlite", through_step=1, groups_per_step=4)
    assert result.ok, result.problems
