"""The router: one address over engines, driven by clients that know nothing of us."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl.engine import EnginePool, EngineSettings
from agentrl.engine.local import in_process
from agentrl.engine.router import router

SETTINGS = EngineSettings(embedded_slots=8, engine_max_retries=0)
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@asynccontextmanager
async def routed(
    model: Path, settings: EngineSettings = SETTINGS
) -> AsyncIterator[tuple[httpx.AsyncClient, EnginePool]]:
    async with AsyncExitStack() as stack:
        transport, url = await stack.enter_async_context(in_process(settings, model))
        pool = EnginePool([url], settings, vocab_size=512, transport=transport)
        await stack.enter_async_context(pool)
        address = await stack.enter_async_context(router(pool))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=60)), pool


@pytest.fixture
async def pair(tiny_model: Path) -> AsyncIterator[tuple[httpx.AsyncClient, EnginePool]]:
    async with routed(tiny_model) as pair:
        yield pair


async def ask(client: httpx.AsyncClient, path: str = "/generate", **body: Any) -> Any:
    answer = await client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_ids_get_what_the_engine_answers(pair: tuple[httpx.AsyncClient, EnginePool]) -> None:
    client, _ = pair
    got = await ask(client, input_ids=[10, 60, 61], sampling_params=GREEDY, return_logprob=True, top_logprobs_num=2)
    meta = got["meta_info"]
    assert got["output_ids"] == [id_ for _, id_, _ in meta["output_token_logprobs"]]
    assert len(got["output_ids"]) == 8 == len(meta["output_top_logprobs"])
    two = await ask(client, input_ids=[[10, 60, 61], [10, 60, 62]], sampling_params=GREEDY)
    assert len(two) == 2
    assert two[0]["output_ids"] == got["output_ids"]


async def test_a_text_goes_on_with_the_ids_that_were_sampled(pair: tuple[httpx.AsyncClient, EnginePool]) -> None:
    client, _ = pair
    hot = {"temperature": 2.0, "max_new_tokens": 30, "ignore_eos": True, "skip_special_tokens": False}
    first = await ask(client, text="What is 12 plus 30?", sampling_params={**hot, "sampling_seed": 3})
    text = "What is 12 plus 30?" + first["text"]
    known = await ask(client, "/retrieve_from_text", text=text)
    plain = (await ask(client, "/v1/tokenize", prompt=text))["tokens"]
    assert known["tokens"] != plain
    assert known["tokens"][-30:] == first["output_ids"]
    assert known["rollout_logp"][-30:] == [p for p, _, _ in first["meta_info"]["output_token_logprobs"]]
    assert known["loss_mask"] == [0] * (known["token_length"] - 30) + [1] * 30
    second = await ask(client, text=text + " Go on.", sampling_params=GREEDY)
    assert second["meta_info"]["cached_tokens"] >= known["token_length"] - 1


MIDDLEWARE = """
class Counting:
    def __init__(self, app, *, router):
        self.app, router.counted = app, []
        self.router = router

    async def __call__(self, scope, receive, send):
        self.router.counted.append(scope["path"])
        if scope["path"] == "/counted":
            from starlette.responses import JSONResponse
            return await JSONResponse(self.router.counted)(scope, receive, send)
        await self.app(scope, receive, send)
"""


async def test_middleware_of_ones_own_stands_before_it(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(MIDDLEWARE)
    settings = SETTINGS.model_copy(update={"router_middleware_paths": (f"{tmp_path}/own.py:Counting",)})
    async with routed(tiny_model, settings) as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await client.get("/counted")).json() == ["/health", "/counted"]
