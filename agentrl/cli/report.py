"""`agentrl report`."""

from pathlib import Path

import click


@click.command("report")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--title", help="Headline of the page; the folder's name if not given.")
def command(run: Path, title: str | None) -> None:
    """Write RUN/report.html from the metrics and trajectories in the folder RUN: one file to send.

    The last lines say whether the run learned, and if not, the likeliest cause.

    RUN is the --output-dir of a run, or its folder rollouts or evaluation. `agentrl view RUN` shows all trajectories."""
    from agentrl.observability.report import run_verdict, write_report

    click.echo("\n".join([str(write_report(run, title=title)), *run_verdict(run)]))
