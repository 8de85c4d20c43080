"""A `GPTModel` from a Hugging Face config, for this process's place in the layout. Fusions of Transformer Engine and
Apex are off, megatron's default. Prompts need no logits: the output layer runs only on
`picked_rows`, int64 positions in this rank's packed tokens."""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.mappings import gather_from_sequence_parallel_region
from megatron.core.transformer.module import Float16Module
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.utils import unwrap_model
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.train.forward_backward import ModelContext
from agentrl.train.megatron.attention import LatentAttention, PackedAttention
from agentrl.train.megatron.experts import SPEC as GROUPED_EXPERTS
from agentrl.train.megatron.families import Mixture, ModelFamily, ModelShape
from agentrl.train.megatron.layout import ParallelLayout, alike
from agentrl.train.routing import Replay
from agentrl.train.settings import TrainSettings


def transformer_config(shape: ModelShape, family: ModelFamily, settings: TrainSettings, device: torch.device) -> Any:
    """Return megatron's config for a model's sizes and the settings. Raises TrainError: the layout does not fit."""
    _check_cuts(shape, settings)
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    return (MLATransformerConfig if shape.latent else TransformerConfig)(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.ffn,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head_dim,
        normalization="RMSNorm",
        layernorm_epsilon=shape.norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=family.has("linear_qkv.bias"),
        # The norms of latents have whole gradients on every rank, and megatron would add them up:
        qk_layernorm=family.has("q_layernorm.weight") and not shape.latent,
        rotary_interleaved=family.interleaved and not shape.latent,  # `LatentAttention` always interleaves
        hidden_dropout=0.0,
        attention_dropout=0.0,
        variable_seq_lengths=settings.pipeline_model_parallel_size > 1,
        num_layers_in_first_pipeline_stage=settings.decoder_first_pipeline_num_layers,
        num_layers_in_last_pipeline_stage=settings.decoder_last_pipeline_num_layers,
        moe_token_dispatcher_type="alltoall",  # it accepts packs of any length
        params_dtype=dtype,
        pipeline_dtype=dtype,
        calculate_per_token_loss=True,
        use_cpu_initialization=device.type == "cpu",
        # The values are loaded later. But initialization also marks parameters as tensor-parallel, and the gradient
        # norm needs these marks to count each parameter once.
        perform_initialization=True,
        **alike(settings, TransformerConfig) | _of_latent(shape) | _of_experts(shape.mixture, family, settings),
    )


def _of_latent(shape: ModelShape) -> dict[str, Any]:
    if not (z := shape.latent):
        return {}
    return {
        "q_lora_rank": z.query_rank,
        "kv_lora_rank": z.rank,
        "qk_head_dim": shape.head_dim - z.rotated,
        "qk_pos_emb_head_dim": z.rotated,
        "v_head_dim": z.value,
        "rope_type": "rope",  # made but not used. The next two set YaRN's factor of the scores:
        "rotary_scaling_factor": shape.rope_scaling.get("factor") or 1.0,
        "mscale_all_dim": shape.rope_scaling.get("mscale_all_dim") or 0.0,
    }


def _of_experts(mixture: Mixture | None, family: ModelFamily, settings: TrainSettings) -> dict[str, Any]:
    """Return settings for a mixture: the router uses float32, drops no token, balances no load and fixes its bias."""
    if mixture is None:
        return {}
    sigmoid = family.has("router.expert_bias")
    limited = {"moe_router_num_groups": mixture.groups, "moe_router_group_topk": mixture.group_topk}
    return {
        "num_moe_experts": mixture.experts,
        "moe_ffn_hidden_size": mixture.ffn,
        "moe_layer_freq": mixture.layers,
        "moe_shared_expert_intermediate_size": mixture.shared_ffn or None,
        "moe_shared_expert_gate": family.has("shared_experts.gate_weight"),
        "moe_grouped_gemm": False,  # megatron's version needs CUDA packages; see `GroupedExperts`
        "moe_router_topk": mixture.topk,
        "moe_router_score_function": "sigmoid" if sigmoid else "softmax",
        "moe_router_pre_softmax": not sigmoid and not mixture.normalised,
        "moe_router_topk_scaling_factor": mixture.scaling,
        "moe_router_enable_expert_bias": sigmoid,
        "moe_router_bias_update_rate": 0.0,
        "moe_router_dtype": "fp32",
        "moe_router_load_balancing_type": "none",
        "expert_tensor_parallel_size": settings.expert_tensor_parallel,
        **(limited if mixture.groups > 1 else {}),
    }


def _check_cuts(shape: ModelShape, settings: TrainSettings) -> None:
    tp, pp = settings.tensor_model_parallel_size, settings.pipeline_model_parallel_size
    ep, etp = settings.expert_model_parallel_size, settings.expert_tensor_parallel
    latent, mixture = shape.latent, shape.mixture
    over_tp = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.groups,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ffn,
        "q_lora_rank": (latent and latent.query_rank) or 0,
        "kv_lora_rank + qk_rope_head_dim": latent.rank + latent.rotated if latent else 0,
        "width of a shared expert": mixture.shared_ffn if mixture else 0,
    }
    cuts = [("tensor_model_parallel_size", tp, what, size) for what, size in over_tp.items()]
    if mixture:
        cuts.append(("expert_model_parallel_size", ep, "number of experts", mixture.experts))
        cuts.append(("expert_tensor_parallel_size", etp, "width of an expert", mixture.ffn))
        if settings.moe_grouped_gemm:  # torch's kernels read 16 bytes at a time
            of = 8 if settings.bf16 else 4
            cuts += [("moe_grouped_gemm: numbers in 16 bytes,", of, "hidden_size", shape.hidden)]
            cuts += [("moe_grouped_gemm: numbers in 16 bytes,", of * etp, "width of an expert", mixture.ffn)]
    stages = settings.stage_sizes(shape.layers)
    for name, by, what, size in cuts:
        if size % by:
            raise TrainError(f"{name} {by} must divide the model's {what} {size}")
    if mixture is None:
        for name, used in (("expert_model_parallel_size", ep > 1), ("moe_grouped_gemm", settings.moe_grouped_gemm)):
            if used:
                raise TrainError(f"{name} needs a model with experts, and this one is dense")
        return
    if tp > 1 and not settings.sequence_parallel:
        raise TrainError(f"a mixture of experts with tensor_model_parallel_size {tp} needs sequence_parallel")
    ends = list(itertools.accumulate(stages))
    sparse = [any(mixture.layers[end - size : end]) for end, size in zip(ends, stages, strict=True)]
    learns = settings.lora_rank is None and (settings.use_distributed_optimizer or settings.bf16)
    if learns and not all(sparse):
        raise TrainError(  # megatron cannot save an optimizer without parameters
            f"pipeline_model_parallel_size {pp} makes a stage without experts, of which bf16 and use_distributed_optimizer "
            "cannot write a checkpoint: take fewer stages, or turn both off"
        )


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last axis, built as megatron builds a norm. Stock `torch_norm` refuses sequence
    parallelism; here the weight is marked so that megatron sums its gradient over the tensor-parallel ranks."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class LatentNorm(RMSNorm):
    """The norm of a latent. Its eps is transformers' default, not `rms_norm_eps`, as in DeepSeek's code."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__(config, hidden_size, 1e-6)


class SandwichLayer(TransformerLayer):
    """A layer with norms after attention and after the MLP too."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, part in (("post_self_attn_layernorm", self.self_attention), ("post_mlp_layernorm", self.mlp)):
            norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            setattr(self, name, norm)
            part.register_forward_hook(lambda _part, _inputs, out, norm=norm: (norm(out[0]), out[1]))


class FixedBiasRouter(TopKRouter):
    """Megatron's router with the bias fixed: it does not call the compiled function that counts an expert's tokens."""

    def _apply_expert_bias(self, *_args: Any, **_kwargs: Any) -> None:
        return


def block_spec(config: Any, family: ModelFamily, *, grouped: bool) -> TransformerBlockSubmodules:
    """Return the spec of this pipeline stage's layers and the final norm; `grouped`: experts are `GroupedExperts`."""
    block = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    block.layer_norm = RMSNorm
    for spec in block.layer_specs:  # one object for all layers of a kind
        if family.has("post_mlp_layernorm.weight"):
            spec.module = SandwichLayer
        layer = spec.submodules
        layer.input_layernorm = layer.pre_mlp_layernorm = RMSNorm
        attention = layer.self_attention.submodules
        attention.core_attention = PackedAttention
        if hasattr(layer.mlp.submodules, "router"):
            layer.mlp.submodules.router = FixedBiasRouter
            if grouped:
                layer.mlp.submodules.experts = GROUPED_EXPERTS
        if config.multi_latent_attention:
            layer.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = LatentNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


class _Replay(Replay):
    """A replacement for megatron's `RouterReplay`, which has one list for all models of a process."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        return self.pick(scores, choose(scores, topk, groups, group_topk)[1])


def replaying(model: Any) -> None:
    """Make the routers of a `GPTModel` use `routing` of the `MegatronPack` that layers get as `packed_seq_params`."""
    for layer in model.decoder.layers:
        if router := getattr(layer.mlp, "router", None):
            router.router_replay = _Replay()
            hand = partial(router.router_replay.hand, "packed_seq_params", layer.layer_number - 1)
            layer.register_forward_pre_hook(hand, with_kwargs=True)


def build_model(
    config: Any, shape: ModelShape, family: ModelFamily, place: ModelContext, *, values: bool
) -> torch.nn.Module:
    """Build this rank's part of the model on its device, in megatron's half-precision wrapper if bf16 is set. With
    `values` its output layer is a `ValueHead`; `shape` is then not tied."""
    layout: ParallelLayout = place.ranks
    vocab = shape.vocab + -shape.vocab % layout.tp
    build = partial(
        GPTModel,
        config,
        block_spec(config, family, grouped=place.settings.moe_grouped_gemm),
        vocab_size=vocab,
        max_sequence_length=shape.max_positions,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="none",  # `PackedAttention` rotates by the positions of the pack
        parallel_output=True,
    )
    last = layout.pp_rank == layout.pp - 1
    model = place.hooks.model(build, pre_process=layout.pp_rank == 0, post_process=last)
    for name, parameter in model.named_parameters():
        # Experts have other replicas and another optimizer. Megatron marks them only if EP is above 1. Marks are needed
        # as well if TP shards only other parameters, and they give all checkpoints one form.
        parameter.allreduce = ".local_experts." not in name
    if last:
        if values:
            model.output_layer = ValueHead(config)
        _pick_rows(model)
    model = model.to(place.device)
    return Float16Module(config, model) if config.bf16 else model


def keep_gradients_flowing(model: torch.nn.Module) -> None:
    """Let gradients flow with a frozen embedding: a recomputed layer has none if its input requires no gradient."""
    inner = unwrap_model(model)
    if inner.pre_process and not inner.embedding.word_embeddings.weight.requires_grad:
        inner.embedding.register_forward_hook(
            lambda _module, _args, hidden: hidden.requires_grad_(torch.is_grad_enabled())
        )


class ValueHead(torch.nn.Module):
    """A linear layer to one number, in place of megatron's output layer. All tensor-parallel ranks have the whole layer
    and compute the same from whole hidden states, so no gradient is summed over the ranks. The layer computes in
    float32: a value needs more digits than bfloat16 has."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1, config.hidden_size, dtype=config.params_dtype))
        self.sequence_parallel = config.sequence_parallel  # read by `_pick_rows`, which then gathers

    def forward(self, hidden: Tensor, **_kwargs: Any) -> tuple[Tensor, None]:
        """Map [n, 1, hidden] to float32 [n, 1, 1]; the bias is None."""
        return F.linear(hidden.float(), self.weight.float()), None


def _pick_rows(model: Any) -> None:
    """Run the output layer only on the rows of `picked_rows`; under sequence parallelism, gather the tokens first."""
    layer, group = model.output_layer, model.pg_collection.tp
    if gathers := bool(layer.sequence_parallel):
        # The gather now happens here, so the layer must take whole inputs and sum their gradients itself.
        layer.sequence_parallel, layer.allreduce_dgrad = False, True

    def pick(_layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        hidden, *rest = args
        if gathers:
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=group)
        return (hidden.index_select(0, model.picked_rows), *rest), kwargs

    layer.register_forward_pre_hook(pick, with_kwargs=True)
