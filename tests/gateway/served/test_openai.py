"""Behaviour that OpenAI's clients need, of an application in this process whose model calls tools in Hermes' form."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.testclient import TestClient

from agentrl.chat import Chat, make_parser
from agentrl.engine.embedded.server import build
from agentrl.engine.embedded.service import Options
from agentrl.engine.embedded.stopping import StopRules, aborted
from agentrl.gateway.live import stable_prefix
from agentrl.gateway.served.openai import ROUTES
from tests.chat.acceptance.table import TABLE, Format, outputs, parser_of
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model

USER = [{"role": "user", "content": "What is 12 plus 30?"}]
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": parameters}}
    for name, parameters in {
        "calc": {"type": "object", "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}}, "required": ["a"]},
        "look": {"type": "object", "properties": {"place": {"enum": ["here", "there"]}}, "required": ["place"]},
    }.items()
]
SCHEMA = {"type": "object", "properties": {"ok": {"type": "boolean"}, "n": {"enum": [1, 22]}}, "required": ["ok", "n"]}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    folder = make_tiny_model(tmp_path_factory.mktemp("hermes"))
    app = build(Options(str(folder), slots=4, served_model_name="a/b"), on_crash=lambda: None, routes=ROUTES)
    with TestClient(app, "http://localhost") as client:
        yield client


def chat(client: TestClient, **more: Any) -> Any:
    body = {"model": "m", "messages": USER, "max_tokens": 60, "seed": 3, "logit_bias": {"6": 0}, **more}
    return client.post("/v1/chat/completions", json=body)


def streamed(client: TestClient, **more: Any) -> list[dict[str, Any]]:
    lines = chat(client, stream=True, **more).text.split("\n\n")
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


def test_a_stream_has_the_log_probs_and_the_usage_of_the_plain_answer(client: TestClient) -> None:
    body = {"logprobs": True, "top_logprobs": 2, "max_tokens": 9}
    plain = chat(client, **body).json()
    *chunks, last = streamed(client, **body, stream_options={"include_usage": True})
    logs = [chunk["choices"][0]["logprobs"] for chunk in chunks]
    found = [entry["logprob"] for log in logs if log for entry in log["content"]]
    assert found == pytest.approx([entry["logprob"] for entry in plain["choices"][0]["logprobs"]["content"]], abs=1e-5)
    assert (last["choices"], last["usage"]) == ([], plain["usage"])
    assert all("usage" not in chunk for chunk in chunks)


@pytest.mark.parametrize("limit", nightly([{}, {"max_tokens": None}], 1))
def test_a_chat_without_a_limit_goes_on_to_the_end_of_the_context(client: TestClient, limit: dict[str, Any]) -> None:
    body = {"model": "m", "messages": USER, "logit_bias": {"5": 100}, "ignore_eos": True, **limit}
    answer = client.post("/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert sum(answer["usage"][name] for name in ("prompt_tokens", "completion_tokens")) > 200


def test_a_chat_ends_at_the_end_token_of_the_template(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    service = client.app.state.service  # type: ignore[attr-defined]
    end = service.chat({}).stop_token_ids[0]
    monkeypatch.setattr(service.vocab, "eos", frozenset())  # a base model, which has another EOS
    assert chat(client, logit_bias={str(end): 100}).json()["choices"][0]["finish_reason"] == "stop"


def test_the_prompt_says_if_an_answer_begins_in_its_reasoning(
    client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = client.app.state.service  # type: ignore[attr-defined]
    source = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% if messages[-1].role == 'user' %}<think>{% endif %}"
    made = Chat(service.chat({}).tokenizer, chat_template=source + "{# </think> #}")
    monkeypatch.setattr(service, "chat", lambda _: made)
    for last, found in (([], ("", "ok")), ([{"role": "tool", "content": "R"}], ("ok", None))):
        message = chat(client, messages=[*USER, *last], regex="ok").json()["choices"][0]["message"]
        assert (message["content"], message["reasoning_content"]) == found


def test_a_limit_that_is_null_is_not_given(client: TestClient) -> None:
    answer = chat(client, max_tokens=3, max_completion_tokens=None, ignore_eos=True).json()
    assert answer["usage"]["completion_tokens"] == 3
    body = {"model": "m", "prompt": "a", "max_tokens": None, "ignore_eos": True}
    assert client.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 16


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_fails_while_it_is_sampled_gets_an_error(
    client: TestClient, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    monkeypatch.setattr(StopRules, "check", lambda *_: aborted("a broken rule", 500, "InternalServerError"))
    answer = chat(client, stream=stream)
    if not stream:
        assert (answer.status_code, answer.json()["message"]) == (500, "a broken rule")
        return
    event, end = answer.text.rstrip().split("\n\n")[-2:]
    error = json.loads(event.removeprefix("data: "))["error"]
    assert (error["message"], error["code"], end) == ("a broken rule", 500, "data: [DONE]")


def test_a_model_is_found_by_its_name(client: TestClient) -> None:
    assert client.get("/v1/models/a/b").json() == client.get("/v1/models").json()["data"][0]
    assert client.get("/v1/models/c").status_code == 404


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "look"}}])
def test_calls_are_forced_and_have_ids_of_their_own(client: TestClient, choice: Any) -> None:
    calls = [{"id": "call00007", "type": "function", "function": {"name": "look", "arguments": '{"place": "here"}'}}]
    before = [*USER, {"role": "assistant", "tool_calls": calls}, {"role": "tool", "content": "no"}]
    body = {"messages": before, "tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    plain = chat(client, **body).json()["choices"][0]
    assert (plain["finish_reason"], plain["message"]["content"]) == ("tool_calls", "")
    (call,) = plain["message"]["tool_calls"]
    assert re.fullmatch("[0-9a-f]{9}", call["id"])
    (other,) = chat(client, **body).json()["choices"][0]["message"]["tool_calls"]
    assert other == {**call, "id": other["id"]}
    assert other["id"] != call["id"]
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "look":
        assert arguments in ({"place": "here"}, {"place": "there"})
    else:
        assert choice == "required"
        assert arguments.pop("a") in (1, 2)
        assert arguments in ({}, {"b": True}, {"b": False})
    chunks = streamed(client, **body)
    sent = [chunk["choices"][0]["delta"].get("tool_calls") for chunk in chunks]
    assert [{**each, "id": call["id"]} for found in sent for each in found or ()] == [call]
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


def test_answers_follow_a_schema(client: TestClient) -> None:
    for seed in range(3):
        answer = chat(client, response_format=FORM, logprobs=True, top_logprobs=5, seed=seed).json()["choices"][0]
        found = json.loads(answer["message"]["content"])
        assert (type(found["ok"]), found["n"] in (1, 22), len(found)) == (bool, True, 2)
        tops = [top["logprob"] for entry in answer["logprobs"]["content"] for top in entry["top_logprobs"]]
        assert None not in tops, "a token that is not allowed has no log-prob to show"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"messages": []}, "Messages cannot be empty"),
        ({"tool_choice": "required"}, "none of the 0 tools"),
        ({"tool_choice": "often", "tools": TOOLS}, "tool_choice must be"),
        ({"tool_choice": {"type": "function", "function": {"name": "x"}}, "tools": TOOLS}, "'x' is none of"),
        ({"response_format": {"type": "xml"}}, "response_format 'xml' is not known"),
        ({"response_format": {"type": "json_schema"}}, "no JSON schema"),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "Only one of"),
        ({"response_format": {"type": "json_object"}, "ebnf": "a"}, "Only one of"),
        ({"response_format": "json"}, "no JSON schema"),
        ({"tool_choice": {"function": "x"}, "tools": [1]}, "tool_choice must be"),
        ({"tool_choice": {"function": {"name": "x"}}, "tools": [1]}, "none of the 1 tools"),
        ({"tool_choice": "required", "tools": [{"function": {}}]}, ""),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, ""),
        ({"messages": [{"role": "assistant", "tool_calls": [5]}]}, ""),
        ({"messages": [5]}, ""),
        ({"response_format": {**FORM, "json_schema": {"schema": {"type": "objec"}}}}, "ebnf cannot be used"),
    ],
)
def test_what_cannot_be_had_is_refused(client: TestClient, body: dict[str, Any], message: str) -> None:
    answer = chat(client, **body)
    assert (answer.status_code, answer.json()["object"]) == (400, "error")
    assert message in answer.json()["message"]


@pytest.mark.parametrize("form", nightly(TABLE, 9), ids=lambda row: row.parser)
def test_the_streamed_part_of_a_turn_is_a_prefix_of_the_whole(form: Format) -> None:
    shown = 0
    for output in outputs(form):
        parser = parser_of(form, output.prompt)
        turn = parser.parse(output.text, output.tools)
        for end in range(len(output.text)):
            reasoning, content = stable_prefix(parser, output.text[:end])
            assert (turn.reasoning or "").startswith(reasoning), output.id
            assert turn.content.startswith(content), output.id
            shown += len(content) + len(reasoning)
    assert shown or not parser_of(form).family.begins, "nothing was sent before the end"


def test_text_is_sent_up_to_what_may_be_a_tag() -> None:
    parser = make_parser("hermes", "think", "")
    assert stable_prefix(parser, "<thi") == ("", "")
    assert stable_prefix(parser, "<think> so </thin") == ("so", "")
    assert stable_prefix(parser, "<think>so</think> I see <tool") == ("so", "I see")
    assert stable_prefix(parser.without_calls(), "I see <tool_call>x") == ("", "I see <tool_call>x")
