"""Sessions under parallel requests, odd numbers in calls, and prompts that are only counted."""

import asyncio
import gc
import json
import random
import tempfile
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from agentrl.buffer.codec import encode_group
from agentrl.chat import Chat
from agentrl.engine.pool import EnginePool
from agentrl.engine.wire import FinishReason, Generation, Prompt, SamplingParams, encode
from agentrl.errors import EngineRejected, EngineUnreachable, EnvFailure
from agentrl.gateway.contracts import AgentRequest, Refusal
from agentrl.gateway.server import Gateway
from agentrl.gateway.sessions import Limits
from agentrl.gateway.tree import SessionTree, TurnNode
from agentrl.sample import Sample
from tests.engine import faults
from tests.engine.faults import until
from tests.gateway.acceptance_engine import LoggingEngine, hermes
from tests.gateway.acceptance_gateway import Served, serving
from tests.support.agent_clients import Json
from tests.support.assets import chat_templates
from tests.support.chats import STOPS, interrupted, make_chat

LOOK = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
OTHER = {"type": "function", "function": {"name": "other", "parameters": {"type": "object", "properties": {}}}}
BEGUN: list[Json] = [{"role": "user", "content": "x"}]


def engine_of(*said: Any) -> LoggingEngine:
    """Make an engine that gives these turns in order, then always the last one."""
    left = list(said)
    return LoggingEngine(make_chat("qwen3"), lambda *_: left.pop(0) if left[1:] else left[0], damage=False)


async def ask(served: Served, base: str, messages: list[Json], **more: Any) -> httpx.Response:
    body = {"model": "m", "messages": messages, **more}
    return await served.agents.post(f"{base}/chat/completions", json=body)


@pytest.mark.parametrize("number", ["1" + "0" * 30, "-" + "9" * 400, "NaN", "-Infinity", "1e999"])
async def test_numbers_that_json_encoders_refuse_are_answered_compared_and_stored(number: str) -> None:
    arguments = f'{{"n": {number}}}'
    engine = engine_of(f'<tool_call>\n{{"name": "look", "arguments": {arguments}}}\n</tool_call>', "Done.")
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        first = await ask(served, base, BEGUN, tools=[LOOK])
        assert first.status_code == 200, first.text
        said = first.json()["choices"][0]["message"]
        result = {"role": "tool", "tool_call_id": said["tool_calls"][0]["id"], "content": "r"}
        second = await ask(served, base, [*BEGUN, said, result], tools=[LOOK])
        assert second.status_code == 200, second.text
        assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend"]
        closed = await served.close(base, reward=1.0)
        assert closed.counts["trained"] == closed.counts["sampled"]
        encode_group(closed.samples)


@pytest.mark.parametrize("name", ["qwen3", "llama3_2"])
async def test_large_numbers_in_a_history_of_others_are_shown(name: str) -> None:
    engine = LoggingEngine(make_chat(name), lambda *_: "Done.", damage=False)
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": '{"n": 1' + "0" * 30 + "}"}}
    calls = [call, {**call, "id": "d"}]
    told = [{"role": "tool", "tool_call_id": each["id"], "content": "r"} for each in calls]
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        response = await ask(served, base, [*BEGUN, {"role": "assistant", "content": "I", "tool_calls": calls}, *told])
        assert response.status_code == 200, response.text
        assert "1" + "0" * 30 in engine.chat.decode(engine.log[0].prompt)


async def test_numbers_that_javascript_rounds_are_the_same_history() -> None:
    engine = engine_of(hermes(calls=[("look", {"id": 1_234_567_890_123_456_789, "n": 2**53 + 1})]), "Done.")
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        said = (await ask(served, base, BEGUN, tools=[LOOK])).json()["choices"][0]["message"]
        (call,) = said["tool_calls"]
        assert "1234567890123456789" in call["function"]["arguments"]
        call["function"]["arguments"] = '{"id":1234567890123456800,"n":9007199254740992}'
        result = {"role": "tool", "tool_call_id": call["id"], "content": "r"}
        assert (await ask(served, base, [*BEGUN, said, result], tools=[LOOK])).status_code == 200
        assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend"]


STRICT = """{% for m in messages %}{% if m.role == 'assistant' and not loop.first and messages[loop.index0 - 1].role == 'assistant' %}
{{ raise_exception('roles must alternate') }}{% endif %}{% for c in m.tool_calls %}{% if c.id | length != 9 %}
{{ raise_exception('ids have nine characters') }}{% endif %}{% endfor %}{% endfor %}"""
"""Mistral's rules. They precede Qwen3's template, in which tool names have Kimi K2's form."""


def strict_engine() -> LoggingEngine:
    named = chat_templates()["qwen3"].replace("<tool_response>\\n'", "<tool_response>functions.' + message.name + ':'")
    chat = Chat(make_chat("qwen3").tokenizer, chat_template=STRICT + named, stop_tokens=STOPS["qwen"])
    return LoggingEngine(chat, lambda *_: "yes", damage=False)


CALL = {"id": "call00001_0", "type": "function", "function": {"name": "look", "arguments": "{}"}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [CALL]}


@pytest.mark.parametrize("edit", [
    [*BEGUN, CALLED, {"role": "tool", "tool_call_id": "call00001_0", "content": "r"}],
    [{"role": "assistant", "content": "I never said so."}, *BEGUN],
], ids=["calls", "two turns in a row"])  # fmt: skip
async def test_turns_of_others_behind_a_turn_are_shown_as_the_template_requires(edit: list[Json]) -> None:
    engine = strict_engine()
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        said = (await ask(served, base, BEGUN, tools=[LOOK])).json()["choices"][0]["message"]
        history = [*BEGUN, said, *edit]
        for _ in range(2):
            response = await ask(served, base, history, tools=[LOOK])
            assert response.status_code == 200, response.text
            history += [response.json()["choices"][0]["message"], *BEGUN]
        tree = await served.tree(base)
        assert [node["reason"] for node in tree["nodes"]] == ["first", "edited", "extend"]
        assert [root["role"] for root in tree["roots"]] == ["main", "main"]
        assert ("functions.look:" in engine.chat.decode(engine.log[1].prompt)) is (CALLED in edit)
        closed = await served.close(base, reward=1.0)
        assert closed.counts["trained"] == closed.counts["sampled"]


async def test_equal_requests_at_once_lose_nothing() -> None:
    engine = engine_of("yes")
    async with serving(engine.chat, engine) as served:
        base, history = await served.open(index=0, group_index=0), [*BEGUN]
        (session,) = served.gateway._sessions.values()
        for _ in range(2):
            engine.gate = asyncio.Event()
            both = [asyncio.ensure_future(ask(served, base, history)) for _ in range(2)]
            await until(lambda: sum(not node.finish for node in session.tree.nodes.values()) == 2)
            engine.gate.set()
            history += [(await each).json()["choices"][0]["message"] for each in both][:1] + BEGUN
        nodes = (await served.tree(base))["nodes"]
        assert [node["reason"] for node in nodes] == ["first", "retry", "extend", "retry"]
        assert {len(node.keys) for node in session.tree.nodes.values()} == {1}, "a node does not keep its whole history"


async def test_references_stand_for_the_items_of_earlier_answers() -> None:
    """Vercel's AI SDK sends this by default: some items whole, the others by their ids."""
    engine = engine_of(hermes("Why.", "I look.", [("look", {"at": 1}), ("look", {"at": 2})]), "Done.")
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        body: Json = {"model": "m", "input": [*BEGUN], "tools": tools}
        output = (await served.agents.post(f"{base}/responses", json=body)).json()["output"]
        assert [item["type"] for item in output] == ["reasoning", "message", "function_call", "function_call"]
        assert (await served.agents.post(f"{base}/responses", json={"input": []})).status_code == 400
        items = [{"type": "item_reference", "id": item["id"]} for item in output[:3]]
        results = [{"type": "function_call_output", "call_id": each["call_id"], "output": "r"} for each in output[2:]]
        body["input"] = [*BEGUN, *items, output[3], *results]
        assert (await served.agents.post(f"{base}/responses", json=body)).status_code == 200
        assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend"]
        body["input"] = [*BEGUN, {"type": "item_reference", "id": "msg_other"}, *BEGUN]
        unknown = await served.agents.post(f"{base}/responses", json=body)
        assert unknown.status_code == 404
        assert "msg_other" in unknown.text


async def test_numbers_of_samples_in_a_run_can_be_stored() -> None:
    engine = engine_of(hermes(calls=[("look", {"n": float("nan"), "m": [float("inf")]})]), "Done.")
    gateway = Gateway(engine.chat, engine, context_length=1000)
    async with gateway.serving() as base, httpx.AsyncClient() as client:
        session = gateway.open(Sample(index=0, group_index=0), SamplingParams())
        body = {"model": "m", "messages": BEGUN, "tools": [LOOK]}
        assert (await client.post(f"{gateway.url(session)}/v1/chat/completions", json=body)).status_code == 200
        samples = gateway.close(session.token, 1.0)
    assert base
    encode_group(samples)


async def test_the_main_conversation_is_that_of_the_first_request_that_is_answered() -> None:
    engine = engine_of(EngineUnreachable("no engine"), "yes")
    engine.gate = asyncio.Event()
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        both = [asyncio.ensure_future(ask(served, base, BEGUN)) for _ in range(2)]
        (session,) = served.gateway._sessions.values()
        await until(lambda: session.counts["requests"] == 2)
        engine.gate.set()
        assert sorted([(await each).status_code for each in both]) == [200, 503]
        assert [root["role"] for root in (await served.tree(base))["roots"]] == ["main"]
        closed = await served.close(base, reward=1.0)
        assert closed.counts["trained"] == closed.counts["sampled"] > 0


async def test_a_conversation_that_gets_its_tools_later_is_the_main_one() -> None:
    engine = engine_of("A plan.", "Done.", "A part.")
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        plan = (await ask(served, base, BEGUN)).json()["choices"][0]["message"]
        await ask(served, base, [*BEGUN, plan, {"role": "user", "content": "do it"}], tools=[LOOK])
        await ask(served, base, [{"role": "user", "content": "a part"}], tools=[LOOK])
        assert [root["role"] for root in (await served.tree(base))["roots"]] == ["main", "main", "subagent"]
        closed = await served.close(base, reward=1.0)
        assert closed.counts["trained"] == closed.counts["sampled"] > 0


async def test_results_for_an_answers_id_come_in_the_order_of_its_calls() -> None:
    engine = engine_of(hermes(calls=[("look", {"at": 1}), ("look", {"at": 2})]), "Done.")
    tools = [{"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        body: Json = {"model": "m", "input": "x", "tools": tools}
        first = (await served.agents.post(f"{base}/responses", json=body)).json()
        ids = [item["call_id"] for item in first["output"] if item["type"] == "function_call"]
        outputs = [{"type": "function_call_output", "call_id": id_, "output": f"of {id_}"} for id_ in reversed(ids)]
        body |= {"previous_response_id": first["id"], "input": outputs}
        assert (await served.agents.post(f"{base}/responses", json=body)).status_code == 200
        shown = engine.chat.decode(engine.log[1].prompt)
        assert 0 < shown.index(f"of {ids[0]}") < shown.index(f"of {ids[1]}")


async def test_prompts_that_are_only_counted_are_not_kept() -> None:
    engine = engine_of("yes")
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        (session,) = served.gateway._sessions.values()
        tree = session.tree
        assert (await ask(served, base, BEGUN)).status_code == 200
        kept = [tree._normal, tree._digests, tree._tools, tree._asked]
        before = [len(each) for each in kept]
        for n in range(20):
            body = {
                "messages": [*BEGUN, {"role": "user", "content": f"y{n}"}],
                "tools": [{"name": f"t{n}", "input_schema": {}}],
            }
            counted = await served.agents.post(f"{base}/messages/count_tokens", json=body)
            assert counted.json()["input_tokens"] > 0
        assert [len(each) for each in (tree._normal, tree._digests, tree._tools, tree._asked)] == before
        assert (await ask(served, base, [*BEGUN, {"role": "assistant", "content": "yes"}, *BEGUN])).status_code == 200
        assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend"]


async def test_a_session_with_a_request_in_flight_is_not_idle() -> None:
    engine = engine_of("yes")
    engine.gate = asyncio.Event()
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0, limits={"idle_seconds": 10})
        (session,) = served.gateway._sessions.values()
        now = session._last
        session.clock = lambda: now
        first = asyncio.ensure_future(ask(served, base, BEGUN))
        await engine.asking.wait()
        now += 11
        second = asyncio.ensure_future(ask(served, base, [*BEGUN, *BEGUN]))
        await until(lambda: session.counts["requests"] == 2 or second.done())
        now += 11
        engine.gate.set()
        assert [(await first).status_code, (await second).status_code] == [200, 200]
        assert (await ask(served, base, BEGUN)).status_code == 200, "the idle time begins at a request's end"
        now += 11
        assert "idle_seconds" in (await ask(served, base, BEGUN)).text


async def test_a_session_that_is_closed_twice_at_once_is_closed_once() -> None:
    engine = engine_of("yes")
    async with serving(engine.chat, engine) as served:
        path = f"/sessions/{(await served.open(index=0)).rsplit('/', 1)[1]}"
        body, headers = b'{"reward": 1}'.ljust(1 << 18), {"content-type": "application/json"}  # it is read in a thread
        both = [served.owner.request("DELETE", path, content=body, headers=headers) for _ in range(2)]
        answers = await asyncio.gather(*both)
        assert sorted(each.status_code for each in answers) == [200, 404]


async def test_a_stream_whose_client_leaves_is_aborted_at_the_engine() -> None:
    begun = asyncio.Event()

    async def reply(server: Any, body: Json, request: Any) -> Any:
        stream = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await stream.prepare(request)
        said = faults.answer([1], text="Hello", prompt_tokens=len(body["input_ids"]), finish_reason=None)
        await stream.write(b"data: " + json.dumps({**said, "text": "Hello"}).encode() + b"\n\n")
        begun.set()
        await server.aborted.wait()
        return stream

    chat = make_chat("qwen3")
    async with faults.serving(reply) as server, EnginePool([server.url], faults.FAST, vocab_size=None) as pool:
        gateway = Gateway(chat, pool, context_length=1000, streams=True)
        async with gateway.serving(), httpx.AsyncClient() as client:
            session = gateway.open(Sample(index=0, group_index=0), SamplingParams(), Limits())
            url = f"{gateway.url(session)}/v1/chat/completions"
            async with client.stream("POST", url, json={"model": "m", "messages": BEGUN, "stream": True}) as stream:
                await anext(stream.aiter_bytes())
                await begun.wait()
            async with asyncio.timeout(20):
                await until(lambda: len(server.aborts) == 1)
            await until(lambda: not pool.members[0].in_flight)


async def test_a_session_that_is_closed_while_a_request_is_placed_has_no_node_of_it() -> None:
    engine = engine_of("Done.")
    gateway = Gateway(engine.chat, engine, context_length=1000)
    session = gateway.open(Sample(), SamplingParams())

    async def run(work: Any, *given: Any, size: int) -> Any:
        """Run like a thread that ends after the session."""
        found = work(*given)
        if isinstance(found, TurnNode):
            session.close(1.0)
            await asyncio.sleep(0)
        return found

    with pytest.raises(Refusal):
        await session.turn(AgentRequest(messages=BEGUN), 10, run)
    assert session.tree.nodes == {}


class StoppingEngine(LoggingEngine):
    """Ends a turn at the first stop string, whose tokens the ids include."""

    def _ids(self, said: str, rng: random.Random, params: SamplingParams) -> tuple[list[int], FinishReason]:
        for stop in params.stop or ():
            if stop in said:
                return self.chat.encode(said[: said.index(stop) + len(stop)]), FinishReason("stop", stop)
        return super()._ids(said, rng, params)


@pytest.mark.parametrize("stop", ["HALT", " HALT ", "HALT three"])
@pytest.mark.parametrize(("path", "field"), [("chat/completions", "stop"), ("messages", "stop_sequences")])
async def test_an_answer_ends_before_the_agents_stop_string(path: str, field: str, stop: str) -> None:
    engine = StoppingEngine(make_chat("qwen3"), lambda *_: "One two HALT three", damage=False)
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        body: Json = {"model": "m", "messages": BEGUN, "max_tokens": 50, field: [stop]}
        answer = (await served.agents.post(f"{base}/{path}", json=body)).json()
        if path == "messages":
            assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", stop)
            said = {"role": "assistant", "content": answer["content"]}
            assert answer["content"] == [{"type": "text", "text": "One two"}]
        else:
            said = answer["choices"][0]["message"]
            assert (said["content"], answer["choices"][0]["finish_reason"]) == ("One two", "stop")
        body["messages"] = [*BEGUN, said, {"role": "user", "content": "go on"}]
        assert (await served.agents.post(f"{base}/{path}", json=body)).status_code == 200
        assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend"]
        (sample,) = (await served.close(base, reward=1.0)).samples
        assert engine.chat.decode(sample.tokens).count("One two HALT") == 2


WRONG: list[Json] = [
    {"temperature": -1},
    {"top_p": 0},
    {"max_new_tokens": -5},
    {"max_new_tokens": 0},
    {"stop_token_ids": [1 << 20]},
    {"min_new_tokens": 9, "max_new_tokens": 8},
]


@pytest.mark.parametrize("sampling", WRONG)
async def test_sampling_that_no_engine_takes_is_refused_when_the_session_opens(sampling: Json) -> None:
    engine = engine_of("Done.")
    async with serving(engine.chat, engine) as served:
        response = await served.owner.post("/sessions", json={"sampling": sampling})
    assert response.status_code == 400
    assert next(iter(sampling)) in response.text


async def test_what_an_engine_refuses_of_a_request_is_the_agents_fault() -> None:
    refused = EngineRejected("min_new_tokens must be in [0, 6]", status=400)
    engine = engine_of(refused, EngineRejected("broken", status=500), "Done.")
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        (session,) = served.gateway._sessions.values()
        for status, failed in ((400, False), (502, True), (200, False)):
            assert (await ask(served, base, BEGUN)).status_code == status
            assert (session.failure is not None) == failed


async def test_counting_a_prompt_is_within_the_sessions_limits() -> None:
    engine = engine_of("Done.")
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0, limits={"bytes": 400, "requests": 1})
        body = {"model": "m", "messages": [{"role": "user", "content": "x" * 100}]}
        counted = [await served.agents.post(f"{base}/messages/count_tokens", json=body) for _ in range(3)]
        assert [response.status_code for response in counted] == [200, 200, 429]
        assert "bytes" in counted[-1].text
        assert (await served.tree(base))["counts"].get("requests", 0) == 0


async def test_a_parser_that_raises_fails_the_session_and_not_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("the user's parser")

    engine = engine_of("Done.")
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        monkeypatch.setattr(SessionTree, "sampled", broken)
        for stream in (False, True):
            response = await ask(served, base, BEGUN, stream=stream)
            assert "the user's parser" in response.text
            assert response.status_code == 502
        (session,) = served.gateway._sessions.values()
        assert isinstance(session.failure, EnvFailure)


async def test_a_long_folder_for_temporary_files_is_no_trouble(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / ("long" * 30)))
    Path(tempfile.gettempdir()).mkdir()
    engine = engine_of("Done.")
    gateway = Gateway(engine.chat, engine, context_length=1000)
    async with gateway.serving():
        assert gateway.socket.is_socket()


async def test_sessions_that_are_unused_for_a_day_are_removed() -> None:
    engine, now = engine_of("Done."), 0.0
    gateway = Gateway(engine.chat, engine, context_length=1000)
    sessions = [gateway.open(Sample(index=at), SamplingParams()) for at in range(3)]
    for session in sessions:
        session.clock = lambda: now
        session._last = 0.0
    now = 24 * 3600.0
    gateway.open(Sample(index=3), SamplingParams())
    assert gateway.close(sessions[0].token) == []
    now += 1
    for at in range(4, 8):
        gateway.open(Sample(index=at), SamplingParams())
    for session in sessions[1:]:
        with pytest.raises(KeyError):
            gateway.close(session.token)


class InterruptedEngine(LoggingEngine):
    """An engine whose answers are each interrupted within the last character before the end token."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **more: Any) -> Generation:
        got = await super().generate(input_ids, params, **more)
        return interrupted(self.chat, got, len(got.ids) - 2)


async def test_the_text_of_an_interrupted_answer_is_that_of_its_ids() -> None:
    engine = InterruptedEngine(make_chat("qwen3"), lambda *_: "Fine \U0001fae8", damage=False)
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        await ask(served, base, BEGUN)
        (node,) = (await served.tree(base))["nodes"]
    assert node["text"] == "Fine \U0001fae8<|im_end|>"


@pytest.mark.parametrize("arguments", [{"input": "a"}, {"patch": "a"}, {"input": "a", "why": "b"}, {"input": {"a": 1}}])
async def test_a_call_of_a_custom_tool_that_comes_back_is_the_same_history(arguments: Json) -> None:
    engine = engine_of(hermes(calls=[("apply_patch", arguments)]), "Done.")
    tool = {"type": "custom", "name": "apply_patch", "description": "Patch."}
    body: Json = {"model": "m", "tools": [tool], "input": [{"role": "user", "content": "x"}]}
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        (call,) = (await served.agents.post(f"{base}/responses", json=body)).json()["output"]
        result = {"type": "custom_tool_call_output", "call_id": call["call_id"], "output": "r"}
        body["input"] = [*body["input"], call, result]
        assert (await served.agents.post(f"{base}/responses", json=body)).status_code == 200
        assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend"]


async def test_calls_of_a_history_have_their_own_ids_though_the_agent_repeats_its_ids() -> None:
    shows = "{% for m in messages %}{{ m.tool_call_id }}{% for c in m.tool_calls %}{{ c.id }}{% endfor %}{% endfor %}"
    chat = Chat(
        make_chat("qwen3").tokenizer, chat_template=chat_templates()["qwen3"] + shows, stop_tokens=STOPS["qwen"]
    )
    engine = LoggingEngine(chat, lambda *_: "yes", damage=False)
    calls = [{**CALL, "id": name} for name in "ab"]
    results = [{"role": "tool", "tool_call_id": name, "content": "r"} for name in "ab"]
    turn: list[Json] = [{"role": "assistant", "content": "", "tool_calls": calls}, *results]
    async with serving(chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        assert (await ask(served, base, [*BEGUN, *turn, *turn], tools=[LOOK])).status_code == 200
    shown = chat.decode(engine.log[0].prompt)
    assert [shown.count(f"call0000{number}") for number in range(1, 6)] == [2, 2, 2, 2, 0]


@pytest.mark.parametrize("tools", [[LOOK], [LOOK, OTHER]])
async def test_a_request_that_does_not_fit_ends_the_conversation_with_context_also_as_a_new_root(
    tools: list[Json],
) -> None:
    engine = engine_of("yes")
    async with serving(engine.chat, engine, context_length=1000) as served:
        base = await served.open(index=0, group_index=0)
        said = (await ask(served, base, BEGUN, tools=[LOOK])).json()["choices"][0]["message"]
        long = [*BEGUN, said, {"role": "user", "content": "word " * 2000}]
        assert (await ask(served, base, long, tools=tools)).status_code == 400
        (sample,) = (await served.close(base, reward=1.0)).samples
        assert sample.stop_reason == "context"


async def test_the_least_number_of_tokens_gives_way_to_the_agents_limit() -> None:
    asked: list[SamplingParams] = []

    class Noting(LoggingEngine):
        def _ids(self, said: str, rng: random.Random, params: SamplingParams) -> tuple[list[int], FinishReason]:
            asked.append(params)
            return super()._ids(said, rng, params)

    engine = Noting(make_chat("qwen3"), lambda *_: "One two three", damage=False)
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0, sampling={"min_new_tokens": 8})
        assert (await ask(served, base, BEGUN, max_tokens=2)).status_code == 200
        await ask(served, base, BEGUN)
    assert [(params.min_new_tokens, (params.max_new_tokens or 0) > 8) for params in asked] == [(2, False), (8, True)]


async def test_a_gateway_at_all_addresses_names_the_one_that_the_owner_used() -> None:
    engine = engine_of("yes")
    async with serving(engine.chat, engine) as served:
        served.gateway.base = "http://0.0.0.0:8080"
        answer = await served.owner.post("/sessions", json={}, headers={"host": "10.1.2.3:8081"})
        assert answer.json()["base_url"].startswith("http://10.1.2.3:8080/s/")


async def test_only_new_ids_of_a_prompt_are_encoded_also_if_conversations_alternate() -> None:
    encoded = list[tuple[int, int]]()

    class Encoding(LoggingEngine):
        async def generate(self, input_ids: Sequence[int], *args: Any, **options: Any) -> Generation:
            assert isinstance(input_ids, Prompt)
            encoded.append((input_ids.known[0], len(input_ids)))
            assert encode(input_ids, None) == encode(list(input_ids), None)
            return await super().generate(input_ids, *args, **options)

    engine = Encoding(make_chat("qwen3"), lambda *_: "yes", damage=False)
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        histories: list[list[Json]] = [[{"role": "user", "content": name}] for name in ("a", "b")]
        for _ in range(3):
            for history in histories:
                said = (await ask(served, base, history)).json()["choices"][0]["message"]
                history += [said, {"role": "user", "content": "go on"}]
        nodes = (await served.tree(base))["nodes"]
        assert [node["reason"] for node in nodes] == ["first", "new_agent", *["extend"] * 4]
    assert [known for known, _ in encoded] == [0, 0, *(length for _, length in encoded[:4])]


async def test_a_closed_session_is_freed_without_garbage_collection() -> None:
    engine = engine_of("yes")
    async with serving(engine.chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        said = (await ask(served, base, BEGUN)).json()["choices"][0]["message"]
        for end in ("a", "b", "b"):  # a fork, and a retry
            assert (await ask(served, base, [*BEGUN, said, {"role": "user", "content": end}])).status_code == 200
        assert (await ask(served, base, [*BEGUN, {**said, "content": "no"}, *BEGUN])).status_code == 200
        nodes = [node for session in served.gateway._sessions.values() for node in session.tree.nodes.values()]
        held = [weakref.ref(node.chat) for node in nodes]
        del nodes
        gc.collect()
        gc.disable()
        try:
            await served.close(base, reward=1.0)
            assert [ref() for ref in held] == [None] * 5
        finally:
            gc.enable()
