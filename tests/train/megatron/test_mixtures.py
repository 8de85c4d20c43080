"""Mixtures of experts over several processes: equal to one process, and checkpoints across layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import TrainError
from agentrl.train.contracts import RankInfo
from agentrl.train.hf import HFFolder
from agentrl.train.megatron.experts import GroupedExperts, grouped_product
from agentrl.train.megatron.families import family_of, shape_of
from agentrl.train.megatron.model import transformer_config
from tests.support.distributed import run_ranks
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import backend, gradients, make_batch, settings

STEPS = 2
TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
EP = {"expert_model_parallel_size": 2}
ETP1 = {"expert_tensor_parallel_size": 1}
PP = {"pipeline_model_parallel_size": 2}
SHARDED = {"use_distributed_optimizer": True, "dist_ckpt_optim_fully_reshardable": True}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "ep2": (2, EP),
    "ep2_sharded": (2, EP | SHARDED),
    "tp2": (2, TP),
    "tp2_ep2": (2, TP | EP | ETP1),
    "tp2_etp1": (2, TP | ETP1),
    "tp2_ep2_grouped": (2, TP | EP | ETP1 | {"moe_grouped_gemm": True}),
    "pp2": (2, PP),
    "cp2_ep2": (2, EP | {"context_parallel_size": 2}),
    "ep2_etp2": (4, TP | EP),
    "pp2_ep2": (4, PP | EP),
    "tp2_pp2_ep2": (4, TP | PP | EP | ETP1),
    "ep2_dp2_sharded": (4, EP | SHARDED),
}


def train(made: Any, first: int, steps: int) -> list[tuple[float, float]]:
    batch = make_batch()
    metrics = [made.train(batch, number) for number in range(first, first + steps)]
    return [(m["loss"], m["grad_norm"]) for m in metrics]


def everything(made: Any, saved: str) -> dict[str, Any]:
    """Return log-probs, metrics of steps, weights after them; save a checkpoint, and take a step after it."""
    log_probs, metrics = made.log_probs(make_batch()), train(made, 0, STEPS)
    weights = {name: tensor.cpu().numpy().copy() for name, tensor in made.export_weights()}
    staged = {name: tensor.cpu().numpy().copy() for name, tensor in made.actor.network.export(by_stage=True)}
    assert list(staged) == [spec.name for spec in made.weight_specs().get(made.ranks.rank, [])]
    made.save(saved, STEPS)
    found = {"log_probs": log_probs, "metrics": metrics, "weights": weights, "staged": staged}
    return found | {"next": train(made, STEPS, 2)}


def in_processes(rank: int, world: int, root: str, names: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/of{world}", rank=rank, world_size=world)
    out: dict[str, Any] = {}
    for name in names:
        changes = LAYOUTS[name][1]
        with backend(
            settings(Path(root) / "model", clip_grad=0.5, **changes), where=RankInfo(rank, world, rank)
        ) as made:
            out[name] = everything(made, f"{root}/{name}")
            made.load(f"{root}/one_{'use_distributed_optimizer' in changes}")
            out[name]["resumed"] = train(made, STEPS, 2)
    return out


def check(root: Path, arch: Arch, names: list[str]) -> None:
    """Check every layout against one process, and that each one's checkpoint resumes in the other."""
    folder = make_tiny_model(root / "model", arch, tie_word_embeddings=False)
    alone, sharded = (settings(folder, clip_grad=0.5, **more) for more in ({}, SHARDED))
    for one in (sharded, alone) if any("sharded" in name for name in names) else (alone,):
        with backend(one) as made:
            want = everything(made, str(root / f"one_{one.use_distributed_optimizer}"))
    for world in sorted({LAYOUTS[name][0] for name in names}):
        chosen = [name for name in names if LAYOUTS[name][0] == world]
        ranks = run_ranks(in_processes, world, world, str(root), chosen)
        for name, got in ranks[0].items():
            staged = {tensor: value for rank in ranks for tensor, value in rank[name]["staged"].items()}
            assert staged.keys() == got["weights"].keys()
            assert all(np.array_equal(value, got["weights"][tensor]) for tensor, value in staged.items()), name
            np.testing.assert_allclose(got["log_probs"], want["log_probs"], rtol=0, atol=1e-5, err_msg=name)
            for key, wanted in (("metrics", "metrics"), ("next", "next"), ("resumed", "next")):
                np.testing.assert_allclose(got[key], want[wanted], rtol=1e-5, atol=1e-6, err_msg=f"{name} {key}")
            assert list(got["weights"]) == list(want["weights"])
            for tensor, value in got["weights"].items():
                message = f"{name} {tensor}"
                np.testing.assert_allclose(value, want["weights"][tensor], rtol=0, atol=1e-5, err_msg=message)
            with backend(sharded if "sharded" in name else alone) as made:
                made.load(root / name)
                np.testing.assert_allclose(train(made, STEPS, 2), got["next"], rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.timeout(900)
def test_experts_over_two_processes_are_as_on_one(tmp_path: Path) -> None:
    check(tmp_path, "deepseek_v3", ["pp2", "tp2_ep2_grouped"])


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("arch", ["qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"])
def test_every_layout_is_as_one_process(tmp_path: Path, arch: Arch) -> None:
    check(tmp_path, arch, list(LAYOUTS))


@pytest.mark.parametrize("arch", ["qwen3_moe", "deepseek_v3"])
def test_grouped_products_are_as_one_expert_after_another(tmp_path: Path, arch: Arch) -> None:
    folder, found = make_tiny_model(tmp_path / "m", arch), []
    for grouped in (False, True):
        with backend(settings(folder, clip_grad=0.0, moe_grouped_gemm=grouped)) as made:
            assert grouped == any(isinstance(m, GroupedExperts) for m in made.actor.network.model.modules())
            log_probs, _ = made.log_probs(make_batch()), made.train(make_batch(), 0)
            found.append((log_probs, {name: gradient.clone() for name, gradient in gradients(made)}))
    (log_probs, wanted), (others, got) = found
    np.testing.assert_allclose(others, log_probs, rtol=0, atol=1e-6)
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(got[name], gradient, rtol=1e-6, atol=1e-6, msg=f"{name}: {{}}".format)


def test_an_expert_without_tokens_has_a_gradient_of_zero() -> None:
    rows, weights = torch.randn(6, 8, requires_grad=True), [torch.randn(4, 8, requires_grad=True) for _ in range(3)]
    out = grouped_product(rows, torch.tensor([2, 2, 6], dtype=torch.int32), weights)
    want = torch.cat([rows[:2] @ weights[0].T, rows[2:] @ weights[2].T])
    torch.testing.assert_close(out, want)
    along = torch.randn_like(out)
    got = torch.autograd.grad(out, [rows, *weights], along)
    wanted = torch.autograd.grad(want, [rows, weights[0], weights[2]], along)
    torch.testing.assert_close([got[0], got[1], got[3]], list(wanted))
    assert not got[2].any()
    none = grouped_product(rows[:0], torch.zeros(3, dtype=torch.int32), weights)
    assert not any(g.any() for g in torch.autograd.grad(none.sum(), weights))


def test_experts_in_groups_are_chosen_as_by_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    groups: dict[str, Any] = {"n_routed_experts": 8, "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
    folder = make_tiny_model(tmp_path / "m", "glm4_moe", routed_scaling_factor=2.5, **groups)
    batch = make_batch(groups=1)
    ids = torch.from_numpy(batch.sample_tokens(0).astype(np.int64))
    model = AutoModelForCausalLM.from_pretrained(folder)
    want = (model(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1).gather(-1, ids[1:, None])[:, 0].detach().numpy()
    with backend(settings(folder)) as made:
        got = made.log_probs(batch)[batch.response_slice(0)]
    np.testing.assert_allclose(got, want[-len(got) :], rtol=0, atol=1e-5)


def test_the_bias_of_the_router_is_kept_in_float32_and_as_it_was(tmp_path: Path) -> None:
    folder, name = make_tiny_model(tmp_path / "m", "glm4_moe"), "model.layers.1.mlp.gate.e_score_correction_bias"
    with backend(settings(folder, bf16=True)) as made:
        before = dict(made.export_weights())[name].clone()
        made.train(make_batch(groups=1), 0)
        after = dict(made.export_weights())
    with backend(settings(folder)) as made:
        want = dict(made.export_weights())[name]
    assert torch.equal(before, want)
    assert torch.equal(after[name], want)
    assert {tensor.dtype for key, tensor in after.items() if key != name} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "glm4_moe", "norm_topk_prob": False}, "norm_topk_prob=False"),
        ({"model_type": "glm4_moe", "n_group": 4, "topk_group": 1, "num_experts_per_tok": 4}, "topk_group=1"),
        ({"model_type": "qwen3_moe", "norm_topk_prob": True, "num_experts_per_tok": 1}, "num_experts_per_tok=1"),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, "qkv_bias=False"),
    ],
)
def test_a_router_that_megatron_has_not_is_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(TrainError, match=words):
        family_of(changes)


@pytest.mark.parametrize(
    ("arch", "changes", "words"),
    [
        ("qwen3", EP, "expert_model_parallel_size needs a model with experts"),
        ("qwen3_moe", {"expert_model_parallel_size": 3}, "expert_model_parallel_size 3 must divide .* experts 4"),
        ("qwen3_moe", {"expert_tensor_parallel_size": 5}, "expert_tensor_parallel_size 5 must divide .* expert 48"),
        ("glm4_moe", {"tensor_model_parallel_size": 2}, "needs sequence_parallel"),
        ("glm4_moe", PP | SHARDED, "a stage without experts"),
        ("glm4_moe", PP | {"bf16": True}, "a stage without experts"),
    ],
)
def test_layouts_that_experts_do_not_fit_are_refused(
    tmp_path: Path, arch: Arch, changes: dict[str, Any], words: str
) -> None:
    folder = make_tiny_model(tmp_path / "m", arch)
    config = HFFolder(folder).config
    with pytest.raises(TrainError, match=words):
        transformer_config(shape_of(config), family_of(config), settings(folder, **changes), torch.device("cpu"))


def test_something_besides_experts_must_learn(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_moe")
    train = settings(folder, only_train_params_name_list=("experts",))
    with pytest.raises(TrainError, match="nothing of the model but experts is left to learn"), backend(train):
        pass


def test_processes_that_experts_cannot_be_cut_over_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_moe")
    words = "1 trainer processes cannot be divided by expert TP x EP x PP = 2"
    with pytest.raises(TrainError, match=words), backend(settings(folder, **EP)):
        pass
