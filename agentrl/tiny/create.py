"""Writing a tiny model's folder."""

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from agentrl.errors import SettingsError, disk_trouble
from agentrl.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

Arch = Literal[
    "qwen3", "qwen2", "llama", "mistral", "glm", "glm4", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3"
]  # fmt: skip

_FEW: dict[str, Any] = {"num_experts_per_tok": 2, "norm_topk_prob": True}
_ARCHS: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {},
    "llama": {},
    "mistral": {"sliding_window": None},
    "glm": {"attention_bias": True},
    "glm4": {},
    "qwen2_moe": {"num_experts": 4, **_FEW},
    "qwen3_moe": {"num_experts": 4, **_FEW},
    "glm4_moe": {"n_routed_experts": 4, "use_qk_norm": True, **_FEW},
    "deepseek_v3": {
        "n_routed_experts": 4,
        "n_group": 1,
        "topk_group": 1,
        "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1,
        **_FEW,
    },
}
"""Values of transformers' `model_type`, with what the config has beside sizes: a mixture's four experts, two a token."""

# Queries and keys above 1, by their norms where a family has them, sharpen attention from the start; a short rope base
# suits short contexts. Together they let induction heads (and so copying) form some hundred steps earlier.
_QK_START = 1.5
_ROPE_THETA = 1000.0
_INIT_STD = 0.05


@dataclass(frozen=True, slots=True)
class TinyModel:
    """What `create` wrote: the folder, and the model's size."""

    path: Path
    arch: Arch
    parameters: int
    vocab_size: int


def create(
    path: str | os.PathLike[str],
    *,
    arch: Arch = "qwen3",
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    kv_heads: int = 2,
    ffn: int | None = None,
    vocab_size: int = 512,
    context_length: int = 1024,
    tie_embeddings: bool = True,
    seed: int = 0,
    corpus: Iterable[str] | None = None,
    markup: Sequence[str] = (),
    spaces_apart: bool = False,
    draw_pad_row: bool = False,
) -> TinyModel:
    """Write a tiny causal language model with random float32 weights.

    Args:
        path: the folder to write; made if it does not exist.
        arch: the architecture, one that the trainer and SGLang know.
        layers: number of transformer layers.
        hidden: width of the residual stream, a multiple of `heads`.
        heads: attention heads.
        kv_heads: key-value heads, a divisor of `heads`; latent attention (deepseek_v3) has one for every head.
        ffn: width of the feed-forward layer, and of an expert; default three times `hidden`.
        vocab_size: size of the embedding; the tokenizer has at most as many ids.
        context_length: longest sequence in tokens.
        tie_embeddings: whether the output layer shares the embedding's weights.
        seed: of the weights.
        corpus: texts to train the tokenizer on; words that are frequent here become single tokens.
        markup: tags that are to be one token each, besides `MARKUP_TOKENS`.
        spaces_apart: whether the tokenizer keeps spaces out of words, so that names can be copied by token.
        draw_pad_row: give the padding token a random embedding, like all others, instead of transformers' zeros. A
            model that is not taught first samples that token now and then, and the gradient of RMSNorm at zero is
            a thousand times too large.

    Raises:
        SettingsError: the sizes do not fit together, or the folder cannot be made.
    """
    if arch not in _ARCHS:
        raise SettingsError(f"arch: expected one of {', '.join(_ARCHS)}, got {arch!r}")
    if hidden % heads or heads % kv_heads or (hidden // heads) % 2:
        raise SettingsError(
            f"hidden={hidden}, heads={heads}, kv_heads={kv_heads}: expected hidden to be an even multiple of heads, "
            "and heads a multiple of kv_heads"
        )
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"{path} cannot be made: {error.strerror}; choose another folder") from error
    tokenizer = train_tokenizer(
        DEFAULT_CORPUS if corpus is None else corpus, vocab_size, markup, spaces_apart=spaces_apart
    )
    config = _config(
        arch,
        vocab_size=vocab_size,
        hidden_size=hidden,
        **{name: ffn or 3 * hidden for name in _widths(arch)},
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=context_length,
        tie_word_embeddings=tie_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = _model(arch, config, seed, draw_pad_row)
    try:
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    except Exception as error:
        if (trouble := disk_trouble(error)) is None:
            raise
        raise SettingsError(f"{path}: {trouble}") from error
    return TinyModel(Path(path), arch, sum(parameter.numel() for parameter in model.parameters()), vocab_size)


def _config(arch: Arch, **sizes: Any) -> "PretrainedConfig":
    import transformers

    rope = {"rope_type": "default", "rope_theta": _ROPE_THETA}
    start = {"initializer_range": _INIT_STD, "bos_token_id": None, "dtype": "float32"}
    own = _ARCHS[arch] | (_latent(**sizes) if arch == "deepseek_v3" else {})
    made: PretrainedConfig = transformers.AutoConfig.for_model(arch, **sizes | own, rope_parameters=rope, **start)
    return made


def _latent(hidden_size: int, num_attention_heads: int, head_dim: int, **_: Any) -> dict[str, Any]:
    """Keys and values out of a latent vector; a head has half as many dims without a position as with one."""
    heads = {"qk_rope_head_dim": head_dim, "qk_nope_head_dim": head_dim // 2, "v_head_dim": head_dim}
    return heads | {"num_key_value_heads": num_attention_heads, "q_lora_rank": None, "kv_lora_rank": hidden_size // 2}


def _widths(arch: Arch) -> list[str]:
    names = ["intermediate_size"]
    names += ["moe_intermediate_size"] if _ARCHS[arch] else []
    return names + (["shared_expert_intermediate_size"] if arch == "qwen2_moe" else [])


def _model(arch: Arch, config: "PretrainedConfig", seed: int, draw_pad_row: bool) -> "PreTrainedModel":
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
