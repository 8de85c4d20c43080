"""Rebuild the shipped tiny models: `python -m examples.tiny_models.make [NAME...]`, in the repository's root.

1. One thread, and at most AVX2 instructions, so that processors differ as little as possible.
2. Weights are stored in bfloat16; the CPU's engine and trainers load them as float32.
3. `records.json` beside the models has the recipe of each model, its checksum and the rows of the acceptance check. A model is
   accepted by these rows, not by its checksum.
"""

import asyncio
import hashlib
import json
import os
import random
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import click

from agentrl.demo.example import Say
from agentrl.errors import AgentRLError, TrainError
from agentrl.plugins import load_object
from agentrl.sample import Message
from agentrl.tiny import SHIPPED
from examples.tiny_models.acceptance import PhraseCheck, Row, failures, measure
from examples.tiny_models.warm_start import Lessons, Phase, WarmStartSettings, in_own_process, warm_start

RECORDS = "records.json"
SAME_EVERYWHERE = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_CBWR": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"}
"""Environment of the making process: no vector instructions newer than AVX2."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The lessons of a model by import path, each with its share of the demonstrations, and the settings."""

    lessons: Mapping[str, float]
    settings: WarmStartSettings

    def load(self) -> Lessons:
        """Load the lessons; those of examples need the repository's root as the working directory."""
        found = {path: load_object(path, what="lessons")() for path in self.lessons}
        (first, *others) = found.values()
        return first if not others else SeveralLessons(found, tuple(self.lessons.values()))


class SeveralLessons:
    """Lessons of several tasks for one model, mixed by their shares; see `examples.tiny_models.warm_start.Lessons`."""

    def __init__(self, lessons: Mapping[str, Lessons], shares: Sequence[float]) -> None:
        self.lessons, self.shares = list(lessons.items()), shares
        self.markup = tuple(dict.fromkeys(tag for one in lessons.values() for tag in one.markup))

    def corpus(self) -> Iterator[str]:
        """Return the texts of all tasks."""
        return chain.from_iterable(one.corpus() for _, one in self.lessons)

    def tools(self, conversation: Sequence[Message] = ()) -> Sequence[dict[str, Any]]:
        """Return the tools of the task that the first message names."""
        return self.lessons[conversation[0]["task"]][1].tools(conversation)

    async def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """Yield conversations without end, each of a task drawn by its share."""
        rng = random.Random(f"{phase} tasks {seed}")
        streams = [one.demonstrations(phase, seed) for _, one in self.lessons]
        while True:
            (at,) = rng.choices(range(len(streams)), self.shares)
            yield _of(at, await anext(streams[at]))

    async def checks(self) -> list[PhraseCheck]:
        """Return the checks of all tasks; the task's name precedes phrases and forms."""
        return [
            replace(
                check,
                phrase=f"{_name(path)}: {check.phrase}",
                messages=_of(at, check.messages),
                texts={place: (f"{_name(path)}: {form}", text) for place, (form, text) in check.texts.items()},
            )
            for at, (path, one) in enumerate(self.lessons)
            for check in await one.checks()
        ]


def _of(task: int, messages: list[Message]) -> list[Message]:
    return [{**messages[0], "task": task}, *messages[1:]]


def _name(path: str) -> str:
    return path.split(".")[1].partition(":")[0]


RECIPES = {
    "calculator": Recipe({"examples.tiny_models.calculator:CalculatorLessons": 1}, WarmStartSettings(seed=1)),
    "examples": Recipe(
        {
            "examples.search_r1.lessons:SearchLessons": 3,
            "examples.search_r1.lessons:native": 2,
            "examples.retool.lessons:PythonLessons": 3,
            "examples.tau_bench.lessons:ShopLessons": 2,
            "examples.multi_agent.lessons:TeamLessons": 4,
        },
        WarmStartSettings(
            vocab_size=1024,
            feed_forward=160,
            skill_steps=2400,
            skill_batch=24,
            skill_rounds=3,
            least_skill_rounds=2,
            habit_steps=130,
            habit_lr=2e-3,
        ),
    ),
    "tools": Recipe(
        {"examples.tiny_models.tools:ToolLessons": 1},
        WarmStartSettings(
            vocab_size=768,
            feed_forward=128,
            spaces_apart=True,
            skill_steps=2400,
            skill_batch=24,
            skill_rounds=2,
            habit_steps=0,
        ),
    ),
}
"""The shipped models by name."""


def make(name: str, folder: Path, say: Say) -> list[Row]:
    """Make the model and put it, with its record, into `folder`. Returns the rows of its acceptance check.

    Raises:
        TrainError: the model is not accepted; the message names the phrases and forms that failed.
    """
    recipe, before = RECIPES[name], dict(os.environ)
    os.environ.update(SAME_EVERYWHERE)
    try:
        with tempfile.TemporaryDirectory() as work:
            made = in_own_process(warm_start, Path(work) / name, recipe.load(), recipe.settings, say)
            return keep(name, made, folder)
    finally:
        os.environ.clear()
        os.environ.update(before)


def keep(name: str, made: Path, folder: Path) -> list[Row]:
    """Store the model in `made` in bfloat16, check it, and copy it into `folder` with its record; see `make`."""
    recipe = RECIPES[name]
    halve(made)
    rows = asyncio.run(measure(made, recipe.load()))
    if failed := failures(rows, recipe.settings.least_right, recipe.settings.least_probability):
        raise TrainError(f"{name}: failed the acceptance check in bfloat16: {failed}")
    shutil.copytree(made, folder / name, dirs_exist_ok=True)
    file = folder / RECORDS
    records = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    records[name] = {
        "lessons": dict(recipe.lessons),
        "settings": recipe.settings.model_dump(),
        "sha256": hashlib.sha256((folder / name / "model.safetensors").read_bytes()).hexdigest(),
        "acceptance": [row.record() for row in rows],
    }
    file.write_text(json.dumps(dict(sorted(records.items())), indent=1) + "\n", encoding="utf-8")
    return rows


def halve(folder: Path) -> None:
    """Store the weights of the model in `folder` in bfloat16."""
    import torch
    from safetensors.torch import load_file, save_file

    file, config = folder / "model.safetensors", folder / "config.json"
    save_file({name: weight.to(torch.bfloat16) for name, weight in load_file(file).items()}, file, {"format": "pt"})
    described = json.loads(config.read_text(encoding="utf-8"))
    config.write_text(json.dumps(described | {"dtype": "bfloat16"}, indent=2) + "\n", encoding="utf-8")


@click.command()
@click.argument("names", nargs=-1, type=click.Choice(list(RECIPES)))
@click.option("--output-dir", type=click.Path(path_type=Path), help="Another folder than the package's own.")
def main(names: tuple[str, ...], output_dir: Path | None) -> None:
    """Make the shipped models NAMES again, by default all; ten minutes to an hour each."""
    try:
        for name in names or RECIPES:
            for row in make(name, output_dir or SHIPPED, click.echo):
                click.echo(f"{name}: {row}")
    except AgentRLError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
