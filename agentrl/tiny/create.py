"""Creation of a tiny model's folder."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from agentrl.errors import SettingsError, disk_trouble, raised_as
from agentrl.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Arch = Literal[
    "qwen3", "qwen2", "llama", "mistral", "glm", "glm4", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"
]  # fmt: skip
"""Values of transformers' `model_type`."""

# Queries and keys that start above 1 (by their norms, if a family has them) sharpen attention. A small RoPE base suits
# short contexts. With both, induction heads (and so copying) form some hundred steps earlier.
_QK_START = 1.5
_ROPE_THETA = 1000.0
_INIT_STD = 0.05


def create(
    path: str | os.PathLike[str],
    *,
    arch: Arch = "qwen3",
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    feed_forward: int | None = None,
    vocab_size: int = 512,
    context_length: int = 1024,
    tie_embeddings: bool = True,
    seed: int = 0,
    corpus: Iterable[str] | None = None,
    markup: Sequence[str] = (),
    spaces_apart: bool = False,
    draw_pad_row: bool = False,
) -> "PreTrainedModel":
    """Write a tiny causal language model with random float32 weights, and return the model.

    Args:
        path: the folder to write; made if it does not exist.
        arch: the architecture, one that the trainer and SGLang know.
        layers: number of transformer layers.
        hidden: width of the residual stream, a multiple of `heads`.
        heads: attention heads.
        kv_heads: key-value heads, a divisor of `heads`; latent attention (deepseek_v3) has one for every head.
        feed_forward: width of a feed-forward layer or an expert; by default three times `hidden`.
        vocab_size: size of the embedding; the tokenizer has at most as many ids.
        context_length: longest sequence in tokens.
        tie_embeddings: whether the output layer shares the embedding's weights.
        seed: seed of the weights.
        corpus: texts to train the tokenizer on; words that are frequent here become single tokens.
        markup: tags that become one token each, besides `MARKUP_TOKENS`.
        spaces_apart: whether the tokenizer keeps spaces out of words, so that names can be copied by token.
        draw_pad_row: give the padding token a random embedding, like all others, instead of transformers' zeros. An
            untrained model sometimes samples this token, and the gradient of RMSNorm at a zero embedding is a
            thousand times too large.

    Raises SettingsError: the sizes do not fit together, or the folder cannot be made."""
    if arch not in get_args(Arch):
        raise SettingsError(f"arch: expected one of {', '.join(get_args(Arch))}, got {arch!r}")
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        expected = "expected hidden to be an even multiple of heads, and heads a multiple of kv_heads"
        raise SettingsError(f"hidden={hidden}, heads={heads}, kv_heads={kv_heads}: {expected}")
    what, remedy = f"{path} cannot be made", "choose another folder"
    with raised_as(SettingsError, what, OSError, shown=": {.strerror}", remedy=remedy):
        Path(path).mkdir(parents=True, exist_ok=True)
    import transformers

    texts = DEFAULT_CORPUS if corpus is None else corpus
    tokenizer = train_tokenizer(texts, vocab_size, markup, spaces_apart=spaces_apart)
    inner = feed_forward or 3 * hidden
    sizes: dict[str, Any] = {"vocab_size": vocab_size, "hidden_size": hidden, "intermediate_size": inner}
    sizes |= {"num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {"head_dim": hidden // heads, "max_position_embeddings": context_length}
    sizes |= {"tie_word_embeddings": tie_embeddings, "initializer_range": _INIT_STD, "dtype": "float32"}
    sizes |= {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "bos_token_id": None}
    sizes["rope_parameters"] = {"rope_type": "default", "rope_theta": _ROPE_THETA}
    config = transformers.AutoConfig.for_model(arch, **sizes | _own(arch, hidden, heads, inner))
    model = _model(config, seed, draw_pad_row)
    try:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    except Exception as error:
        if (trouble := disk_trouble(error)) is None:
            raise
        raise SettingsError(f"{path}: {trouble}") from error
    return model


def _own(arch: Arch, hidden: int, heads: int, wide: int) -> dict[str, Any]:
    """Return an architecture's config besides the usual sizes; a mixture has four experts, two per token."""
    experts = {"num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": wide}
    # Keys and values come from a latent vector. A head has half as many dims without RoPE as with RoPE.
    dim, ranks = hidden // heads, {"q_lora_rank": None, "kv_lora_rank": hidden // 2}
    latent = {"qk_rope_head_dim": dim, "qk_nope_head_dim": dim // 2, "v_head_dim": dim, **ranks}
    chosen = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "first_k_dense_replace": 1}
    own: dict[str, dict[str, Any]] = {
        "mistral": {"sliding_window": None},
        "glm": {"attention_bias": True},
        "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": wide, **experts},
        "qwen3_moe": {"num_experts": 4, **experts},
        "glm4_moe": {"n_routed_experts": 4, "use_qk_norm": True, **experts},
        "deepseek_v3": {"n_routed_experts": 4, "num_key_value_heads": heads, **experts, **latent, **chosen},
    }
    return own.get(arch, {})


def _model(config: "PretrainedConfig", seed: int, draw_pad_row: bool) -> "PreTrainedModel":
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)
        if draw_pad_row:
            torch.nn.init.normal_(model.get_input_embeddings().weight[config.pad_token_id].data, std=_INIT_STD)
    norms = [p for name, p in model.named_parameters() if name.endswith(("q_norm.weight", "k_norm.weight"))]
    for norm in norms:
        torch.nn.init.constant_(norm, _QK_START)
    for name, weight in () if norms else model.named_parameters():
        if name.endswith(("q_proj.weight", "k_proj.weight", "kv_a_proj_with_mqa.weight")):
            weight.data *= _QK_START / (_INIT_STD * weight.shape[1] ** 0.5)
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id, do_sample=True, temperature=1.0
    )
    return model
