"""Checkpoints by torch.distributed.checkpoint, which loads into other shards than it has saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl.train.network import Store
from agentrl.train.ranks import Ranks


class FsdpStore(Store):
    """States are tensors by name; they are loaded in place."""

    def save(self, state: dict[str, Any], folder: Path) -> None:
        save(state, checkpoint_id=str(folder))

    def load(self, state: dict[str, Any], folder: Path) -> dict[str, Any]:
        load(state, checkpoint_id=str(folder))
        return state

    def random(self, ranks: Ranks) -> dict[str, Any]:
        found = {f"cpu_{ranks.rank}": torch.get_rng_state()}
        if torch.cuda.is_available():
            found[f"cuda_{ranks.rank}"] = torch.cuda.get_rng_state()
        return found

    def restore_random(self, loaded: dict[str, Any]) -> None:
        for name, state in loaded.items():
            (torch.set_rng_state if name.startswith("cpu") else torch.cuda.set_rng_state)(state)
