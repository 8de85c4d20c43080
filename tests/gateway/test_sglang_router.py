"""`agentrl router` with a real SGLang server: each endpoint and each stream equals the engine's own."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import anyio
import httpx
import pytest

from agentrl.gateway.router import router
from tests.support.real_sglang import MARKS, Server

pytestmark = MARKS

GREEDY = {"temperature": 0.0, "max_new_tokens": 400, "ignore_eos": True}
SAID = [{"role": "user", "content": "What is 12 plus 30?"}]
TOKENS = {"temperature": 0.0, "max_tokens": 400, "ignore_eos": True}
CALLED = '<tool_call>\n{"name": "look", "arguments": {"q": "x"}}\n</tool_call>'
LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


@dataclass(frozen=True)
class Routed:
    """Clients of an engine: direct and through the router."""

    direct: httpx.Client
    router: httpx.Client

    @property
    def both(self) -> tuple[httpx.Client, httpx.Client]:
        """Return the two clients."""
        return self.direct, self.router

    def whole(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body with the model's name, which responses need. `/generate` has no such field."""
        if path == "/generate":
            return body
        return {"model": self.direct.get("/v1/models").json()["data"][0]["id"], **body}

    def generates(self) -> bool:
        """Return true if a request is in flight: the cache cannot be emptied then."""
        answer = self.direct.post("/flush_cache")
        assert answer.status_code in (200, 400)
        return answer.status_code == 400


@pytest.fixture(scope="module")
def routed(sglang: Server) -> Iterator[Routed]:
    command = [sys.executable, "-m", "agentrl", "router", sglang.url, "--port", "0"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    ) as it:
        assert it.stdout is not None
        try:
            url = it.stdout.readline().removeprefix("ready on ").strip()
            with (
                httpx.Client(base_url=sglang.url, timeout=120) as direct,
                httpx.Client(base_url=url, timeout=120) as own,
            ):
                yield Routed(direct, own)
        finally:
            it.terminate()


# ---- endpoints --------------------------------------------------------------------------------------------------

CONTROL = ("abort", "pause", "continue", "flush", "cache", "weight", "memory", "lora", "state", "slow_down")
"""Words in the paths that only the run may use."""
CHANGING = ("profile", "freeze_gc", "configure_logging", "trace_level", "distribution_record", "dumper", "role_switch")
"""Words in the paths that change a server."""
OWN = ("/generate", "/abort_request", "/health")


def test_the_router_passes_every_endpoint_that_the_engine_has(routed: Routed) -> None:
    """An empty request gets the engine's own answer or error."""
    paths: dict[str, dict[str, Any]] = routed.direct.get("/openapi.json").json()["paths"]
    asked = [
        (method, path.replace("{model}", "none").replace("{response_id}", "none"))
        for path, methods in paths.items()
        for method in sorted(methods)
        if method in ("get", "post") and path not in OWN and not any(word in path for word in (*CONTROL, *CHANGING))
    ]
    assert len(asked) > 30
    differ = []
    for method, path in asked:
        empty: Any = {} if method == "post" else None
        direct, own = (client.request(method, path, json=empty) for client in routed.both)
        kinds = [answer.content and answer.headers["content-type"] for answer in (direct, own)]
        if (direct.status_code, kinds[0]) != (own.status_code, kinds[1]):
            differ.append((method, path, direct.status_code, own.status_code, *kinds, own.text))
    assert differ == []


def test_the_router_refuses_control_of_the_engine(routed: Routed) -> None:
    paths: dict[str, dict[str, Any]] = routed.direct.get("/openapi.json").json()["paths"]
    control = [path for path in paths if any(word in path for word in CONTROL) and path not in OWN]
    assert len(control) > 20
    for path in control:
        assert routed.router.post(path, json={}).status_code == 404, path


def shape(value: Any) -> Any:
    """Return names and types of an answer; texts too, except ids, times and the state of the cache."""
    if isinstance(value, dict):
        left = {"id", "created", "cached", "prefill"}
        return {name: shape(inner) for name, inner in value.items() if not left & set(name.split("_"))}
    if isinstance(value, list):
        return [shape(inner) for inner in value]
    return "number" if isinstance(value, int | float) else value


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**TOKENS, "messages": SAID}),
        ("/v1/completions", {**TOKENS, "prompt": "What is"}),
        ("/v1/messages", {**TOKENS, "messages": SAID}),
        ("/v1/messages/count_tokens", {"messages": SAID}),
        ("/v1/tokenize", {"prompt": "What is"}),
        ("/v1/detokenize", {"tokens": [10, 60, 61]}),
        ("/v1/score", {"query": "What is", "items": ["12", "30"], "label_token_ids": [60, 61]}),
        ("/generate", {"input_ids": [[10, 60], [10, 61]], "sampling_params": GREEDY}),
        ("/generate", {"text": "What is", "sampling_params": {**GREEDY, "n": 2}}),
        ("/invocations", {**TOKENS, "messages": SAID}),
        ("/separate_reasoning", {"text": "<think>a</think>b", "reasoning_parser": "qwen3"}),
        ("/parse_function_call", {"text": CALLED, "tools": [LOOK], "tool_call_parser": "qwen25"}),
        (
            "/api/generate",
            {"model": "m", "prompt": "What is", "stream": False, "options": {"temperature": 0, "num_predict": 5}},
        ),
    ],
)
def test_an_answer_is_the_engines_own(routed: Routed, path: str, body: dict[str, Any]) -> None:
    direct, own = (client.post(path, json=routed.whole(path, body)) for client in routed.both)
    assert (own.status_code, direct.status_code) == (200, 200), own.text
    texts = [json.dumps(shape(answer.json()), sort_keys=True) for answer in (own, direct)]
    assert texts[0] == texts[1]


# ---- streams ----------------------------------------------------------------------------------------------------


def deltas(events: list[Any]) -> str:
    return "".join(
        choice["delta"].get("content") or "" if "delta" in choice else choice["text"]
        for event in events
        for choice in event["choices"]
    )


def of_messages(events: list[Any]) -> str:
    return "".join(event["delta"].get("text", "") for event in events if event["type"] == "content_block_delta")


def of_responses(events: list[Any]) -> str:
    return "".join(event["delta"] for event in events if event["type"] == "response.output_text.delta")


def last_ids(events: list[Any]) -> str:
    counts = [len(event["output_ids"]) for event in events]
    assert counts == sorted(counts)
    return str(events[-1]["output_ids"])


def of_lists(events: list[Any]) -> str:
    return str(sorted((event["index"], event["output_ids"]) for event in events if event["meta_info"]["finish_reason"]))


def spoken(events: list[Any]) -> str:
    return "".join(event["message"]["content"] for event in events)


STREAMS: dict[str, tuple[str, dict[str, Any], Callable[[list[Any]], str]]] = {
    "chat": ("/v1/chat/completions", {**TOKENS, "messages": SAID, "stream": True}, deltas),
    "completions": ("/v1/completions", {**TOKENS, "prompt": "What is", "stream": True}, deltas),
    "messages": ("/v1/messages", {**TOKENS, "messages": SAID, "stream": True}, of_messages),
    "responses": (
        "/v1/responses",
        {"input": SAID, "temperature": 0.0, "max_output_tokens": 400, "stream": True},
        of_responses,
    ),
    "ids": ("/generate", {"input_ids": [10, 60, 61], "sampling_params": GREEDY, "stream": True}, last_ids),
    "text": ("/generate", {"text": "What is", "sampling_params": GREEDY, "stream": True}, last_ids),
    "lists": ("/generate", {"input_ids": [[10, 60], [10, 61]], "sampling_params": GREEDY, "stream": True}, of_lists),
    "ollama": (
        "/api/chat",
        {"model": "m", "messages": SAID, "options": {"temperature": 0, "num_predict": 400}},
        spoken,
    ),
}


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_comes_token_by_token_and_is_the_engines_own(routed: Routed, name: str) -> None:
    path, body, joined = STREAMS[name]
    found = []
    for client in routed.both:
        events, generates = [], []
        with client.stream("POST", path, json=routed.whole(path, body)) as stream:
            assert stream.status_code == 200, stream.read()
            for line in stream.iter_lines():
                data = line.removeprefix("data: ")
                if not data.startswith("{"):
                    continue
                events.append(json.loads(data))
                if len(events) == 4:
                    generates.append(routed.generates())
        assert generates == [True], "the engine was done when the fourth event came"
        found.append((joined(events), [event.get("type") for event in events][:2]))
        assert len(events) > 10
    assert found[0] == found[1]
    assert found[0][0]


@pytest.mark.parametrize("name", ["chat", "messages", "responses", "ids", "text"])
async def test_a_client_that_leaves_a_stream_ends_the_request(routed: Routed, name: str) -> None:
    path, body, _ = STREAMS[name]
    limits = {"max_tokens": 6000, "max_output_tokens": 6000}
    long = {**routed.whole(path, body), **{key: most for key, most in limits.items() if key in body}}
    if "sampling_params" in body:
        long["sampling_params"] = {**GREEDY, "max_new_tokens": 6000}
    async with httpx.AsyncClient(base_url=routed.router.base_url, timeout=120) as client:
        async with client.stream("POST", path, json=long) as stream:
            await anext(stream.aiter_bytes())
            assert routed.generates()
        with anyio.fail_after(60):
            while routed.generates() or routed.router.get("/list_workers").json()["workers"][0]["load"]:
                await anyio.lowlevel.checkpoint()


async def test_a_stream_of_generate_goes_on_after_a_pause(sglang: Server) -> None:
    body = {"input_ids": [10, 60, 61], "sampling_params": GREEDY, "stream": True}
    async with sglang.pool() as pool, router(pool) as url, httpx.AsyncClient(base_url=url, timeout=120) as client:
        async with client.stream("POST", "/generate", json=body) as stream:
            events = []
            async for line in stream.aiter_lines():
                if line.startswith("data: {"):
                    events.append(json.loads(line.removeprefix("data: ")))
                if len(events) == 4 and line:
                    await pool.pause()
                    await pool.resume()
        whole = (await client.post("/generate", json={**body, "stream": False})).json()
    meta = events[-1]["meta_info"]
    assert meta["finish_reason"]["type"] == "length"
    assert meta["completion_tokens"] == len(events[-1]["output_ids"]) == len(meta["output_token_logprobs"]) == 400
    assert len(events) < 400, "the last event has many tokens"
    assert events[-1]["output_ids"] == whole["output_ids"]


# ---- the SDKs ---------------------------------------------------------------------------------------------------


def test_openais_client_gets_the_same_through_the_router(routed: Routed) -> None:
    openai = pytest.importorskip("openai")
    found = []
    for http in routed.both:
        with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="any", max_retries=0) as client:
            (model,) = client.models.list().data
            assert client.models.retrieve(model.id).id == model.id
            asked = {"model": model.id, "temperature": 0.0}
            with client.chat.completions.stream(messages=SAID, max_tokens=20, **asked) as events:
                kinds = [event.type for event in events]
            with client.responses.stream(input=SAID, max_output_tokens=20, **asked) as events:
                said = list(events)
            text = "".join(event.delta for event in said if event.type == "response.output_text.delta")
            with pytest.raises(openai.APIStatusError) as refused:
                client.responses.cancel("resp_none")
            found.append(({*kinds, *(event.type for event in said)}, text, str(refused.value)))
    assert found[0] == found[1]
    assert found[0][1]


def test_anthropics_client_gets_the_same_through_the_router(routed: Routed) -> None:
    anthropic = pytest.importorskip("anthropic")
    found = []
    for http in routed.both:
        with anthropic.Anthropic(base_url=str(http.base_url), api_key="any", max_retries=0) as client:
            counted = client.messages.count_tokens(model="m", messages=SAID).input_tokens
            asked = {"model": "m", "messages": SAID, "max_tokens": 20, "extra_body": {"temperature": 0.0}}
            with client.messages.stream(**asked) as events:
                kinds = [event.type for event in events]
                message = events.get_final_message()
            assert message.usage.input_tokens == counted
            found.append((set(kinds), message.content[0].text, client.messages.create(**asked).content[0].text))
    assert found[0] == found[1]
