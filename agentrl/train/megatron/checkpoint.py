"""Checkpoints through megatron's `dist_checkpointing`, in its fully reshardable form."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl.train.megatron.layout import Layout
from agentrl.train.network import Store


class MegatronStore(Store):
    """Sharded states as megatron's."""

    def save(self, state: dict[str, Any], folder: Path) -> None:
        dist_checkpointing.save(state, str(folder), _InProcess("torch_dist", 1))

    def load(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
        return loaded

    def random(self, ranks: Layout) -> Any:
        state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return ShardedObject("rng", state, (ranks.world,), (ranks.rank,), replica_id=0)

    def restore_random(self, loaded: dict[str, Any]) -> None:
        torch.set_rng_state(loaded["torch"])
        if "cuda" in loaded and torch.cuda.is_available():
            torch.cuda.set_rng_state(loaded["cuda"])
        get_cuda_rng_tracker().set_states(loaded["tracker"])


class _InProcess(torch_dist.TorchDistSaveShardedStrategy):
    """Megatron's format by torch's writer. Megatron's own starts a manager process and forks a writer on every save: seconds
    of overhead, and re-import of the main module, for nothing when the caller waits anyway.
    """

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        state, *_ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        planner = torch_dist.MCoreSavePlanner(flatten_state_dict=False)
        save(torch_dist.mcore_to_pyt_state_dict(state, False), checkpoint_id=checkpoint_dir, planner=planner)
