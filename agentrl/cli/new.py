"""`agentrl new`."""

import json
import keyword
import re
from collections.abc import Iterable
from pathlib import Path
from string import Template

import click

from agentrl.errors import SettingsError

_ENVIRONMENT = '''"""Towns and how many people live there: replace the tool and the reward by those of your task."""

from agentrl import Environment, Sample, tool
from agentrl.rm_hub import final_answer

PEOPLE = ${POPULATION}


@tool
def look_up(city: str) -> str:
    """Population of a city.

    Args:
        city: its English name
    """
    return PEOPLE.get(city, "unknown")


class ${CLASS}(Environment):
    """Answer with the number that the tool finds."""

    tools = [look_up]
    max_turns = 3

    async def reward(self, sample: Sample) -> float:
        """1 where the model's last turn has the right number."""
        return float(sample.label in final_answer(sample))
'''
_PLAY = """# Turns of the model, one a line; ! calls a tool. `agentrl check ... --play play.txt` plays them.
# Each episode gets the next prompt of train.jsonl. An empty line ends an episode.
!look_up {"city": "Paris"}
2.1 million people live in Paris.
expect reward 1

I do not know.
expect reward 0
"""
_TEST = """import asyncio
from pathlib import Path

from ${MODULE} import PEOPLE, ${CLASS}

from agentrl import Sample
from agentrl.cli.main import run

FOLDER = Path(__file__).parent


def test_the_episodes_of_play_earn_what_they_say():
    env, prompts = f"{FOLDER}/${MODULE}.py:${CLASS}", f"{FOLDER}/train.jsonl"
    play = ["--prompt-data", prompts, "--label-key", "label", "--play", f"{FOLDER}/play.txt"]
    assert run(["check", env, *play]) == 0


def test_the_tool_finds_what_it_knows():
    found = asyncio.run(${CLASS}().toolbox.run("look_up", {"city": "Oslo"}))
    assert found.text == PEOPLE["Oslo"]


def test_the_last_turn_is_graded():
    answer = [{"role": "assistant", "content": "Oslo: 709 thousand"}]
    sample = Sample(label=PEOPLE["Oslo"], metadata={"messages": answer})
    assert asyncio.run(${CLASS}().reward(sample)) == 1.0
"""
_SETTINGS = """# Flags without the dashes; flags on the command line win. `agentrl train --help` explains them.
env: ${MODULE}.py:${CLASS}
hf_checkpoint: ./model
prompt_data: train.jsonl
label_key: label
eval_prompt_data: [held_out, test.jsonl]
eval_interval: 5
output_dir: runs/first
backend: local # everything in one process; take this line out for Ray
num_rollout: 10
rollout_batch_size: 8
n_samples_per_prompt: 8
rollout_max_response_len: 64
rollout_temperature: 2.2 # the skilled tiny model is sure of itself, and learns from mistakes; for others take this out
lr: 3.0e-4
"""
_README = """# ${MODULE}

    agentrl init --skilled ./model           # a tiny model that can call a tool
    agentrl check ${MODULE}.py:${CLASS}            # is the environment well-formed? what will the model see?
    agentrl check --config run.yaml --play   # be the model: type its turns
    agentrl check --config run.yaml --play play.txt   # turns and rewards written down, which pytest plays too
    pytest                                   # your own tests
    agentrl train --config run.yaml
    agentrl view runs/first                  # curves and every trajectory, token by token, in the browser
"""
_TOWNS = (
    "Oslo 709 thousand, Paris 2.1 million, Rome 2.8 million, Berlin 3.7 million, London 8.9 million, Lisbon 548 thousand, "
    "Madrid 3.3 million, Vienna 2.0 million, Prague 1.4 million, Dublin 593 thousand, Athens 643 thousand, Warsaw 1.9 million"
)
_PEOPLE = dict(town.split(" ", 1) for town in _TOWNS.split(", "))
_HELD_OUT = ("Oslo", "Dublin", "Rome", "Madrid")


@click.command("new")
@click.argument("path", type=click.Path(path_type=Path))
def command(path: Path) -> None:
    """Write a small project into PATH: an environment with a tool, prompts, settings, a test.

    It runs as it is, on a laptop; then make it yours."""
    module = re.sub(r"\W", "_", path.resolve().name)
    if not module.isidentifier() or keyword.iskeyword(module) or not module.isascii():
        raise SettingsError(f"{path}: the folder's name becomes a Python module's; begin it with a letter, as my_env")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingsError(f"{path} is there and not empty; choose another PATH")
    people = json.dumps(_PEOPLE, indent=4).replace('"\n}', '",\n}')
    written = {"POPULATION": people, "MODULE": module, "CLASS": "".join(map(str.capitalize, module.split("_")))}
    texts = {f"{module}.py": _ENVIRONMENT, f"test_{module}.py": _TEST, "run.yaml": _SETTINGS, "README.md": _README}
    texts["play.txt"] = _PLAY
    texts["train.jsonl"] = _rows(city for city in _PEOPLE if city not in _HELD_OUT)
    texts["test.jsonl"] = _rows(_HELD_OUT)
    path.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (path / name).write_text(Template(text).substitute(written), encoding="utf-8")
        click.echo(path / name)
    click.echo(f"Next: cd {path}, and what README.md says")


def _rows(cities: Iterable[str]) -> str:
    rows = ({"input": f"How many people live in {city}?", "label": _PEOPLE[city]} for city in cities)
    return "".join(json.dumps(row) + "\n" for row in rows)
