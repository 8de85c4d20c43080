"""The mismatch between engine and trainer, on five tokens worked out by hand."""

import math

import pytest
import torch

from agentrl.algorithms.ops.corrections import mismatch_metrics, mismatch_sums
from tests.algorithms.views import view


def sums(
    ratios: list[float], staleness: list[int], mask: list[int], *, engine_is_old: bool = False
) -> dict[str, float]:
    """Return the sums for tokens whose probability is `ratios` times the engine's (the old one, if `engine_is_old`)."""
    trainer = torch.full((len(ratios),), -1.0, dtype=torch.float64)
    rollout = trainer - torch.tensor(ratios, dtype=torch.float64).log()
    seen = view(
        trainer if engine_is_old else trainer - 9,
        loss_mask=torch.tensor(mask),
        staleness=torch.tensor(staleness),
        old_log_probs=rollout if engine_is_old else trainer,
        rollout_log_probs=rollout,
    )
    return {name: value.item() for name, value in mismatch_sums(seen, engine_is_old=engine_is_old).items()}


@pytest.mark.parametrize("engine_is_old", [False, True])
def test_tokens_of_the_newest_weights_and_older_ones_are_told_apart(engine_is_old: bool) -> None:
    parts = [
        sums([2.0, 1.0, 0.5], [0, 0, 3], [1, 1, 1], engine_is_old=engine_is_old),
        sums([4.0, 8.0], [1, -1], [1, 0], engine_is_old=engine_is_old),
        sums([], [], []),
    ]
    found = mismatch_metrics(parts)
    log2 = math.log(2)
    assert found["train_rollout_logprob_abs_diff"] == pytest.approx(4 * log2 / 4)
    assert found["mismatch_kl"] == pytest.approx(-2 * log2 / 4)
    assert found["mismatch_ess"] == pytest.approx(7.5**2 / (4 * 21.25))
    assert found["mismatch_numerics_abs_diff"] == pytest.approx(log2 / 2)
    assert found["mismatch_numerics_ess"] == pytest.approx(3**2 / (2 * 5))
    assert found["mismatch_staleness_kl"] == pytest.approx(-log2 / 2)
    assert found["mismatch_staleness_ess"] == pytest.approx(4.5**2 / (2 * 16.25))


def test_a_part_without_tokens_has_no_metrics() -> None:
    found = mismatch_metrics([sums([2.0, 2.0], [0, -1], [1, 1])])
    assert found["mismatch_ess"] == pytest.approx(1)
    assert [name for name in found if "staleness" in name] == []
    assert mismatch_metrics([sums([2.0], [0], [0]), {}]) == {}


def test_a_log_ratio_of_100_is_bounded() -> None:
    found = sums([math.exp(100), math.exp(-100)], [0, 0], [1, 1])
    assert found["mismatch/ratio"] == pytest.approx(math.exp(20))
    assert found["mismatch/abs_diff"] == pytest.approx(200)
    assert math.isfinite(mismatch_metrics([found])["mismatch_ess"])
