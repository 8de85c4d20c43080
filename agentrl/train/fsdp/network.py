"""`FsdpNetwork`: the `Network` of a transformers model."""

import itertools
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load as load_in_place
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.fsdp import FSDPModule

from agentrl.engine.weights import TensorSpec
from agentrl.errors import TrainError
from agentrl.lora import merged, off
from agentrl.modelfolder import STATEFUL, VISION, VISION_MODEL_TYPES
from agentrl.numerics.vision import Vision
from agentrl.train.batch import TrainBatch
from agentrl.train.checkpoints import torch_dist
from agentrl.train.contracts import RankInfo
from agentrl.train.forward_backward import ForwardBackward, ModelContext, OnOutput, lora_of
from agentrl.train.fsdp.attention import FsdpPack, by_sequence, replaying
from agentrl.train.fsdp.model import Mesh, adapted, config_of, load, shape_of, without_weights
from agentrl.train.fsdp.vision import ImagePreprocessor
from agentrl.train.hf import HFFolder
from agentrl.train.microbatches import OutputPositions, Packer
from agentrl.train.network import Network, frozen, idle, learning, rope_max_length
from agentrl.train.optimizer import Optimizer, decay_groups
from agentrl.train.packing import PackingPlan
from agentrl.train.routing import routing_of
from agentrl.train.saving import WriteFiles
from agentrl.train.settings import TrainSettings
from agentrl.train.trainer import TrainBackend

_SIZE = re.compile(r"(_size|_layers|_heads|_dim|_experts|_rank)$")  # config keys with an architecture's sizes
_LAYER = re.compile(r".*?\.\d+\.")  # the prefix that the parameters of a layer share


@dataclass(slots=True, kw_only=True)
class FsdpForwardBackward(ForwardBackward):
    """Passes over one microbatch at a time; FSDP gathers and reduces within the model."""

    def run(
        self, batch: TrainBatch, plan: PackingPlan, rows: OutputPositions, on_output: OnOutput, *, learns: bool
    ) -> list[Any]:
        found = []
        for mb in self.packer.microbatches(batch, plan, rows):
            inputs = {"input_ids": mb.tokens, "position_ids": mb.positions, "use_cache": False}
            inputs["pack"] = FsdpPack(mb, None if mb.routing is None else routing_of(mb.routing, *self.mixture))
            with self.batch_invariant():
                out = self.model(**inputs, logits_to_keep=mb.rows).logits[0]
            result = on_output(out, mb)
            if learns:
                loss, result = result
                if loss.requires_grad:  # false without images if only the vision tower learns
                    loss.backward()
            found.append(result)
        return found


def local(tensor: Any) -> Any:
    """Return this rank's shard of a sharded tensor; any other tensor is returned unchanged."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


class FsdpOptimizer(Optimizer):
    """Torch's AdamW, in float32; vectors do not decay."""

    inner: torch.optim.AdamW

    def __init__(
        self, parameters: Mapping[str, Any], settings: TrainSettings, ranks: Mesh, total_steps: int | None
    ) -> None:
        super().__init__(settings, total_steps)
        if settings.optimizer != "adam":
            raise TrainError(f"optimizer {settings.optimizer}: fsdp has AdamW; --train-backend megatron has both")
        self.ranks, self.learning = ranks, {name: p for name, p in parameters.items() if p.requires_grad}
        groups, betas = decay_groups(self.learning.values()), (settings.adam_beta1, settings.adam_beta2)
        self.inner = torch.optim.AdamW(groups, lr=settings.lr, betas=betas, eps=settings.adam_eps, fused=True)
        self.parts = [self.inner]

    def norm(self) -> float:
        norms = torch._foreach_norm(found) if (found := self._gradients()) else (torch.zeros(()),)
        squares = torch.stack(norms).double().square().sum().to(self.ranks.device)
        dist.all_reduce(squares, group=self.ranks.shard_group)
        return float(squares.sqrt())

    def apply(self, norm: float) -> None:
        most = self.settings.clip_grad
        if 0 < most < norm:
            torch._foreach_mul_(self._gradients(), most / (norm + 1e-6))
        self.inner.step()

    def _gradients(self) -> list[Tensor]:
        return [local(p.grad) for p in self.learning.values() if p.grad is not None]

    def memory(self) -> list[Tensor]:
        return [local(tensor) for tensor in super().memory()]

    def state(self, weights: dict[str, Any], *, is_loading: bool, reshardable: bool) -> dict[str, Any]:
        for p in self.learning.values():
            if is_loading or not self.inner.state[p]:  # vision weights have no state before the first image
                zeros = {name: torch.zeros_like(p.detach()) for name in ("exp_avg", "exp_avg_sq")}
                self.inner.state[p] = {"step": torch.zeros((), device=p.device), **zeros}
        return {f"{name}.{key}": v for name, p in self.learning.items() for key, v in self.inner.state[p].items()}

    def take(self, state: dict[str, Any] | None) -> None:
        if state is None:
            self.inner.state.clear()


class FsdpNetwork(Network):
    """A model, whole or sharded, and its passes."""

    def __init__(self, folder: HFFolder, place: ModelContext, *, values: bool, learns: bool) -> None:
        self.place, self.sizes = place, self.sizes_of(folder)
        self.reach = rope_max_length(config_of(folder).get_text_config())
        self.model = load(folder, place, values=values, learns=learns)
        by_sequence(self.model)
        self.shape = shape_of(self.model)
        if learns and place.lora is None:
            _freeze(self.model, place.settings)
        sight = ImagePreprocessor.of(folder, self.model)
        self.forward_backward = FsdpForwardBackward(
            model=self.model,
            place=place,
            packer=Packer(place.ranks, place.device, routed=learns and not values, see=sight.see if sight else None),
            mixture=replaying(self.model) if learns and not values else ([], 0, 0),
            vocab=self.shape.vocab,
        )

    @staticmethod
    def sizes_of(folder: HFFolder) -> Mapping[str, Any]:
        config = config_of(folder)
        parts = {"": config.get_text_config(), "vision_": getattr(config, "vision_config", None)}
        found = {prefix + name: n for prefix, part in parts.items() if part for name, n in part.to_dict().items()}
        sizes = {name: n for name, n in found.items() if isinstance(n, int) and _SIZE.search(name)}
        return {"train_backend": "fsdp", "model_type": config.model_type, **sizes}

    @classmethod
    def check_model(cls, folder: HFFolder, settings: TrainSettings, *, values: bool) -> None:
        kind = cls.sizes_of(folder)["model_type"]
        if settings.true_on_policy_mode and kind in STATEFUL:
            raise TrainError(
                f"--true-on-policy-mode: {kind} has layers with a state. The engine computes the state in other steps than the "
                "trainer, so log-probs are not equal to the bit; leave the flag out"
            )
        if settings.true_on_policy_mode and kind in VISION_MODEL_TYPES:
            raise TrainError(
                f"--true-on-policy-mode: {kind} sees images, and their features are not equal to the bit; leave it out"
            )
        if settings.train_vision and kind not in VISION_MODEL_TYPES:
            raise TrainError(f"--train-vision: {folder.path} is a {kind}, of which no weights for images are trained")
        Vision.load(folder.path)
        model = without_weights(folder, values=values)
        shape_of(model)
        if lora := lora_of(settings):
            adapted(model, lora, settings)
        else:
            _freeze(model, settings)

    def optimizer(self, total_steps: int | None) -> FsdpOptimizer:
        return FsdpOptimizer(self.parameters(), self.place.settings, self.place.ranks, total_steps)

    def zero_grad(self) -> None:
        self.model.zero_grad()

    def forget(self) -> None:
        self.zero_grad()  # clears gathered parameters, which the reset does not
        if isinstance(self.model, FSDPModule):
            if not hasattr(self.model, "reset_iter_state"):
                what = f"memory ran out, and torch {torch.__version__} cannot begin a sharded step again"
                raise TrainError(f"{what}: lower --max-tokens-per-gpu or --micro-batch-size, or use torch 2.13")
            self.model.reset_iter_state()

    def parameters(self) -> dict[str, Any]:
        found = {id(tensor): (name, tensor) for name, tensor in reversed(self.model.state_dict(keep_vars=True).items())}
        return dict(reversed(found.values()))  # a tied tensor appears once, by its first name

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        self.zero_grad()
        return [local(tensor) for tensor in (*self.model.parameters(), *self.model.buffers())], []

    def specs(self) -> Mapping[int, list[TensorSpec]]:
        with torch.device("meta"):
            kinds = ((name, torch.empty(p.shape, dtype=self._dtype(p))) for name, p in self._base())
            found = self._renamed(kinds)
            return {0: [TensorSpec(name, str(t.dtype).removeprefix("torch."), list(t.shape)) for name, t in found]}

    @torch.no_grad()
    def export(self, *, by_stage: bool = False, in_step: bool = False) -> Iterator[tuple[str, Tensor]]:
        adapter, scale = self.adapter(), self.place.lora.scale if self.place.lora else 1.0
        whole = ((n, merged(n, self._whole(p), adapter, scale).to(self._dtype(p))) for n, p in self._base())
        for name, tensor in self._renamed(whole):
            if in_step or self.place.ranks.rank == 0:
                yield name, tensor

    def _base(self) -> list[tuple[str, Any]]:
        """Return the parameters of the model without adapters, and without a frozen vision tower."""
        adapter, sees = _adapter_of(parameters := self.parameters()), self.place.settings.train_vision
        kept = {name: p for name, p in parameters.items() if sees or not name.startswith(VISION)}
        return [(name, parameter) for name, parameter in kept.items() if name not in adapter]

    def unadapted(self) -> AbstractContextManager[None]:
        return off(self.model)

    @torch.no_grad()
    def adapter(self) -> dict[str, Tensor]:
        return {name: self._whole(p).to(self._dtype(p)) for name, p in _adapter_of(self.parameters()).items()}

    def _whole(self, parameter: Any) -> Tensor:
        """Return the full tensor of a parameter, on the device, because NCCL needs it there. Collective."""
        tensor = parameter.detach()
        return tensor.to(self.place.device).full_tensor() if hasattr(tensor, "full_tensor") else tensor

    def _dtype(self, tensor: Tensor) -> torch.dtype:
        half = self.place.settings.bf16 and isinstance(tensor, torch.nn.Parameter)
        return torch.bfloat16 if half else tensor.dtype

    def _renamed(self, named: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield tensors layer by layer with the folder's names and shapes: transformers may join experts on loading."""
        from transformers.core_model_loading import revert_weight_conversion

        for _, items in itertools.groupby(named, lambda item: (_LAYER.match(item[0]) or item)[0]):
            yield from revert_weight_conversion(self.model, dict(items)).items()

    def state(self, prefix: str = "") -> dict[str, Any]:
        parameters = self.parameters()  # with an adapter, the adapter alone: the weights are those of the folder
        return {prefix + name: p.detach() for name, p in (_adapter_of(parameters) or parameters).items()}

    def take(self, state: dict[str, Any], prefix: str = "") -> None:
        """Do nothing: `read` has loaded in place, also if the shards differ from the saved ones."""

    @staticmethod
    def write(state: dict[str, Any], folder: Path, group: dist.ProcessGroup | None) -> WriteFiles:
        if group is not None:
            stager = DefaultStager(StagingOptions(False, False, False, False))
            state = cast(dict[str, Any], stager.stage(state))
            stager.close()
        return partial(save, state, checkpoint_id=str(folder), process_group=group)

    @staticmethod
    def read(state: dict[str, Any], folder: Path) -> dict[str, Any]:
        if "rng" in state:  # a checkpoint written without a GPU has no CUDA state
            there = FileSystemReader(folder).read_metadata().state_dict_metadata
            state["rng"] = {name: value for name, value in state["rng"].items() if f"rng.{name}" in there}
        load_in_place(state, checkpoint_id=str(folder))
        return state

    def random(self) -> dict[str, Any]:
        found = {f"cpu_{self.place.ranks.rank}": torch.get_rng_state()}
        if torch.cuda.is_available():
            found[f"cuda_{self.place.ranks.rank}"] = torch.cuda.get_rng_state()
        return found

    @staticmethod
    def restore_random(loaded: dict[str, Any]) -> None:
        for name, state in loaded.items():
            (torch.set_rng_state if name.startswith("cpu") else torch.cuda.set_rng_state)(state)


def _freeze(model: Any, settings: TrainSettings) -> None:
    """Freeze the parameters that the settings exclude, and the vision tower unless `train_vision` is set."""
    parameters = dict(model.named_parameters())
    chosen = learning(settings, [(name,) for name in parameters]) if frozen(settings) else [True] * len(parameters)
    for (name, parameter), one in zip(parameters.items(), chosen, strict=True):
        parameter.requires_grad_(one and (settings.train_vision or not name.startswith(VISION)))
    if not any(parameter.requires_grad for parameter in parameters.values()):
        raise idle(settings, "the model")


def _adapter_of(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: parameter for name, parameter in parameters.items() if ".lora_" in name}


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
