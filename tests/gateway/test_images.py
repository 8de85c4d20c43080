"""Images of agents: three wires with one meaning, native errors, samples that a trainer can read."""

import base64
import io
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import PIL.Image
import pytest

from agentrl.chat import Chat
from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.gateway.served.openai import ROUTES
from agentrl.media import Image
from tests.engine.embedded.driver import check_seen
from tests.gateway.acceptance_gateway import Served, serving
from tests.gateway.turns import CHAT, MESSAGES, RESPONSES
from tests.support.vision import ROWS, picture, tiny_vlm

RED, WIDE, SMALL = (picture(*size) for size in ((90, 70, 1), (200, 60, 2), (64, 64, 3)))
SETTINGS = EngineSettings(embedded_slots=8, engine_max_retries=0)
Json = dict[str, Any]


def address(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def chat_part(data: bytes) -> Json:
    return {"type": "image_url", "image_url": {"url": address(data), "detail": "low"}}


def block(data: bytes) -> Json:
    encoded = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": encoded}}


def input_part(data: bytes) -> Json:
    return {"type": "input_image", "image_url": address(data)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("seeing"), "qwen3_vl", tie_word_embeddings=False)


@pytest.fixture(scope="module")
def chat(folder: Path) -> Chat:
    return Chat.load(str(folder))


@pytest.fixture
async def served(folder: Path, chat: Chat) -> AsyncIterator[Served]:
    async with (
        in_process(SETTINGS, folder, ROUTES) as url,
        EnginePool([url], SETTINGS, vocab_size=ROWS) as pool,
        serving(chat, pool) as served,
    ):
        served.gateway.engine_url = url
        yield served


def asked(path: str, first: bytes, result: bytes) -> tuple[Json, Callable[[Json], Json]]:
    """Return a request with an image, and the next one, whose tool result has another image."""
    if path == CHAT:
        parts = [{"type": "text", "text": "Look: "}, chat_part(first), {"type": "text", "text": "What is it?"}]
        messages: list[Json] = [{"role": "user", "content": parts}]

        def more_messages(answer: Json) -> Json:
            said = answer["choices"][0]["message"]
            called = {"id": "c1", "type": "function", "function": {"name": "draw", "arguments": "{}"}}
            tool = {
                "role": "tool",
                "tool_call_id": "c1",
                "content": [chat_part(result), {"type": "text", "text": "ok"}],
            }
            told = [
                said,
                {"role": "user", "content": "Draw."},
                {"role": "assistant", "content": None, "tool_calls": [called]},
                tool,
            ]
            return {"model": "m", "messages": [*messages, *told]}

        return {"model": "m", "messages": messages}, more_messages
    if path == MESSAGES:
        parts = [{"type": "text", "text": "Look: "}, block(first), {"type": "text", "text": "What is it?"}]
        messages = [{"role": "user", "content": parts}]

        def more_blocks(answer: Json) -> Json:
            call = {"type": "tool_use", "id": "c1", "name": "draw", "input": {}}
            content = [block(result), {"type": "text", "text": "ok"}]
            tool = {"type": "tool_result", "tool_use_id": "c1", "content": content}
            told = [
                {"role": "assistant", "content": answer["content"]},
                {"role": "user", "content": "Draw."},
                {"role": "assistant", "content": [call]},
                {"role": "user", "content": [tool]},
            ]
            return {"model": "m", "max_tokens": 8, "messages": [*messages, *told]}

        return {"model": "m", "max_tokens": 8, "messages": messages}, more_blocks
    parts = [{"type": "input_text", "text": "Look: "}, input_part(first), {"type": "input_text", "text": "What is it?"}]
    items: list[Json] = [{"role": "user", "content": parts}]

    def more_items(answer: Json) -> Json:
        told = [
            *answer["output"],
            {"role": "user", "content": "Draw."},
            {"type": "function_call", "call_id": "c1", "name": "draw", "arguments": "{}"},
            {
                "type": "function_call_output",
                "call_id": "c1",
                "output": [input_part(result), {"type": "input_text", "text": "ok"}],
            },
        ]
        return {"model": "m", "input": [*items, *told]}

    return {"model": "m", "input": items}, more_items


async def directly(served: Served, body: Json) -> httpx.Response:
    """Ask the engine's own chat API."""
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(f"{served.gateway.engine_url}/v1/chat/completions", json=body)


async def send(served: Served, base: str, path: str, body: Json) -> Json:
    response = await served.agents.post(f"{base}/v1{path}", json=body)
    assert response.status_code == 200, response.text
    found: Json = response.json()
    return found


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
async def test_a_session_with_images_becomes_exact_samples(path: str, served: Served, folder: Path) -> None:
    base = await served.open(sampling={"max_new_tokens": 8, "ignore_eos": True, "sampling_seed": 5})
    first, more = asked(path, RED, WIDE)
    answer = await send(served, base, path, first)
    await send(served, base, path, more(answer))
    closed = await served.close(base, reward=1.0)
    images = {image.hash: image for image in map(Image.from_bytes, (RED, WIDE))}
    (last,) = [sample for sample in closed.samples if len(sample.image_spans) == 2]
    assert [span.hash for span in last.image_spans] == list(images)
    assert last.images == images
    for sample in closed.samples:
        check_seen(sample, folder)


async def test_one_image_on_three_wires_is_one_prompt(served: Served, chat: Chat) -> None:
    """The three wires give the same prompt. A retry on the same wire finds its turn again."""
    prompts = []
    for path in (CHAT, MESSAGES, RESPONSES):
        base = await served.open(sampling={"max_new_tokens": 4})
        body, _ = asked(path, RED, WIDE)
        await send(served, base, path, body)
        await send(served, base, path, body)
        tree = await served.tree(base)
        assert [node["reason"] for node in tree["nodes"]] == ["first", "retry"]
        other, _ = asked(path, SMALL, WIDE)
        await send(served, base, path, other)
        assert (await served.tree(base))["nodes"][-1]["reason"] == "new_agent"
        closed = await served.close(base, reward=0.0)
        prompts.append([list(sample.tokens[: -sample.response_length]) for sample in closed.samples])
    assert prompts[0] == prompts[1] == prompts[2]


def bomb() -> bytes:
    held = io.BytesIO()
    PIL.Image.new("1", (5000, 5000)).save(held, "PNG")
    return held.getvalue()


REFUSED = {
    "an address": ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not fetched"),
    "a path": ({"type": "image", "image": "a.png"}, "path"),
    "no image": ({"type": "image_url", "image_url": {"url": address(b"hello")}}, "none of PNG"),
    "a damaged file": (chat_part(RED[:200]), "damaged"),
    "too many pixels": (chat_part(bomb()), "5000 x 5000 pixels"),
    "no url": ({"type": "image_url", "image_url": {}}, "image"),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_an_image_that_is_refused(name: str, served: Served) -> None:
    part, reason = REFUSED[name]
    base = await served.open()
    body = {"model": "m", "messages": [{"role": "user", "content": [part]}]}
    response = await served.agents.post(f"{base}/v1{CHAT}", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "invalid_request_error"
    assert reason in response.json()["error"]["message"]
    direct = await directly(served, body)
    assert direct.status_code == 400
    assert reason in direct.json()["message"]


async def test_other_wires_refuse_in_their_own_form(served: Served) -> None:
    base = await served.open()
    source = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    body = {"model": "m", "max_tokens": 8, "messages": [{"role": "user", "content": [source]}]}
    response = await served.agents.post(f"{base}/v1{MESSAGES}", json=body)
    assert (response.status_code, response.json()["type"]) == (400, "error")
    assert "only base64 is read" in response.json()["error"]["message"]
    items = {"model": "m", "input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f1"}]}]}
    response = await served.agents.post(f"{base}/v1{RESPONSES}", json=items)
    assert response.status_code == 400


async def test_a_session_has_a_limit_of_images(served: Served) -> None:
    base = await served.open(limits={"images": 1}, sampling={"max_new_tokens": 4})
    first, more = asked(CHAT, RED, RED)
    answer = await send(served, base, CHAT, first)
    await send(served, base, CHAT, more(answer))
    _, more = asked(CHAT, RED, WIDE)
    response = await served.agents.post(f"{base}/v1{CHAT}", json=more(answer))
    assert response.status_code == 400
    assert "at most 1" in response.json()["error"]["message"]


async def test_tokens_of_images_are_counted(served: Served) -> None:
    base = await served.open()
    with_image, _ = asked(MESSAGES, RED, WIDE)
    without = {**with_image, "messages": [{"role": "user", "content": "Look: What is it?"}]}
    counts = []
    for body in (with_image, without):
        response = await served.agents.post(f"{base}/v1{MESSAGES}/count_tokens", json=body)
        counts.append(response.json()["input_tokens"])
    assert counts[0] - counts[1] >= 6 + 2  # 96 x 64 pixels in squares of 32, and two marks


async def test_the_served_chat_api_sees_images(served: Served) -> None:
    body = {**asked(CHAT, RED, WIDE)[0], "max_tokens": 4, "return_prompt_token_ids": True}
    response = await directly(served, body)
    assert response.status_code == 200, response.text
    base = await served.open(sampling={"max_new_tokens": 4})
    await send(served, base, CHAT, body)
    (sample,) = (await served.close(base, reward=0.0)).samples
    assert response.json()["choices"][0]["prompt_token_ids"] == list(sample.tokens[: -sample.response_length])
