"""`python -m agentrl.demo`: a tiny model learns to use a calculator."""

import sys
import time
from pathlib import Path
from typing import Literal

import click

from agentrl.demo.run import run_demo
from agentrl.errors import AgentRLError


@click.command(context_settings={"show_default": True})
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of weights, data and sampling.")
@click.option("--steps", default=20, type=click.IntRange(1), help="GRPO steps.")
@click.option("--backend", default="local", type=click.Choice(["local", "ray"]), help="One process, or Ray's actors.")
@click.option("--output-dir", type=click.Path(path_type=Path), help="A new folder for the run; default runs/demo/...")
@click.option(
    "--cache", default="runs/demo-cache", type=click.Path(path_type=Path), help="Where warm-started models are kept."
)
def main(seed: int, steps: int, backend: Literal["local", "ray"], output_dir: Path | None, cache: Path) -> None:
    """A tiny model learns to use a calculator: random weights, warm start, GRPO, evaluation on unseen problems."""
    folder = output_dir or Path(f"runs/demo/seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        result = run_demo(folder.resolve(), cache.resolve(), seed=seed, steps=steps, backend=backend, say=click.echo)
    except AgentRLError as error:
        raise click.ClickException(str(error)) from error
    if not result.learned:
        click.echo("the model did not learn as expected", err=True)
        sys.exit(1)


if __name__ == "__main__":
    main()
