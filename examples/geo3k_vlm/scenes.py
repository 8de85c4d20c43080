"""Drawn scenes: a picture of coloured shapes with dots on them, and a question about the dots of one shape.

python -m examples.geo3k_vlm.scenes --output-dir data/scenes

1. The picture is a grid of `GRID` by `GRID` fields. One field has a shape, or with `--shapes` 2 to 5 fields, each of
   another colour.
2. Questions ask for the number, the colour or the side of the dots.
3. The seed alone decides pictures and questions. No test picture occurs in training.
"""

import base64
import io
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import click
from PIL import Image, ImageDraw

Split = Literal["train", "test"]

GRID = 3
FIELD = 56
"""Pixels of a field's side."""
BACKGROUND = 235
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220), "yellow": (230, 200, 40)}
COLOURS |= {"purple": (150, 60, 190), "orange": (240, 140, 30)}
SHAPES = ("circle", "square", "triangle", "cross")
DOT_COLOURS = {"black": (0, 0, 0), "white": (255, 255, 255), "pink": (255, 120, 200)}
SIDES = {"left": (-1, 0), "right": (1, 0), "top": (0, -1), "bottom": (0, 1)}
MAX_DOTS = 3
TRAIN_QUESTIONS, TEST_QUESTIONS = 512, 200


@dataclass(frozen=True, slots=True)
class Thing:
    """A shape in a field, and the dots on it.

    Attributes:
        row: of the field, from 0 at the top.
        column: of the field, from 0 at the left.
        colour: of the shape, a key of `COLOURS`.
        shape: one of `SHAPES`.
        dots: number of dots.
        dot_colour: a key of `DOT_COLOURS`.
        side: side of the shape with the dots, a key of `SIDES`.
        shift: distance in pixels of the shape from the field's middle, to the right and down.
    """

    row: int
    column: int
    colour: str
    shape: str
    dots: int
    dot_colour: str
    side: str
    shift: tuple[int, int]

    @property
    def field(self) -> int:
        """Return the number of the field, from 1, row by row."""
        return GRID * self.row + self.column + 1


@dataclass(frozen=True, slots=True)
class Question:
    """A question about the dots of one shape of a picture, and its answer."""

    things: tuple[Thing, ...]
    about: Thing
    text: str
    answer: str


def make_scene(rng: random.Random, count: int) -> tuple[Thing, ...]:
    """Draw `count` random shapes of a picture."""
    fields = rng.sample([(row, column) for row in range(GRID) for column in range(GRID)], count)
    colours = rng.sample(list(COLOURS), count)
    return tuple(_thing(rng, *field, colour) for field, colour in zip(fields, colours, strict=True))


def _thing(rng: random.Random, row: int, column: int, colour: str) -> Thing:
    dots, dot_colour, side = rng.randint(1, MAX_DOTS), rng.choice(list(DOT_COLOURS)), rng.choice(list(SIDES))
    shift = (rng.randint(-1, 1), rng.randint(-1, 1))
    return Thing(row, column, colour, rng.choice(SHAPES), dots, dot_colour, side, shift)


def ask(rng: random.Random, things: tuple[Thing, ...], about: Thing) -> Question:
    """Ask for the number, the colour or the side of the dots of `about`; its colour is named if there are others."""
    shape = f"{about.colour} shape" if len(things) > 1 else "shape"
    text, answer = rng.choice(
        (
            (f"How many dots are on the {shape}?", str(about.dots)),
            (f"What colour are the dots on the {shape}?", about.dot_colour),
            (f"On which side of the {shape} are the dots?", about.side),
        )
    )
    return Question(things, about, text, answer)


def choices(question: Question) -> tuple[str, ...]:
    """Return all answers that a question of this form may have."""
    match question.text.split()[0]:
        case "How":
            return tuple(map(str, range(1, MAX_DOTS + 1)))
        case "What":
            return tuple(DOT_COLOURS)
    return tuple(SIDES)


def questions(split: Split, seed: int, shapes: int = 1) -> Iterator[Question]:
    """Yield questions without end. `shapes` is the maximum number of shapes. No picture occurs in both splits."""
    rng = random.Random(f"{split} {seed}")
    while True:
        things = make_scene(rng, rng.randint(min(shapes, 2), shapes))
        if held_out(things) == (split == "test"):
            yield ask(rng, things, rng.choice(things))


def held_out(things: tuple[Thing, ...]) -> bool:
    """Return true for a fifth of all pictures, chosen by their fields and shapes."""
    said = " ".join(sorted(f"{thing.row} {thing.column} {thing.colour} {thing.shape}" for thing in things))
    return random.Random(said).random() < 0.2


def draw(things: tuple[Thing, ...]) -> Image.Image:
    """Draw a picture."""
    picture = Image.new("RGB", (GRID * FIELD, GRID * FIELD), (BACKGROUND,) * 3)
    pen = ImageDraw.Draw(picture)
    for thing in things:
        x, y = ((place + 0.5) * FIELD + by for place, by in zip((thing.column, thing.row), thing.shift, strict=True))
        _shape(pen, thing, x, y, 0.4 * FIELD)
        right, down = SIDES[thing.side]
        for number in range(thing.dots):
            along = (number - (thing.dots - 1) / 2) * 0.2 * FIELD
            dot_x = x + 0.22 * FIELD * right + along * abs(down)
            dot_y = y + 0.22 * FIELD * down + along * abs(right)
            pen.ellipse(_square(dot_x, dot_y, 0.07 * FIELD), fill=DOT_COLOURS[thing.dot_colour])
    return picture


def cropped(picture: Image.Image, field: int) -> Image.Image:
    """Return one field of a picture; `field`: 1 to 9, row by row."""
    width, height = picture.width / GRID, picture.height / GRID
    left, top = (field - 1) % GRID * width, (field - 1) // GRID * height
    return picture.crop((round(left), round(top), round(left + width), round(top + height)))


def _shape(pen: Any, thing: Thing, x: float, y: float, half: float) -> None:
    fill = COLOURS[thing.colour]
    match thing.shape:
        case "circle":
            pen.ellipse(_square(x, y, half), fill=fill)
        case "square":
            pen.rectangle(_square(x, y, 0.9 * half), fill=fill)
        case "triangle":
            pen.polygon([(x, y - half), (x + half, y + half), (x - half, y + half)], fill=fill)
        case "cross":
            arm = 0.45 * half
            pen.rectangle((x - half, y - arm, x + half, y + arm), fill=fill)
            pen.rectangle((x - arm, y - half, x + arm, y + half), fill=fill)


def _square(x: float, y: float, half: float) -> tuple[float, float, float, float]:
    return x - half, y - half, x + half, y + half


def write_data(
    folder: Path, seed: int, shapes: int = 1, blank: bool = False, instruction: str = ""
) -> tuple[Path, Path]:
    """Write `train.jsonl` and `test.jsonl`; the test questions are the same for every seed. See `main`."""
    folder.mkdir(parents=True, exist_ok=True)
    files = []
    splits: tuple[tuple[Split, int, int], ...] = (("train", TRAIN_QUESTIONS, seed), ("test", TEST_QUESTIONS, 0))
    for split, count, own_seed in splits:
        asked = islice(questions(split, own_seed, shapes), count)
        lines = (json.dumps(row(question, blank, instruction)) + "\n" for question in asked)
        (file := folder / f"{split}.jsonl").write_text("".join(lines), encoding="utf-8")
        files.append(file)
    return files[0], files[1]


def row(question: Question, blank: bool = False, instruction: str = "") -> dict[str, Any]:
    """Return the prompt row of a question; the picture is a part of the message, in OpenAI's form."""
    picture = draw(() if blank else question.things)
    content = [
        {"type": "image_url", "image_url": {"url": data_url(picture)}},
        {"type": "text", "text": f"{question.text} {instruction}".strip()},
    ]
    return {"prompt": [{"role": "user", "content": content}], "label": question.answer}


def data_url(picture: Image.Image) -> str:
    """Return a picture as a PNG file in a data URL."""
    stream = io.BytesIO()
    picture.save(stream, "PNG", compress_level=1)
    return f"data:image/png;base64,{base64.b64encode(stream.getvalue()).decode()}"


@click.command()
@click.option("--output-dir", required=True, type=click.Path(path_type=Path), help="For train.jsonl and test.jsonl.")
@click.option("--seed", default=0, help="Of the training questions.")
@click.option("--shapes", default=1, type=click.IntRange(1, len(COLOURS)), help="Most shapes of a picture.")
@click.option("--blank", is_flag=True, help="Show empty pictures, to measure what guesses earn.")
@click.option("--instruction", default="", help="Text after each question, for models that would answer in sentences.")
def main(output_dir: Path, seed: int, shapes: int, blank: bool, instruction: str) -> None:
    """Write the prompts."""
    click.echo("\n".join(map(str, write_data(output_dir, seed, shapes, blank, instruction))))


if __name__ == "__main__":
    main()
