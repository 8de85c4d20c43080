"""A second model that does not learn, behind an address of OpenAI's form (`agentrl serve` is one): an opponent, a user."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from agentrl import Message
from agentrl.engine.launcher import launch_blocking
from agentrl.engine.settings import EngineSettings

PATIENCE = 60.0
"""Seconds for an answer."""


@contextmanager
def served(model: Path, logs: Path) -> Iterator[str]:
    """The address of an engine of its own that serves `model`, for as long as the context lasts."""
    with launch_blocking(EngineSettings(embedded_threads=1), str(model), log_dir=logs) as engines:
        yield engines[0].url


async def say(url: str, messages: Sequence[Message], **options: Any) -> Message:
    """The model's next message; `options` are the API's own, such as `tools`, `seed` and `max_tokens`.

    Raises:
        httpx.HTTPError: none came within `PATIENCE` seconds, or a refusal.
    """
    body = {"model": "second", "messages": list(messages), "max_tokens": 64, **options}
    async with httpx.AsyncClient(timeout=PATIENCE, verify=False, trust_env=False) as client:
        answer = await client.post(f"{url.rstrip('/')}/v1/chat/completions", json=body)
    message: Message = answer.raise_for_status().json()["choices"][0]["message"]
    return message
