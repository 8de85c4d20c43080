"""`agentrl check`."""

import json
import os
import sys
import textwrap
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import anyio
import click

from agentrl.cli.settings_command import PlayedCommand, given_settings
from agentrl.config.inapplicable import inapplicable
from agentrl.errors import SettingsError
from agentrl.plugins import compat
from agentrl.sample import Origin

if TYPE_CHECKING:
    from agentrl.chat import Chat
    from agentrl.check.harness import Episode, Harness
    from agentrl.check.play import CheckedPlay
    from agentrl.check.policy import Live
    from agentrl.check.script import Lines
    from agentrl.config import RunSettings

    LivePlayer = Live | Sequence[Lines] | None  # replaces the scripts: a person, a file's turns, or a served model

_MOST = 4000  # characters of a text that are shown
_PLAY = "Type the model's turns. A FILE has the turns, and the rewards that they must earn."
_HOOK = "Call a hook of slime as a run does (docs/slime-hooks.md); without PATH, the hook of the settings."


@click.command(
    "check",
    cls=PlayedCommand,
    params=[
        click.Argument(["targets"], nargs=-1, metavar="[TARGET...]"),
        click.Option(["--config"], metavar="FILE", help="The run's YAML or TOML file of settings; flags override it."),
        click.Option(["--seconds"], type=click.FloatRange(1), default=6.0, help="Seconds for episodes. [default: 6]"),
        click.Option(["--play"], is_flag=False, flag_value="", metavar="[FILE]", help=_PLAY),
        click.Option(["--model"], metavar="URL", help="Have a model play: an OpenAI-compatible server's address."),
        click.Option(["--schemas"], is_flag=True, help="Print the schemas of the tools."),
        click.Option(["--hook"], multiple=True, metavar="NAME[=PATH]", help=_HOOK),
    ],
)
def command(
    targets: tuple[str, ...],
    config: str | None,
    seconds: float,
    play: str | None,
    model: str | None,
    schemas: bool,
    hook: tuple[str, ...],
) -> int:
    """Play episodes without training. A script writes the model's turns, or you do, or a served model does.

    A TARGET is an environment (pkg.mod:Name or path/file.py:Name, the same as --env) or a model folder. The folder's
    chat template is checked and used in the episodes; without a folder, a small template of agentrl's own. The agent
    loop, the parser, the tools and the graders are the run's."""
    if play and (Path(play).is_dir() or ":" in play or play.endswith(".py")):  # a target that follows a bare --play
        targets, play = (play, *targets), ""
    folders = [target for target in targets if Path(target).expanduser().is_dir()]
    envs = [target for target in targets if target not in folders]
    if neither := [target for target in envs if ":" not in target and not target.endswith(".py")]:
        raise SettingsError(f"{neither[0]}: neither a folder nor an environment; expected DIR or pkg.mod:Name")
    more: dict[str, Any] = {"hf_checkpoint": folders[0]} if folders else {}
    settings = given_settings(config, **more)
    for folder in folders:
        check_model(folder)
    if hook:
        if (slime := compat()) is None:
            raise SettingsError("--hook: slime's hooks need agentrl.compat, which this installation does not have")
        for name, _, path in (named.partition("=") for named in hook):
            click.echo(slime.check_hook(name, path or None, settings))
        return 0
    played = [settings.replace(env=env) for env in envs] or [settings]
    if settings.rollout.agent is not None:
        for problem in inapplicable(played[0], "rollout"):
            if problem.startswith("--agent "):  # something else plays
                raise SettingsError(problem)
        return check_agent(settings, _live(play, model))
    if not envs and not settings.rollout.env and settings.rollout.custom_generate_function_path is None:
        if not folders:
            raise SettingsError("nothing to check: name an environment, a model folder, or --config FILE")
        return 0
    live = _live(play, model)
    return max([check_env(one, seconds, schemas, live) for one in played])


def check_model(folder: str) -> None:
    """Print what the folder's chat template does. Raises SettingsError: the folder has no tokenizer."""
    from agentrl.chat import Chat
    from agentrl.chat.render_turn import unread_call
    from agentrl.run.preflight import has_tokenizer

    has_tokenizer("--hf-checkpoint", Path(folder).expanduser())
    chat = Chat.load(folder)
    click.secho(f"{folder}: {chat.vocab_size} tokens", bold=True)
    click.echo(str(chat.report))
    unread, parser = unread_call(chat), chat.turn_parser
    none = "; calls are text: name a format with --tool-call-parser" if parser.family.name == "none" else ""
    reads = none if unread is None else f" does not read: {unread.strip()!r:.120}"
    click.echo(f"{'tool-call parser':20} {parser.family.name}{reads}")
    tags = f"{parser.tags.open} {parser.tags.close}" if parser.tags else "channels" if parser.reasoning else "none"
    click.echo(f"{'reasoning parser':20} {tags!r}")


def _live(play: str | None, model: str | None) -> "LivePlayer":
    if play is not None and model:
        raise SettingsError("--play and --model cannot be combined; leave one out")
    from agentrl.check.policy import Endpoint, Person
    from agentrl.check.script import read_lines

    if play:
        return read_lines(play)
    return Person if play is not None else (lambda chat, tools: Endpoint(chat, model)) if model else None


def check_agent(settings: "RunSettings", live: "LivePlayer") -> int:
    """Have the agent of `--agent` or `--env` play a session. Print its tree; return 1 if it fails or ids are wrong."""
    from agentrl.check.agent import OneAnswer, play_session
    from agentrl.check.harness import first_rows
    from agentrl.run.preflight import Plugins

    environments, chat = Plugins.load(settings).environments, _chat(settings)
    assert environments is not None
    if live is not None and not callable(live):
        raise SettingsError("--play FILE cannot play an agent; use --model URL, or neither of the two")
    if environments.names:
        raise SettingsError(f"an agent is checked alone; give the path of one of {', '.join(environments.names)}")
    policy = live(chat, []) if live else OneAnswer(chat)
    sample = first_rows(settings)[0][0]
    click.secho(f"{settings.rollout.agent or settings.rollout.env}", bold=True)
    played = anyio.run(play_session, settings, chat, environments.of(sample), sample, policy)
    for line in played.lines(chat):
        click.echo(f"  {line}")
    proved = "" if played.error or played.wrong else ", ids and masks are right"
    click.secho(f"{len(played.samples)} samples in {played.seconds:.1f} s{proved}", bold=True)
    return int(bool(played.error or played.wrong))


def check_env(settings: "RunSettings", seconds: float, schemas: bool, live: "LivePlayer" = None) -> int:
    """Check an environment and print the findings. Return 1 if there is a problem."""
    from agentrl.check.play import CheckedPlay, play
    from agentrl.run.preflight import Plugins

    plugins = Plugins.load(settings)  # outside the event loop, so that Ctrl-C ends an import at once
    if plugins.agents and plugins.generate is None:
        return check_agent(settings, live)
    if plugins.generate is not None and plugins.generate.agent:
        said = (
            f"{settings.rollout.custom_generate_function_path} is an agent in Python, which agentrl check does not play"
        )
        raise SettingsError(f"{said}; agentrl rollout --num-rollout 1 plays it")
    played = CheckedPlay()

    def leave() -> None:
        """End the process, even if user code still runs in it."""
        _show_end(played)
        sys.stdout.flush()
        os._exit(1)

    anyio.run(play, settings, _chat(settings), seconds, played, leave, partial(_show, schemas=schemas), live)
    if any(episode.lost for episode in played.episodes):
        leave()
    _show_end(played)
    return int(bool(played.problems))


def _chat(settings: "RunSettings") -> "Chat":
    from agentrl.run.preflight import has_tokenizer, load_chat

    if settings.train.hf_checkpoint is not None:
        has_tokenizer("--hf-checkpoint", Path(settings.train.hf_checkpoint))
        return load_chat(settings)
    from agentrl.tiny.tokenizer import DEFAULT_CORPUS, train_tokenizer

    with TemporaryDirectory() as folder:
        train_tokenizer(DEFAULT_CORPUS, 512).save_pretrained(folder)
        return load_chat(settings.replace(hf_checkpoint=folder))


def _show(stage: "Harness", episode: "Episode | None", schemas: bool) -> None:
    """Print the environment, and what the model reads and writes in one episode."""
    from agentrl.check.observer import own_methods

    if (kind := stage.kind) is not None:
        tools = ", ".join(tool.name for tool in kind.declared_tools()) or "none"
        click.secho(f"\n{stage.path}: class {kind.__name__}", bold=True)
        click.echo(
            f"  max_turns {stage.settings.rollout.max_turns or kind.max_turns}; when_interrupted {kind.when_interrupted}; tools: {tools}"
        )
        click.echo(f"  methods of its own: {', '.join(own_methods(kind)) or 'none'}")
    if schemas:
        click.echo(json.dumps(stage.tools, indent=2, ensure_ascii=False))
    if episode is not None and episode.samples:
        _show_episode(stage, episode)


def _show_episode(stage: "Harness", episode: "Episode") -> None:
    sample = episode.samples[0]
    prompt = sample.tokens[: sample.prompt_length]
    where = "an invented prompt (name --prompt-data for your own)" if stage.made_up else "the prompt"
    click.secho(f"\n{where}, as the model reads it: {len(prompt)} tokens", bold=True)
    _quote(stage.chat.decode(prompt))
    click.secho(f"\nan episode in which the policy {episode.name}", bold=True)
    for model, held in groupby(sample.segments, lambda segment: segment.origin is Origin.MODEL):
        segments = list(held)
        wrote = sample.tokens[len(prompt) + segments[0].start : len(prompt) + segments[-1].end]
        _quote(stage.chat.decode(wrote), "green" if model else None)
    click.echo(f"  {sample.status.value} ({sample.stop_reason}), reward {sample.reward}")
    if "calls" in episode.name:
        click.secho("  arguments are guesses from prompt and schema; --play FILE plays your turns", dim=True)


def _quote(text: str, colour: str | None = None) -> None:
    more = f"\n... {len(text) - _MOST} more characters" if len(text) > _MOST else ""
    plain = "".join(c if c.isprintable() or c == "\n" else repr(c)[1:-1] for c in text[:_MOST])
    click.secho(textwrap.indent((plain + more).rstrip("\n"), "  | ", lambda line: True), fg=colour)


def _show_end(played: "CheckedPlay") -> None:
    from agentrl.check.findings import summed

    problems, turns = len(played.problems), sum(len(t) for e in played.episodes for t in e.policy.asked.values())
    verdict = f"{problems} problem{'s' * (problems != 1)}" if problems else "no problem"
    episodes = f"{len(played.episodes)} of {played.rows} played" if played.rows else f"{len(played.episodes)} episodes"
    click.secho(f"\n{episodes} with {turns} turns: {verdict}", bold=True)
    for found, times in summed(played.found):
        more = f", {times} times" if times > 1 else ""
        when = f" [when the policy {found.episode}{more}]" if found.episode else ""
        click.secho("  note     " if found.note else "  problem  ", fg="yellow" if found.note else "red", nl=False)
        click.echo(f"{found.what}{when}{found.detail and f'; {found.detail}'}")
    for what in played.untried:
        click.secho(f"  not tried: {what}", dim=True)
