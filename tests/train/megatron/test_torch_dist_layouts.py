"""Checkpoints that two megatron processes wrote convert back to the original folder, in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.run.training import free_port
from agentrl.train.contracts import RankInfo
from agentrl.train.megatron.folder import opened
from tests.support.distributed import run_ranks
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import backend, settings

LAYOUTS: dict[str, tuple[Arch, dict[str, Any]]] = {
    "tp2": ("qwen2", {"tensor_model_parallel_size": 2}),
    "pp2": ("qwen3", {"pipeline_model_parallel_size": 2}),
    "ep2": ("qwen3_moe", {"expert_model_parallel_size": 2}),
    "tp2_mixture": ("deepseek_v3", {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def saved(rank: int, folder: str, ports: list[int]) -> None:
    for port, (name, (_, layout)) in zip(ports, LAYOUTS.items(), strict=True):
        where = RankInfo(rank=rank, world_size=2, local_rank=rank, master_port=port)
        with backend(settings(Path(folder) / name, **layout), where=where) as made:
            made.save(f"{folder}/{name}_stored", 0)


def test_the_layout_that_wrote_it_is_not_seen(tmp_path: Path) -> None:
    sources = {name: make_tiny_model(tmp_path / name, arch) for name, (arch, _) in LAYOUTS.items()}
    run_ranks(saved, 2, str(tmp_path), [free_port() for _ in LAYOUTS])
    for name, source in sources.items():
        stored, want = opened(tmp_path / f"{name}_stored", source), opened(source, None)
        assert set(stored.files) == set(want.files) - {"lm_head.weight"}
        assert all(torch.equal(stored.tensor(key), want.tensor(key)) for key in stored.files), name
