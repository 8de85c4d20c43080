"""The output in the terminal."""

import io
import math
import time

import pytest
from rich.console import Console

from agentrl.observability.progress import Progress, describe_bottleneck, describe_step
from agentrl.observability.settings import ObservabilitySettings

TRAINED = {"rollout/reward": 0.5, "train/loss": math.nan, "perf/rollout_tokens_per_second": 12345.6}
EVALUATED = {"eval/dev/reward": 0.25, "eval/dev/pass@1": 0.25, "eval/dev/samples": 8.0}


def run(mode: str, *, terminal: bool) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=terminal, width=120, highlight=False, color_system=None)
    settings = ObservabilitySettings.model_validate({"progress": mode})
    with Progress(settings, total=4, console=console) as progress:
        progress.begin("starting Ray")
        progress.ready("Ray is up", time.monotonic() - 2.5)
        progress.step(-1, EVALUATED)
        progress.phase("rollout 0: generating [x]")
        progress.step(0, TRAINED)
    return out.getvalue()


@pytest.mark.parametrize("mode", ["auto", "plain"])
def test_a_pipe_gets_one_plain_line_a_step(mode: str) -> None:
    lines = run(mode, terminal=False).splitlines()
    assert len(lines) == 4
    assert lines[0].endswith("s] starting Ray")
    assert lines[1].endswith("s] Ray is up  time 2.5s")
    assert "eval before training  dev reward 0.250  dev pass@1 0.250" in lines[2]
    assert "rollout 1/4  reward 0.500  loss nan  tokens/s 12,346" in lines[3]
    assert all("\x1b" not in line for line in lines)


@pytest.mark.parametrize("mode", ["auto", "live"])
def test_a_terminal_gets_a_live_line_and_the_same_steps(mode: str) -> None:
    text = run(mode, terminal=True)
    assert "rollout 1/4  reward 0.500" in text
    assert "Ray is up  time 2.5s" in text
    assert "generating [x]" in text, "brackets are text, not markup"


def test_off_prints_nothing() -> None:
    assert run("off", terminal=False) == ""


def test_rewards_without_spread_are_said_once() -> None:
    out = io.StringIO()
    with Progress(ObservabilitySettings(progress="plain"), total=4, console=Console(file=out, width=120)) as progress:
        progress.step(0, {"rollout/zero_std_groups": 1.0, "train/grad_norm": 0.5})
        assert "note:" not in out.getvalue(), "another term of the loss taught something"
        for step in (1, 2):
            progress.step(step, {"rollout/zero_std_groups": 1.0, "train/grad_norm": 0.0})
    assert out.getvalue().count("all rewards were equal") == 1


@pytest.mark.parametrize(("mode", "said"), [("plain", 1), ("live", 1), ("off", 0)])
def test_notes_stay(mode: str, said: int) -> None:
    out = io.StringIO()
    settings = ObservabilitySettings.model_validate({"progress": mode})
    with Progress(settings, total=4, console=Console(file=out, width=120)) as progress:
        progress.note("the model is in x")
    assert out.getvalue().count("the model is in x") == said


def test_an_evaluation_names_its_rollout() -> None:
    assert describe_step(9, 20, EVALUATED).startswith("eval after rollout 10")


@pytest.mark.parametrize(
    ("waited", "busy", "engines", "tools", "limit"),
    [
        (0.2, 0.99, 1.0, 9.0, "the trainer (80% of the time)"),
        (0.9, 0.95, 40.0, 9.0, "the event loop of the rollouts (95% busy"),
        (0.9, 0.5, 4.0, 9.0, "tools and environments (9.0 trajectories in them, 4.0 at the engines)"),
        (0.9, 0.5, 40.0, 9.0, "the engines (40.0 requests at once"),
    ],
)
def test_each_step_says_what_limits_it(waited: float, busy: float, engines: float, tools: float, limit: str) -> None:
    names = ("perf/wait_time_ratio", "loop/busy_share", "engines/in_flight", "tools/in_flight")
    metrics = dict(zip(names, (waited, busy, engines, tools), strict=True))
    assert describe_bottleneck(metrics)[0].startswith(f"limited by {limit}")
    assert describe_step(0, 2, metrics).endswith(describe_bottleneck(metrics)[0])
    assert describe_bottleneck({**metrics, "engines/in_flight": 0.9, "tools/in_flight": 0.1}) == (
        [] if waited > 0.5 and busy < 0.9 else describe_bottleneck(metrics)
    ), "agent programs may limit the step"
    assert describe_bottleneck({"perf/wait_time_ratio": waited}) == (
        [] if waited > 0.5 else describe_bottleneck(metrics)
    )
