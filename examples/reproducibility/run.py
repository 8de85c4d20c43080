"""`python -m examples.reproducibility.run`: the same run twice, to the bit; then with a planted bit, which is found."""

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from agentrl.demo.data import write_train_and_test
from agentrl.demo.example import must_be_new
from agentrl.dumps import read_groups
from agentrl.errors import AgentRLError
from agentrl.observability.metrics import read_metrics
from agentrl.tiny import shipped

CONFIG = Path(__file__).parents[1] / "true_on_policy/cpu.yaml"
PLANTED = "examples.reproducibility.planted:reward"
NOTICED = "engine and trainer differ"


def train(folder: Path, model: Path, prompts: Path, *flags: str) -> tuple[int, str]:
    """Run three rollouts by `agentrl train` in a separate process. Returns the exit code and the output."""
    argv = ["--config", str(CONFIG), "--hf-checkpoint", str(model), "--prompt-data", str(prompts)]
    argv += ["--output-dir", str(folder), "--save-debug-rollout-data", str(folder / "played/{rollout_id}.jsonl")]
    argv += ["--num-rollout", "3", "--progress", "plain", *flags]
    done = subprocess.run([sys.executable, "-m", "agentrl", "train", *argv], capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def differences(one: Path, other: Path) -> Iterator[str]:
    """Return the differences of two finished runs: trajectories with log-probs, training metrics, the final weights."""
    for file in sorted((one / "played").glob("*.jsonl")):
        if _played(file) != _played(other / "played" / file.name):
            yield f"the trajectories of rollout {file.stem}"
    if _measured(one) != _measured(other):
        yield "what training measured"
    weights = [(folder / "model/model.safetensors").read_bytes() for folder in (one, other)]
    if weights[0] != weights[1]:
        yield "the weights"


def _played(file: Path) -> list[Any]:
    fields = ("index", "tokens", "loss_mask", "rollout_log_probs", "reward")
    return [[getattr(sample, name) for name in fields] for group in read_groups(file) for sample in group]


def _measured(folder: Path) -> list[dict[str, float]]:
    rows = read_metrics(folder / "metrics.jsonl")
    return [{k: v for k, v in row.items() if k.startswith("train/") and "seconds" not in k} for row in rows]


@click.command(context_settings={"show_default": True, "ignore_unknown_options": True})
@click.option("--seed", default=0, type=click.IntRange(0), help="Seed of data and sampling.")
@click.option("--output-dir", type=click.Path(path_type=Path), help="A new folder; default runs/reproducibility/...")
@click.argument("flags", nargs=-1, type=click.UNPROCESSED)
def main(seed: int, output_dir: Path | None, flags: tuple[str, ...]) -> None:
    """Run three rollouts twice, compare everything, then plant a bit. All other flags go to `agentrl train`."""
    folder = (output_dir or Path(f"runs/reproducibility/seed{seed}-{time.strftime('%Y%m%d-%H%M%S')}")).resolve()
    try:
        must_be_new(folder)
    except AgentRLError as error:
        raise click.ClickException(str(error)) from error
    prompts, held_out = write_train_and_test(folder / "data", train_count=48, seed=seed)
    more = ["--rollout-seed", str(seed), "--eval-prompt-data", "held_out", f"{held_out}@[0:20]", *flags]
    for name in ("one", "two"):
        code, said = train(folder / name, shipped("calculator"), prompts, *more)
        if code:
            raise click.ClickException(f"run {name} failed: {said}")
    found = list(differences(folder / "one", folder / "two"))
    click.echo(f"two runs of the same seed differ in: {', '.join(found) or 'nothing'}")
    code, said = train(folder / "planted", shipped("calculator"), prompts, *more, "--custom-rm-path", PLANTED)
    click.echo(said.strip().splitlines()[-1])
    if found or code == 0 or NOTICED not in said:
        sys.exit(1)


if __name__ == "__main__":
    main()
