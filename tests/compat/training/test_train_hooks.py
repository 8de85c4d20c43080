"""slime's training hooks against the built-in forms that they repeat: values and gradients, in every layout."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from agentrl.config import RunSettings
from agentrl.errors import PluginError
from agentrl.train.contracts import RankInfo
from agentrl.train.hooks import hooks_of
from agentrl.train.megatron.network import MegatronBackend
from tests.compat.training import hook_examples
from tests.support.distributed import run_ranks
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import TEMPERATURE, gradients, make_batch, settings

LOSS, TIS, REDUCER = (f"custom_{name}_function_path" for name in ("loss", "tis", "pg_loss_reducer"))


def path(name: str) -> str:
    return f"{hook_examples.__name__}:{name}"


HOOKED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "advantages": ({}, {"compat_options": {"custom_advantage_function_path": path("grpo")}}),
    "loss": ({}, {"loss_type": "custom_loss", LOSS: path("clipped")}),
    "loss per token": (
        {"calculate_per_token_loss": True},
        {"calculate_per_token_loss": True, "loss_type": "custom_loss", LOSS: path("clipped")},
    ),
    "weights": ({"use_tis": True, "tis_clip": 1.1}, {"use_tis": True, "tis_clip": 1.1, TIS: path("truncated")}),
    "rejection": (
        {"use_rs": True, "rs_level": "geometric", "rs_upper_bound": 30.0},
        {"use_tis": True, "use_rs": True, "rs_upper_bound": 30.0, TIS: path("rejecting")},
    ),
    "reducer": (
        {"loss_denominator": "all", "entropy_coef": 0.1},
        {"loss_denominator": "all", "entropy_coef": 0.1, REDUCER: path("sample_means")},
    ),
}
"""The settings of a built-in form, and those of the hook that repeats it."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "cp2": {"context_parallel_size": 2},
    "pp2": {"pipeline_model_parallel_size": 2},
    "dp2": {},
}

Found = tuple[list[dict[str, float]], dict[str, NDArray[np.float32]]]


@contextlib.contextmanager
def backend(
    root: Path, algorithm: dict[str, Any], where: RankInfo | None = None, **train: Any
) -> Iterator[MegatronBackend]:
    chosen = settings(root / "m", clip_grad=0.0, **train).model_dump(exclude_defaults=True)
    place = {"rollout_temperature": TEMPERATURE, "actor_num_gpus_per_node": where.world_size if where else 1}
    run = RunSettings.from_flat({**chosen, **algorithm, **place})
    made = MegatronBackend(
        run.train, run.algorithm, rollout_temperature=TEMPERATURE, device="cpu", hooks=hooks_of(run.args)
    )
    try:
        made.init(where or RankInfo())
        yield made
    finally:
        made.close()


def trained(root: Path, algorithm: dict[str, Any], where: RankInfo | None = None, **train: Any) -> Found:
    """Train two rollouts of two steps. Returns the metrics, and the last gradients."""
    with backend(root, algorithm, where, num_steps_per_rollout=2, **train) as made:
        metrics = [dict(made.train(make_batch(seed=i), i)) for i in range(2)]
        return metrics, {name: value.clone().numpy() for name, value in gradients(made)}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hooks")
    make_tiny_model(folder / "m", "qwen3")
    return folder


@pytest.fixture(scope="module")
def built_in(root: Path) -> dict[str, Found]:
    return {name: trained(root, algorithm) for name, (algorithm, _) in HOOKED.items()}


def check(want: Found, got: Found) -> None:
    for ours, theirs in zip(want[0], got[0], strict=True):
        assert theirs["loss"] == pytest.approx(ours["loss"], rel=1e-6, abs=1e-6)
        assert theirs["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-5)
        assert theirs["ppo_kl"] == pytest.approx(ours["ppo_kl"], rel=1e-5, abs=1e-6)
    assert got[1].keys() == want[1].keys()
    for name, gradient in want[1].items():
        np.testing.assert_allclose(got[1][name], gradient, rtol=1e-4, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", nightly(HOOKED, 1))
def test_what_a_hook_does_again_is_the_same(root: Path, built_in: dict[str, Found], name: str) -> None:
    check(built_in[name], trained(root, HOOKED[name][1]))


def of_layouts(rank: int, world: int, root: Path, cases: list[tuple[str, str]]) -> dict[tuple[str, str], Found]:
    torch.set_num_threads(1)
    meeting = f"file://{root}/{world}-{len(cases)}"
    torch.distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=world)
    place = RankInfo(rank, world, rank)
    return {(name, layout): trained(root, HOOKED[name][1], place, **LAYOUTS[layout]) for name, layout in cases}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hook_sees_whole_samples_in_every_layout(root: Path, built_in: dict[str, Found]) -> None:
    cases = [(name, layout) for name in HOOKED for layout in LAYOUTS]
    for (name, layout), found in run_ranks(of_layouts, 2, 2, root, cases)[0].items():
        try:
            check(built_in[name], found)
        except AssertionError as error:
            raise AssertionError(f"{name}, {layout}: {error}") from error


FEW: dict[str, Any] = {"use_dynamic_batch_size": False, "max_tokens_per_gpu": None, "micro_batch_size": 1}


def few(root: Path, name: str, samples: int, where: RankInfo | None = None) -> Found:
    """Train samples, one a microbatch: of two processes, one has a microbatch without samples."""
    with backend(root, HOOKED[name][1], where, num_steps_per_rollout=1, **FEW) as made:
        metrics = dict(made.train(make_batch(1, samples), 0))
        return [metrics], {name: value.clone().numpy() for name, value in gradients(made)}


def few_in_two(rank: int, root: Path, names: list[str]) -> dict[tuple[str, int], Found]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/few", rank=rank, world_size=2)
    place = RankInfo(rank, 2, rank)
    return {(name, samples): few(root, name, samples, place) for name in names for samples in (1, 3)}


def test_a_process_with_too_few_samples_calls_no_hook_for_its_padding(root: Path) -> None:
    for (name, samples), found in run_ranks(few_in_two, 2, root, ["loss", "weights", "reducer"])[0].items():
        check(few(root, name, samples), found)


BY_HELPERS = """
import torch
from slime.backends.megatron_utils.loss import get_log_probs_and_entropy


def loss(args, batch, logits, sum_of_sample_mean):
    args.kinds = [said["kind"] for said in batch["metadata"]]
    where = {key: batch[key] for key in ("unconcat_tokens", "total_lengths", "response_lengths")}
    found = get_log_probs_and_entropy(logits, args=args, with_entropy=True, **where)[1]
    entropy = sum_of_sample_mean(torch.cat(found["entropy"]))
    gain = sum_of_sample_mean(torch.cat(found["log_probs"]) * torch.cat(batch["advantages"]))
    return 0 * entropy - gain, {"entropy": entropy.detach(), "said": torch.tensor(float(len(args.kinds)))}


def cut(args, *, pg_loss, train_log_probs, total_lengths, response_lengths, loss_masks, **kwargs):
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp, slice_log_prob_with_cp

    for log_probs, *lengths in zip(train_log_probs, total_lengths, response_lengths):
        whole = all_gather_with_cp(log_probs, *lengths)
        assert slice_log_prob_with_cp(whole, *lengths).shape == whole.shape == (lengths[1],)
    return pg_loss, loss_masks, {"cut": torch.ones_like(pg_loss)}
"""


def test_slimes_helpers_and_the_samples_metadata(root: Path, tmp_path: Path) -> None:
    (tmp_path / "hooks.py").write_text(BY_HELPERS)
    batch, texts = make_batch(), [f'{{"kind":"{number}"}}' for number in range(12)]
    said = dataclasses.replace(batch, metadata=np.array(texts, np.bytes_))
    with backend(root, {"loss_type": "custom_loss", LOSS: f"{tmp_path}/hooks.py:loss"}) as made:
        got = made.train(said, 0)
    with backend(root, {}) as made:
        want = made.train(batch, 0)
    assert got["entropy"] == pytest.approx(want["entropy"], rel=1e-5)
    assert got["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
    assert got["said"] * len(batch) == len(batch)
    with backend(root, {"use_tis": True, TIS: f"{tmp_path}/hooks.py:cut"}) as made:
        assert made.train(batch, 0)["cut"] == pytest.approx(1)


def test_a_reducer_must_be_a_weighted_sum(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def squares(total_lengths: Any, response_lengths: Any, loss_masks: Any, calculate_per_token_loss: bool) -> Any:
        return lambda losses: losses.square().sum()

    monkeypatch.setattr(hook_examples, "sample_means", squares)
    with backend(root, {REDUCER: path("sample_means")}) as made, pytest.raises(PluginError, match="no weighted sum"):
        made.train(make_batch(), 0)
