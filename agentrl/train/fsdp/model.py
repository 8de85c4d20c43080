"""Loading, sharding and sizes of a causal language model of transformers on this rank.

1. A single process without half precision or offload uses transformers' model unchanged. Otherwise FSDP2 shards each
   layer and the rest of the model. Rank 0 alone reads the weights, and the others receive their shards.
2. Weights that learn are stored in float32. If `bf16` is set, the model computes in bfloat16."""

import itertools
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor

from agentrl.errors import CheckpointError, TrainError, raised_as
from agentrl.lora import LoraShape, attach, start
from agentrl.modelfolder import STATEFUL, VISION, VISION_MODEL_TYPES
from agentrl.train.contracts import RankInfo
from agentrl.train.forward_backward import ModelContext
from agentrl.train.fsdp.attention import PACKED, register
from agentrl.train.hf import HFFolder
from agentrl.train.network import CostShape
from agentrl.train.ranks import Ranks, started
from agentrl.train.settings import TrainSettings

_ATTENTION = {"full_attention", "sliding_attention"}
_BY_PART = {"text_config": PACKED, "vision_config": "sdpa"}
"""The attention of a model that sees images: its vision tower is not causal and uses `sdpa`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh(Ranks):
    """A layout with data parallelism alone."""

    device: torch.device
    mesh: Any  # FSDP's device mesh: (shards,) or (copies, shards); None if nothing is sharded
    shard_group: dist.ProcessGroup  # the processes that have different shards

    @classmethod
    def join(cls, settings: TrainSettings, where: RankInfo, device: torch.device) -> Self:
        """Join the other trainer processes. Collective. Raises TrainError: the copies do not divide their number."""
        world, copies = where.world_size, settings.data_parallel_replicate_degree
        if world % copies:
            raise TrainError(f"{world} trainer processes cannot be divided by data_parallel_replicate_degree {copies}")
        groups, mesh = started(settings, where, device), None
        everyone = shard_group = dist.distributed_c10d._get_default_group()
        if world > 1 or settings.bf16 or settings.fsdp_cpu_offload:
            sizes = (copies, world // copies) if copies > 1 else (world,)
            mesh = init_device_mesh(device.type, sizes, mesh_dim_names=("copies", "shards")[-len(sizes) :])
            shard_group = mesh.get_group("shards")
        return cls(
            **groups,
            rank=where.rank,
            world=world,
            dp=world,
            dp_rank=where.rank,
            dp_cp_group=everyone,
            cp_group=everyone,
            device=device,
            mesh=mesh,
            shard_group=shard_group,
        )


def config_of(folder: HFFolder) -> Any:
    """Return transformers' config of a folder's model. Raises TrainError: the model cannot be trained with fsdp."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    what = f"{folder.path}: transformers makes no causal language model of it"
    with raised_as(TrainError, what, ValueError, KeyError, OSError, StrictDataclassError):
        config = type(AutoConfig.from_pretrained(folder.path, trust_remote_code=False)).from_dict(dict(folder.config))
        if config.get_text_config() is not config and config.model_type not in VISION_MODEL_TYPES:
            kind = type(config).__name__
            seen = ", ".join(sorted(VISION_MODEL_TYPES))
            raise TrainError(f"{folder.path} has parts for more than text ({kind}); fsdp trains {seen} and text models")
        cls = _class_of(config, values=False)
    known = config.get_text_config().model_type in STATEFUL
    other = sorted({*(getattr(config.get_text_config(), "layer_types", None) or ())} - _ATTENTION) if not known else []
    if not known and (other or cls._is_stateful or not cls._supports_attention_backend):
        what = f"layers of {', '.join(other)}" if other else f"no attention that can be replaced ({cls.__name__})"
        raise TrainError(f"{folder.path} cannot be trained with fsdp: samples are packed, and it has {what}")
    if getattr(config, "quantization_config", None):
        raise TrainError(f"{folder.path} is quantised; fsdp trains plain weights: start from a bfloat16 folder of it")
    return config


def _class_of(config: Any, *, values: bool) -> Any:
    """Return the class of transformers' model, with `values` without an LM head. Raises KeyError: no class exists."""
    from transformers import AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

    with_head = AutoModelForImageTextToText if config.model_type in VISION_MODEL_TYPES else AutoModelForCausalLM
    return (AutoModel if values else with_head)._model_mapping[type(config)]


def _attention(config: Any) -> Any:
    return _BY_PART if config.model_type in VISION_MODEL_TYPES else PACKED


def load(folder: HFFolder, place: ModelContext, *, values: bool, learns: bool) -> Any:
    """Load the model on this rank. Collective. Raises CheckpointError: weights are missing or do not fit the config."""
    from transformers.utils.logging import disable_progress_bar

    register()
    disable_progress_bar()
    config = config_of(folder)
    cls, half = _class_of(config, values=values), place.settings.bf16 and not learns
    form = {"attn_implementation": _attention(config), "dtype": torch.float32}

    def read(*, pre_process: bool, post_process: bool) -> Any:
        what = f"{folder.path}: its weights cannot be read"
        with raised_as(CheckpointError, what, OSError, RuntimeError, ValueError, shown=" ({})"):
            model, found = cls.from_pretrained(**folder.given(), **form, config=config, output_loading_info=True)
        if missing := sorted(found["missing_keys"]):
            raise CheckpointError(f"{folder.path}: its weights lack {missing[0]} and {len(missing) - 1} more")
        return Values(model, folder) if values else model

    mesh, settings = place.ranks.mesh, place.settings

    def made(build: Any) -> Any:
        model = place.hooks.model(build, pre_process=True, post_process=True).eval().requires_grad_(learns)
        if learns and place.lora is not None:
            _adapt(model, place.lora, settings)
        # Buffers keep their dtype: a router's bias would choose other experts if it were rounded.
        for parameter in model.parameters() if half or (settings.bf16 and place.lora is not None) else ():
            if half or not parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
        return model

    if mesh is None:
        model = made(read).to(place.device)
    else:
        model = made(lambda **_: without_weights(folder, values=values))
        offload = settings.fsdp_cpu_offload and learns
        _shard(model, mesh, half=bool(settings.bf16), offload=offload)
        whole = made(read) if place.ranks.rank == 0 else None
        _fill(model, whole, place.device, offload)
        found = [getattr(whole, "_weight_conversions", None)]
        dist.broadcast_object_list(found)  # only rank 0 has read the folder
        if found[0] is not None:
            model._weight_conversions = found[0]  # for transformers to restore the folder's names
    if settings.recompute_granularity and learns:
        (model.model if values else model).gradient_checkpointing_enable({"use_reentrant": False})
        for layer in _layers(model):
            layer.training = True  # recomputation needs training mode; modules in a layer keep dropout off
    return model


def without_weights(folder: HFFolder, *, values: bool) -> Any:
    """Return the model of `load` on the meta device."""
    register()
    config = config_of(folder)
    with torch.device("meta"):
        cls = _class_of(config, values=values)
        model = cls._from_config(config, attn_implementation=_attention(config), dtype=torch.float32)
        return Values(model, None) if values else model


def adapted(model: Any, lora: LoraShape, settings: TrainSettings) -> dict[str, torch.nn.Linear]:
    """Return the layers with adapters by name, the vision tower's only if it learns. Raises TrainError: none exists."""
    found = {n: m for n, m in lora.layers(model).items() if settings.train_vision or not n.startswith(VISION)}
    if not found:
        raise TrainError(
            f"--target-modules {' '.join(lora.targets)}: only the vision tower has them; set --train-vision"
        )
    return found


def _adapt(model: Any, lora: LoraShape, settings: TrainSettings) -> None:
    """Freeze the model and add adapters with PEFT's names to its layers; they are sharded like other parameters."""
    model.requires_grad_(False)
    model.adapters_on = True
    for name, layer in adapted(model, lora, settings).items():
        like: dict[str, Any] = {"bias": False, "device": layer.weight.device, "dtype": layer.weight.dtype}
        a = torch.nn.Linear(layer.in_features, lora.rank, **like)
        b = torch.nn.Linear(lora.rank, layer.out_features, **like)
        with torch.no_grad():
            a.weight.copy_(start(name, lora.rank, layer.in_features, settings.seed))
        torch.nn.init.zeros_(b.weight)
        layer.lora_A, layer.lora_B = a, b
        attach(layer, a, b, lora.scale, lambda: bool(model.adapters_on))


def _layers(model: Any) -> list[torch.nn.Module]:
    names = set(getattr(model, "_no_split_modules", None) or model.model._no_split_modules)
    return [module for module in model.modules() if type(module).__name__ in names]


def _shard(model: Any, mesh: Any, *, half: bool, offload: bool) -> None:
    precision = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if half else MixedPrecisionPolicy()
    policy = CPUOffloadPolicy(pin_memory=torch.cuda.is_available()) if offload else OffloadPolicy()
    for module in (*_layers(model), model):
        fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)  # a loss is a sum over all ranks
            module.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def _fill(model: Any, whole: Any | None, device: torch.device, offload: bool) -> None:
    """Copy to each rank its shards of the model `whole` that rank 0 has read, and all buffers."""
    model.to_empty(device="cpu" if offload else device)
    for module in model.modules():  # FSDP moves parameters to the device, but not buffers
        held = ((name, buffer) for name, buffer in module._buffers.items() if buffer is not None)
        module._buffers |= {name: torch.empty_like(buffer, device=device) for name, buffer in held}
    weights = dict(whole.named_parameters()) if whole else {}
    for name, parameter in model.named_parameters():
        full = weights[name].detach() if whole else torch.empty(parameter.shape, dtype=parameter.dtype)
        shard = distribute_tensor(full.to(device), parameter.device_mesh, parameter.placements)
        parameter.to_local().copy_(shard.to_local())
    buffers = dict(whole.named_buffers()) if whole else {}
    for name, buffer in model.named_buffers():
        found = buffers[name].to(device) if whole else torch.empty_like(buffer, device=device)
        dist.broadcast(found, 0)
        buffer.copy_(found)


class Values(torch.nn.Module):
    """A model without its LM head, and a linear layer to one number, which computes in float32."""

    def __init__(self, model: Any, folder: HFFolder | None) -> None:
        super().__init__()
        self.model, self.score = model, torch.nn.Linear(model.config.get_text_config().hidden_size, 1, bias=False)
        torch.nn.init.zeros_(self.score.weight)
        if folder and "score.weight" in folder.files:
            stored, shape = folder.tensor("score.weight"), self.score.weight.shape
            if stored.shape != shape:
                said = f"expected one score, a tensor {tuple(shape)}, got {tuple(stored.shape)}"
                raise CheckpointError(f"{folder.path}: score.weight: {said}")
            self.score.weight.data.copy_(stored)

    def forward(self, *, logits_to_keep: Tensor, **inputs: Any) -> Any:
        """Return the output of a causal language model, with values [1, n, 1] as `logits`."""
        from transformers.modeling_outputs import CausalLMOutput

        hidden = self.model(**inputs).last_hidden_state[:, logits_to_keep]
        return CausalLMOutput(logits=F.linear(hidden.float(), self.score.weight.float()))


def shape_of(model: Any) -> CostShape:
    """Return the sizes of a transformers model without its vision tower."""
    body = getattr(model, "model", model)
    unused = body.get_input_embeddings().weight if not body.config.tie_word_embeddings else None
    config, matrices = body.config.get_text_config(), 0
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1 and parameter is not unused and not name.startswith(VISION):
            met = parameter.dim() == 3 and getattr(config, "num_experts_per_tok", 0) / parameter.size(0)
            matrices += int(parameter.numel() * (met or 1))
    kinds, channels = getattr(config, "layer_types", None) or itertools.repeat("full_attention"), 0
    for layer, kind in zip(config.per_layer_config, kinds, strict=False):  # heads may differ by layer
        if kind in _ATTENTION:
            dim = getattr(layer, "head_dim", None) or layer.hidden_size // layer.num_attention_heads
            channels += 2 * layer.num_attention_heads * dim
    return CostShape(config.vocab_size, matrices, channels)
