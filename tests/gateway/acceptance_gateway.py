"""The gateway under test, accessed only by HTTP: the one module that knows how it is made."""

import traceback
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from agentrl.chat import Chat
from agentrl.gateway.server import Gateway
from agentrl.sample import Sample
from tests.support.agent_clients import AsgiTransport

KEY = "the owner's key"
CONTEXT = 200_000
ALL_KEPT = {"return_sampling_mask": True, "routed_experts_start_len": 0}
"""Sampling settings of a session that needs kept sets and experts."""


@dataclass(frozen=True)
class Closed:
    """The response to the end of a session."""

    samples: list[Sample]
    counts: dict[str, int]


@dataclass(frozen=True)
class Served:
    """A gateway and its two clients."""

    agents: httpx.AsyncClient
    owner: httpx.AsyncClient
    gateway: Any

    async def open(self, **fields: Any) -> str:
        """Open a session. Returns the path of its base, `/s/ID`."""
        response = await self.owner.post("/sessions", json=fields)
        assert response.status_code == 201, response.text
        return str(urlsplit(response.json()["base_url"]).path)

    async def tree(self, base: str) -> dict[str, Any]:
        """Return the session's nodes, roots and counts."""
        response = await self.owner.get(f"/sessions/{base.rsplit('/', 1)[1]}")
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    async def close(self, base: str, **reward: Any) -> Closed:
        """Close the session; its samples are validated."""
        response = await self.owner.request("DELETE", f"/sessions/{base.rsplit('/', 1)[1]}", json=reward or None)
        assert response.status_code == 200, response.text
        found = response.json()
        return Closed([Sample.from_dict(sample) for sample in found["samples"]], found["counts"])


@asynccontextmanager
async def serving(chat: Chat, engine: Any, *, context_length: int = CONTEXT) -> AsyncIterator[Served]:
    """Run a gateway. An exception in its apps, which a server would answer with 500, fails the test."""
    gateway = Gateway(chat, engine, context_length=context_length, owner_key=KEY)
    lines = AsgiTransport(gateway.agent_app), AsgiTransport(gateway.owner_app)
    key = {"Authorization": f"Bearer {KEY}"}
    async with (
        httpx.AsyncClient(transport=lines[0], base_url="http://127.0.0.1:8080", timeout=None) as agents,
        httpx.AsyncClient(transport=lines[1], base_url="http://127.0.0.1:8081", timeout=None, headers=key) as owner,
    ):
        try:
            yield Served(agents, owner, gateway)
        except Exception as error:
            for failure in (failure for line in lines for failure in line.errors):
                error.add_note(f"the gateway raised: {''.join(traceback.format_exception(failure))}")
            raise
    assert [error for line in lines for error in line.errors] == []
