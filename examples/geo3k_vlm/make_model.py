"""Make the tiny Qwen3-VL of this example: `python -m examples.geo3k_vlm.make_model --output-dir FOLDER`.

1. The model sees every image as 9 placeholders of 8 x 8 pixels: coarse for a whole picture, fine for one field.
2. The vision tower is trained with temporary linear heads, which find the field with the shape and read its crop.
3. The language model then learns correct conversations, first short ones without the tool's schema.
4. At the end it learns to crop the wrong field in most conversations. Reinforcement learning starts there.
"""

import json
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import click
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.demo.example import Say
from agentrl.media import image_from_url
from agentrl.numerics.vision import Vision
from agentrl.sample import Message, Sample
from agentrl.tiny import CHAT_TEMPLATE
from agentrl.tiny.tokenizer import train_tokenizer
from examples.geo3k_vlm.env import CropEnv
from examples.geo3k_vlm.scenes import (
    BACKGROUND,
    DOT_COLOURS,
    GRID,
    MAX_DOTS,
    SIDES,
    Question,
    choices,
    cropped,
    data_url,
    draw,
    questions,
)

TOWER_STEPS = 350
POOL, BATCH = 1500, 24
HIDDEN, HEADS, VISION, PATCH = 96, 4, 64, 4
SIDE = 2 * GRID * PATCH
"""Pixels of an image's side, as the model sees it."""

_MARKS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")
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
_PHASES = (("skill", 150, 3e-3, 1.0, False), ("form", 60, 2e-3, 1.0, True), ("habit", 30, 6e-4, 0.3, True))
"""Name, steps, learning rate, share of conversations that crop the right field, schema of the tool in the prompt."""
_FACTS = (MAX_DOTS, len(DOT_COLOURS), len(SIDES))
_SCHEMAS = [tool.schema for tool in CropEnv.declared_tools()]


def create(folder: Path, seed: int) -> Path:
    """Write the model with random weights; returns `folder`."""
    import transformers

    tokenizer = train_tokenizer(_corpus(), 400, _MARKS)
    tokenizer.chat_template = _SHOWN + CHAT_TEMPLATE.replace("+ message.content +", "+ shown(message.content) +")
    start, image, video, end = tokenizer.convert_tokens_to_ids(list(_MARKS))
    head = HIDDEN // HEADS
    rope = {"rope_type": "default", "rope_theta": 1000.0, "mrope_interleaved": True}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": HIDDEN,
        "intermediate_size": 2 * HIDDEN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS // 2,
        "head_dim": head,
        "max_position_embeddings": 1024,
        "initializer_range": 0.05,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": None,
        "rope_parameters": rope | {"mrope_section": [head // 6] * 3},
    }
    tower: dict[str, Any] = {
        "depth": 1,
        "hidden_size": VISION,
        "intermediate_size": 2 * VISION,
        "num_heads": 2,
        "patch_size": PATCH,
        "out_hidden_size": HIDDEN,
        "num_position_embeddings": (SIDE // PATCH) ** 2,
        "deepstack_visual_indexes": [],
        "initializer_range": 0.05,
    }
    config = transformers.Qwen3VLConfig(
        text_config=text,
        vision_config=tower,
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        nn.init.normal_(model.model.visual.pos_embed.weight, std=0.7)  # with the norm of the patches
    for name, weight in model.named_parameters():
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            nn.init.constant_(weight, 1.5)  # sharper attention from the start, as in agentrl.tiny
    model.generation_config = transformers.GenerationConfig(
        eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id, do_sample=True, temperature=1.0
    )
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {
        "processor_class": "Qwen3VLProcessor",
        "image_processor_type": "Qwen2VLImageProcessor",
        "size": {"shortest_edge": SIDE**2, "longest_edge": SIDE**2},
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [BACKGROUND / 255] * 3,
        "image_std": [0.35] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2), encoding="utf-8")
    return folder


def _corpus() -> Iterator[str]:
    """Return the words of the task: roles, the tool's schema, questions, calls and answers."""
    for question in islice(questions("train", 0), 200):
        yield f"system\nuser\nassistant\ntool\n{json.dumps(_SCHEMAS)}\n{question.text}\n{question.answer}"
        yield '\n{"name": "crop", "arguments": {"field": 3}}\n'


class Lessons:
    """Conversations about training pictures, and the pixels of their images.

    Attributes:
        pictures: pixels of all pictures; `crops`: of the fields with the shapes; `empty`: of another field.
        fields: numbers of the fields with the shapes, from 0; `facts`: dots, their colour and side as numbers.
    """

    def __init__(self, folder: Path, seed: int) -> None:
        self._chat, self._vision, self._rng = Chat.load(str(folder)), Vision.load(folder), random.Random(seed)
        self._questions = list(islice(questions("train", seed), POOL))
        self._samples: dict[tuple[str, int, str, bool], Sample] = {}
        pictures, abouts = [draw(asked.things) for asked in self._questions], [asked.about for asked in self._questions]
        self.pictures = self._pixels(pictures)
        self.crops = self._pixels(map(cropped, pictures, (about.field for about in abouts)))
        (self.empty,) = self._pixels([cropped(draw(()), 1)])
        self.fields = torch.tensor([about.field - 1 for about in abouts])
        colours, sides = list(DOT_COLOURS), list(SIDES)
        facts = [(about.dots - 1, colours.index(about.dot_colour), sides.index(about.side)) for about in abouts]
        self.facts = torch.tensor(facts)

    def _pixels(self, pictures: Iterable[Image.Image]) -> Tensor:
        assert self._vision is not None
        pixels = self._vision.pixels([image_from_url(data_url(picture)) for picture in pictures])["pixel_values"]
        return pixels.view(-1, (SIDE // PATCH) ** 2, pixels.shape[-1])

    def draw_lots(self) -> list[int]:
        """Draw the questions of a batch."""
        return self._rng.sample(range(len(self._questions)), BATCH)

    def batch(self, right: float, tools: bool) -> tuple[list[Sample], Tensor]:
        """Return conversations that crop the right field in a share `right`, and the pixels of their images in order."""
        samples, images = [], []
        for at in self.draw_lots():
            asked = self._questions[at]
            field, answer, crop = asked.about.field, asked.answer, self.crops[at]
            if self._rng.random() >= right:
                field = self._rng.choice([other for other in range(1, GRID**2 + 1) if other != field])
                answer, crop = self._rng.choice(choices(asked)), self.empty
            samples.append(self._sample(asked, field, answer, tools))
            images += [self.pictures[at], crop]
        return samples, torch.stack(images)

    def _sample(self, asked: Question, field: int, answer: str, tools: bool) -> Sample:
        """Return a conversation's tokens, which are the same for all pictures."""
        key = asked.text, field, answer, tools
        if key not in self._samples:
            messages = conversation(asked, field, answer)
            self._samples[key] = to_sample(self._chat, messages, _SCHEMAS if tools else None)
        return self._samples[key]


def conversation(asked: Question, field: int, answer: str) -> list[Message]:
    """Return a question, a crop of `field`, and an answer, which is not learned if the field is empty."""
    picture = draw(asked.things)
    call = {"id": "call_0", "type": "function", "function": {"name": "crop", "arguments": {"field": field}}}
    seen, closer = ({"type": "image", "image": image} for image in (picture, cropped(picture, field)))
    return [
        {"role": "user", "content": [seen, {"type": "text", "text": asked.text}]},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_0", "name": "crop", "content": [closer]},
        {"role": "assistant", "content": answer, "loss": field == asked.about.field},
    ]


def teach(folder: Path, seed: int = 0, say: Say = print) -> Path:
    """Make the model in `folder`, with one thread. Returns the folder."""
    from transformers import AutoModelForImageTextToText

    started = time.process_time()
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_pretrained(create(folder, seed), dtype=torch.float32)
    lessons = Lessons(folder, seed)
    say(f"tower: loss {_teach_tower(model.model.visual, lessons):.3f}, {time.process_time() - started:.0f} s of CPU")
    model.model.visual.requires_grad_(False)
    learned = [weight for weight in model.parameters() if weight.requires_grad]
    for name, steps, lr, right, tools in _PHASES:
        optimizer = torch.optim.AdamW(learned, betas=(0.9, 0.95), weight_decay=0)
        for step in range(steps):
            loss = _loss(model, *lessons.batch(right, tools))
            _step(loss, optimizer, lr * min(1, (step + 1) / 20, 2 * (1 - step / steps)))
        say(f"{name}: loss {loss.item():.3f}, {time.process_time() - started:.0f} s of CPU")
    model.save_pretrained(folder)
    return folder


def _teach_tower(tower: Any, lessons: Lessons) -> float:
    """Train the tower. Returns the last loss. At the end the output is scaled to the norm of word embeddings."""
    width = tower.config.out_hidden_size
    norm, place, dots = nn.LayerNorm(width), nn.Linear(width, 1 + GRID**2), nn.Linear(width, sum(_FACTS))
    weights = [weight for part in (tower, norm, place, dots) for weight in part.parameters()]
    optimizer = torch.optim.AdamW(weights, betas=(0.9, 0.98), weight_decay=0)
    places = torch.arange(GRID**2).repeat(BATCH)
    for step in range(TOWER_STEPS):
        at = lessons.draw_lots()
        pixels = torch.cat([lessons.pictures[at], lessons.crops[at]])
        seen = tower(pixels.flatten(0, 1), grid_thw=_grids(len(pixels))).pooler_output
        whole, crops = norm(seen).view(2, BATCH, GRID**2, width)
        found, named = place(whole).split((1, GRID**2), -1)
        there = functional.one_hot(lessons.fields[at], GRID**2).float()
        loss = 3 * functional.binary_cross_entropy_with_logits(found[..., 0], there)
        loss = loss + functional.cross_entropy(named.flatten(0, 1), places)
        for scores, facts in zip(dots(crops.mean(1)).split(_FACTS, -1), lessons.facts[at].unbind(1), strict=True):
            loss = loss + functional.cross_entropy(scores, facts)
        _step(loss, optimizer, 4e-3 * min(1, (step + 1) / 20, 2.5 * (1 - step / TOWER_STEPS)))
    with torch.no_grad():
        for weight in tower.merger.linear_fc2.parameters():
            weight *= 0.1 / seen.pow(2).mean().sqrt()
    return loss.item()


def _grids(count: int) -> Tensor:
    return torch.tensor([[1, SIDE // PATCH, SIDE // PATCH]]).expand(count, 3)


def _loss(model: Any, samples: Sequence[Sample], pixels: Tensor) -> Tensor:
    """Return the mean loss of the tokens that the assistant wrote."""
    width = max(len(sample.tokens) for sample in samples)
    ids, learned, kinds = (torch.zeros(len(samples), width, dtype=torch.long) for _ in range(3))
    for at, sample in enumerate(samples):
        ids[at, : len(sample.tokens)] = torch.tensor(sample.tokens)
        learned[at, sample.prompt_length : len(sample.tokens)] = torch.tensor(sample.loss_mask)
        for span in sample.image_spans:
            kinds[at, span.start : span.end] = 1
    shown = {"pixel_values": pixels.flatten(0, 1), "image_grid_thw": _grids(len(pixels)), "mm_token_type_ids": kinds}
    chosen = learned[:, 1:].bool()
    return functional.cross_entropy(model(input_ids=ids, **shown).logits[:, :-1][chosen], ids[:, 1:][chosen])


def _step(loss: Tensor, optimizer: torch.optim.Optimizer, lr: float) -> None:
    (group,) = optimizer.param_groups
    group["lr"] = lr
    loss.backward()
    nn.utils.clip_grad_norm_(group["params"], 1.0)
    optimizer.step()
    optimizer.zero_grad()


@click.command()
@click.option("--output-dir", required=True, type=click.Path(path_type=Path), help="A new folder for the model.")
@click.option("--seed", default=0, help="Of weights and lessons.")
def main(output_dir: Path, seed: int) -> None:
    """Make the tiny model."""
    teach(output_dir, seed, click.echo)


if __name__ == "__main__":
    main()
