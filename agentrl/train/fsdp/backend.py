"""`FsdpBackend`: the train backend on FSDP2, for any causal language model of transformers."""

from __future__ import annotations

from pathlib import Path

from agentrl.train.checkpoints import torch_dist
from agentrl.train.contracts import RankInfo
from agentrl.train.fsdp.mesh import Mesh
from agentrl.train.fsdp.network import FsdpNetwork
from agentrl.train.hf import HFFolder
from agentrl.train.trainer import TrainBackend


class FsdpBackend(TrainBackend):
    """One rank of FSDP's trainer."""

    network = FsdpNetwork

    def opened(self, folder: str | Path) -> HFFolder:
        if torch_dist(folder) is None:
            return HFFolder(folder)
        from agentrl.train.megatron.folder import opened  # the names in such a checkpoint are Megatron's

        return opened(Path(folder), self.settings.hf_checkpoint)

    def join(self, where: RankInfo) -> Mesh:
        return Mesh.join(self.settings, where, self.device)
