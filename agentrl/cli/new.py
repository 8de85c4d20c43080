"""`agentrl new`."""

import keyword
import re
import sys
from pathlib import Path
from string import Template

import click

from agentrl.errors import SettingsError

_TEMPLATES = Path(__file__).parent / "project"


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
    written = {"MODULE": module, "CLASS": "".join(map(str.capitalize, module.split("_")))}
    files = {f"{module}.py": "environment.py.txt", f"test_{module}.py": "test_environment.py.txt"}
    files |= {name: name for name in ("run.yaml", "README.md", "play.txt", "train.jsonl", "test.jsonl")}
    path.mkdir(parents=True, exist_ok=True)
    for name, file in files.items():
        text = (_TEMPLATES / file).read_text(encoding="utf-8")
        (path / name).write_text(Template(text).substitute(written), encoding="utf-8")
        click.echo(path / name)
    click.echo(f"Next: cd {path}, and what README.md says")
