"""Commands that take all settings as flags: `train`, `eval`, `rollout`. `--help` explains the settings for a first use
and lists the others by topic; `--help-all` explains every setting."""

import textwrap
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from agentrl.config.compat_interface import foreign
from agentrl.config.fields import FieldRef, Sections, all_fields
from agentrl.config.flags import ESSENTIAL, help_text, merged, read_flags, read_script
from agentrl.config.inapplicable import possibly_inapplicable
from agentrl.config.problems import Problems
from agentrl.config.settings import Purpose, RunSettings

_GIVEN, _PROBLEMS = "settings", "problems"
_EXAMPLES = Path(__file__).with_name("examples")


class SettingsCommand(click.Command):
    """A command whose flags are the settings of all packages."""

    presets: Mapping[str, Any] = MappingProxyType({})

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ctx.meta[_PROBLEMS] = problems = Problems()
        own = [name for own in self.get_params(ctx) for name in own.opts]
        *ctx.meta[_GIVEN], rest = read_flags(args, own, problems)
        try:
            return super().parse_args(ctx, rest)
        except click.UsageError:
            problems.raise_all()
            raise

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the command's own options and the essentials in full, the other settings as names."""
        _own_section(self, ctx, formatter)
        essential = ESSENTIAL[self.name or ""]
        with formatter.section("Essentials"):
            formatter.write_dl([_row(all_fields()[name], self.presets) for name in essential])
        formatter.write_paragraph()
        self.format_others(ctx, formatter, frozenset(essential))

    def format_others(self, ctx: click.Context, formatter: click.HelpFormatter, essential: frozenset[str]) -> None:
        shared = " train, rollout and eval take one settings file; a note names the settings that are ignored here."
        every = f"All other settings by topic; `{ctx.command_path} --help-all` explains each of them."
        formatter.write_text(every if self.name in ("train", "sft") else every + shared)
        for title, group in _groups(skip=essential):
            with formatter.section(title):
                width = formatter.width - formatter.current_indent
                names = "  ".join(f"--no-{f.flag[2:]}" if f.is_bool and f.default is True else f.flag for f in group)
                for line in textwrap.wrap(names, width, break_on_hyphens=False, break_long_words=False):
                    formatter.write(f"{'':{formatter.current_indent}}{line}\n")


class PlayedCommand(SettingsCommand):
    """A command with its own options that also takes a run's settings."""

    def format_others(self, ctx: click.Context, formatter: click.HelpFormatter, essential: frozenset[str]) -> None:
        formatter.write_text("Any other setting of a run is understood, too: see `agentrl rollout --help-all`.")


def given_names() -> frozenset[str]:
    """Return the names of the settings that the command line gives."""
    values, _ = click.get_current_context().meta[_GIVEN]
    return frozenset(values)


def given_settings(
    config: str | None,
    presets: Mapping[str, Any] = MappingProxyType({}),
    script: str | None = None,
    problems: Problems | None = None,
    **more: Any,
) -> RunSettings:
    """Return the settings: the command line overrides a script, then a file, then `presets`. `more`: flat names that
    override all. `problems`: collects the problems of command line and file; None: they are raised."""
    if problems is None:
        click.get_current_context().meta[_PROBLEMS].raise_all()
    values, origins = click.get_current_context().meta[_GIVEN]
    if script is not None:
        *low, notes = read_script(script, values)
        values, origins = merged((low[0], low[1]), (values, origins))
        for note in notes:
            click.echo(f"note: {note}", err=True)
    return RunSettings.from_parts({**values, **more}, origins, config=config, presets=presets, problems=problems)


def settings_command(
    purpose: Purpose, *, name: str | None = None, presets: Mapping[str, Any] = MappingProxyType({})
) -> Callable[[Callable[[RunSettings], int]], click.Command]:
    """Make a click command of a function that takes the run's settings and returns an exit code. `purpose`: the
    required settings (`RunSettings.check_complete`), and the default `name`. The file `examples/NAME.txt` ends its
    `--help`. A file and flags override `presets`."""

    def make(function: Callable[[RunSettings], int]) -> click.Command:
        def callback(config: str | None, slime_script: str | None, dry_run: bool) -> int:
            problems: Problems = click.get_current_context().meta[_PROBLEMS]
            alone = {} if purpose == "train" else {"debug_rollout_only": True}  # without a trainer's rules
            settings = given_settings(config, {**presets, **alone}, slime_script, problems)
            foreign_notes = compat.notes(settings) if (compat := foreign()) else ()
            for line in () if problems.any else [*possibly_inapplicable(settings, purpose), *foreign_notes]:
                click.echo(f"note: {line}", err=True)
            return _dry_run(settings, purpose, problems) if dry_run or problems.any else function(settings)

        examples = (_EXAMPLES / f"{name or purpose}.txt").read_text(encoding="utf-8")
        epilog = "\b\nExamples:\n" + textwrap.indent(examples, "  ")
        about: dict[str, Any] = {"help": function.__doc__, "epilog": epilog}
        made = SettingsCommand(name or purpose, params=_own_options(), callback=callback, **about)
        made.presets = presets
        return made

    return make


def _dry_run(settings: RunSettings, purpose: Purpose, problems: Problems) -> int:
    """Make the checks that precede a run, and print the settings of the run."""
    from agentrl.config.dry_run import show
    from agentrl.run.preflight import prepared
    from agentrl.run.resuming import changed

    understood = not problems.any
    try:
        settings, notes = prepared(settings, purpose, problems)
    finally:
        if understood:
            show(settings, purpose=purpose)
    for note in notes:
        click.echo(f"note: {note}", err=True)
    if purpose == "train" and (differs := ", ".join(changed(settings))):
        click.echo(f"The run in {settings.observability.output_dir} would go on with changed settings: {differs}")
    click.echo("All checks that precede a run have passed.")
    return 0


def _own_options() -> list[click.Parameter]:
    script = "Launch script of slime: its flags are read, with slime's defaults. Other flags override them."
    stops: dict[str, Any] = {"is_flag": True, "expose_value": False, "is_eager": True, "callback": _help_all}
    return [
        click.Option(["--config"], metavar="FILE", help="YAML or TOML file of settings; flags override it."),
        click.Option(["--slime-script"], metavar="FILE", help=script),
        click.Option(["--dry-run"], is_flag=True, help="Check everything, print non-default settings, and stop."),
        click.Option(["--help-all"], help="Explain every setting.", **stops),
    ]


def _help_all(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if not wanted:
        return
    formatter = ctx.make_formatter()
    ctx.command.format_usage(ctx, formatter)
    _own_section(ctx.command, ctx, formatter)
    for title, group in _groups():
        with formatter.section(title):
            formatter.write_dl([_row(field, getattr(ctx.command, "presets", {})) for field in group])
    click.echo(formatter.getvalue().rstrip("\n"))
    ctx.exit()


def _own_section(command: click.Command, ctx: click.Context, formatter: click.HelpFormatter) -> None:
    with formatter.section("Command"):
        formatter.write_dl([row for p in command.get_params(ctx) if (row := p.get_help_record(ctx)) is not None])


def _groups(skip: frozenset[str] = frozenset()) -> Iterator[tuple[str, list[FieldRef]]]:
    for section, info in Sections.model_fields.items():
        if group := [f for f in all_fields().values() if f.section == section and f.name not in skip]:
            yield str(info.title), group


def _row(field: FieldRef, presets: Mapping[str, Any] = MappingProxyType({})) -> tuple[str, str]:
    behind = f"/ --no-{field.flag[2:]}" if field.is_bool else field.metavar
    return f"{field.flag} {behind}", help_text(field, presets)
