"""The placement that `--dry-run` prints."""

import io

import pytest
from rich.console import Console

from agentrl.config import RunSettings
from agentrl.config.dry_run import describe, show


def build(line: str) -> RunSettings:
    return RunSettings.from_cli(line.split())


def test_how_the_trainer_is_cut() -> None:
    settings = build(
        "--actor-num-nodes 2 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --context-parallel-size 2"
    )
    said = next(describe(settings))
    assert said == "trainer: megatron, 16 process(es) on 2 node(s), TP 2 x PP 2 x CP 2 x DP 2, device auto"


def test_engines() -> None:
    own = [*describe(build("--engine sglang --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2"), "eval")]
    assert own[1:3] == [f"engine {n}: sglang, on engine devices {of}" for n, of in ((0, "0, 1"), (1, "2, 3"))]
    external = [*describe(build("--engine external --rollout-external-engine-addrs a:1 b:2"), "eval")]
    assert external[1:3] == ["engine 0: already running at a:1", "engine 1: already running at b:2"]


def test_debug_modes_leave_out_what_does_not_start() -> None:
    assert "trainer: none" in describe(build("--debug-rollout-only"))
    assert "engines: none (rollouts come from a dump)" in describe(build("--load-debug-rollout-data d"))


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("--advantage-estimator ppo", "critic: in the trainer's processes"),
        (
            "--advantage-estimator ppo --critic-num-nodes 2",
            "critic: 4 process(es) of its own, DP 2, cut as the trainer",
        ),
    ],
)
def test_where_a_critic_learns(line: str, said: str) -> None:
    settings = build(f"--actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 {line}")
    assert said in describe(settings)


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_printed(terminal: bool) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=100, highlight=False, color_system=None)
    show(build("--lr 3e-4 --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --rollout-stop [x]"), console)
    text = out.getvalue()
    assert "0.0003" in text
    assert "TP 2 x PP 1 x CP 1 x DP 1" in text
    assert "16 prompts x 8 samples = 128 trajectories, in 1 optimizer step(s) of 128" in " ".join(text.split())
    if not terminal:
        assert "lr = 0.0003\n" in text, "what was given carries no mark"
        assert "global_batch_size = 128  # follows from the rest" in text
        assert "rollout_batch_size" not in text


def test_an_evaluation_starts_no_trainer() -> None:
    assert next(describe(build(""), "eval")) == "trainer: none"
