"""Weights in shared memory of two trainer processes: each has all tensors, equal to the bit to the exported ones."""

import base64
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.engine.weights import buckets
from agentrl.numerics.weight_group import views
from agentrl.train.contracts import RankInfo
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings
from tests.train.test_float8_engines import published_in_blocks

TP = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP = {"pipeline_model_parallel_size": 2}
EP = {"expert_model_parallel_size": 2}
LORA = {"lora_rank": 4, "lora_alpha": 8.0}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "tensor": ("mixture", TP),
    "stages": ("mixture", PP),
    "experts": ("mixture", EP),
    "replicas": ("dense", {}),
    "adapter": ("dense", TP | LORA),
    "adapter in stages": ("dense", PP | LORA),
    "blocks": ("blocks", TP | EP | {"expert_tensor_parallel_size": 1}),
    "fsdp": ("dense", {"train_backend": "fsdp"}),
    "fsdp of joined experts": ("joined", {"train_backend": "fsdp"}),
}
EVERYDAY = ("adapter in stages", "blocks", "fsdp of joined experts")


def with_joined_experts(folder: Path) -> None:
    """Make a mixture whose file has one tensor for all experts of a layer, as transformers has in memory."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(folder, "qwen3_moe"), dtype=torch.float32)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def read(handle: str) -> Tensor:
    """Return the bytes of a bucket, as an engine reads them."""
    found: Tensor = pickle.loads(base64.b64decode(handle))["flattened_tensor"].cpu().clone()
    return found


def shared(rank: int, root: str, names: list[str]) -> dict[str, list[str]]:
    """Compare on rank 0. Returns the tensors of each layout that differ on a rank, or were not sent."""
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    wrong: dict[str, list[str]] = {}
    told: list[Any]
    for name in names:
        folder, changes = LAYOUTS[name]
        with backend(settings(Path(root, folder), **changes), where=RankInfo(rank, 2, rank)) as made:
            made.train(make_batch(), 0)
            exported = made.engine_form.tensors(made.export_weights())
            expected = {tensor: value.cpu().clone() for tensor, value in exported}
            every = [spec for each in made.weight_specs().values() for spec in each]
            told = [every] if rank == 0 else [None]
            torch.distributed.broadcast_object_list(told)  # a run cuts the buckets once, by rank 0's sizes
            differs, cut = set(expected), buckets(told[0], 40_000)
            assert len(cut) > 3
            # An update that is interrupted leaves nothing to the next.
            made.share_weights(cut[0], first=True, readers=2)
            for i, bucket in enumerate(cut):
                handles = made.share_weights(bucket, first=i == 0, readers=2)
                assert len(set(handles)) == 2
                if rank == 0:
                    copies = [dict(views(read(handle), bucket)) for handle in handles]
                    differs -= {s.name for s in bucket if all(same(copy[s.name], expected[s.name]) for copy in copies)}
                torch.distributed.barrier()  # the next bucket reuses the memory of this one
            few = made.share_weights(cut[0], first=True, readers=1)
            assert [bool(handle) for handle in few] == [True, False], "what no engine opens is never freed"
            assert made.share_weights([], first=False, readers=0) == []
            wrong[name] = sorted(differs)
    return wrong


def same(one: Tensor, other: Tensor) -> bool:
    """Return true if shape, dtype and bits are equal."""
    alike = one.shape == other.shape and one.dtype == other.dtype
    return alike and torch.equal(*(tensor.contiguous().view(torch.uint8) for tensor in (one, other)))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_every_process_has_all_tensors(tmp_path: Path, every: bool) -> None:
    names = list(LAYOUTS if every else EVERYDAY)
    make_tiny_model(tmp_path / "dense")
    make_tiny_model(tmp_path / "mixture", "qwen3_moe")
    published_in_blocks(tmp_path / "blocks")
    with_joined_experts(tmp_path / "joined")
    assert run_ranks(shared, 2, str(tmp_path), names)[0] == {name: [] for name in names}
