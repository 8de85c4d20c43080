"""`agentrl eval`."""

from pathlib import Path
from typing import Any

import click

from agentrl.cli.settings_command import settings_command
from agentrl.config.settings import RunSettings


@settings_command("eval")
def command(settings: RunSettings) -> int:
    """Evaluate a model on held-out prompts, with the environment, parser and grader that training uses.

    Every evaluation is kept in OUTPUT_DIR/evaluation: the figures in evaluations.jsonl, the trajectories to `agentrl view`.
    """
    from agentrl.cluster.launch import workers_of
    from agentrl.run.offline import evaluate
    from agentrl.run.resuming import evaluations_in

    for name, value in evaluate(settings, workers_of(settings)).items():
        click.echo(f"{name:40s} {value:.4f}")
    folder = Path(settings.observability.output_dir).expanduser() / "evaluation"
    click.echo(f"kept as {folder}@{evaluations_in(folder) - 1}, for --compare; its trajectories: agentrl view {folder}")
    return 0


def _compare(ctx: click.Context, _: click.Parameter, pair: tuple[str, str] | None) -> None:
    if not pair:
        return
    from agentrl.observability.compare import compare, find_evaluation

    before, after = map(find_evaluation, pair)
    for side in (before, after):
        click.echo(f"{side.name}: {side.checkpoint or 'of an unknown checkpoint'}")
    for name, (prompts, differences) in compare(before, after).items():
        click.echo(f"\n{name}, {prompts} prompt{'s' if prompts != 1 else ''}, means over prompts")
        click.echo(f"  {'':16s} {'before':>9s} {'after':>9s} {'difference':>11s}   95 % interval")
        for one in differences:
            interval = "too few prompts" if one.interval is None else "{:+.4g} to {:+.4g}".format(*one.interval)
            text = f"{one.before:9.4g} {one.after:9.4g} {one.difference:+11.4g}   {interval}"
            click.echo(f"  {one.measure:16s} {text}")
    ctx.exit()


_HELP = "Compare two kept evaluations by prompt and stop: folders (FOLDER@2: its evaluation 2, counted from 0; else the last)."
_STOPS: dict[str, Any] = {"is_eager": True, "expose_value": False, "callback": _compare}
command.params.append(click.Option(["--compare"], nargs=2, metavar="BEFORE AFTER", help=_HELP, **_STOPS))
