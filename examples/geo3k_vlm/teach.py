"""The warm start of the tiny model: `python -m examples.geo3k_vlm.teach --output-dir FOLDER`, in the repository's root.

1. Tower: the vision tower learns to see, by linear layers on its output that are thrown away. Of each field they name
   the colour, the row and the column; of a cropped field the dots.
2. Skill: the language model learns to speak about what the tower sees (`lessons.SKILL`). The tower stays as it is.
3. Habit: a few steps on imperfect lessons (`lessons.HABIT`), so that reinforcement learning has something to improve.

Taught all at once, a tiny model learns the words first and does not begin to see within 250 steps. Muon is the one of
`agentrl.train.megatron`'s trainer in small; Megatron trains no models that see.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor, nn
from torch.nn import functional

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.media import Image, image_from_url
from agentrl.numerics.vision import Vision
from agentrl.sample import Sample
from examples.geo3k_vlm.lessons import HABIT, SKILL, Kind, lesson, new_scene
from examples.geo3k_vlm.model import create
from examples.geo3k_vlm.scenes import COLOURS, DOT_COLOURS, FIELD, GRID, MOST_DOTS, SIDES, Thing, data_url, draw

TOWER_STEPS, SKILL_STEPS, HABIT_STEPS = 400, 800, 60
BATCH = 24
_FIELD_SIZES = (1 + len(COLOURS), GRID, GRID)
_DOT_SIZES = (len(COLOURS), MOST_DOTS, len(DOT_COLOURS), len(SIDES))
Say = Callable[[str], None]


def teach(folder: Path, seed: int = 0, say: Say = print) -> Path:
    """Make the model in `folder`; returns the folder. One thread, about 200 s of one idle core."""
    from transformers import AutoModelForImageTextToText

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    create(folder, seed=seed)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    vision = Vision.load(folder)
    assert vision is not None
    rng, started = random.Random(seed), time.process_time()
    say(f"tower: loss {_tower(model.model.visual, vision, rng):.3f}, {time.process_time() - started:.0f} s of CPU")
    model.model.visual.requires_grad_(False)
    chat = Chat.load(str(folder))
    phases: tuple[tuple[str, Mapping[Kind, float], int], ...] = (
        ("skill", SKILL, SKILL_STEPS),
        ("habit", HABIT, HABIT_STEPS),
    )
    for name, shares, steps in phases:
        optimizers = _optimizers(model, name == "skill")
        for step in range(steps):
            _scale(optimizers, min(1, (step + 1) / 20, 2 * (1 - step / steps)))
            loss = _loss(model, vision, _samples(chat, shares, rng))
            _step(loss, model.parameters(), optimizers)
            if (step + 1) % 100 == 0 or step + 1 == steps:
                say(f"{name}: step {step + 1}, loss {loss.item():.3f}, {time.process_time() - started:.0f} s of CPU")
    model.save_pretrained(folder)
    return folder


def _tower(tower: Any, vision: Vision, rng: random.Random) -> float:
    """Teach the tower; returns the last loss. The output is scaled to the loudness of words at the end."""
    width: int = tower.config.out_hidden_size
    norm, fields, dots = nn.LayerNorm(width), nn.Linear(width, sum(_FIELD_SIZES)), nn.Linear(width, sum(_DOT_SIZES))
    weights = [p for part in (tower, norm, fields, dots) for p in part.parameters()]
    optimizers: list[torch.optim.Optimizer] = [torch.optim.AdamW(weights, lr=2e-3, betas=(0.9, 0.98), weight_decay=0)]
    places = torch.tensor([(row, column) for row in range(GRID) for column in range(GRID)])
    for step in range(TOWER_STEPS):
        _scale(optimizers, min(1, (step + 1) / 20, 2.5 * (1 - step / TOWER_STEPS)))
        scenes = [new_scene(rng) for _ in range(BATCH)]
        close = [(things, thing) for things in scenes for thing in rng.sample(things, 2)]
        seen = _seen(tower, vision, [draw(things) for things in scenes]).view(BATCH, GRID**2, width)
        crops = _seen(tower, vision, [_field(*pair) for pair in close]).view(len(close), -1, width).mean(1)
        colour_row_column = torch.cat([_colours(scenes)[..., None], places.expand(BATCH, -1, -1)], -1)
        loss = _classes(fields(norm(seen)), _FIELD_SIZES, colour_row_column)
        loss = loss + _classes(dots(norm(crops)), _DOT_SIZES, torch.tensor([_facts(thing) for _, thing in close]))
        _step(loss, weights, optimizers)
    with torch.no_grad():
        last = tower.merger.linear_fc2
        loud = 0.1 / seen.pow(2).mean().sqrt()
        last.weight *= loud
        last.bias *= loud
    return loss.item()


def _seen(tower: nn.Module, vision: Vision, pictures: Sequence[Any]) -> Tensor:
    pixels = vision.pixels([image_from_url(data_url(picture)) for picture in pictures])
    features: Tensor = tower(pixels["pixel_values"], grid_thw=pixels["image_grid_thw"]).pooler_output
    return features


def _field(things: tuple[Thing, ...], thing: Thing) -> Any:
    left, top = thing.column * FIELD, thing.row * FIELD
    return draw(things).crop((left, top, left + FIELD, top + FIELD))


def _colours(scenes: Sequence[tuple[Thing, ...]]) -> Tensor:
    """Colours of all fields of the scenes, 0 for an empty one."""
    found = torch.zeros(len(scenes), GRID**2, dtype=torch.long)
    for at, things in enumerate(scenes):
        for thing in things:
            found[at, GRID * thing.row + thing.column] = 1 + list(COLOURS).index(thing.colour)
    return found


def _facts(thing: Thing) -> tuple[int, ...]:
    names = (list(COLOURS), thing.colour), (list(DOT_COLOURS), thing.dot_colour), (list(SIDES), thing.side)
    colour, dot_colour, side = (known.index(name) for known, name in names)
    return colour, thing.dots - 1, dot_colour, side


def _classes(scores: Tensor, sizes: Sequence[int], labels: Tensor) -> Tensor:
    """The sum of the cross-entropies of several classifications, one after the other in the last dimension."""
    parts = zip(scores.split(list(sizes), -1), labels.unbind(-1), strict=True)
    return torch.stack([functional.cross_entropy(part.flatten(0, -2), label.flatten()) for part, label in parts]).sum()


def _samples(chat: Chat, shares: Mapping[Kind, float], rng: random.Random) -> list[Sample]:
    """The samples of one step, all of one kind, so that they have similar lengths."""
    (kind,) = rng.choices(list(shares), list(shares.values()))
    rows = [lesson(kind, rng) for _ in range(BATCH)]
    return [to_sample(chat, row["messages"], row.get("tools")) for row in rows]


def _loss(model: Any, vision: Vision, samples: Sequence[Sample]) -> Tensor:
    """The mean loss of the tokens that the assistant wrote."""
    width = max(len(sample.tokens) for sample in samples)
    ids, learned, kinds = (torch.zeros(len(samples), width, dtype=torch.long) for _ in range(3))
    images: list[Image] = []
    for at, sample in enumerate(samples):
        ids[at, : len(sample.tokens)] = torch.tensor(sample.tokens)
        learned[at, sample.prompt_length : len(sample.tokens)] = torch.tensor(sample.loss_mask)
        for span in sample.image_spans:
            kinds[at, span.start : span.end] = 1
            images.append(sample.images[span.hash])
    logits = model(input_ids=ids, mm_token_type_ids=kinds, **vision.pixels(images)).logits[:, :-1]
    chosen = learned[:, 1:].bool()
    return functional.cross_entropy(logits[chosen], ids[:, 1:][chosen])


def _optimizers(model: nn.Module, muon: bool) -> list[torch.optim.Optimizer]:
    named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
    if not muon:
        return [torch.optim.AdamW([weight for _, weight in named], lr=1e-3, betas=(0.9, 0.95), weight_decay=0)]
    matrices = [weight for name, weight in named if weight.ndim == 2 and "embed" not in name]
    others = [weight for name, weight in named if weight.ndim != 2 or "embed" in name]
    adam = torch.optim.AdamW(others, lr=2e-3, betas=(0.9, 0.95), weight_decay=0)
    return [torch.optim.Muon(matrices, lr=6e-3, weight_decay=0, adjust_lr_fn="match_rms_adamw"), adam]


def _scale(optimizers: Sequence[torch.optim.Optimizer], factor: float) -> None:
    """Set the learning rates to `factor` times the peak."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = factor * group.setdefault("peak", group["lr"])


def _step(loss: Tensor, weights: Iterator[nn.Parameter] | list[nn.Parameter], optimizers: Any) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(list(weights), 1.0)
    for optimizer in optimizers:
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
