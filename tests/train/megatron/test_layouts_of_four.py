"""Four processes in combined layouts: tied weights over pipeline stages, and a vocabulary not divisible by TP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.algorithms import AlgorithmSettings
from agentrl.train.contracts import RankInfo
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VOCAB = 511
LAYOUTS: dict[str, dict[str, Any]] = {
    "tp2_pp2": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "sequence_parallel": True},
    "tp2_cp2": {"tensor_model_parallel_size": 2, "context_parallel_size": 2, "sequence_parallel": True},
    "tp2_dp2": {"tensor_model_parallel_size": 2},
    "pp2_dp2": {"pipeline_model_parallel_size": 2},
    "pp2_dp2_sharded": {"pipeline_model_parallel_size": 2, "use_distributed_optimizer": True},
    "pp2_cp2": {"pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    "cp2_dp2_sharded": {"context_parallel_size": 2, "use_distributed_optimizer": True},
    "pp4": {"pipeline_model_parallel_size": 4},
}
ONE: dict[str, dict[str, Any]] = {"one": {}}


def train(rank: int, world: int, root: str, layouts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/of{world}", rank=rank, world_size=world)
    out: dict[str, Any] = {}
    for name, changes in layouts.items():
        with backend(settings(Path(root) / "m", **changes), AlgorithmSettings(), RankInfo(rank, world, rank)) as made:
            metrics = [made.train(make_batch(vocab=VOCAB), number) for number in range(3)]
            weights = {key: tensor.numpy().copy() for key, tensor in made.export_weights()}
            if name == "tp2_pp2":
                made.save(f"{root}/checkpoint", 3)
            if name == "one" and (Path(root) / "checkpoint").exists():
                made.load(f"{root}/checkpoint")
                out["loaded"] = {key: tensor.numpy().copy() for key, tensor in made.export_weights()}
        out[name] = [(m["loss"], m["grad_norm"]) for m in metrics], weights
    return out


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, Any]]:
    root = tmp_path_factory.mktemp("four")
    folder = make_tiny_model(root / "m", "qwen2", layers=4, tie_word_embeddings=True)
    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:VOCAB].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text()) | {"vocab_size": VOCAB}
    (folder / "config.json").write_text(json.dumps(config))
    four = run_ranks(train, 4, 4, str(root), LAYOUTS)[0]
    return run_ranks(train, 1, 1, str(root), ONE)[0], four


@pytest.mark.parametrize("name", LAYOUTS)
def test_same_as_one_process(results: tuple[dict[str, Any], dict[str, Any]], name: str) -> None:
    (want_metrics, want), (got_metrics, got) = results[0]["one"], results[1][name]
    np.testing.assert_allclose(got_metrics, want_metrics, rtol=1e-5, atol=1e-7)
    assert list(got) == list(want)
    for key in want:
        np.testing.assert_allclose(got[key], want[key], rtol=0, atol=2e-5, err_msg=key)


def test_a_checkpoint_of_four_loads_in_one(results: tuple[dict[str, Any], dict[str, Any]]) -> None:
    saved, loaded = results[1]["tp2_pp2"][1], results[0]["loaded"]
    assert all(np.array_equal(saved[key], loaded[key]) for key in saved)
