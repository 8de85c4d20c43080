"""Losses, advantages and weights by path: valid functions, and errors that name the path."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from agentrl.algorithms import (
    AdvantageInputs,
    AlgorithmSettings,
    SampleView,
    TokenLoss,
    TokenView,
    WeightInputs,
    algorithm_of,
    compute_advantages,
)
from agentrl.algorithms.trust_region import DPPO
from agentrl.errors import AgentRLError, PluginError, SettingsError
from tests.algorithms.test_returns import inputs
from tests.algorithms.views import view


def path(name: str) -> str:
    return f"{__file__}:{name}"


def custom(name: str, **changes: Any) -> AlgorithmSettings:
    return AlgorithmSettings(loss_type="custom_loss", custom_loss_function_path=path(name), **changes)


def plain(seen: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    assert seen.advantages is not None
    return TokenLoss(-settings.eps_clip * seen.advantages * seen.log_probs, {"twice": 2 * seen.log_probs})


def summed(seen: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    return TokenLoss(-seen.log_probs.sum(), {})


def half(seen: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    return TokenLoss(-seen.log_probs.half(), {})


def detached(seen: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    return TokenLoss(-seen.log_probs.detach(), {})


def bare(seen: TokenView, settings: AlgorithmSettings) -> torch.Tensor:
    return -seen.log_probs


def odd_statistic(seen: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    return TokenLoss(-seen.log_probs, {"mean": seen.log_probs.mean()})


class Anchored(DPPO):
    pass


@pytest.mark.parametrize("name", ["dppo", path("Anchored")])
def test_an_algorithm_that_is_anchored_at_the_rollout_reads_the_engines_log_probs(name: str) -> None:
    assert algorithm_of(AlgorithmSettings(advantage_estimator=name)).settings.use_rollout_logprobs
    given = AlgorithmSettings(advantage_estimator=name, use_rollout_logprobs=False)
    assert not algorithm_of(given).settings.use_rollout_logprobs


def test_a_loss_of_ones_own_is_taken_with_the_advantages_of_an_estimator() -> None:
    algorithm = algorithm_of(custom("plain", advantage_estimator="reinforce_plus_plus", gamma=0.5, kl_coef=0.1))
    new = torch.tensor([-1.0, -2.0], requires_grad=True)
    got = algorithm.token_loss(view(new, advantages=torch.tensor([1.0, -1.0])))
    assert got.loss.tolist() == pytest.approx([0.2, -0.4])
    assert got.stats["twice"].tolist() == [-2, -4]
    assert not got.stats["twice"].requires_grad
    assert algorithm.whitens
    assert algorithm.reads == {"old_log_probs", "ref_log_probs"}
    assert not algorithm.compares_within_group
    assert not algorithm.supervised
    assert algorithm_of(custom("plain")).compares_within_group
    assert algorithm_of(custom("plain", advantage_estimator=path("ones"))).advantages(
        inputs([[1]], [0.0])
    ).tolist() == [1]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("summed", "summed: the loss: expected one value for each of the 2 response tokens, got shape ()"),
        ("half", "half: the loss is torch.float16, but the log-probs are torch.float32"),
        ("detached", "detached: the loss has no gradient"),
        ("bare", "bare: expected a TokenLoss, got Tensor"),
        ("odd_statistic", "odd_statistic: the statistic 'mean': expected one value for each"),
    ],
)
def test_a_loss_that_cannot_be_trained_on_is_refused(name: str, words: str) -> None:
    with pytest.raises(PluginError) as caught:
        algorithm_of(custom(name)).token_loss(view(torch.tensor([-1.0, -2.0], requires_grad=True)))
    assert f"--custom-loss-function-path {path(name)}"[:40] in str(caught.value)
    assert words in str(caught.value)


def ones(batch: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return torch.ones_like(batch.loss_mask)


def infinite(batch: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return batch.loss_mask.log()


def broken(seen: SampleView | TokenView, settings: AlgorithmSettings) -> torch.Tensor:
    raise KeyError("nope")


def all_of(settings: AlgorithmSettings) -> None:
    compute_advantages(weight_inputs(), settings)
    algorithm_of(settings).token_weights(weight_inputs())
    algorithm_of(settings).token_loss(view(torch.tensor([-1.0, -2.0], requires_grad=True)))


@pytest.mark.parametrize(
    ("flag", "more"),
    [
        ("advantage_estimator", {}),
        ("custom_loss_function_path", {"loss_type": "custom_loss"}),
        ("custom_pg_loss_reducer_function_path", {}),
        ("custom_tis_function_path", {"use_tis": True}),
    ],
)
def test_an_error_of_ones_own_function_names_its_path_and_line(flag: str, more: dict[str, Any]) -> None:
    words = rf"--{flag.replace('_', '-')} .*:broken raised KeyError: 'nope' at .*test_own\.py:\d+ in broken"
    with pytest.raises(PluginError, match=words):
        all_of(AlgorithmSettings(**{flag: path("broken"), **more}))


def too_large(seen: TokenView, settings: AlgorithmSettings) -> TokenLoss:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_a_loss_that_runs_out_of_memory_is_left_to_the_trainer() -> None:
    with pytest.raises(torch.OutOfMemoryError):
        algorithm_of(custom("too_large")).token_loss(view(torch.tensor([-1.0], requires_grad=True)))


def spoiled(batch: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return torch.tensor([1.0, math.inf, math.nan])


def whole_numbers(batch: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return batch.loss_mask.long()


def a_list(batch: SampleView, settings: AlgorithmSettings) -> list[float]:
    return batch.loss_mask.tolist()


def test_advantages_must_be_finite_numbers_where_a_token_trains() -> None:
    batch = inputs([[1, 0, 1]], [1.0])
    assert compute_advantages(batch, AlgorithmSettings(advantage_estimator=path("infinite"))).advantages[0] == 0
    whitened = AlgorithmSettings(advantage_estimator=path("infinite"), normalize_advantages=True)
    assert compute_advantages(batch, whitened).advantages[[0, 2]].tolist() == [0, 0]
    for name, words in [
        ("spoiled", "spoiled: the advantages of 1 trained token(s) are not finite, e.g. nan at 2"),
        ("whole_numbers", "whole_numbers: the advantages: expected floating-point numbers, got torch.int64"),
        ("a_list", "a_list: the advantages: expected a tensor, got list"),
    ]:
        with pytest.raises(PluginError) as caught:
            compute_advantages(batch, AlgorithmSettings(advantage_estimator=path(name)))
        assert words in str(caught.value)


def twice(given: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return torch.full(given.loss_mask.shape, 2.0)


def by_group(given: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return given.group_ids.double().repeat_interleave(given.lengths)


def one_a_sample(given: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return given.lengths.double()


def nowhere(given: SampleView, settings: AlgorithmSettings) -> torch.Tensor:
    return given.loss_mask / 0


def below(given: SampleView | TokenView, settings: AlgorithmSettings) -> torch.Tensor:
    return 0 - given.loss_mask.double()


def of_one_argument(batch: SampleView) -> torch.Tensor:
    return batch.loss_mask


def weight_inputs() -> SampleView:
    mask, lengths = torch.tensor([1, 0, 1, 1, 0]), torch.tensor([2, 2, 1])
    trajectories, groups = torch.tensor([0, 0, 1]), torch.tensor([5, 5, 7])
    return SampleView(
        rewards=torch.zeros(3), loss_mask=mask, lengths=lengths, trajectory_ids=trajectories, group_ids=groups
    )


@pytest.mark.parametrize(("name", "want"), [("twice", [2, 0, 2, 2, 0]), ("by_group", [5, 0, 5, 5, 0])])
def test_weights_of_ones_own_are_taken_with_every_loss(name: str, want: list[float]) -> None:
    for more in ({}, {"loss_type": "sft_loss"}, {"advantage_estimator": "rloo"}):
        settings = AlgorithmSettings(custom_pg_loss_reducer_function_path=path(name), **more)
        assert algorithm_of(settings).token_weights(weight_inputs()).tolist() == want


@pytest.mark.parametrize(
    ("name", "words"),
    [("one_a_sample", "of the 5 response tokens"), ("nowhere", "not finite"), ("below", "negative, got -1")],
)
def test_weights_that_mean_nothing_are_refused(name: str, words: str) -> None:
    settings = AlgorithmSettings(custom_pg_loss_reducer_function_path=path(name))
    with pytest.raises(PluginError, match=f"--custom-pg-loss-reducer-function-path .*:{name}: the weights.*{words}"):
        algorithm_of(settings).token_weights(weight_inputs())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"loss_type": "custom_loss"}, "go together"),
        ({"custom_loss_function_path": "a:b"}, "go together"),
        ({"loss_denominator": "all", "calculate_per_token_loss": True}, "set one of them"),
        ({"loss_denominator": "all", "custom_pg_loss_reducer_function_path": path("half")}, "set one of them"),
        ({"loss_max_length": 10}, "has no effect without"),
        ({"overlong_penalty_factor": 0.5}, "without overlong_buffer_len"),
        ({"loss_type": "sft_loss", "overlong_buffer_len": 5}, "no effect with sft_loss"),
    ],
)
def test_settings_that_do_not_go_together(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        AlgorithmSettings(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "custom_loss", "custom_loss_function_path": path("nope")},
        {"custom_pg_loss_reducer_function_path": path("nope")},
        {"advantage_estimator": path("nope")},
        {"custom_pg_loss_reducer_function_path": path("__name__")},
        {"custom_pg_loss_reducer_function_path": path("of_one_argument")},
        {"loss_type": "custom_loss", "custom_loss_function_path": path("of_one_argument")},
        {"use_tis": True, "custom_tis_function_path": path("of_one_argument")},
        {"advantage_estimator": path("of_one_argument")},
    ],
)
def test_a_path_that_leads_nowhere_is_known_before_anything_starts(changes: dict[str, Any]) -> None:
    with pytest.raises((PluginError, SettingsError)) as caught:
        algorithm_of(AlgorithmSettings(**changes))
    assert isinstance(caught.value, AgentRLError)
    assert "--" in str(caught.value)


def test_former_names_of_inputs_are_still_read() -> None:
    with pytest.warns(DeprecationWarning, match="trajectory_ids"):
        assert weight_inputs().rollout_ids.tolist() == [0, 0, 1]
    assert AdvantageInputs is WeightInputs is SampleView
