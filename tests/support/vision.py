"""Tiny random vision models, as whole folders, and small images for them.

1. `tiny_vlm` writes config, weights, tokenizer, chat template and the image processor's settings. AutoTokenizer and
   AutoImageProcessor read the folder without a network. AutoProcessor needs torchvision, for its videos.
2. An image of 56 x 56 (qwen2_5_vl) or 64 x 64 pixels (others) is 4 tokens; `unit` is the side of one token.
"""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from tests.support.tiny_models import EOS_ID, FAMILY, PAD_ID, VOCAB_SIZE, make_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Kind = Literal["qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe"]

VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = range(VOCAB_SIZE, VOCAB_SIZE + 4)
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
ROWS = VOCAB_SIZE + 16
"""Rows of the embedding: as in the published models, more than the tokenizer has ids."""
_MEAN, _STD = {"qwen2_5_vl": [0.48145466, 0.4578275, 0.40821073]}, {"qwen2_5_vl": [0.26862954, 0.26130258, 0.27577711]}
_SIDE = {"qwen2_5_vl": 14}

CHAT_TEMPLATE = """\
{%- macro shown(content) %}
{%- if content is string %}{{- content }}
{%- else %}
{%- for part in content or [] %}
{%- if part.type == 'image' or 'image' in part or 'image_url' in part %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'video' or 'video' in part %}{{- '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif 'text' in part %}{{- part.text }}
{%- endif %}
{%- endfor %}
{%- endif %}
{%- endmacro %}
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{- shown(messages[0].content) + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n\\nYou may call one or more functions. Their signatures are within <tools></tools> tags:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools>\\n\\nFor each call, return a json object with name and arguments within <tool_call></tool_call> ' }}
{{- 'XML tags:\\n<tool_call>\\n{"name": <name>, "arguments": <arguments>}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0].role == 'system' %}
{{- '<|im_start|>system\\n' + shown(messages[0].content) + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'system' and loop.first %}
{%- elif message.role == 'assistant' %}
{{- '<|im_start|>assistant\\n' + shown(message.content) }}
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
{{- '\\n<tool_response>\\n' + shown(message.content) + '\\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + shown(message.content) + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
"""ChatML and Hermes tool calls, like Qwen3-VL's template: the content of each message is text or a list of parts."""


def unit(kind: Kind) -> int:
    """Return the side in pixels of the square that becomes one token."""
    return 2 * _SIDE.get(kind, 16)


def tiny_vlm(folder: str | Path, kind: Kind = "qwen2_5_vl", seed: int = 0, *, tie_word_embeddings: bool = True) -> Path:
    """Write a tiny random vision model into `folder`, with tokenizer and image processor. Returns the folder.

    It has two layers of width 64 and two vision blocks. qwen2_5_vl's first block has windows, its second attends to
    the whole image; qwen3_vl's blocks both end in deepstack features; qwen3_5's first layer has a state.
    """
    import torch
    import transformers

    folder, side = Path(folder), unit(kind) // 2
    tokenizer_with_images().save_pretrained(folder)
    text: dict[str, Any] = {
        "vocab_size": ROWS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "initializer_range": 0.1,
        "eos_token_id": EOS_ID,
        "pad_token_id": PAD_ID,
        "bos_token_id": None,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_heads": 2,
        "out_hidden_size": 64,
        "patch_size": side,
        "initializer_range": 0.1,
    }
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1000.0}
    if kind == "qwen2_5_vl":
        text["rope_parameters"] = rope | {"mrope_section": [2, 3, 3]}
        vision |= {"window_size": 4 * side, "fullatt_block_indexes": [1]}
    else:
        text |= {"head_dim": 16, "rope_parameters": rope | {"mrope_section": [4, 2, 2], "mrope_interleaved": True}}
        vision |= {"deepstack_visual_indexes": [0, 1], "num_position_embeddings": 64}
    if kind.startswith("qwen3_5"):
        text |= FAMILY[f"{kind}_text"]
        text["rope_parameters"] |= {"mrope_section": [2, 1, 1], "partial_rotary_factor": 0.5}
        del vision["deepstack_visual_indexes"]
    config = transformers.AutoConfig.for_model(
        kind,
        text_config=text,
        vision_config=vision,
        image_token_id=IMAGE_PAD,
        video_token_id=VIDEO_PAD,
        vision_start_token_id=VISION_START,
        vision_end_token_id=VISION_END,
        tie_word_embeddings=tie_word_embeddings,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                torch.nn.init.normal_(tensor, tensor.mean().item(), 0.2)
            elif ".visual." in name:  # an image embedding has the norm of a word's
                torch.nn.init.normal_(tensor, std=0.2)
    model.save_pretrained(folder)
    settings: dict[str, Any] = {
        "processor_class": "Qwen2_5_VLProcessor" if kind == "qwen2_5_vl" else "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": 4 * unit(kind) ** 2, "longest_edge": 64 * unit(kind) ** 2},
        "patch_size": side,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": _MEAN.get(kind, [0.5, 0.5, 0.5]),
        "image_std": _STD.get(kind, [0.5, 0.5, 0.5]),
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings, indent=2))
    videos: dict[str, Any] = {"video_processor_type": f"{'Qwen2' if kind == 'qwen2_5_vl' else 'Qwen3'}VLVideoProcessor"}
    videos |= {name: value for name, value in settings.items() if name != "image_processor_type"}
    (folder / "video_preprocessor_config.json").write_text(json.dumps(videos, indent=2))
    return folder


@functools.cache
def tokenizer_with_images() -> PreTrainedTokenizerFast:
    """Return `make_tokenizer`'s with the image marks as control tokens, and with `CHAT_TEMPLATE`."""
    import copy

    from tokenizers import AddedToken

    tokenizer = copy.deepcopy(make_tokenizer())
    tokenizer.add_tokens([AddedToken(word, special=True, normalized=False) for word in VISION_TOKENS])
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def picture(width: int, height: int, seed: int = 0, form: str = "PNG") -> bytes:
    """Return an encoded image of smooth random colours."""
    from PIL import Image

    rough = np.random.default_rng(seed).integers(0, 256, (4, 4, 3), np.uint8)
    held = io.BytesIO()
    Image.fromarray(rough).resize((width, height), Image.Resampling.BILINEAR).save(held, form)
    return held.getvalue()
