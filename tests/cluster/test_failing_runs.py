"""Runs that fail midway: one message, exit code 2, no process left running, and the same command resumes."""

from pathlib import Path

import pytest

from tests.support.audit import audit_ledger
from tests.support.runs import RunKit, still_running
from tests.support.tiny_models import make_tiny_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

FAILING = """
import os
from pathlib import Path

from agentrl import Environment, Step


class Good(Environment):
    async def reward(self, sample):
        return sum(sample.tokens[sample.prompt_length:]) % 7 / 7


class Setup(Good):
    @classmethod
    async def setup(cls, args):
        raise FileNotFoundError("no index at corpus.idx")


class Raising(Good):
    async def step(self, turn):
        return {}[turn.content]


class Hanging(Good):
    async def step(self, turn):
        import anyio
        await anyio.sleep_forever()


class NotANumber(Good):
    async def reward(self, sample):
        return float("nan")


class Late(Good):
    async def step(self, turn):
        if (turn.sample.group_index or 0) >= 6:
            raise RuntimeError("the sandbox is gone")
        return Step(done=True)


class Dying(Good):
    @classmethod
    async def setup(cls, args):
        if Path("died").exists():
            os._exit(1)

    async def step(self, turn):
        Path("died").touch()
        os._exit(1)
"""


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    kit = RunKit.make(Path(tmp_path_factory.mktemp("kit")))
    (kit.folder / "failing.py").write_text(FAILING)
    return kit


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("Setup", ["Setup.setup raised FileNotFoundError: no index at corpus.idx", "failing.py:"]),
        ("Raising", ["Raising.step raised KeyError", "failing.py:"]),
        ("Hanging", ["Hanging.step took longer than 0.5 s"]),
        ("NotANumber", ["NotANumber.reward (", "failing.py:", "must be a finite number", "got nan"]),
    ],
)
def test_a_rollout_with_a_bad_environment(kit: RunKit, name: str, parts: list[str]) -> None:
    arguments = kit.arguments(f"rollout-{name}", env=f"failing.py:{name}", env_timeout=0.5, num_rollout=1)
    run = kit.start(arguments, "rollout")
    assert run.wait() == 2, run.output
    assert [part for part in parts if part not in run.output] == [], run.output
    assert "Traceback" not in run.output


def test_workers_that_die_at_every_start_end_the_run_with_that_reason(kit: RunKit) -> None:
    run = kit.start(kit.arguments("dying", env="failing.py:Dying", rollout_workers=2))
    assert run.wait() == 2, run.output
    assert "died at each of 5 starts" in run.output.splitlines()[-1], run.output


def test_an_environment_that_fails_late_loses_nothing(kit: RunKit) -> None:
    """Rollout 0 is trained, rollout 1 fails. With the environment repaired the same command resumes from there."""
    changes = {"save_interval": 1, "num_rollout": 3}
    first = kit.start(kit.arguments("late", env="failing.py:Late", **changes))
    first.until(first.processes)
    processes = first.processes()
    assert first.wait() == 2, first.output
    assert "Late.step raised RuntimeError: the sandbox is gone" in first.output
    assert "Traceback" not in first.output
    assert still_running(processes) == []
    again = kit.start(kit.arguments("late", env="failing.py:Good", **changes))
    assert again.wait() == 0, again.output
    assert [row["step"] for row in again.metrics()] == [0, 1, 2]
    result = audit_ledger(again.folder / "ledger.sqlite", through_step=2, groups_per_step=4)
    assert result.ok, result.problems


def test_a_checkpoint_of_another_model_is_refused(kit: RunKit) -> None:
    make_tiny_model(kit.folder / "other", layers=3)
    done = kit.start(kit.arguments("mine", num_rollout=1))
    assert done.wait() == 0, done.output
    other = kit.start(kit.arguments("theirs", num_rollout=2, hf_checkpoint="other", load="mine/checkpoints"))
    assert other.wait() == 2, other.output
    assert "layers is 2 there and 3 here" in other.output
    assert "Traceback" not in other.output
