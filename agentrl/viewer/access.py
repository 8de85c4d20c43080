"""Access control of the viewer for other machines, by a token."""

import secrets

from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocketClose


class TokenGate:
    """`app` for users with the token: first as ?token=... in the address, later in a cookie."""

    def __init__(self, app: ASGIApp, token: str) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app if scope["type"] == "lifespan" else self._answer(HTTPConnection(scope))
        await app(scope, receive, send)

    def _answer(self, asked: HTTPConnection) -> ASGIApp:
        kind, cookie = asked.scope["type"], f"agentrl-view-{asked.scope['server'][1]}"  # ports share cookies
        if kind == "http" and self._is(asked.query_params.get("token")):
            clean = RedirectResponse(asked.url.remove_query_params("token"), 303, {"cache-control": "no-store"})
            clean.set_cookie(cookie, self._token, httponly=True, samesite="strict")
            return clean
        if self._is(asked.cookies.get(cookie)):
            return self._app
        said = "this page needs the token: open the address that `agentrl view` printed"
        return WebSocketClose(reason="refused") if kind == "websocket" else PlainTextResponse(said, 403)

    def _is(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self._token.encode())
