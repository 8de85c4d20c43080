"""`agentrl convert`."""

import sys
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from agentrl.train.convert import Form

_PATH = click.Path(path_type=Path)


@click.command("convert")
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
@click.option("--to", "form", required=True, type=click.Choice(["hf", "torch_dist"]), help="Form of TARGET.")
@click.option("--hf-checkpoint", type=_PATH, metavar="DIR", help="Config and tokenizer, if SOURCE has none.")
def command(source: Path, target: Path, form: "Form", hf_checkpoint: Path | None) -> int:
    """Write the model in SOURCE to the new folder TARGET in another form.

    SOURCE is a Hugging Face folder (also one of float8 blocks, as DeepSeek publishes), a torch_dist checkpoint of
    Megatron or slime, or a checkpoint of a run.

    \b
        agentrl convert Qwen3-4B Qwen3-4B_torch_dist --to torch_dist
        agentrl convert slime-run model --to hf --hf-checkpoint Qwen3-4B"""
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")  # about GPU features
    from agentrl.train.convert import convert

    if left := convert(source, target, form, hf_checkpoint, _shown):
        some = f"{', '.join(left[:3])}{', ...' if len(left) > 3 else ''}"
        click.echo(f"left out: {len(left)} tensors that a {form} checkpoint has no place for ({some})", err=True)
    click.echo(f"wrote {target}")
    return 0


def _shown(things: Iterable[Any], count: int) -> Iterator[Any]:
    with click.progressbar(things, count, "converting", show_pos=True, file=sys.stderr) as bar:
        yield from bar
