"""`MegatronBackend`: the train backend on megatron.core, with gloo on the CPU and NCCL on GPUs."""

from __future__ import annotations

from pathlib import Path
from typing import cast

from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from agentrl.train.contracts import RankInfo
from agentrl.train.hf import HFFolder
from agentrl.train.megatron import device
from agentrl.train.megatron.folder import opened
from agentrl.train.megatron.layout import Layout
from agentrl.train.megatron.network import MegatronNetwork
from agentrl.train.trainer import TrainBackend


class MegatronBackend(TrainBackend):
    """One rank of megatron's trainer."""

    network = MegatronNetwork

    def join(self, where: RankInfo) -> Layout:
        device.prepare()
        return Layout.join(self.settings, where, self.device)

    def opened(self, folder: str | Path) -> HFFolder:
        return opened(Path(folder), self.settings.hf_checkpoint)

    def seed(self, seed: int) -> None:
        seed += 100 * cast(Layout, self.ranks).pp_rank
        super().seed(seed)
        model_parallel_cuda_manual_seed(seed)
