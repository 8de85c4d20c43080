"""The gateway with a real SGLang server: the trained ids are those that the engine itself reports as sampled.

The model is random, so a grammar makes it call tools. It still chooses the ids of the marks and the words.
"""

import asyncio
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agentrl.engine.pool import EnginePool
from agentrl.engine.transport import Sink
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.sample import Sample
from tests.engine.faults import until
from tests.engine.protocol_checks import reference_log_probs
from tests.gateway.acceptance_engine import Audit, Sampled, tree_faults
from tests.gateway.acceptance_gateway import serving
from tests.gateway.acceptance_play import DISTURBANCES, Total, play_session, prompts_that_nobody_sent
from tests.support.agent_clients import AGENTS, Agent, Json, Refused, runs
from tests.support.real_sglang import CONTEXT, MARKS, Server
from tests.support.tiny_models import make_tiny_model

pytestmark = MARKS

TOLERANCE = 0.02
WIRES = sorted(AGENTS)
CALL = r'<tool_call>\n\{"name": "look", "arguments": \{"q": "[a-z ]{1,12}"\}\}\n</tool_call>'
CALLS = {"regex": rf"([A-Z][a-z ]{{0,8}}\n)?{CALL}(\n{CALL})?"}
"""A turn of one or two calls, with or without text before the calls."""
WORDS = {"max_new_tokens": 24}
"""A turn of random text, invalid UTF-8 included."""
MIXED = {"regex": rf"[A-Z][a-z ]{{0,8}}|{CALL}(\n{CALL})?"}


@dataclass
class RecordingPool:
    """A pool whose log holds the engine's raw JSON, before agentrl reads it."""

    pool: EnginePool
    log: list[Sampled] = field(default_factory=list)

    async def generate(
        self,
        input_ids: Sequence[int],
        params: SamplingParams,
        *,
        session_id: str | None = None,
        images: Any = None,
        sink: Sink = None,
    ) -> Generation:
        prompt = list(input_ids)
        got = await self.pool.generate(prompt, params, session_id=session_id, extra={})
        parts = [json.loads(raw) for raw in got.raw]
        entries = [entry for part in parts for entry in part["meta_info"]["output_token_logprobs"]]
        log_probs, ids = ([entry[at] for entry in entries] for at in (0, 1))
        assert ids == [id_ for part in parts for id_ in part["output_ids"]]
        spans = [len(part["output_ids"]) for part in parts]
        versions = tuple(
            (part["meta_info"]["weight_version"], sum(spans[:at]), sum(spans[: at + 1]))
            for at, part in enumerate(parts)
        )
        self.log.append(Sampled(len(self.log), prompt, ids, log_probs, versions, None, params))
        return got


async def play(agent: Agent, turns: int, *, stream: bool | None = None) -> int:
    """Play turns. Returns the number of calls."""
    calls = 0
    agent.user("Look around.")
    for number in range(turns):
        ids = await agent.turn(stream=stream)
        calls += len(ids)
        agent.results(ids, [f"seen {number}-{at}" for at in range(len(ids))])
        if not ids:
            agent.user(f"Go on, {number}.")
    return calls


def check_samples(samples: list[Sample], log: list[Sampled]) -> None:
    """Check that each trained id was sampled at that place, with the engine's own log-prob."""
    audit = Audit(log)
    for sample in samples:
        audit.add(sample)
        log_probs, mask = sample.rollout_log_probs or [], sample.loss_mask or []
        assert len(log_probs) == len(mask) == sample.response_length
        assert all(math.isfinite(log_prob) and log_prob <= 0 for log_prob in log_probs)
    assert audit.wrong == []


@pytest.mark.parametrize("sampling", [CALLS, WORDS], ids=["calls", "words"])
@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("wire", WIRES)
async def test_four_turns_are_one_sample_of_the_ids_that_were_sampled(
    sglang: Server, wire: str, stream: bool, sampling: Json
) -> None:
    async with sglang.pool() as pool:
        engine = RecordingPool(pool)
        async with serving(sglang.chat, engine, context_length=CONTEXT) as served:
            base = await served.open(index=3, group_index=1, sampling={"temperature": 1.0, **sampling})
            agent = AGENTS[wire](served.agents, base, seed=wire, plain=True)
            calls = await play(agent, 4, stream=stream)
            tree = await served.tree(base)
            closed = await served.close(base, reward=0.5)
    if sampling is CALLS:
        assert calls >= 4
        assert [node["finish"] for node in tree["nodes"]] == ["calls"] * 4
    assert [node["reason"] for node in tree["nodes"]] == ["first", "extend", "extend", "extend"]
    assert tree_faults(tree, closed.counts, closed.samples) == []
    assert prompts_that_nobody_sent(sglang.chat, closed, [agent]) == []
    (sample,) = closed.samples
    assert list(sample.tokens[: sample.prompt_length]) == sglang.chat.render_ids(*agent.requests[0][0])
    check_samples(closed.samples, engine.log)
    trained = [id_ for at, end in runs(sample.loss_mask or []) for id_ in sample.tokens[sample.prompt_length :][at:end]]
    assert trained == [id_ for turn in engine.log for id_ in turn.ids]
    for before, after in pairwise(engine.log):
        whole = [*before.prompt, *before.ids]
        assert after.prompt[: len(whole)] == whole
    if sampling is WORDS:  # with a grammar: among allowed tokens, which the reference cannot compute
        for turn in engine.log:
            want = reference_log_probs(sglang.model, turn.prompt, turn.ids)
            assert max(abs(got - float(one)) for got, one in zip(turn.log_probs, want, strict=True)) <= TOLERANCE


async def test_disturbed_sessions_at_once_train_each_token_where_it_was_sampled(sglang: Server) -> None:
    total = Total()
    async with sglang.pool() as pool:
        engine = RecordingPool(pool)
        async with serving(sglang.chat, engine, context_length=CONTEXT) as served:
            audit = Audit(engine.log)
            # The engine's sampling has no seed, so a rare disturbance might not occur.
            given = {"sampling": {"temperature": 1.0, **MIXED}, "chances": {**DISTURBANCES, "compact": 0.3}}
            for start in (0, 6):
                await asyncio.gather(
                    *(
                        play_session(served, sglang.chat, seed, total, engine.log, audit, **given)
                        for seed in range(start, start + 6)
                    )
                )
    assert not total.wrong, total.wrong[:3]
    assert len(set(total.did) & set(DISTURBANCES)) >= 6
    reasons = {name.removeprefix("reason/") for name, n in total.counts.items() if n and name.startswith("reason/")}
    assert {"first", "extend", "compacted"} <= reasons
    assert total.counts["trained"] > 0.6 * total.counts["sampled"]


@pytest.mark.parametrize("wire", WIRES)
async def test_a_weight_update_in_the_middle_of_a_turn_gives_two_versions(
    sglang: Server, tmp_path: Path, wire: str
) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen3", seed=1, context_length=CONTEXT)
    async with sglang.pool() as pool:
        await pool.receive(DiskUpdate(str(sglang.model)), "1")
        engine = RecordingPool(pool)
        async with serving(sglang.chat, engine, context_length=CONTEXT) as served:
            sampling = {"temperature": 1.0, "max_new_tokens": 1500, "ignore_eos": True}
            base = await served.open(index=0, group_index=0, sampling=sampling)
            agent = AGENTS[wire](served.agents, base, plain=True)
            playing = asyncio.create_task(play(agent, 1, stream=True))
            await until(lambda: pool.members[0].in_flight > 0)
            await asyncio.sleep(0.3)  # the first tokens
            await pool.receive(DiskUpdate(str(other)), "2")
            await playing
            (sample,) = (await served.close(base, reward=1.0)).samples
        await pool.receive(DiskUpdate(str(sglang.model)), "3")
    check_samples([sample], engine.log)
    ((_, start, middle), (_, _, end)) = engine.log[0].versions
    assert [version for version, _, _ in engine.log[0].versions] == ["1", "2"]
    assert 0 == start < middle < end == 1500
    prompt, ids, log_probs = engine.log[0].prompt, engine.log[0].ids, engine.log[0].log_probs
    for model, first, last in ((sglang.model, start, middle), (other, middle, end)):
        want = reference_log_probs(model, [*prompt, *ids[:first]], ids[first:last])
        assert max(abs(a - float(b)) for a, b in zip(log_probs[first:last], want, strict=True)) <= TOLERANCE


# ---- the context ------------------------------------------------------------------------------------------------


def overflow(wire: str, error: Json) -> str:
    """Return the message of a native error for a prompt that is too long."""
    inner: Json = error["response"]["error"] if error.get("type") == "response.failed" else error["error"]
    if wire == "messages":
        assert (error["type"], inner["type"]) == ("error", "invalid_request_error")
    else:
        assert inner["code"] == "context_length_exceeded"
    return str(inner["message"])


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_prompt_that_overflows_gets_the_native_error_and_the_session_goes_on(
    sglang: Server, wire: str, stream: bool
) -> None:
    async with sglang.pool() as pool:
        engine = RecordingPool(pool)
        async with serving(sglang.chat, engine, context_length=CONTEXT) as served:
            base = await served.open(index=0, group_index=0, sampling=WORDS)
            agent = AGENTS[wire](served.agents, base, plain=True)
            await play(agent, 1, stream=stream)
            kept = len(agent.history)
            agent.user("long " * CONTEXT)
            with pytest.raises(Refused) as refused:
                await agent.turn(stream=stream)
            assert refused.value.status == 400
            assert "prompt is too long" in overflow(wire, json.loads(refused.value.body))
            assert len(engine.log) == 1
            agent.restart(kept)
            await agent.turn(stream=stream)
            assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend"]
            check_samples((await served.close(base, reward=1.0)).samples, engine.log)


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("wire", WIRES)
async def test_a_prompt_that_the_engine_refuses_as_too_long_gets_the_same_error(
    sglang: Server, wire: str, stream: bool
) -> None:
    """The gateway has a larger context length than the engine. A stream has begun by then."""
    async with sglang.pool() as pool, serving(sglang.chat, pool, context_length=10 * CONTEXT) as served:
        base = await served.open(index=0, group_index=0, sampling=WORDS)
        agent = AGENTS[wire](served.agents, base, plain=True)
        agent.user("long " * CONTEXT)
        response = await served.agents.post(f"{base}/{agent.path}", json={**agent.body(), "stream": stream})
        assert response.status_code == (200 if stream else 400), response.text
        *_, last = response.text.strip().split("\n\n") if stream else [f"data: {response.text}"]
        message = overflow(wire, json.loads(last.partition("data: ")[2]))
        assert "prompt is too long" in message
        assert f"context length ({CONTEXT} tokens)" in message
        counts = (await served.tree(base))["counts"]
        assert counts["refused/context"] == 1
        agent.restart(0)
        await play(agent, 2, stream=stream)
        assert [node["reason"] for node in (await served.tree(base))["nodes"]] == ["first", "extend"]


async def test_near_the_end_of_the_context_a_prompt_gets_what_is_left_or_the_native_error(sglang: Server) -> None:
    """SGLang reserves a few positions of its context: no prompt may get another error there."""

    def length(text: str) -> int:
        return len(sglang.chat.render_ids([{"role": "user", "content": text}]))

    async with sglang.pool() as pool:
        engine = RecordingPool(pool)
        async with serving(sglang.chat, engine, context_length=CONTEXT) as served:
            base = await served.open(index=0, group_index=0)
            found = []
            for left in range(9, 0, -1):
                text = "~" * (CONTEXT - left - length("~") + 1)
                assert length(text) == CONTEXT - left
                body = {"model": "m", "messages": [{"role": "user", "content": text}]}
                response = await served.agents.post(f"{base}/chat/completions", json=body)
                found.append(response.status_code)
                if response.status_code == 200:
                    assert 0 < len(engine.log[-1].ids) < left
                else:
                    assert "prompt is too long" in overflow("chat", response.json())
    assert found == sorted(found)
    assert set(found) == {200, 400}
