"""The transformer layer's parts: megatron's own linear layers, an RMSNorm for any layout, and `PackedAttention`. Stock
`torch_norm` refuses sequence parallelism; the norm here marks its weight so that megatron sums its gradient over the
tensor-parallel ranks."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor

from agentrl.train.megatron.attention import LatentAttention, PackedAttention
from agentrl.train.megatron.families import ModelFamily
from agentrl.train.routing import Replay


class RMSNorm(torch.nn.RMSNorm):
    """Root-mean-square norm over the last axis, built as megatron builds a norm: (config, hidden_size, eps)."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_kwargs: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        weight: Any = self.weight
        weight.sequence_parallel = config.sequence_parallel


class LatentNorm(RMSNorm):
    """The norm of a latent, whose eps is transformers' default whatever `rms_norm_eps` says, as in DeepSeek's code."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_kwargs: Any) -> None:
        super().__init__(config, hidden_size, 1e-6)


class SandwichLayer(TransformerLayer):
    """A layer with norms behind attention and MLP too."""

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        for name, part in (("post_self_attn_layernorm", self.self_attention), ("post_mlp_layernorm", self.mlp)):
            norm = RMSNorm(config, config.hidden_size, config.layernorm_epsilon)
            setattr(self, name, norm)
            part.register_forward_hook(lambda _part, _inputs, out, norm=norm: (norm(out[0]), out[1]))


class FixedBiasRouter(TopKRouter):
    """Megatron's router, whose bias stays as it was loaded: nobody counts an expert's tokens (in a function that is compiled)."""

    def _apply_expert_bias(self, *_args: Any, **_kwargs: Any) -> None:
        return


def block_spec(config: Any, family: ModelFamily) -> TransformerBlockSubmodules:
    """The layers of this pipeline stage and the final norm, for a `TransformerConfig`."""
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
        if config.multi_latent_attention:
            layer.self_attention.module = LatentAttention
            attention.q_layernorm = attention.kv_layernorm = LatentNorm
        elif config.qk_layernorm:
            attention.q_layernorm = attention.k_layernorm = RMSNorm
    return block


class _Replay(Replay):
    """In the place of megatron's `RouterReplay`, of which there is one list for all the models of a process."""

    def get_replay_topk(
        self, scores: Tensor, topk: int, groups: int | None, group_topk: int | None, choose: Callable[..., Any]
    ) -> tuple[Tensor, Tensor]:
        return self.pick(scores, choose(scores, topk, groups, group_topk)[1])


def replaying(model: Any) -> None:
    """Have the routers of a `GPTModel` read `Pack.routing` from now on, which its layers get as `packed_seq_params`."""
    for layer in model.decoder.layers:
        if router := getattr(layer.mlp, "router", None):
            router.router_replay = _Replay()
            hand = partial(router.router_replay.hand, "packed_seq_params", layer.layer_number - 1)
            layer.register_forward_pre_hook(hand, with_kwargs=True)
