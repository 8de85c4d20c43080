"""Who plays the user: a script, or a second model behind an address of OpenAI's form (`USER_URL`)."""

import os
from typing import Protocol

from agentrl import Message, Sample
from examples.second_model import say

INSTRUCTION = (
    "You are a customer. You want: {wish} Your order is {order}. Answer in a sentence; say BYE when it is done."
)


class User(Protocol):
    """Answers the agent; remembers the conversation."""

    async def reply(self, text: str) -> str | None:
        """What the user says to the agent's `text`; None if the user leaves."""


class ScriptedUser:
    """Says which order it is when asked, once; whatever else she hears ends the conversation."""

    def __init__(self, order: str) -> None:
        self.order, self.asked = order, False

    async def reply(self, text: str) -> str | None:
        if self.asked or "?" not in text:
            return None
        self.asked = True
        return f"It is order {self.order}."


class ModelUser:
    """A second model, which is told who it is."""

    def __init__(self, url: str, wish: str, order: str) -> None:
        self.url = url
        said = INSTRUCTION.format(wish=wish, order=order)
        self.heard: list[Message] = [{"role": "system", "content": said}, {"role": "assistant", "content": wish}]

    async def reply(self, text: str) -> str | None:
        """Raises `httpx.HTTPError` where the model does not answer."""
        self.heard.append({"role": "user", "content": text})
        said = str((await say(self.url, self.heard))["content"] or "")
        self.heard.append({"role": "assistant", "content": said})
        return None if "BYE" in said else said


def user_of(sample: Sample) -> User:
    """The user of one conversation."""
    wish, order = str(sample.metadata["wish"]), str(sample.metadata["order"])
    url = os.environ.get("USER_URL")
    return ModelUser(url, wish, order) if url else ScriptedUser(order)
