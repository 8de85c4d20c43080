"""Two processes in every layout against one process: same numbers, same weights, checkpoints across layouts.

All layouts run in one pair of processes, because starting a process costs more than the training.
"""

from __future__ import annotations

from collections.abc import Set
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.train.contracts import RankInfo
from agentrl.train.settings import TrainSettings
from tests.support.distributed import run_ranks
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import PPO, backend, make_batch, settings, timeless

STEPS = 2
ALGORITHM = AlgorithmSettings(use_kl_loss=True, kl_loss_coef=0.05, kl_loss_type="k3", entropy_coef=0.01)
SEQUENCES = AlgorithmSettings(
    advantage_estimator="gspo",
    eps_clip=0.5,
    use_tis=True,
    tis_level="geometric",
    tis_clip=0.03,
    use_rs=True,
    rs_level="geometric",
    rs_lower_bound=0.013,
    rs_veto_threshold=5e-4,
    use_opsm=True,
    opsm_delta=3.7,
)
"""Its loss needs whole samples, which context parallelism splits."""
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "dp2": {},
    "dp2_sharded": {"use_distributed_optimizer": True},
    "tp2_bf16": {"tensor_model_parallel_size": 2, "bf16": True},
}
TIED = ("tp2", "pp2", "dp2_sharded")
"""Layouts that are also run with tied embeddings, which these layouts handle in different ways."""
CRITICS = ("tp2_sp", "pp2", "dp2_sharded")
"""Layouts of PPO with its critic, in which the actor's embeddings are tied; others are in `test_critic_layouts`."""
EXACT = [name for name in LAYOUTS if "bf16" not in name]
TIES = {"tied": True, "untied": False}
CASES = [(name, "untied") for name in EXACT] + [(name, "tied") for name in TIED]
EVERYDAY = ("tp2_sp", "pp2", "dp2_sharded")
"""Layouts of `make test`; their pair of processes trains no others."""

pytestmark = pytest.mark.timeout(900)


def saved_by_one(name: str) -> str:
    """Return the name of the one-process checkpoint with the optimizer of layout `name`."""
    return "single_sharded" if name == "dp2_sharded" else "single"


def train_steps(made: Any, first: int, steps: int = STEPS) -> list[dict[str, float]]:
    batch = make_batch()
    return [dict(made.train(batch, number)) for number in range(first, first + steps)]


def everything(made: Any) -> dict[str, Any]:
    """Return log-probs before, metrics of the steps (the last on one sample alone), weights after (on rank 0)."""
    log_probs, metrics = made.log_probs(make_batch()), train_steps(made, 0)
    return {
        "log_probs": log_probs,
        "details": made.details(),
        "metrics": [*metrics, dict(made.train(make_batch().select([0]), STEPS))],
        "weights": {name: tensor.float().cpu().numpy().copy() for name, tensor in made.export_weights()},
    }


def whole_samples(root: str | Path, **changes: Any) -> TrainSettings:
    """Take two steps a rollout, so that ratios differ from 1 and old log-probs come from a separate pass."""
    return settings(Path(root) / "untied", num_steps_per_rollout=2, **changes)


def actor_and_critic(made: Any) -> dict[str, Any]:
    """Return metrics of steps, including one with a nonzero critic, then values and both models."""
    metrics = train_steps(made, 0)
    critic = {name: tensor.float().cpu().numpy().copy() for name, tensor in made.critic.network.export()}
    weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in made.export_weights()}
    return {"metrics": metrics, "values": made.values(make_batch()), "weights": weights, "critic": critic}


def with_critic(root: str | Path, **changes: Any) -> TrainSettings:
    """Return settings: two steps a rollout, clipping, weight decay, and tied embeddings."""
    common = {"num_steps_per_rollout": 2, "weight_decay": 0.1, "clip_grad": 0.5, "critic_lr": 2e-3}
    return settings(Path(root) / "tied", **common, **changes)


def check_critics(want: dict[str, Any], got: dict[str, Any]) -> None:
    """Check that numbers are equal up to rounding."""
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        for key in (
            "loss",
            "grad_norm",
            "value_loss",
            "value_clipfrac",
            "critic/grad_norm",
            "critic/explained_variance",
        ):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), key
    np.testing.assert_allclose(got["values"], want["values"], rtol=0, atol=1e-5)
    for part in ("weights", "critic"):
        assert list(got[part]) == list(want[part])
        for tensor, value in got[part].items():
            np.testing.assert_allclose(value, want[part][tensor], rtol=0, atol=2e-5, err_msg=tensor)


def in_two_processes(rank: int, root: str, names: Set[str]) -> dict[str, Any]:
    """Run each tie of the layouts `names`, with checkpoints: written by one process and read here, and written here."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    out: dict[str, Any] = {}
    for tie in TIES:
        for name, changes in LAYOUTS.items():
            if name not in names or (tie == "tied" and name not in TIED):
                continue
            train = settings(Path(root) / tie, async_save=True, **changes)
            with backend(train, ALGORITHM, RankInfo(rank, 2, rank)) as made:
                out[f"{tie}/{name}"] = everything(made)
                if tie == "untied" and name in EXACT:
                    made.save(f"{root}/from/{name}", STEPS)
                    out[f"next/{name}"] = train_steps(made, STEPS, 2)
                    assert made.saved()
                    assert made.load(f"{root}/{saved_by_one(name)}") == STEPS
                    out[f"resumed/{name}"] = train_steps(made, STEPS, 2)
    with backend(whole_samples(root, **LAYOUTS["cp2"]), SEQUENCES, RankInfo(rank, 2, rank)) as made:
        out["sequences"] = everything(made)
    for name in sorted(names & set(CRITICS)):
        with backend(with_critic(root, **LAYOUTS[name]), PPO, RankInfo(rank, 2, rank)) as made:
            out[f"critic/{name}"] = actor_and_critic(made)
            made.save(f"{root}/critics/{name}", STEPS)
            out[f"critic/{name}/next"] = train_steps(made, STEPS, 2)
            if "sharded" not in name:
                assert made.load(f"{root}/critics/one") == STEPS
                out[f"critic/{name}/resumed"] = train_steps(made, STEPS, 2)
    return out


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("layouts")
    for tie, tied in TIES.items():
        make_tiny_model(path / tie, "qwen3", tie_word_embeddings=tied)
    return path


@pytest.fixture(scope="module")
def single(root: Path) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for tie in TIES:
        with backend(settings(root / tie), ALGORITHM) as made:
            out[tie] = everything(made)
            if tie == "untied":
                made.save(root / saved_by_one("any"), STEPS)
                out["next"] = train_steps(made, STEPS, 2)
    with backend(whole_samples(root), SEQUENCES) as made:
        out["sequences"] = everything(made)
    with backend(with_critic(root), PPO) as made:
        out["critic"] = actor_and_critic(made)
        made.save(root / "critics" / "one", STEPS)
        out["critic/next"] = train_steps(made, STEPS, 2)
    with backend(settings(root / "untied", **LAYOUTS["dp2_sharded"]), ALGORITHM) as made:
        everything(made)
        made.save(root / saved_by_one("dp2_sharded"), STEPS)
    return out


@pytest.fixture(scope="module")
def double(request: pytest.FixtureRequest, root: Path, single: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results of two processes for the layouts that this session tests."""
    tests = [item for item in request.session.items if item.path == request.path and isinstance(item, pytest.Function)]
    names = {str(test.callspec.params["name"]) for test in tests if "name" in test.fixturenames}
    return run_ranks(in_two_processes, 2, str(root), names)


@pytest.mark.parametrize(("name", "tie"), nightly(CASES, [(name, "untied") for name in EVERYDAY]))
def test_same_numbers_as_one_process(single: dict[str, Any], double: list[dict[str, Any]], name: str, tie: str) -> None:
    want, got = single[tie], double[0][f"{tie}/{name}"]
    np.testing.assert_allclose(got["log_probs"], want["log_probs"], rtol=0, atol=1e-5)
    assert got["details"].keys() == {"log_probs", "advantages", "ref_log_probs"}
    for what, values in got["details"].items():
        np.testing.assert_allclose(values, want["details"][what], rtol=0, atol=2e-3, err_msg=what)
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        for key in ("loss", "grad_norm", "entropy", "kl_loss", "train_rollout_logprob_abs_diff", "tokens"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key
        for key in ("mismatch_kl", "mismatch_ess"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key


@pytest.mark.parametrize(("name", "tie"), nightly(CASES, [(name, "untied") for name in EVERYDAY]))
def test_same_weights_as_one_process(single: dict[str, Any], double: list[dict[str, Any]], name: str, tie: str) -> None:
    want, got = single[tie]["weights"], double[0][f"{tie}/{name}"]["weights"]
    assert list(got) == list(want)
    for tensor, value in got.items():
        np.testing.assert_allclose(value, want[tensor], rtol=0, atol=2e-5, err_msg=tensor)


def test_a_loss_over_whole_samples_is_the_same_where_they_are_cut_apart(
    single: dict[str, Any], double: list[dict[str, Any]]
) -> None:
    want, got = single["sequences"], double[0]["sequences"]
    assert any(abs(step["ppo_kl"]) > 1e-4 for step in want["metrics"])
    assert all(0 < step["rs_masked"] < 1 for step in want["metrics"][:STEPS])  # the last has one sample alone
    for ours, theirs in zip(got["metrics"], want["metrics"], strict=True):
        for key in ("loss", "grad_norm", "ppo_kl", "pg_clipfrac", "tis", "rs_masked", "opsm_clipfrac"):
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-7), key
    for tensor, value in got["weights"].items():
        np.testing.assert_allclose(value, want["weights"][tensor], rtol=0, atol=2e-5, err_msg=tensor)


@pytest.mark.parametrize("name", nightly(LAYOUTS, EVERYDAY))
def test_all_ranks_know_the_numbers_and_rank_zero_the_weights(double: list[dict[str, Any]], name: str) -> None:
    first, second = (rank[f"untied/{name}"] for rank in double)
    np.testing.assert_array_equal(first["log_probs"], second["log_probs"])
    for ours, theirs in zip(first["metrics"], second["metrics"], strict=True):
        assert ours.keys() == theirs.keys()
        assert timeless(ours) == timeless(theirs)
    assert second["weights"] == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tp2_bf16"])
def test_bf16_under_tensor_parallelism_is_near(single: dict[str, Any], double: list[dict[str, Any]], name: str) -> None:
    want, got = single["untied"], double[0][f"untied/{name}"]
    assert [m["grad_norm"] for m in got["metrics"]] == pytest.approx([m["grad_norm"] for m in want["metrics"]], rel=0.1)


@pytest.mark.parametrize("name", nightly(EXACT, EVERYDAY))
def test_a_checkpoint_of_one_process_goes_on_in_two(
    single: dict[str, Any], double: list[dict[str, Any]], name: str
) -> None:
    want, got = single["next"][-1], double[0][f"resumed/{name}"][-1]
    for key in ("loss", "grad_norm"):
        assert got[key] == pytest.approx(want[key], rel=1e-5), key


@pytest.mark.parametrize("name", nightly(EXACT, EVERYDAY))
def test_a_checkpoint_of_two_processes_goes_on_in_one(root: Path, double: list[dict[str, Any]], name: str) -> None:
    sharded = LAYOUTS[name].get("use_distributed_optimizer", False)
    with backend(settings(root / "untied", use_distributed_optimizer=sharded), ALGORITHM) as made:
        assert made.load(root / "from" / name) == STEPS
        got = train_steps(made, STEPS, 2)[-1]
    for key in ("loss", "grad_norm"):
        assert got[key] == pytest.approx(double[0][f"next/{name}"][-1][key], rel=1e-5), key


@pytest.mark.parametrize("name", nightly(CRITICS, ("pp2",)))
def test_a_critic_learns_the_same_as_on_one_process(
    single: dict[str, Any], double: list[dict[str, Any]], name: str
) -> None:
    check_critics(single["critic"], double[0][f"critic/{name}"])
    np.testing.assert_array_equal(double[0][f"critic/{name}"]["values"], double[1][f"critic/{name}"]["values"])


@pytest.mark.parametrize("name", nightly(CRITICS, ("pp2",)))
def test_a_critics_checkpoint_goes_on_in_another_layout(
    root: Path, single: dict[str, Any], double: list[dict[str, Any]], name: str
) -> None:
    sharded = LAYOUTS[name].get("use_distributed_optimizer", False)
    with backend(with_critic(root, use_distributed_optimizer=sharded), PPO) as made:
        assert made.load(root / "critics" / name) == STEPS
        pairs = [(double[0][f"critic/{name}/next"][-1], train_steps(made, STEPS, 2)[-1])]
    if not sharded:
        pairs.append((single["critic/next"][-1], double[0][f"critic/{name}/resumed"][-1]))
    for want, got in pairs:
        for key in ("loss", "grad_norm", "value_loss", "critic/grad_norm", "critic/explained_variance"):
            assert got[key] == pytest.approx(want[key], rel=1e-5, abs=1e-6), key
