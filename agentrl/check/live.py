"""Policies that are somebody: a person at the terminal, or a model behind an OpenAI-compatible server."""

import json
from collections.abc import Callable, Sequence
from typing import Any

import anyio
import click
import httpx

from agentrl.chat import Chat
from agentrl.chat.written import written
from agentrl.check.policy import Asked, Policy
from agentrl.check.script import calling
from agentrl.errors import EngineFailure

Live = Callable[[Chat, Sequence[dict[str, Any]]], Policy]
"""Makes the policy of one episode from the chat room and the schemas of the tools."""

_SECONDS = 300.0
"""In which a server must have written a turn."""


class Person(Policy):
    """Whoever sits at the terminal and is shown what a model would be shown.

    A line is a turn; `!NAME {"city": "Oslo"}` is the call of a tool, written as the chat template writes it.
    """

    def __init__(self, chat: Chat, tools: Sequence[dict[str, Any]]) -> None:
        super().__init__(chat)
        self._tools, self._shown = tools, 0

    async def write(self, asked: Asked) -> tuple[list[int], bool]:
        click.echo(self.chat.decode(asked.given[self._shown :]), nl=False)
        self._shown = len(asked.given)
        return self.ids(await anyio.to_thread.run_sync(self._typed, abandon_on_cancel=True), ended=True)

    def _typed(self) -> str:
        line: str = click.prompt("", prompt_suffix="", default="", show_default=False)
        name, _, arguments = line.removeprefix("!").partition(" ")
        try:
            calls = [(name, json.loads(arguments or "{}"))] if line.startswith("!") else []
        except json.JSONDecodeError as error:
            click.echo(f"arguments are a JSON object, as in !NAME {{...}}: {error}; once more:")
            return self._typed()
        return written(self.chat, calling(calls), self._tools) if calls else line


class Endpoint(Policy):
    """The first model behind `URL/v1/completions`; it goes on behind the prompt as the run's own chat template renders it.

    Raises:
        EngineFailure: from `write`: no answer in time, or none in OpenAI's form.
    """

    def __init__(self, chat: Chat, url: str) -> None:
        super().__init__(chat)
        self._url = f"{url.rstrip('/').removesuffix('/v1')}/v1"

    async def write(self, asked: Asked) -> tuple[list[int], bool]:
        prompt, stop = self.chat.decode(asked.given), list(self.chat.report.stops)[:4]
        body = {"prompt": prompt, "stop": stop, "max_tokens": asked.most, "temperature": 1.0}
        try:
            async with httpx.AsyncClient(timeout=_SECONDS) as client:
                models = (await client.get(f"{self._url}/models")).raise_for_status().json()["data"]
                answer = await client.post(f"{self._url}/completions", json={"model": models[0]["id"], **body})
                choice = answer.raise_for_status().json()["choices"][0]
                return self.ids(str(choice["text"]), ended=choice["finish_reason"] != "length")
        except (httpx.HTTPError, LookupError, TypeError, ValueError) as error:
            raise EngineFailure(
                f"--model {self._url} gave no completion: {error!r:.300}; is the address right?"
            ) from error
