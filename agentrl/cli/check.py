"""`agentrl check`."""

import contextlib
import json
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
import click

from agentrl.cli.main import debug_option
from agentrl.errors import SettingsError

if TYPE_CHECKING:
    from agentrl.envs import Environment
    from agentrl.tools import Tool


@click.command("check", context_settings={"max_content_width": 100})
@click.argument("targets", nargs=-1, required=True, metavar="TARGET...")
@debug_option
def command(targets: tuple[str, ...]) -> None:
    """Look at environments and model folders before a run uses them.

    A TARGET is an environment (pkg.mod:Name or path/file.py:Name): its tools and their schemas are shown. Or it is a
    Hugging Face folder: what its chat template does to a conversation is probed and shown.
    """
    for target in targets:
        if Path(target).expanduser().is_dir():
            check_model(target)
        elif ":" in target or target.endswith(".py"):
            check_env(target)
        else:
            raise SettingsError(f"{target}: neither a folder nor an environment; expected DIR or pkg.mod:Name")


async def _tools_of(env: "type[Environment]") -> "list[Tool]":
    """The environment's tools, those of its tool sources included, which are opened for this."""
    async with contextlib.AsyncExitStack() as stack:
        for source in env.tool_sources():
            stack.push_async_callback(source.close)
            await source.open()
        return env.declared_tools()


def check_model(folder: str) -> None:
    """Print what the folder's chat template does.

    Raises:
        SettingsError: the folder has no tokenizer.
    """
    if not any((Path(folder).expanduser() / f).is_file() for f in ("tokenizer.json", "tokenizer_config.json")):
        raise SettingsError(f"{folder}: no tokenizer.json in it; expected a Hugging Face model folder")
    from agentrl.chat import Chat

    chat = Chat.load(folder)
    click.secho(f"{folder}: {chat.vocab_size} tokens", bold=True)
    click.echo(str(chat.report))


def check_env(path: str) -> None:
    """Print what an environment offers: turns, tools, and which methods are its own."""
    from agentrl.envs import Environment, load_environment

    env = load_environment(path, what="check")
    click.secho(f"{path}: class {env.__name__}", bold=True)
    click.echo(f"  max_turns: {env.max_turns}")
    click.echo(f"  when_interrupted: {env.when_interrupted}")
    for method in ("setup", "reset", "step", "reward", "close"):
        own = getattr(env, method) is not getattr(Environment, method)
        if method == "setup":
            own = "setup" in {name for cls in env.__mro__[:-1] if cls is not Environment for name in vars(cls)}
        click.echo(f"  {method}: {'its own' if own else 'the default'}")
    tools = anyio.run(_tools_of, env)
    click.echo(f"  tools: {', '.join(tool.name for tool in tools) or 'none'}")
    for tool in tools:
        click.echo(json.dumps(tool.schema, indent=2, ensure_ascii=False))
