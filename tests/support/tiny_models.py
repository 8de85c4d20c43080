"""Tiny random models with a real tokenizer and chat template, made on the spot and the same for the same seed.

1. `make_tiny_model` writes a Hugging Face folder: config, safetensors weights, a byte-level BPE tokenizer of 512
   ids and a ChatML template with Hermes tool calls. Nothing is downloaded.
2. The weights have a larger spread than a usual initialisation, so that next-token distributions are far from
   uniform and a wrong log-probability cannot pass for a right one.
3. `<|im_end|>` (id 2) is the end-of-turn token, `<|pad|>` (id 3) the padding token.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Arch = Literal[
    "qwen3",
    "qwen2",
    "llama",
    "mistral",
    "glm",
    "glm4",
    "qwen2_moe",
    "qwen3_moe",
    "glm4_moe",
    "deepseek_v3",
    "glm4_moe_lite",
]
NoTable = Literal[
    "gemma3_text",
    "gemma4_text",
    "granite",
    "smollm3",
    "gpt_oss",
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "lfm2",
    "lfm2_moe",
    "minimax_m2",
]
"""Families of transformers that megatron does not support."""

_EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "head_dim": 8,
    **_EXPERTS,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
}
_LINEAR: dict[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rms_norm_eps": 1e-3,  # the norm of a head with nearly zero output would multiply rounding errors by 1000
}
_SHARED: dict[str, Any] = {"num_experts": 4, "shared_expert_intermediate_size": 64, **_EXPERTS}
_CONV: dict[str, Any] = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
FAMILY: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "glm": {"attention_bias": True},
    "glm4": {"attention_bias": False},
    "qwen2_moe": _SHARED,
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True, "mlp_only_layers": [0], **_EXPERTS},
    "gemma3_text": {"sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"]},
    "gemma4_text": {
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 32,
        "vocab_size_per_layer_input": 512,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
    },
    "gpt_oss": {"sliding_window": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    "glm4_moe": {"n_routed_experts": 4, "use_qk_norm": True, "attention_bias": True, **_EXPERTS},
    "deepseek_v3": _LATENT | {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2},
    "glm4_moe_lite": _LATENT,
    "qwen3_next": _LINEAR | _SHARED,
    "qwen3_5_text": _LINEAR,
    "qwen3_5_moe_text": _LINEAR | _SHARED,
    "minimax_m2": {"num_local_experts": 4, "num_experts_per_tok": 2, "rotary_dim": 8},
    "lfm2": _CONV,
    "lfm2_moe": _CONV | _EXPERTS | {"num_experts": 4, "num_dense_layers": 1},
}
"""The config entries of a family, beside the sizes that all families have."""

VOCAB_SIZE = 512
EOS_ID = 2
PAD_ID = 3

_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")
_MARKS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>")
_CORPUS = (
    "The quick brown fox jumps over the lazy dog. ",
    "What is 12 plus 30? The answer is 42. ",
    "Solve the equation x + 3 = 7 step by step. ",
    'user assistant system tool {"name": "search", "arguments": {"query": "capital of France"}} ',
)

CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions. Their signatures are within <tools></tools> tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call, return a json object with name and arguments within <tool_call></tool_call> ' }}
{{- 'XML tags:\\n<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{%- set call = call.function or call %}
{%- if not loop.first or message.content %}{{- '\\n' }}{%- endif %}
{{- '<tool_call>\\n{"name": "' + call.name + '", "arguments": ' }}
{{- call.arguments if call.arguments is string else (call.arguments | tojson) }}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def make_tiny_model(
    folder: str | Path,
    arch: Arch | NoTable = "qwen3",
    seed: int = 0,
    *,
    layers: int = 2,
    hidden_size: int = 64,
    context_length: int = 2048,
    dtype: str = "float32",
    tie_word_embeddings: bool = True,
    **changes: Any,
) -> Path:
    """Write a tiny random model and its tokenizer into `folder`; returns the folder.

    The weights have `dtype`; vocabulary 512, 4 heads, 2 key-value heads. `changes` are entries of the config. Biases and norms
    are random too.
    """
    import torch
    import transformers

    folder = Path(folder)
    make_tokenizer().save_pretrained(folder)
    sizes: dict[str, Any] = {"num_key_value_heads": 2}
    if arch != "qwen2":
        sizes["head_dim"] = hidden_size // 4
    config = transformers.AutoConfig.for_model(
        arch,
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=context_length,
        bos_token_id=None,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=0.1,
        **(sizes | FAMILY.get(arch, {}) | changes),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config)
        if arch in FAMILY:
            biases = [bias for name, bias in model.named_buffers() if name.endswith("e_score_correction_bias")]
            for tensor in (*model.parameters(), *biases):
                if tensor.dim() == 1:
                    torch.nn.init.normal_(tensor, tensor.mean().item(), 0.2)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return folder


@functools.cache
def make_tokenizer() -> PreTrainedTokenizerFast:
    """Make a byte-level BPE tokenizer of exactly `VOCAB_SIZE` ids with the ChatML and Hermes marks as single tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    reserved = [AddedToken(word, special=True, normalized=False) for word in _SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(_MARKS),
        special_tokens=reserved,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(list(_CORPUS) * 20, trainer)
    bpe.add_tokens([AddedToken(word, special=False, normalized=False) for word in _MARKS])
    missing = VOCAB_SIZE - bpe.get_vocab_size()
    bpe.add_tokens([AddedToken(f"<extra_{i}>", special=False, normalized=False) for i in range(missing)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>", "<|endoftext|>"],
        model_max_length=2048,
        chat_template=CHAT_TEMPLATE,
    )
