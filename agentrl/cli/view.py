"""`agentrl view`."""

import os
import sys
from pathlib import Path

import click


@click.command("view", context_settings={"show_default": True})
@click.argument("folders", metavar="[FOLDER]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", metavar="ADDRESS", help="Address to listen on; there are no passwords.")
@click.option("--port", default=8800, type=click.IntRange(0, 65535), metavar="PORT", help="0 takes a free one.")
@click.option("--browser/--no-browser", default=None, help="Open the page in a browser.  [default: where there is one]")
def command(folders: tuple[Path, ...], host: str, port: int, browser: bool | None) -> int:
    """Look at runs in a browser: curves side by side, and every trajectory token by token, also while they are written.

    FOLDER is the --output-dir of a run, or a folder that has such folders in it; `runs` if none is given.
    """
    from agentrl.serving.server import listen, serve
    from agentrl.viewer.app import application
    from agentrl.viewer.library import Library

    library = Library(folders or (Path("runs"),))
    listener = listen(host, port)
    opens = _has_display() if browser is None else browser
    name = f"[{host}]" if ":" in host else host
    app = application(library, opens=f"http://{name}:{listener.getsockname()[1]}" if opens else None)
    serve(app, listener, host, ready=f"{len(library.runs)} run(s) on {{url}} (Ctrl-C ends it)")
    return 0


def _has_display() -> bool:
    return sys.platform in ("darwin", "win32") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
