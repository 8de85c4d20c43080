"""`agentrl init`."""

import shutil
from pathlib import Path
from typing import get_args

import click
from click.core import ParameterSource

from agentrl.errors import SettingsError
from agentrl.modelfolder import INDEX
from agentrl.tiny import Arch, create, shipped

_HELP = f"Architecture: {', '.join(get_args(Arch))}."


@click.command("init", context_settings={"show_default": True})
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--arch", default="qwen3", type=click.Choice(get_args(Arch)), metavar="TYPE", help=_HELP)
@click.option("--layers", default=4, type=click.IntRange(1), metavar="N", help="Transformer layers.")
@click.option("--hidden", default=128, type=click.IntRange(1), metavar="N", help="Width of the residual stream.")
@click.option("--heads", default=4, type=click.IntRange(1), metavar="N", help="Attention heads.")
@click.option("--kv-heads", default=2, type=click.IntRange(1), metavar="N", help="Key-value heads.")
@click.option("--context-length", default=1024, type=click.IntRange(1), metavar="N", help="Longest sequence in tokens.")
@click.option("--seed", default=0, metavar="N", help="Seed of the random weights.")
@click.option("--skilled", is_flag=True, help="Take a model that can call a tool and repeat what it finds.")
@click.option("--force", is_flag=True, help="Write into a folder that is not empty.")
def command(path: Path, skilled: bool, force: bool, **shape: str | int) -> None:
    """Make a tiny model in PATH: random weights, a tokenizer, a chat template with tool calls.

    It knows nothing yet, but every part of a run works with it, on a laptop and without a network. With --skilled it
    is a model that ships with agentrl: it calls the tool that its prompt offers, if that has one text argument, and
    answers with what was found. An environment of your own then earns rewards."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())) and not force:
        raise SettingsError(f"{path} is there and not empty; choose another PATH or pass --force")
    if skilled:
        source = click.get_current_context().get_parameter_source
        if fixed := [name for name in shape if name != "seed" and source(name) is not ParameterSource.DEFAULT]:
            raise SettingsError(f"--skilled has a shape of its own; leave out --{fixed[0].replace('_', '-')}")
        _remove_index(path)
        shutil.copytree(shipped("tools"), path, dirs_exist_ok=True)
        click.echo(f"{path}: a model that calls a tool and repeats what it finds; it is the same for every --seed")
        click.echo(f"Next: agentrl check {path}")
        return
    from transformers.utils import logging

    logging.disable_progress_bar()
    _remove_index(path)
    made = create(path, draw_pad_row=True, **shape)  # type: ignore[arg-type]
    click.echo(f"{path}: {shape['arch']}, {made.num_parameters():,} parameters, {made.config.vocab_size} tokens")
    click.echo(f"Next: agentrl check {path}")


def _remove_index(path: Path) -> None:
    """Remove the index of an older, sharded model."""
    if (old := path / INDEX).is_file():
        old.unlink()
