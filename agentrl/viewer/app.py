"""The viewer's application: the pages by address, and their updates.

1. A thread renders a page as HTML, which is sent as a whole. Links change the content without a reload.
2. Every second, a page checks its files for changes and sends new content.
3. A browser may load resources only from this server (Content-Security-Policy), so no data can leave through a page."""

import secrets
import webbrowser
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import ParamSpec, TypeVar

import anyio
import nicegui
from anyio import to_thread
from fastapi import FastAPI, Request, Response
from jinja2 import FunctionLoader
from nicegui import PageArguments, ui
from nicegui import app as nicegui_app
from nicegui.client import templates

from agentrl.errors import AgentRLError, DataError
from agentrl.observability import charts
from agentrl.viewer import curves, table, trajectory
from agentrl.viewer.library import Library
from agentrl.viewer.query import Query, macro

P = ParamSpec("P")
R = TypeVar("R")
_LOOK = 1.0  # seconds between two checks of the files
_PATIENCE = 60.0  # maximum seconds to render a page
_AWAY = 30.0
"""Seconds without contact to a busy or disconnected browser, after which its page is dropped and loaded again."""
_FILES = Path(__file__).parent / "templates"
_SHARED = Path(charts.__file__).parent / "templates"
_POLICY = (
    "default-src 'none'; script-src 'self' 'nonce-{nonce}' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data:; font-src 'self'; connect-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; "
    "frame-ancestors 'none'"
)
"""Sources that a page may load. NiceGUI needs 'unsafe-eval' because it compiles Vue's templates in the browser and
changes pages by `eval`. It needs 'unsafe-inline' because its elements and charts set styles."""


def application(library: Library, *, opens: str | None = None) -> FastAPI:
    """Return the ASGI application that shows a library. At startup, a browser opens the address `opens`."""
    app = FastAPI(openapi_url=None, docs_url=None, redoc_url=None)

    @app.middleware("http")
    async def with_policy(request: Request, answer: Callable[[Request], Awaitable[Response]]) -> Response:
        request.state.nonce = secrets.token_urlsafe(16)
        response = await answer(request)
        response.headers["Content-Security-Policy"] = _POLICY.format(nonce=request.state.nonce)
        return response

    templates.env.loader = FunctionLoader(_with_nonce)
    if opens:
        nicegui_app.on_startup(partial(webbrowser.open, opens))
    ui.run_with(
        app,
        root=partial(_frame, library),
        title="agentrl view",
        favicon="🔎",
        tailwind=False,
        show_welcome_message=False,
        binding_refresh_interval=None,
        reconnect_timeout=_AWAY,
    )
    return app


def _with_nonce(name: str) -> str:
    """Return NiceGUI's template with the nonce on each of its scripts. Scripts that a page inserts get no nonce."""
    text = (Path(nicegui.__file__).parent / "templates" / name).read_text(encoding="utf-8")
    return text.replace("<script", '<script nonce="{{ request.state.nonce }}"')


def _frame(library: Library) -> None:
    """Add the parts of all pages: the bar at the top, the note of a token at the bottom, the keyboard shortcuts."""
    css = "".join(file.read_text(encoding="utf-8") for file in (_SHARED / "tokens.css", _FILES / "viewer.css"))
    script = (_FILES / "viewer.js").read_text(encoding="utf-8")
    nonce = ui.context.client.request.state.nonce
    ui.add_head_html(f"<style>{css}</style><script nonce={nonce}>{script}</script>")
    _html(macro("frame.html", "bar")(), "header")
    routes = {"/": _table, "/curves": _curves, "/side": _side, "/t/{source}/{number}": _trajectory}
    ui.sub_pages({path: _page(library, build) for path, build in routes.items()}).classes("page")
    _html(macro("frame.html", "foot")(), "footer")


def _page(
    library: Library, build: Callable[[Library, PageArguments], Awaitable[None]]
) -> Callable[..., Awaitable[None]]:
    async def shown(args: PageArguments) -> None:
        async def again() -> None:
            args.frame.refresh()

        try:
            await _aside(library.refresh)
            await build(library, args)
        except AgentRLError as error:
            _html(macro("frame.html", "trouble")(str(error)))
            _keep(stores, again)

    def stores() -> tuple[int, ...]:
        library.refresh()
        return tuple(part for source in library.sources for part in source.stamp)

    return shown


async def _table(library: Library, args: PageArguments) -> None:
    query = Query(dict(args.query_parameters))
    _html(await _aside(table.form, library, query))
    rows = _html(await _aside(table.rows, library, query))

    async def renew() -> None:
        rows.content = await _aside(table.rows, library, query)

    def seen() -> tuple[int, ...]:
        sources = library.chosen(query.source)
        return tuple(part for one in sources for part in (*one.stamp, bool(query.search and one.index.note())))

    _keep(seen, renew)


async def _trajectory(library: Library, args: PageArguments) -> None:
    if not (here := trajectory.read_places(f"{args.path_parameters['source']}.{args.path_parameters['number']}")):
        raise DataError(f"{args.path:.80} is no trajectory's address")
    _html(await _aside(trajectory.one, library, here[0], Query(dict(args.query_parameters))))


async def _side(library: Library, args: PageArguments) -> None:
    query = Query(dict(args.query_parameters))
    _html(await _aside(trajectory.beside, library, trajectory.read_places(query.given.get("rows", "")), query))


async def _curves(library: Library, args: PageArguments) -> None:
    everything = bool(args.query_parameters.get("all"))
    runs = _html(await _aside(curves.overview, library))
    _html(macro("frame.html", "which_curves")(everything))
    drawn, grid = dict[str, ui.echart](), ui.element("section").classes("charts")

    async def renew() -> None:
        runs.content = await _aside(curves.overview, library)
        for title, options in (await _aside(curves.charts, library, everything)).items():
            if title in drawn:
                drawn[title].options.update(options)
                drawn[title].update()
            else:
                with grid, ui.element("figure").classes("card"):
                    ui.label(title).classes("caption")
                    drawn[title] = ui.echart(options)

    await renew()
    _keep(lambda: tuple(part for one in library.runs for part in one.stamp), renew)


def _keep(stamp: Callable[[], tuple[int, ...]], renew: Callable[[], Awaitable[None]]) -> None:
    """Call `renew` whenever `stamp` changes, while this page is shown."""
    seen = [stamp()]

    async def look() -> None:
        try:
            if (now := stamp()) != seen[0]:
                seen[0] = now
                await renew()
        except AgentRLError as error:
            ui.notify(str(error), type="negative")

    ui.timer(_LOOK, look)


def _html(content: str, tag: str = "div") -> ui.html:
    return ui.html(content, sanitize=False, tag=tag)


async def _aside(work: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    """Run `work` in a thread, so that other pages need not wait. Raises DataError: `work` took over `_PATIENCE`."""
    try:
        with anyio.fail_after(_PATIENCE):
            return await to_thread.run_sync(partial(work, *args, **kwargs), abandon_on_cancel=True)
    except TimeoutError:
        raise DataError(f"this took longer than {_PATIENCE:.0f} s; is the disk busy? Load the page again") from None
