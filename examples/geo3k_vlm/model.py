"""A tiny Qwen3-VL: its folder with random weights, a tokenizer for the task's words, and the image processor's settings.

1. The picture of a scene is shown at half its size, so that one placeholder is one field; `crop`'s result is shown as
   it is, in four placeholders.
2. Positions of patches are learned weights in Qwen3-VL. Without these weights a tiny model finds no rows and columns.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.tiny import CHAT_TEMPLATE
from agentrl.tiny.tokenizer import train_tokenizer
from examples.geo3k_vlm.env import CropEnv
from examples.geo3k_vlm.lessons import KINDS, lesson
from examples.geo3k_vlm.scenes import BACKGROUND

VISION_START, IMAGE, VIDEO, VISION_END = MARKS = "<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"
PATCH = 14
SEEN = 6 * PATCH
"""Pixels of the side at which a scene's picture is shown."""

_SHOWN = """\
{%- macro shown(content) %}
    {%- if content is string %}{{- content }}
    {%- else %}
        {%- for part in content or [] %}
            {%- if part.type == 'image' %}{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
            {%- else %}{{- part.text }}
            {%- endif %}
        {%- endfor %}
    {%- endif %}
{%- endmacro %}
"""


def create(folder: Path, *, seed: int = 0, hidden: int = 96, layers: int = 2, vision: int = 48) -> Path:
    """Write a model with random weights; returns `folder`. `vision` is the width of the vision tower's one block."""
    import torch
    import transformers

    tokenizer = train_tokenizer(_corpus(), 440, MARKS)
    tokenizer.chat_template = _SHOWN + CHAT_TEMPLATE.replace("+ message.content +", "+ shown(message.content) +")
    ids = dict(zip(MARKS, tokenizer.convert_tokens_to_ids(list(MARKS)), strict=True))
    head = hidden // 4
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000.0,
            "mrope_section": [head // 2 - 2 * (head // 6), head // 6, head // 6],
            "mrope_interleaved": True,
        },
    }
    tower: dict[str, Any] = {
        "depth": 1,
        "hidden_size": vision,
        "intermediate_size": 2 * vision,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": hidden,
        "num_position_embeddings": (SEEN // PATCH) ** 2,
        "deepstack_visual_indexes": [],
        "initializer_range": 0.05,
    }
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=ids[IMAGE],
        video_token_id=ids[VIDEO],
        vision_start_token_id=ids[VISION_START],
        vision_end_token_id=ids[VISION_END],
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        torch.nn.init.normal_(model.model.visual.pos_embed.weight, std=0.7)  # as loud as the patches
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            torch.nn.init.constant_(weight, 1.5)  # sharper attention from the start, as in agentrl.tiny
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(_processor(), indent=2), encoding="utf-8")
    return folder


def _processor() -> dict[str, Any]:
    return {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": (4 * PATCH) ** 2, "longest_edge": SEEN**2},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [BACKGROUND / 255] * 3,
        "image_std": [0.35] * 3,
    }


def _corpus() -> Iterator[str]:
    """The words of the task: schemas of the tools, questions, calls and answers."""
    rng = random.Random("words")
    yield "system\nuser\nassistant\ntool\n"
    yield json.dumps([tool.schema for tool in CropEnv.declared_tools()])
    for _ in range(20):
        for kind in KINDS:
            for message in lesson(kind, rng)["messages"]:
                content = message["content"]
                yield content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
                for call in message.get("tool_calls", ()):
                    yield json.dumps({"name": call["function"]["name"], "arguments": call["function"]["arguments"]})
