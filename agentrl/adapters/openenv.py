"""Environments of an OpenEnv server: `--env openenv:URL`, for example `openenv:http://127.0.0.1:8000`. Each trajectory has a
WebSocket connection, and thus a session of its own on the server. The wire is that of OpenEnv 0.3."""

import contextlib
import json
import re
from typing import Any, ClassVar, Literal
from urllib.parse import urlsplit

import anyio
import httpx
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, WebSocketException

from agentrl.adapters import first_messages, task_number
from agentrl.envs import Environment, Step, Turn
from agentrl.errors import EnvFailure, PluginError, raised_as
from agentrl.sample import Message, Sample

MAX_BYTES = 100 << 20  # largest message of a server
CLOSE_SECONDS = 5.0  # seconds in which a server must end a session


class OpenEnvEnvironment(Environment):
    """One session of a server. The model's answer is the text of the action's only `field`, else a JSON object."""

    max_turns = 32
    url: ClassVar[str]  # the server's address
    action: ClassVar[dict[str, Any]] = {}  # JSON schema of the server's actions; known after `setup`
    field: ClassVar[str | None] = None  # the action's only field if it is a text

    def __init__(self, instructions: str = "", timeout: float = 60.0) -> None:
        """Keep what `reset` needs. `instructions`: the rules, for the first message; a row's prompt replaces them.
        `timeout`: seconds for each answer of the server."""
        self.instructions, self.timeout = instructions, timeout
        self.socket: ClientConnection | None = None

    @classmethod
    async def setup(cls, args: Any) -> None:
        """Read the schema of the actions. Raises PluginError: no OpenEnv server is at the address."""
        what = f"{cls.url}/schema gave no schema of an OpenEnv server"
        with raised_as(PluginError, what, httpx.HTTPError, ValueError, LookupError, TypeError, shown=": {!r:.300}"):
            async with httpx.AsyncClient(timeout=60.0, trust_env=cls._proxied()) as client:
                schema = (await client.get(f"{cls.url}/schema")).raise_for_status().json()["action"]
                fields = {name: kind for name, kind in schema["properties"].items() if name != "metadata"}
        cls.action = {**schema, "properties": fields}
        cls.field = name if len(fields) == 1 and fields[name := next(iter(fields))].get("type") == "string" else None

    @classmethod
    def _proxied(cls) -> bool:
        return urlsplit(cls.url).hostname not in ("localhost", "127.0.0.1", "::1")

    async def reset(self, sample: Sample) -> list[Message]:
        """Start a session. The seed is `metadata["task"]`, or else the group's number."""
        result = await self._request("reset", {"seed": task_number(sample)})
        return first_messages(sample, self.instructions, self._how_to_answer(), _text(result["observation"]))

    async def step(self, turn: Turn) -> Step:
        """Send the answer's action. An answer without a valid action has reward 0. The server's state at the end is
        `metadata["openenv_state"]`."""
        try:
            result = await self._request("step", {self.field: turn.content} if self.field else _object(turn.content))
        except _InvalidAction as error:
            told = {"role": "user", "content": f"{error} {self._how_to_answer()}"}
            return Step([told], reward=0.0, info={"invalid_actions": 1})
        step = Step([{"role": "user", "content": _text(result["observation"])}], reward=float(result["reward"] or 0.0))
        if not result["done"]:
            return step
        turn.sample.metadata["openenv_state"] = await self._request("state")
        return step.finish()

    async def close(self) -> None:
        """End the session. Waits until the server has freed it, so that the next session can start."""
        if self.socket is None:
            return
        with anyio.move_on_after(CLOSE_SECONDS), contextlib.suppress(ConnectionClosed):
            await self.socket.send('{"type": "close"}')
            await self.socket.wait_closed()
        with anyio.move_on_after(CLOSE_SECONDS / 2, shield=True):
            await self.socket.close()

    async def _request(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """Return the data of the server's answer. Raises EnvFailure, or _InvalidAction if the server refuses the action."""
        try:
            with anyio.fail_after(self.timeout):
                answer = await self._exchange({"type": kind} if data is None else {"type": kind, "data": data})
            found: dict[str, Any] = answer["data"]
            if answer["type"] != "error":
                return found if kind == "state" else {name: found[name] for name in ("observation", "reward", "done")}
        except (OSError, WebSocketException, ValueError, LookupError, TypeError) as error:
            lost = f"no connection, or an answer that is not OpenEnv's: {error!r:.300}"
            problem = f"no answer in {self.timeout:g} s" if isinstance(error, TimeoutError) else lost
            raise EnvFailure(f"{self.url}: {kind}: {problem}", kind="openenv_connection") from error
        code, said = found.get("code"), found.get("message")
        if code == "VALIDATION_ERROR" and kind == "step":
            problems = (f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in found.get("errors", ()))
            raise _InvalidAction(f"The action is invalid: {'; '.join(problems)}.")
        advice = "; --rollout-max-concurrency limits the sessions" if code == "CAPACITY_REACHED" else ""
        raise EnvFailure(f"{self.url} answered {kind} with {code}: {said!s:.500}{advice}", kind="openenv_error")

    async def _exchange(self, message: dict[str, Any]) -> dict[str, Any]:
        if self.socket is None:
            address = f"ws{self.url.removeprefix('http')}/ws"
            proxy: Literal[True] | None = True if self._proxied() else None
            opening = connect(address, max_size=MAX_BYTES, open_timeout=None, ping_timeout=None, proxy=proxy)
            self.socket = await opening  # `_request` has the deadline
        with contextlib.suppress(ConnectionClosed):  # a full server sends its error before the request
            await self.socket.send(json.dumps(message))
        return dict(json.loads(await self.socket.recv()))

    def _how_to_answer(self) -> str:
        schema = f"Answer with one JSON object of this schema: {json.dumps(self.action)}"
        return f"Your whole answer is the action's {self.field}." if self.field else schema


class _InvalidAction(Exception):
    pass


def environment(name: str) -> type[Environment]:
    """Return the class for a server's address. Raises PluginError: the name is not an HTTP address."""
    if not re.match(r"https?://[^/]", name):
        raise PluginError("expected the address of an OpenEnv server, as in openenv:http://127.0.0.1:8000")
    return type("OpenEnvEnvironment", (OpenEnvEnvironment,), {"url": name.rstrip("/")})


def _object(answer: str) -> dict[str, Any]:
    """Return the JSON object from the answer's first to its last brace. Raises _InvalidAction: the answer has none."""
    found = None
    with contextlib.suppress(ValueError, RecursionError):
        found = json.loads(answer[answer.index("{") : answer.rindex("}") + 1])
    if not isinstance(found, dict):
        raise _InvalidAction("The answer has no JSON object.")
    return found


def _text(observation: dict[str, Any]) -> str:
    """Return one line for each field, `name: value`; only the value if there is one field. Texts are unquoted."""
    shown = {name: value if isinstance(value, str) else json.dumps(value) for name, value in observation.items()}
    if len(shown) == 1:
        return next(iter(shown.values()))
    return "\n".join(f"{name}: {value}" for name, value in shown.items())
