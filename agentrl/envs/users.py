"""Simulated users: the model talks to a script, or to a second model that does not learn.

class Shop(UserEnvironment):
    async def make_user(self, sample):
        return ScriptedUser([(r"which order", "Order 17.")])"""

import os
import re
from collections.abc import Sequence
from typing import Protocol

from agentrl.envs.base import Environment, Step, Turn
from agentrl.errors import EnvFailure
from agentrl.sample import Message, Sample


class SimulatedUser(Protocol):
    """Answers the agent, and remembers the conversation."""

    async def reply(self, text: str) -> str | None:
        """Return the answer to the agent's `text`; None if the user leaves."""


class ScriptedUser:
    """Answers by rules of a pattern (a regular expression, searched without regard to case) and an answer. The first rule
    that fits is used, and only once. If none fits, the user leaves."""

    def __init__(self, rules: Sequence[tuple[str, str]]) -> None:
        self._rules = list(rules)

    async def reply(self, text: str) -> str | None:
        """Return the answer of the first rule that fits; None if there is none."""
        for at, (pattern, answer) in enumerate(self._rules):
            if re.search(pattern, text, re.IGNORECASE):
                del self._rules[at]
                return answer
        return None


class ModelUser:
    """A second model behind an address of OpenAI's form; `agentrl serve` and SGLang have one.

    Args:
        base_url: with `/v1`.
        instruction: the system message: who the user is, and what the user wants.
        first: the user's first words, which the agent has been given.
        leaves: a text with this word ends the conversation.
        model: the server's name of the model.
        timeout: seconds for an answer.
        api_key_env: environment variable with the server's key."""

    def __init__(
        self,
        base_url: str,
        instruction: str,
        first: str,
        *,
        leaves: str = "BYE",
        model: str = "user",
        timeout: float = 60.0,
        api_key_env: str = "",
    ) -> None:
        self._url, self._model, self._timeout = f"{base_url.rstrip('/')}/chat/completions", model, timeout
        self._leaves, self._key = leaves, os.environ.get(api_key_env, "")
        said = (("system", instruction), ("assistant", first))
        self.messages: list[Message] = [{"role": role, "content": text} for role, text in said]

    async def reply(self, text: str) -> str | None:
        """Have the model answer. Raises EnvFailure: kind `user_model`, it does not."""
        import httpx

        self.messages.append({"role": "user", "content": text})
        headers = {"Authorization": f"Bearer {self._key}"} if self._key else {}
        try:
            async with httpx.AsyncClient(timeout=self._timeout, headers=headers, trust_env=False) as client:
                answer = await client.post(self._url, json={"model": self._model, "messages": self.messages})
            said = str(answer.raise_for_status().json()["choices"][0]["message"]["content"] or "")
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            said = f"the user's model at {self._url} gave no answer: {error!r:.200}"
            raise EnvFailure(said, kind="user_model") from error
        self.messages.append({"role": "assistant", "content": said})
        return None if self._leaves in said else said


class UserEnvironment(Environment):
    """A task in which the model talks to a simulated user. Tools answer tool calls; other turns go to the user."""

    user: SimulatedUser  # of this trajectory

    async def make_user(self, sample: Sample) -> SimulatedUser:
        """Return the user of one trajectory."""
        raise NotImplementedError

    async def reset(self, sample: Sample) -> list[Message]:
        """Make the user. Return the sample's prompt, which is the user's first message."""
        self.user = await self.make_user(sample)
        return await super().reset(sample)

    async def step(self, turn: Turn) -> Step:
        """Run the tool calls, or give the turn's text to the user; the trajectory ends when the user leaves."""
        if turn.tool_calls or turn.broken:
            return await self.run_tools(turn)
        reply = await self.user.reply(turn.content)
        return Step(done=True, stop_reason="user_left") if reply is None else Step([{"role": "user", "content": reply}])
