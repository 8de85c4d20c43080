"""`agentrl router`."""

import signal
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from agentrl.engine.settings import EngineSettings


@click.command("router", context_settings={"show_default": True})
@click.argument("engines", metavar="ENGINE...", nargs=-1, required=True)
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on; there are no passwords.")
@click.option("--port", default=3000, type=click.IntRange(0, 65535), metavar="PORT", help="0 takes a free one.")
@click.option("--tokenizer", type=Path, metavar="DIR", help="Folder with tokenizer.json; default: the engines' own.")
@click.option("--router-middleware-paths", "middleware", multiple=True, metavar="PATH", help="Class around the router.")
@click.option("--sglang-api-key", envvar="SGLANG_API_KEY", show_envvar=True, metavar="KEY", help="The engines' key.")
def command(middleware: tuple[str, ...], sglang_api_key: str | None, **options: Any) -> int:
    """Serve the engines at these addresses as one: /generate, OpenAI's API, exact ids for texts.

    Stays until a signal comes. Waits for the first engine that answers; others may still be loading. Engines come and go
    by /add_worker and /remove_worker."""
    import anyio

    from agentrl.engine.settings import EngineSettings

    key = {"api_key": sglang_api_key} if sglang_api_key else {}
    settings = EngineSettings(router_middleware_paths=middleware, sglang_options=key)
    anyio.run(partial(_serve, settings=settings, **options), backend_options={"use_uvloop": True})
    return 0


async def _serve(
    engines: tuple[str, ...], settings: "EngineSettings", host: str, port: int, tokenizer: Path | None
) -> None:
    import anyio

    from agentrl.clock import freeze_loaded_objects
    from agentrl.engine.pool import EnginePool, vocabulary
    from agentrl.gateway.router import router
    from agentrl.serving.server import listen

    listener = listen(host, port)
    patient = settings.model_copy(update={"engine_absence_timeout": float("inf")})
    async with EnginePool(engines, patient, vocab_size=None) as asked:
        click.echo(f"waiting for an engine: {', '.join(asked.urls)}", err=True)
        size = vocabulary(await asked.check_present()).get("vocab_size")
    async with EnginePool(engines, settings, vocab_size=size) as pool:
        await pool.check_present()
        async with router(pool, tokenizer, host=host, listener=listener) as url:
            freeze_loaded_objects()
            click.echo(f"ready on {url}")
            with anyio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                await anext(signals)
