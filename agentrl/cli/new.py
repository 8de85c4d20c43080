"""`agentrl new`."""

import json
import keyword
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from string import Template

import click

from agentrl.errors import SettingsError

_TEMPLATES = Path(__file__).parent / "project"
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
    taken = module in sys.stdlib_module_names or module in ("agentrl", "path", "sample")  # names of the project's files
    if not module.isidentifier() or module[0] == "_" or keyword.iskeyword(module) or not module.isascii() or taken:
        said = f"{path}: the folder's name becomes a Python module's; begin it with a letter, as my_env"
        raise SettingsError(f"{said}, and take no name of Python's or agentrl's")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise SettingsError(f"{path} is there and not empty; choose another PATH")
    people = json.dumps(_PEOPLE, indent=4).replace('"\n}', '",\n}')
    written = {"POPULATION": people, "MODULE": module, "CLASS": "".join(map(str.capitalize, module.split("_")))}
    files = {f"{module}.py": "environment.py.txt", f"test_{module}.py": "test_environment.py.txt"}
    files |= {name: name for name in ("run.yaml", "README.md", "play.txt")}
    texts = {name: (_TEMPLATES / file).read_text(encoding="utf-8") for name, file in files.items()}
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
