"""What a check prints: the environment, a prompt as the model reads it, an episode, and what was found."""

import json
import textwrap
from itertools import groupby

import click

from agentrl.check.findings import summed
from agentrl.check.observer import own_methods
from agentrl.check.play import Played
from agentrl.check.stage import Episode, Stage
from agentrl.sample import Origin

_MOST = 4000


def show(stage: Stage, episode: Episode | None, schemas: bool) -> None:
    """Print who plays, and what the model reads and writes in one episode."""
    if (kind := stage.kind) is not None:
        tools = ", ".join(tool.name for tool in kind.declared_tools()) or "none"
        click.secho(f"\n{stage.path}: class {kind.__name__}", bold=True)
        click.echo(f"  max_turns {kind.max_turns}; when_interrupted {kind.when_interrupted}; tools: {tools}")
        click.echo(f"  methods of its own: {', '.join(own_methods(kind)) or 'none'}")
    if schemas:
        click.echo(json.dumps(stage.tools, indent=2, ensure_ascii=False))
    if episode is not None:
        _show_episode(stage, episode)


def _show_episode(stage: Stage, episode: Episode) -> None:
    sample = episode.samples[0]
    prompt = sample.tokens[: sample.prompt_length]
    where = "an invented prompt (name --prompt-data for your own)" if stage.made_up else "the first prompt"
    click.secho(f"\n{where}, as the model reads it: {len(prompt)} tokens", bold=True)
    _quote(stage.chat.decode(prompt))
    click.secho(f"\nan episode in which the policy {episode.name}", bold=True)
    for model, held in groupby(sample.segments, lambda segment: segment.origin is Origin.MODEL):
        segments = list(held)
        wrote = sample.tokens[len(prompt) + segments[0].start : len(prompt) + segments[-1].end]
        _quote(stage.chat.decode(wrote), "green" if model else None)
    click.echo(f"  {sample.status.value}, reward {sample.reward}")


def _quote(text: str, colour: str | None = None) -> None:
    more = f"\n... {len(text) - _MOST} more characters" if len(text) > _MOST else ""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text[:_MOST])
    click.secho(textwrap.indent((plain + more).rstrip("\n"), "  | ", lambda line: True), fg=colour)


def show_end(played: Played) -> None:
    """Print what was found."""
    problems, turns = len(played.problems), sum(len(t) for e in played.episodes for t in e.policy.asked.values())
    verdict = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem"
    click.secho(f"\n{len(played.episodes)} episodes with {turns} turns: {verdict}", bold=True)
    for found, times in summed(played.found):
        more = f", {times} times" if times > 1 else ""
        when = f" [when the policy {found.episode}{more}]" if found.episode else ""
        click.secho("  note     " if found.note else "  problem  ", fg="yellow" if found.note else "red", nl=False)
        click.echo(f"{found.what}{when}{found.detail and f'; {found.detail}'}")
    for what in played.untried:
        click.secho(f"  not tried: {what}", dim=True)
