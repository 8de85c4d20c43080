"""Conversations that teach the tiny model before reinforcement learning, in the form of `agentrl sft`.

1. `places`: the colours of a picture's shapes, each with its row and column. `dots`: what there is to say of a field.
   These teach the model to see.
2. `good`: a question, the right call, the answer. `hasty` answers without a look, `elsewhere` crops another field,
   and both answer at random. Reinforcement learning starts from a model that has these habits.
"""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from PIL import Image

from agentrl import Message
from examples.geo3k_vlm.env import CropEnv
from examples.geo3k_vlm.scenes import (
    DOT_COLOURS,
    FIELD,
    GRID,
    MOST_DOTS,
    SIDES,
    Question,
    Thing,
    data_url,
    draw,
    held_out,
    make_question,
    make_scene,
)

Kind = Literal["places", "dots", "good", "hasty", "elsewhere"]
KINDS = get_args(Kind)
SKILL: Mapping[Kind, float] = {"places": 0.5, "dots": 0.2, "good": 0.3}
HABIT: Mapping[Kind, float] = {"good": 0.35, "hasty": 0.2, "elsewhere": 0.45}
"""Shares of the kinds in the two phases."""


def lesson(kind: Kind, rng: random.Random) -> dict[str, Any]:
    """Make a row of `agentrl sft`: `messages`, and `tools` if the model may call one."""
    match kind:
        case "places":
            things = rng.sample(found := new_scene(rng), len(found))
            said = ", ".join(f"{thing.colour} {thing.row + 1} {thing.column + 1}" for thing in things)
            return {"messages": [_shown(draw(found)), _said(said)]}
        case "dots":
            thing = rng.choice(found := new_scene(rng))
            facts = [f"dots {thing.dots}", f"colour {thing.dot_colour}", f"side {thing.side}"]
            said = ", ".join([thing.colour, *rng.sample(facts, len(facts))])
            return {"messages": [_shown(_field(found, thing.row, thing.column)), _said(said)]}
    return _asked(kind, rng)


def _asked(kind: Kind, rng: random.Random) -> dict[str, Any]:
    question = make_question(rng)
    while held_out(question.things):
        question = make_question(rng)
    asked = _shown(draw(question.things), question.text)
    answer = question.answer if kind == "good" else rng.choice(choices(question))
    messages = [asked]
    if kind != "hasty":
        row, column = _where(kind, question, rng)
        arguments = {"row": row + 1, "column": column + 1}
        call = {"id": "call_0", "type": "function", "function": {"name": "crop", "arguments": arguments}}
        seen = _picture(_field(question.things, row, column))
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_0", "name": "crop", "content": [seen]},
        ]
    tools = [tool.schema for tool in CropEnv.declared_tools()]
    return {"messages": [*messages, _said(answer)], "tools": tools, "label": question.answer}


def choices(question: Question) -> tuple[str, ...]:
    """Return all answers that a question of this form may have."""
    match question.text.split()[0]:
        case "How":
            return tuple(map(str, range(1, MOST_DOTS + 1)))
        case "What":
            return tuple(DOT_COLOURS)
    return tuple(SIDES)


def write_lessons(file: Path, shares: Mapping[Kind, float], count: int, seed: int, at_once: int) -> Path:
    """Write `count` rows; runs of `at_once` rows are of one kind, so that a step's conversations have similar lengths."""
    rng = random.Random(f"lessons {seed}")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as lines:
        for number in range(count):
            if number % at_once == 0:
                (kind,) = rng.choices(list(shares), list(shares.values()))
            lines.write(json.dumps(lesson(kind, rng)) + "\n")
    return file


def new_scene(rng: random.Random) -> tuple[Thing, ...]:
    while held_out(things := make_scene(rng)):
        pass
    return things


def _where(kind: Kind, question: Question, rng: random.Random) -> tuple[int, int]:
    about = (question.about.row, question.about.column)
    if kind == "good":
        return about
    return rng.choice([(row, column) for row in range(GRID) for column in range(GRID) if (row, column) != about])


def _field(things: tuple[Thing, ...], row: int, column: int) -> Image.Image:
    left, top = column * FIELD, row * FIELD
    return draw(things).crop((left, top, left + FIELD, top + FIELD))


def _shown(picture: Image.Image, text: str = "") -> Message:
    return {"role": "user", "content": [_picture(picture), *([{"type": "text", "text": text}] if text else [])]}


def _picture(picture: Image.Image) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(picture)}}


def _said(text: str) -> Message:
    return {"role": "assistant", "content": text}
