"""`agentrl serve`."""

import socket

import click

from agentrl.cli.main import debug_option
from agentrl.errors import SettingsError


@click.command("serve", context_settings={"max_content_width": 100, "show_default": True})
@click.argument("model")
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on.")
@click.option("--port", default=30000, type=click.IntRange(1, 65535), metavar="PORT", help="Port to listen on.")
@click.option(
    "--context-length", type=click.IntRange(1), metavar="N", help="Longest sequence in tokens; default: the model's."
)
@click.option("--slots", type=click.IntRange(1), metavar="N", help="Sequences kept in memory at once.")
@click.option("--dtype", type=click.Choice(["auto", "float32", "bfloat16"]), default="auto", help="Number format.")
@click.option("--threads", type=click.IntRange(1), metavar="N", help="CPU threads; default: what the cores allow.")
@debug_option
def command(model: str, **options: str | int | None) -> int:
    """Serve the Hugging Face folder MODEL with the built-in engine: SGLang's HTTP protocol, and OpenAI's chat API."""
    check_port(str(options["host"]), int(options["port"] or 0))
    from agentrl.engine.embedded.__main__ import parser
    from agentrl.engine.embedded.server import serve
    from agentrl.engine.embedded.service import Options

    argv = ["--model-path", model]
    for name, value in options.items():
        if value is not None:
            argv += [f"--{name.replace('_', '-')}", str(value)]
    given = vars(parser().parse_args(argv))
    given.pop("die_with_parent")
    serve(Options(**given))
    return 0


def check_port(host: str, port: int) -> int:
    """The port, free at this moment; 0 becomes one. Before anything is loaded: the server would find out after it.

    Raises:
        SettingsError: the port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            return int(probe.getsockname()[1])
        except OSError as error:
            raise SettingsError(
                f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
            ) from error
