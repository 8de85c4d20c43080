"""`agentrl view`."""

import ipaddress
import os
import secrets
import sys
from pathlib import Path

import click


@click.command("view", context_settings={"show_default": True})
@click.argument("folders", metavar="[FOLDER]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address; beyond this machine with a token.")
@click.option("--port", default=8800, type=click.IntRange(0, 65535), metavar="PORT", help="0 takes a free one.")
@click.option("--browser/--no-browser", default=None, help="Open the page in a browser.  [default: where there is one]")
def command(folders: tuple[Path, ...], host: str, port: int, browser: bool | None) -> int:
    """Look at runs in a browser: curves side by side, and every trajectory token by token, also while they are written.

    FOLDER is the --output-dir of a run, or a folder that has such folders in it; `runs` if none is given."""
    from agentrl.serving.server import listen, serve
    from agentrl.viewer.access import TokenGate
    from agentrl.viewer.app import application
    from agentrl.viewer.library import Library

    library = Library(folders or (Path("runs"),))
    listener = listen(host, port)
    display = sys.platform in ("darwin", "win32") or any(map(os.environ.get, ("DISPLAY", "WAYLAND_DISPLAY")))
    address, number = listener.getsockname()[:2]
    token = None if ipaddress.ip_address(address).is_loopback else secrets.token_urlsafe(16)
    page = f"/?token={token}" if token else ""
    # A browser's command line would show the token to every user of the machine.
    opens = display and not token if browser is None else browser
    name = f"[{host}]" if ":" in host else host
    app = application(library, opens=f"http://{name}:{number}{page}" if opens else None)
    shown = f"{len(library.runs)} run(s) on {{url}}{page} (Ctrl-C ends it)"
    serve(TokenGate(app, token) if token else app, listener, host, ready=shown)
    return 0
