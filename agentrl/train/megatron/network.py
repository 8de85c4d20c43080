"""`MegatronNetwork`: the `Network` of a megatron model, by its family's table."""

import dataclasses
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as torch_dist
from megatron.core.tensor_parallel import get_cuda_rng_tracker
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.utils import unwrap_model
from torch import Tensor
from torch.distributed.checkpoint.state_dict_saver import save

from agentrl.engine.weights import TensorSpec
from agentrl.lora import merged, off
from agentrl.train.contracts import RankInfo
from agentrl.train.forward_backward import ModelContext, lora_of
from agentrl.train.hf import HFFolder
from agentrl.train.megatron import device
from agentrl.train.megatron.adapters import Adapter, adapt, linear_layers
from agentrl.train.megatron.attention import Rope
from agentrl.train.megatron.families import family_of, shape_of
from agentrl.train.megatron.folder import opened
from agentrl.train.megatron.forward_backward import MegatronForwardBackward
from agentrl.train.megatron.layout import ParallelLayout
from agentrl.train.megatron.model import build_model, keep_gradients_flowing, replaying, transformer_config
from agentrl.train.megatron.optimizer import MegatronOptimizer, data_parallel, sharding
from agentrl.train.megatron.weights import WeightMap, stored, unrolled
from agentrl.train.microbatches import Packer
from agentrl.train.network import ELSEWHERE, CostShape, Network, frozen, learning
from agentrl.train.saving import WriteFiles
from agentrl.train.settings import TrainSettings
from agentrl.train.trainer import TrainBackend


class _InProcess(torch_dist.TorchDistSaveShardedStrategy):
    """A save strategy for megatron's format with torch's writer, see `Network.write`. Megatron's own writer starts a
    manager process and forks on every save, which takes seconds."""

    files: WriteFiles

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        super().__init__("torch_dist", 1)
        self._group = group

    def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
        state, *_ = torch_dist._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        if self._group is not None:
            for shard in itertools.chain.from_iterable(state.values()):
                if isinstance(shard, ShardedTensor):
                    shard.data = shard.data.detach().to("cpu", copy=True)
        planner = torch_dist.MCoreSavePlanner(flatten_state_dict=False)
        stored = torch_dist.mcore_to_pyt_state_dict(state, False)
        self.files = partial(save, stored, checkpoint_id=checkpoint_dir, planner=planner, process_group=self._group)


class MegatronNetwork(Network):
    """A `GPTModel`, its weight map and its passes."""

    def __init__(self, folder: HFFolder, place: ModelContext, *, values: bool, learns: bool) -> None:
        self.place, shape = place, shape_of(folder.config)
        shape = dataclasses.replace(shape, tied=False) if values else shape
        self.sizes = dataclasses.asdict(shape)
        family, layout = family_of(folder.config), place.ranks
        self.config = transformer_config(shape, family, place.settings, place.device)
        model = build_model(self.config, shape, family, place, values=values)
        self.weights = WeightMap(family, shape, layout, place.settings, model, values=values)
        self.weights.load(model, folder)
        self.shape = CostShape(shape.vocab, self.weights.matrices, shape.channels)
        rope = Rope.of(folder.config)
        self.reach = rope.reach
        if replays := learns and not values:
            replaying(unwrap_model(model))
        self.adapters: dict[str, Adapter] = {}
        self.model = self._learning(model) if learns else model.requires_grad_(False)
        self.forward_backward = MegatronForwardBackward(
            model=self.model,
            place=place,
            config=self.config,
            packer=Packer(layout, place.device, layout.tp if place.settings.sequence_parallel else 1, routed=replays),
            layout=layout,
            rope=rope,
            mixture=(m.layers, m.experts, m.topk) if (m := shape.mixture) else ((), 0, 0),
            vocab=shape.vocab,
            vocab_group=layout.tp_group,
        )

    def _learning(self, model: torch.nn.Module) -> torch.nn.Module:
        if lora := self.place.lora:
            self.adapters = adapt(model, self.weights, lora, self.place.settings.seed)
        elif frozen(self.place.settings):
            learning = self.weights.learning(self.place.settings)
            for name, parameter in unwrap_model(model).named_parameters():
                parameter.requires_grad_(name in learning)
        keep_gradients_flowing(model)
        return data_parallel(model, self.config, self.place.settings)

    @staticmethod
    def sizes_of(folder: HFFolder) -> Mapping[str, Any]:
        family_of(folder.config)
        return dataclasses.asdict(shape_of(folder.config))

    @classmethod
    def check_model(cls, folder: HFFolder, settings: TrainSettings, *, values: bool) -> None:
        family, shape = family_of(folder.config), shape_of(folder.config)
        transformer_config(shape, family, settings, torch.device("cpu"))
        Rope.of(folder.config)
        entries = list(unrolled(family, shape, values=values))
        if lora := lora_of(settings):
            lora.chosen(linear_layers(entries))
        elif frozen(settings):
            learning(settings, [entry.called for entry in entries])

    def optimizer(self, total_steps: int | None) -> MegatronOptimizer:
        return MegatronOptimizer(self.model, self.place.settings, self.place.ranks, total_steps)

    def zero_grad(self) -> None:
        self.model.zero_grad_buffer()

    def parameters(self) -> dict[str, Any]:
        return stored(self.model)

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        model = unwrap_model(self.model)
        gradients = [p.main_grad for p in model.parameters() if p.requires_grad]
        return [*model.parameters(), *model.buffers()], gradients

    def specs(self) -> Mapping[int, list[TensorSpec]]:
        return self.weights.specs()

    def export(self, *, by_stage: bool = False, in_step: bool = False) -> Iterator[tuple[str, Tensor]]:
        adapter, scale = self.adapter(), self.place.lora.scale if self.place.lora else 1.0
        for name, tensor in self.weights.export(self.parameters(), by_stage=by_stage, in_step=in_step):
            yield name, tensor if tensor is ELSEWHERE else merged(name, tensor, adapter, scale)

    def unadapted(self) -> AbstractContextManager[None]:
        return off(unwrap_model(self.model))

    def adapter(self) -> dict[str, Tensor]:
        whole = (adapter.whole(layer) for layer, adapter in self.adapters.items())
        return self.place.ranks.from_stages({name: tensor for tensors in whole for name, tensor in tensors.items()})

    def state(self, prefix: str = "") -> dict[str, Any]:
        if self.adapters:  # the adapter alone: the weights are those of the folder
            return {key: t for name, own in self.adapters.items() for key, t in own.sharded(prefix + name).items()}
        metadata = sharding(self.place.settings, self.place.ranks)
        state: dict[str, Any] = unwrap_model(self.model).sharded_state_dict(prefix=prefix, metadata=metadata)
        return state

    def take(self, state: dict[str, Any], prefix: str = "") -> None:
        if self.adapters:
            for name, adapter in self.adapters.items():
                adapter.take(prefix + name, state)
            return
        weights = {name.removeprefix(prefix): value for name, value in state.items()}
        unwrap_model(self.model).load_state_dict(weights, strict=True)

    @staticmethod
    def write(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> WriteFiles:
        strategy = _InProcess(group)
        dist_checkpointing.save(state, str(folder), strategy)
        return strategy.files

    @staticmethod
    def read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
        loaded: dict[str, Any] = dist_checkpointing.load(state, str(folder))
        return loaded

    def random(self) -> Any:
        state = {"torch": torch.get_rng_state(), "tracker": get_cuda_rng_tracker().get_states()}
        if torch.cuda.is_available():
            state["cuda"] = torch.cuda.get_rng_state()
        return ShardedObject("rng", state, (self.place.ranks.world,), (self.place.ranks.rank,), replica_id=0)

    @staticmethod
    def restore_random(loaded: dict[str, Any]) -> None:
        torch.set_rng_state(loaded["torch"])
        if "cuda" in loaded and torch.cuda.is_available():
            torch.cuda.set_rng_state(loaded["cuda"])
        get_cuda_rng_tracker().set_states(loaded["tracker"])


class MegatronBackend(TrainBackend):
    """One rank of megatron's trainer."""

    network = MegatronNetwork

    def join(self, where: RankInfo) -> ParallelLayout:
        device.prepare()
        return ParallelLayout.join(self.settings, where, self.device)

    def opened(self, folder: str | Path) -> HFFolder:
        return opened(Path(folder), self.settings.hf_checkpoint)

    def seed(self, seed: int) -> None:
        seed += 100 * cast(ParallelLayout, self.ranks).pp_rank
        super().seed(seed)
        model_parallel_cuda_manual_seed(seed)

    def close(self) -> None:
        # A mixture's dispatcher keeps the last probabilities. Their autograd graph and the model form a cycle that
        # Python's collector does not see, so neither would ever be freed.
        for slot in self._models():
            for module in cast(MegatronNetwork, slot.network).model.modules():
                if (dispatcher := vars(module).get("token_dispatcher")) is not None:
                    dispatcher.probs = None
        super().close()
