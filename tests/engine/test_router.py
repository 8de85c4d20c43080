"""The router: one address over engines, driven by clients that know nothing of us."""

import os
import signal
import sys
from array import array
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import orjson
import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.prefix_cache import Piece, PrefixCache, PrefixTree
from agentrl.engine.router import _tokenizer, router
from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import FinishReason, Generation
from tests.engine.faults import FAST, FaultyServer, answer, late, ok, sent, serving, status, until
from tests.engine.test_interruptions import Sampler

SETTINGS = EngineSettings(embedded_slots=8, engine_max_retries=0)
GREEDY = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}


@asynccontextmanager
async def routed(
    model: Path, settings: EngineSettings = SETTINGS
) -> AsyncIterator[tuple[httpx.AsyncClient, EnginePool]]:
    async with AsyncExitStack() as stack:
        url = await stack.enter_async_context(in_process(settings, model))
        pool = EnginePool([url], settings, vocab_size=512)
        await stack.enter_async_context(pool)
        address = await stack.enter_async_context(router(pool))
        yield await stack.enter_async_context(httpx.AsyncClient(base_url=address, timeout=120)), pool


@asynccontextmanager
async def over(*servers: FaultyServer) -> AsyncIterator[tuple[httpx.AsyncClient, EnginePool]]:
    """A client of a router over servers of ours."""
    async with (
        EnginePool([server.url for server in servers], FAST, vocab_size=512) as pool,
        router(pool) as url,
        httpx.AsyncClient(base_url=url, timeout=120) as client,
    ):
        yield client, pool


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


CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 6, "temperature": 0.0, "model": "tiny"}


async def test_openai_clients_get_completions_whole_and_as_a_stream(pair: tuple[httpx.AsyncClient, EnginePool]) -> None:
    client, _ = pair
    whole = await ask(client, "/v1/chat/completions", **CHAT)
    assert whole["object"] == "chat.completion"
    assert whole["usage"]["completion_tokens"] == 6
    streamed = await client.post(
        "/v1/chat/completions", json={**CHAT, "stream": True, "stream_options": {"include_usage": True}}
    )
    assert streamed.headers["content-type"].startswith("text/event-stream")
    *events, done = streamed.text.strip().split("\n\n")
    chunks = [orjson.loads(event.removeprefix("data: ")) for event in events]
    assert done == "data: [DONE]"
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert chunks[0]["choices"][0]["delta"]["content"] == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["usage"] == whole["usage"]
    plain = await ask(client, "/v1/completions", prompt="Hello", max_tokens=3, temperature=0.0)
    assert plain["choices"][0]["finish_reason"] == "length"
    sent = (await client.post("/generate", json={"text": "Hello", "sampling_params": GREEDY, "stream": True})).text
    assert len(orjson.loads(sent.split("\n\n")[0].removeprefix("data: "))["output_ids"]) == 8


async def test_what_an_update_interrupts_goes_on_with_its_tokens() -> None:
    got: list[Any] = []
    async with serving(Sampler(8)) as server, over(server) as (client, pool):

        async def call() -> None:
            params = {"temperature": 1.0, "max_new_tokens": 8}
            got.append(await ask(client, input_ids=[1], sampling_params=params, return_logprob=True))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            for number in (1, 2):
                await until(partial(sent, server, number))
                await pool.pause()
                await pool.resume()
    meta = got[0]["meta_info"]
    assert got[0]["output_ids"] == [id_ for _, id_, _ in meta["output_token_logprobs"]] == list(range(10, 18))
    assert meta["finish_reason"]["type"] == "length"
    assert meta["prompt_tokens"] == 1
    assert meta["weight_versions"] == [{"version": "1", "start": 0, "end": 8}]


async def test_a_chat_that_an_update_interrupts_is_asked_again() -> None:
    async def chat(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        finish = "stop"
        if sent(server, 1) and not sent(server, 2):
            await server.aborted.wait()
            finish = "abort"
        return web.json_response({"choices": [{"finish_reason": finish, "message": {"content": "Hi"}}]})

    got: list[Any] = []
    async with serving(chat) as server, over(server) as (client, pool), anyio.create_task_group() as group:

        async def call() -> None:
            got.append(await ask(client, "/v1/chat/completions", **CHAT))

        group.start_soon(call)
        await until(partial(sent, server, 1))
        await pool.pause()
        await pool.resume()
    assert got[0]["choices"][0]["finish_reason"] == "stop"
    assert len(server.generates) == 2


@pytest.mark.parametrize("form", ["named", "ids", "chat"])
async def test_conversations_stay_where_they_are_and_others_spread(form: str) -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        if "messages" in body:
            return web.json_response({"choices": []})
        return web.json_response(answer([7], prompt_tokens=len(body["input_ids"])))

    async with serving(reply) as one, serving(reply) as two, over(one, two) as (client, _):
        for turn in (1, 2, 3):
            for talk in range(4):
                headers = {"X-SMG-Routing-Key": str(talk)} if form == "named" else {}
                messages = [{"role": "user", "content": str(number)} for number in (talk, *[9] * turn)]
                chat = form == "chat"
                body: dict[str, Any] = {"messages": messages} if chat else {"input_ids": [talk, *[9] * turn]}
                path = "/v1/chat/completions" if chat else "/generate"
                assert (await client.post(path, json=body, headers=headers)).status_code == 200

    def talk_of(body: dict[str, Any]) -> int:
        return int(body["messages"][0]["content"] if "messages" in body else body["input_ids"][0])

    assert sorted(sorted({talk_of(body) for body in server.generates}) for server in (one, two)) == [[0, 2], [1, 3]]


async def test_clients_that_began_alike_go_on_where_their_own_answers_came_from() -> None:
    async def reply(server: FaultyServer, body: dict[str, Any], request: web.Request) -> web.Response:
        answers.append(server)
        return web.json_response(answer([100 + len(answers)], prompt_tokens=len(body["input_ids"])))

    answers: list[FaultyServer] = []
    async with serving(reply) as one, serving(reply) as two, over(one, two) as (client, _):
        got = [(await ask(client, input_ids=[1, 2]))["output_ids"] for _ in range(4)]
        firsts = answers.copy()
        assert firsts == [one, two, one, two]
        order = [0, 2, 1, 3]  # engines chosen afresh would take turns
        for talk in order:
            await ask(client, input_ids=[1, 2, *got[talk], 9])
    assert answers[4:] == [firsts[talk] for talk in order]


async def test_a_request_whose_client_has_gone_is_aborted_and_one_can_be_aborted_by_its_rid() -> None:
    async with serving(late) as server, over(server) as (client, _):
        with pytest.raises(httpx.ReadTimeout):
            await client.post("/generate", json={"input_ids": [1], "rid": "mine"}, timeout=0.2)
        await until(lambda: server.aborts == ["mine"])
        assert (await client.post("/abort_request", json={"rid": "other"})).status_code == 200
        assert server.aborts == ["mine", "other"]
        assert (await client.post("/abort_request", json={"abort_all": True})).status_code == 400


async def test_a_request_that_is_aborted_before_it_is_sent_has_an_answer_without_tokens() -> None:
    got: list[Any] = []
    async with serving(ok([7])) as server, over(server) as (client, pool):
        await pool.pause()

        async def call() -> None:
            got.append(await ask(client, input_ids=[1, 2], rid="mine"))

        async with anyio.create_task_group() as group:
            group.start_soon(call)
            while not got:
                assert (await client.post("/abort_request", json={"rid": "mine"})).status_code == 200
    assert got[0]["output_ids"] == server.generates == []
    assert got[0]["meta_info"]["finish_reason"] == {"type": "abort"}
    assert got[0]["meta_info"]["prompt_tokens"] == 2


async def test_errors_have_a_status_and_say_what_to_do() -> None:
    async with serving(status(400), status(500)) as server, over(server) as (client, pool):

        async def refused(path: str, expected: int, word: str, **sent: Any) -> None:
            answer = await client.post(path, **sent)
            assert answer.status_code == expected, answer.text
            assert word in answer.text

        good = {"input_ids": [1]}
        await refused("/generate", 400, "answered 400", json=good)
        await refused("/generate", 502, "after 3 attempts", json=good)
        await refused("/generate", 400, "prompt token 0 is 999", json={"input_ids": [999]})
        await refused("/generate", 400, "tokenizer", json={"text": "Hello"})
        await refused("/generate", 400, "application/json", content=b"{}")
        await refused("/generate", 400, "valid dictionary", json=[1])
        await refused("/generate", 502, "after 3 attempts", json={})
        await refused("/generate", 421, "not known", json=good, headers={"host": "evil.example"})
        await refused("/pause_generation", 404, "list_workers", json={})
        await refused("/add_worker", 400, "Field required", json={})
        await refused("/remove_worker?url=http://127.0.0.1:1", 400, "no engine of this pool")
        await refused("/add_worker?url=http://127.0.0.1:1", 503, "cannot connect")
        assert len(pool.urls) == 1


async def test_engines_come_and_go() -> None:
    async with serving(ok([7])) as one, serving(ok([8])) as two, over(one) as (client, _):
        assert (await client.get("/health")).status_code == 200
        assert (await ask(client, "/add_worker", url=two.url))["urls"] == [one.url, two.url]
        await ask(client, "/remove_worker", url=one.url)
        assert (await ask(client, input_ids=[1]))["output_ids"] == [8]
        assert (await client.get("/list_workers")).json()["workers"] == [
            {"url": two.url, "is_healthy": True, "load": 0}
        ]
        assert (await client.get("/get_model_info")).json()["weight_version"] == "1"
        await ask(client, "/remove_worker", url=two.url)
        assert (await client.get("/health")).status_code == 503


async def test_the_command_serves_engines_until_a_signal(tmp_path: Path) -> None:
    async with serving(ok([7])) as server:
        command = [sys.executable, "-m", "agentrl", "router", server.url, "--port", "0"]
        async with await anyio.open_process(command, env={**os.environ, "PYTHONUNBUFFERED": "1"}) as process:
            assert process.stdout is not None
            line = (await process.stdout.receive()).decode()
            async with httpx.AsyncClient(base_url=line.removeprefix("ready on ").strip()) as client:
                assert (await ask(client, input_ids=[1]))["output_ids"] == [7]
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 0


# ---- memory -------------------------------------------------------------------------------------------------------


@given(st.lists(st.text("ab", min_size=1, max_size=6), max_size=30), st.integers(4, 40))
def test_the_tree_knows_the_longest_beginning_and_stays_in_its_room(texts: list[str], room: int) -> None:
    tree, all_of_it, kept = PrefixTree(room), PrefixTree(1 << 20), {}
    for text in texts:
        kept[text] = piece = Piece()
        all_of_it.put(text, piece)
        tree.put(text, piece)
        assert tree.size <= room
        length, found = tree.find(text + "a")
        assert found is None or found is kept[text[:length] + "a" * (length - len(text))]
        for key in texts:
            best = max((k for k in kept if key.startswith(k)), key=len, default="")
            assert all_of_it.find(key) == (len(best), kept.get(best))
    assert all_of_it.size == len({text[: n + 1] for text in texts for n in range(len(text))})


@pytest.mark.parametrize(("matched", "said"), [(2, ""), (2, "<|im_end|>"), (None, "")])
async def test_an_end_token_that_the_text_does_not_show_is_known_with_and_without_it(
    tiny_model: Path, matched: int | None, said: str
) -> None:
    memory = PrefixCache()
    memory.tokenizer = _tokenizer(tiny_model / "tokenizer.json")
    encoded: list[str] = []

    async def here(work: Any, text: str, whole: bool) -> list[int]:
        encoded.append(text)
        return list(work(text, whole))

    prompt, session = await memory.text("Hello", here)
    ids = [70, 71, 72] if matched is None else [70, 71, 2]
    text = "Hello" + str(memory.tokenizer.decode(ids[:-1] if matched else ids)) + said
    finish = FinishReason("length") if matched is None else FinishReason("stop", matched)
    got = Generation(ids, [-0.5] * 3, text[5:], finish, "1", (("1", 0, 3),), 5, 0, {})
    memory.answered("Hello", prompt, got, session)
    for shown in [text] if matched is None or said else [text, text + "<|im_end|>"]:
        whole = prompt.all_ids() + (ids[:-1] if matched and "<|im_end|>" not in shown else ids)
        piece, _ = await memory.text(shown, here)
        assert piece.all_ids() == whole
        assert piece.log_probs == array("d", [-0.5] * len(piece.ids))
    after, again = await memory.text(text + " Go on.", here)
    assert again == session
    assert encoded == ["Hello", " Go on."]
    assert after.before is not None
