"""RewardCalculator and RewardBridge against sums by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.compat.retrain import RewardBridge, RewardCalculator, reward
from agentrl.compat.retrain.formats import KEPT
from agentrl.errors import GraderFailure, SettingsError
from agentrl.sample import Origin, Sample, Segment, Status


@reward
def length(completion: str, config_params: dict[str, Any]) -> float:
    return float(len(completion) * config_params.get("factor", 1))


@reward("polite")
async def asks_nicely(prompt: str, completion: str, step_info: dict[str, Any], **rest: Any) -> float:
    return float(("please" in completion) + step_info["bonus"])


@reward
def turns(raw_rollout: Any, infos: list[Any], each: float = 1.0) -> float:
    return each * len(infos)


@reward
def odd(completion: str) -> float:
    if completion == "boom":
        raise ZeroDivisionError("no luck")
    return float("nan") if completion == "nan" else 1.0


def raw(*texts: str, rewards: tuple[float, ...] = ()) -> Any:
    history = [{"role": "user", "content": "Go."}]
    for text in texts:
        history += [{"role": "assistant", "content": text}, {"role": "user", "content": "And?"}]
    return {
        "full_conversation_history": history,
        "executed_llm_actions": [{"raw_llm_output": text} for text in texts],
        "intrinsic_rewards_per_turn": list(rewards or [0.0] * len(texts)),
        "final_environment_observation": None,
        "step_info_dicts_per_turn": [{"bonus": 10 * at} for at in range(len(texts))],
        "rollout_metadata": {},
    }


def played(*texts: str, status: Status = Status.COMPLETED, evaluation: bool = False) -> Sample:
    messages = raw(*texts)["full_conversation_history"][:-1]
    ids = list(range(len(texts)))
    segments = [Segment(Origin.MODEL, at, at + 1, at + 1) for at in ids]
    kept = {"infos": [{"bonus": 0, "terminated": False, "truncated": False} for _ in texts], "evaluation": evaluation}
    metadata = {"messages": messages, KEPT: kept}
    return Sample(tokens=[9, *ids], response_length=len(ids), loss_mask=[1] * len(ids), rollout_log_probs=[-1.0] * len(ids),
                  segments=segments, status=status, metadata=metadata)  # fmt: skip


async def test_rewards_are_those_worked_out_by_hand() -> None:
    steps = {"length": {"weight": 0.5, "params": {"factor": 2}}, "polite": {"weight": -1.0}}
    calculator = RewardCalculator(steps, {"turns": {"weight": 3.0, "params": {"each": 4.0}}})
    rollout = raw("abc", "please", rewards=(0.25, -0.5))
    own = await calculator.process_step_rewards(rollout)
    whole = await calculator.process_rollout_rewards(rollout)
    first = {"environment": 0.25, "length": 6.0, "polite": 0.0}
    assert own == [first, {"environment": -0.5, "length": 12.0, "polite": 11.0}]
    assert whole == {"turns": 8.0}
    assert calculator.combine_rewards(own, whole) == (0.25 + 3) + (-0.5 + 6 - 11) + 24
    assert calculator.credit(own, whole) == [3.25, -5.5 + 24]


@pytest.mark.parametrize(
    ("strategy", "shares"), [("last_step", [0, 6]), ("all_steps_average", [3, 3]), ("all_steps_equal", [6, 6])]
)
async def test_the_whole_reward_is_credited_as_its_strategy_says(strategy: str, shares: list[float]) -> None:
    calculator = RewardCalculator({}, {"turns": {"weight": 3.0, "distribution_strategy": strategy}})
    assert calculator.credit([{"environment": 0.0}] * 2, {"turns": 2.0}) == shares


@reward
def terse(completion: str) -> bool:
    return len(completion) < 4


async def test_a_verdict_counts_as_0_or_1() -> None:
    bridge = RewardBridge({"terse": {"weight": 2.0}})
    assert [await bridge.reward(None, played(text)) for text in ("abc", "abcd")] == [2.0, 0.0]


async def test_an_error_costs_one_sample() -> None:
    bridge = RewardBridge({"odd": {}})
    assert await bridge.reward(None, played("fine")) == 1.0
    with pytest.raises(GraderFailure, match=r"reward odd raised ZeroDivisionError: no luck at .*test_rewards.py:\d+"):
        await bridge.reward(None, played("boom"))
    with pytest.raises(GraderFailure, match="reward odd must return a finite number, got nan"):
        await bridge.reward(None, played("nan"))


@pytest.mark.parametrize(
    ("info", "status", "earned"),
    [
        ({"terminated": True}, Status.COMPLETED, 10),
        ({}, Status.COMPLETED, 10),
        ({"terminated": False}, Status.TRUNCATED, -2),
        ({"truncated": True}, Status.COMPLETED, -2),
        ({"success": False, "terminated": True}, Status.COMPLETED, -2),
    ],
)
async def test_task_completion_is_told_by_the_end(info: dict[str, Any], status: Status, earned: float) -> None:
    bridge = RewardBridge({"task_completion": {"params": {"success_bonus": 10.0, "failure_penalty": -2.0}}})
    sample = played("a", "b", status=status)
    sample.metadata[KEPT]["infos"][1] = info
    assert await bridge.reward(None, sample) == earned
    assert sample.metadata["rewards"] == {"score": earned, "step/environment": 0.0, "step/task_completion": earned}
    assert sample.metadata["step_credit"] == [0.0, earned]


async def test_scales_are_made_alike() -> None:
    configs = {"length": {"params": {"factor": 1000}}, "odd": {"weight": 5.0}}, {"turns": {"weight": 2.0}}
    group = [played("a"), played("aaa"), played("aaa", "aaa")]
    plain = await RewardBridge(*configs).rewards(None, group)
    assert plain == [1005.0 + 2, 3005.0 + 2, 6010.0 + 4]
    scaled = await RewardBridge(*configs, scale=True).rewards(None, group)
    lengths, lasted = [1, 3, 6], [1, 1, 2]

    def alike(values: list[int]) -> list[float]:
        middle = sum(values) / 3
        spread = math.sqrt(sum((v - middle) ** 2 for v in values) / 3)
        return [(v - middle) / spread for v in values]

    by_hand = [a + 5 * b + 2 * c for a, b, c in zip(alike(lengths), alike(lasted), alike(lasted), strict=True)]
    assert scaled == pytest.approx(by_hand)
    evaluated = [played("a", evaluation=True), played("aaa", evaluation=True)]
    assert await RewardBridge(*configs, scale=True).rewards(None, evaluated) == [1007.0, 3007.0]


async def test_chunks_change_nothing() -> None:
    bridge = RewardBridge({"length": {}}, {"turns": {}}, scale=True)
    group = [played(*["ab"] * (1 + at % 3)) for at in range(20)]
    assert await bridge.rewards(None, group, chunk=3) == await bridge.rewards(None, group)


def test_an_unknown_name_is_an_error_and_a_path_is_a_name(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"'lenght', which is not registered; did you mean length\?"):
        RewardCalculator({"lenght": {}})
    (tmp_path / "mine.py").write_text("def twice(completion):\n    return 2.0\n")
    RewardCalculator({f"{tmp_path}/mine.py:twice": {}})
