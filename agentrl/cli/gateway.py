"""`agentrl gateway`."""

import secrets
import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from socket import socket

    from agentrl.engine.settings import EngineSettings


@click.command("gateway", context_settings={"show_default": True})
@click.argument("engines", metavar="ENGINE...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on, for agents and the owner.")
@click.option("--port", default=8080, type=click.IntRange(0, 65535), metavar="PORT", help="For agents; 0: a free port.")
@click.option("--owner-port", default=8081, type=click.IntRange(0, 65535), metavar="PORT", help="Port for the owner.")
@click.option("--owner-key", envvar="AGENTRL_GATEWAY_KEY", show_envvar=True, metavar="KEY", help="Key of the owner.")
@click.option("--model", metavar="DIR", help="Folder with tokenizer and chat template; default: the engines' own.")
@click.option("--context-length", type=click.IntRange(3), metavar="TOKENS", help="Maximum; default: the engines' own.")
@click.option("--chat-template-path", "chat_template", metavar="FILE", help="Jinja file; default: the model's own.")
@click.option("--tool-call-parser", default="auto", metavar="NAME", help="Format of tool calls.")
@click.option("--reasoning-parser", default="auto", metavar="NAME", help="Format of reasoning.")
@click.option(
    "--token-streams/--whole-turns",
    default=True,
    help="Stream texts while the model writes them, or whole turns, which another engine can finish if one dies.",
)
@click.option("--sglang-api-key", envvar="SGLANG_API_KEY", show_envvar=True, metavar="KEY", help="The engines' key.")
def command(host: str, port: int, owner_port: int, sglang_api_key: str | None, **options: Any) -> int:
    """Serve unmodified agents: their requests become token-exact trajectories.

    Agents speak OpenAI's chat completions or responses, or Anthropic's messages. Runs until SIGINT or SIGTERM.
    The owner is the program that opens and closes sessions. Without --owner-key the gateway prints a new key."""
    import anyio

    from agentrl.engine.settings import EngineSettings
    from agentrl.serving.server import listen

    settings = EngineSettings(sglang_options={"api_key": sglang_api_key} if sglang_api_key else {})
    listeners = listen(host, port), listen(host, owner_port)
    serve = partial(_serve, settings=settings, host=host, listeners=listeners, **options)
    anyio.run(serve, backend_options={"use_uvloop": True})
    return 0


async def _serve(
    engines: tuple[str, ...],
    settings: "EngineSettings",
    host: str,
    listeners: tuple["socket", "socket"],
    owner_key: str | None,
    model: str | None,
    context_length: int | None,
    token_streams: bool,
    **chat_options: Any,
) -> None:
    import anyio
    from anyio import to_thread

    from agentrl.chat import Chat
    from agentrl.clock import freeze_loaded_objects
    from agentrl.config.model_info import read_model_info
    from agentrl.engine.pool import EnginePool, vocabulary
    from agentrl.errors import SettingsError
    from agentrl.gateway.server import Gateway
    from agentrl.serving.server import served

    async with EnginePool(engines, settings, vocab_size=None) as asked:
        click.echo(f"waiting for an engine: {', '.join(asked.urls)}", err=True)
        info = await asked.check_present()
        folder = model or str(info.get("tokenizer_path") or info["model_path"])
        own, every = read_model_info(folder), (await asked.server_info()).values()
    said = [length for each in every if isinstance(length := each.get("context_length"), int)]
    if not (context := context_length or min(said, default=own.context_length if own else None)):
        raise SettingsError("neither the engines nor the model say a context length; give --context-length")
    chat = await to_thread.run_sync(partial(Chat.load, folder, **chat_options))
    async with EnginePool(engines, settings, vocab_size=vocabulary(info).get("vocab_size")) as pool:
        key, name = owner_key or secrets.token_urlsafe(16), Path(folder).name
        gateway = Gateway(chat, pool, context_length=context, model=name, owner_key=key, streams=token_streams)
        freeze_loaded_objects()
        if gateway.roles.report:
            click.echo(gateway.roles.report, err=True)
        async with gateway.serving(host, listeners[0]) as url, served(gateway.owner_app, listeners[1], host) as owner:
            if not owner_key:
                click.echo(f"owner's key: {gateway.owner_key}", err=True)
            click.echo(f"ready on {url} for agents, {owner} for the owner")
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                await anext(signals)
