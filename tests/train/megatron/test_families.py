"""Families other than Qwen and Llama: against transformers' model, and in layouts of two processes (nightly).

Each configuration has the features of the family's published ones, in tiny size.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import TrainError
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import RankInfo
from agentrl.train.hf import HFFolder
from agentrl.train.megatron.families import family_of, shape_of
from agentrl.train.megatron.model import transformer_config
from tests.engine.embedded.driver import make_engine, make_job, prompt, run
from tests.support.distributed import run_ranks
from tests.support.nightly import nightly
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import TEMPERATURE, Reference, backend, by_hub_name, gradients, make_batch, settings

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 24}
CASES: dict[str, tuple[Arch, dict[str, Any]]] = {
    "mistral": ("mistral", {}),
    "glm": ("glm", {}),
    "glm4": ("glm4", {"tie_word_embeddings": False}),
    "glm4 with biases": ("glm4", {"attention_bias": True, "rope_parameters": {**YARN, "partial_rotary_factor": 0.5}}),
    "deepseek_v3": ("deepseek_v3", {"rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}}),
    "moonlight": ("deepseek_v3", {"q_lora_rank": None, "rms_norm_eps": 1e-3, "n_group": 1, "topk_group": 1}),
    "glm4_moe_lite": ("glm4_moe_lite", {}),
    "dense deepseek_v3": ("deepseek_v3", {"v_head_dim": 32, "first_k_dense_replace": 2}),
}
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2": {"tensor_model_parallel_size": 2},
    "tp2_sp": {"tensor_model_parallel_size": 2, "sequence_parallel": True},
    "pp2": {"pipeline_model_parallel_size": 2},
    "cp2": {"context_parallel_size": 2},
    "ep2": {"expert_model_parallel_size": 2},
    "recomputed": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}
MIXTURES = ("deepseek_v3", "moonlight", "glm4_moe_lite")
PAIRS = [(case, name) for case in CASES for name in LAYOUTS]
for mixture in MIXTURES:
    PAIRS.remove((mixture, "tp2"))  # with experts, tensor parallelism needs sequence parallelism
PAIRS = [(case, name) for case, name in PAIRS if name != "ep2" or case in MIXTURES]


def make(folder: Path, case: str) -> Path:
    arch, changes = CASES[case]
    return make_tiny_model(folder / case.replace(" ", "_"), arch, **changes)


@pytest.mark.parametrize("case", nightly(CASES, ("deepseek_v3",)))
def test_log_probs_gradients_and_names_are_those_of_transformers(tmp_path: Path, case: str) -> None:
    """The pack of shared prefixes gives the same numbers as that of whole samples."""
    folder, batch, algorithm = make(tmp_path, case), make_batch(groups=6), AlgorithmSettings()
    train = settings(folder, clip_grad=0.0, max_tokens_per_gpu=200)
    reference, stored = Reference(folder, train, algorithm), HFFolder(folder)
    with backend(train, algorithm) as made:
        exported = dict(made.export_weights())
        assert exported.keys() == set(stored.files)
        assert all(torch.equal(tensor.cpu(), stored.tensor(name)) for name, tensor in exported.items())
        assert [tuple(spec.shape) for spec in made.weight_specs()[0]] == [tensor.shape for tensor in exported.values()]
        np.testing.assert_allclose(made.log_probs(batch), reference.log_probs(batch).detach(), rtol=0, atol=1e-5)
        want, metrics = reference.step(batch), made.train(batch, 0)
        assert metrics["computed_tokens_share"] < 0.8
        assert metrics["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        theirs = by_hub_name({name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None})
        for name, gradient in gradients(made):
            torch.testing.assert_close(
                gradient, theirs[name], rtol=1e-4, atol=2e-6, msg=functools.partial("{}: {}".format, name)
            )


@pytest.mark.parametrize("case", nightly(["deepseek_v3", "glm4 with biases", "moonlight"], 1))
def test_engine_and_trainer_say_the_same(tmp_path: Path, case: str) -> None:
    folder = make(tmp_path, case)
    jobs = [make_job(prompt(20, seed), temperature=TEMPERATURE, max_new_tokens=24) for seed in (1, 1, 2)]
    run(make_engine(folder, slots=4), *jobs)
    samples = []
    for index, job in enumerate(jobs):
        samples.append(Sample(group_index=0, index=index, reward=float(index)))
        samples[-1].set_prompt_tokens(job.prompt)
        samples[-1].append_model(job.output, job.log_probs, "1", turn=0)
    batch = TrainBatch.from_samples([samples])
    assert batch.rollout_log_probs is not None
    with backend(settings(folder)) as made:
        np.testing.assert_allclose(made.log_probs(batch), batch.rollout_log_probs, rtol=0, atol=1e-4)


def found(folder: Path, rank: int = 0, ranks: int = 1, **changes: Any) -> dict[str, Any]:
    with backend(settings(folder, **changes), where=RankInfo(rank, ranks, rank)) as made:
        before = made.log_probs(make_batch())
        metrics = [dict(made.train(make_batch(), number)) for number in range(2)]
        return {
            "log_probs": before,
            "metrics": metrics,
            "weights": {n: t.numpy().copy() for n, t in made.export_weights()},
        }


def in_two_processes(rank: int, root: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    return {
        f"{case} {name}": found(Path(root) / case.replace(" ", "_"), rank, 2, **LAYOUTS[name]) for case, name in PAIRS
    }


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_processes_in_every_layout_are_one(tmp_path: Path) -> None:
    want = {case: found(make(tmp_path, case)) for case in CASES}
    double = run_ranks(in_two_processes, 2, str(tmp_path))[0]
    for case, name in PAIRS:
        one, two, said = want[case], double[f"{case} {name}"], f"{case} {name}"
        np.testing.assert_allclose(two["log_probs"], one["log_probs"], rtol=0, atol=1e-5, err_msg=said)
        for ours, theirs in zip(two["metrics"], one["metrics"], strict=True):
            for key in ("loss", "grad_norm"):
                assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), (said, key)
        assert list(two["weights"]) == list(one["weights"])
        for tensor, value in two["weights"].items():
            np.testing.assert_allclose(value, one["weights"][tensor], rtol=0, atol=1e-5, err_msg=f"{said} {tensor}")


RESUMED = (("glm4", "tp2"), ("dense deepseek_v3", "pp2"), ("moonlight", "tp2_sp"))


def gone_on(rank: int, root: str) -> dict[str, float]:
    """Resume each case's one-process checkpoint for a step in two processes, and save it."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    norms = {}
    for case, name in RESUMED:
        train = settings(Path(root) / case.replace(" ", "_"), **LAYOUTS[name])
        with backend(train, where=RankInfo(rank, 2, rank)) as made:
            assert made.load(f"{root}/one/{case}") == 1
            norms[case] = made.train(make_batch(), 1)["grad_norm"]
            made.save(f"{root}/two/{case}", 2)
    return norms


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_goes_on_in_two_processes_and_back_in_one(tmp_path: Path) -> None:
    want = {}
    for case, _ in RESUMED:
        with backend(settings(make(tmp_path, case))) as made:
            made.train(make_batch(), 0)
            made.save(tmp_path / "one" / case, 1)
            want[case] = [made.train(make_batch(), number)["grad_norm"] for number in (1, 2)]
    norms = run_ranks(gone_on, 2, str(tmp_path))[0]
    for case, _ in RESUMED:
        assert norms[case] == pytest.approx(want[case][0], rel=1e-5)
        with backend(settings(tmp_path / case.replace(" ", "_"))) as made:
            assert made.load(tmp_path / "two" / case) == 2
            assert made.train(make_batch(), 2)["grad_norm"] == pytest.approx(want[case][1], rel=1e-5)


@pytest.mark.parametrize(("model_type", "like"), [("kimi_k2", "deepseek_v3"), ("mimo", "qwen2")])
def test_a_family_that_is_anothers_is_read_as_that(model_type: str, like: Arch, tmp_path: Path) -> None:
    folder, batch = make_tiny_model(tmp_path / like, like), make_batch(groups=1)
    with backend(settings(folder)) as made:
        want = made.log_probs(batch)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"model_type": model_type}))
    with backend(settings(folder)) as made:
        by_order = 1e-6 if torch.cuda.is_available() else 0  # a GPU adds in any order
        np.testing.assert_allclose(made.log_probs(batch), want, rtol=0, atol=by_order)


def test_what_latent_attention_costs(tmp_path: Path) -> None:
    """The matrices that a token is multiplied with, counted in the model itself."""
    for rank in (24, None):
        tied = rank is None
        changes: dict[str, Any] = {"q_lora_rank": rank, "tie_word_embeddings": tied}
        folder = HFFolder(make_tiny_model(tmp_path / f"{rank}", "deepseek_v3", **changes))
        with backend(settings(folder.path)) as made:
            shape = made.actor.shape
        share = folder.config["num_experts_per_tok"] / folder.config["n_routed_experts"]
        read = {n: folder.tensor(n) for n in folder.files if tied or "embed_tokens" not in n}
        met = {n: tensor.numel() for n, tensor in read.items() if tensor.dim() == 2}
        assert shape.matrices == sum(size * (share if ".experts." in n else 1) for n, size in met.items())
        assert shape.channels == folder.config["num_hidden_layers"] * 4 * (24 + folder.config["v_head_dim"])


def test_a_latent_that_cannot_be_cut_is_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "deepseek_v3", q_lora_rank=25)
    config, train = HFFolder(folder).config, settings(folder, tensor_model_parallel_size=2)
    with pytest.raises(TrainError, match="must divide the model's q_lora_rank 25"):
        transformer_config(shape_of(config), family_of(config), train, torch.device("cpu"))
