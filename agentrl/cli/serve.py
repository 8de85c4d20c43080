"""`agentrl serve`; the launcher also uses this command to start the built-in engine."""

from functools import partial
from typing import Any

import click

_ADMIN = "Key for the control routes instead (weights, pauses, memory). Without any key, browsers are refused there."

_key = partial(click.option, type=str.strip, show_envvar=True, metavar="KEY")


@click.command("serve", context_settings={"show_default": True})
@click.argument("model_path", metavar="MODEL")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", default=30000, type=click.IntRange(0, 65535), metavar="PORT", help="0 takes a free one.")
@click.option("--served-model-name", metavar="NAME", help="Name in /model_info and /v1/models; default: MODEL.")
@click.option("--context-length", type=click.IntRange(1), metavar="N", help="Longest sequence; default: the model's.")
@click.option("--slots", type=click.IntRange(1), metavar="N", help="Sequences kept in memory at once.")
@click.option("--chunk", default=1024, type=click.IntRange(1), metavar="N", help="Most tokens of one forward pass.")
@click.option("--device", default="cpu", metavar="DEVICE", help="cpu, cuda or cuda:N.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", help="Number format.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads; default: what the cores allow.")
@click.option("--seed", default=0, type=click.IntRange(0), metavar="N", help="Seeds requests that bring none.")
@click.option("--tool-call-parser", default="auto", metavar="NAME", help="For the chat API; none switches it off.")
@click.option("--reasoning-parser", default="auto", metavar="NAME", help="For the chat API; none switches it off.")
@click.option("--chat-template", metavar="FILE", help="A Jinja template instead of the model's own.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that comes with the model folder.")
@_key("--api-key", envvar="SGLANG_API_KEY", help="Key for all but /health.")
@_key("--admin-api-key", envvar="SGLANG_ADMIN_API_KEY", help=_ADMIN)
@click.option("--batch-invariant", is_flag=True, help="Results do not depend on the batch, for --true-on-policy-mode.")
def command(**options: Any) -> int:
    """Serve the Hugging Face folder MODEL with the built-in engine: SGLang's HTTP protocol, and OpenAI's chat API."""
    from agentrl.engine.embedded.server import serve
    from agentrl.engine.embedded.service import Options
    from agentrl.gateway.served.openai import ROUTES

    serve(Options(**options), ROUTES)
    return 0
