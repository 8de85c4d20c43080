"""Random sessions on all wires: every trained id was sampled at that place, and all counts add up.

`AGENTRL_GATEWAY_SESSIONS` sets the number of sessions of the largest test; `make test-nightly` runs a larger number.
"""

import asyncio
import os
from collections import Counter
from typing import Any

import pytest

from agentrl.chat import Chat, Thought, Verdict, normalise_messages
from agentrl.sample import Sample
from tests.gateway.acceptance_engine import Audit, LoggingEngine, hermes, random_speech
from tests.gateway.acceptance_gateway import ALL_KEPT, Served, serving
from tests.gateway.acceptance_play import DISTURBANCES, Play, Total, check_session, play_session
from tests.support.agent_clients import AGENTS, TOOLS, Agent
from tests.support.chats import make_chat
from tests.support.conversations import completion
from tests.support.nightly import nightly

AT_ONCE = 10
WIRES = sorted(AGENTS)
EVERYDAY = ("chat", "responses")


async def play_many(chat: Chat, sessions: range, **settings: Any) -> Total:
    """Play sessions, some at a time, and check them."""
    engine, total = LoggingEngine(chat, random_speech, order=sessions.start), Total()
    async with serving(chat, engine) as served:
        for start in range(sessions.start, sessions.stop, AT_ONCE):
            audit = Audit(engine.log)
            batch = range(start, min(start + AT_ONCE, sessions.stop))
            own = [{**settings, "sampling": ALL_KEPT if seed % 3 == 0 else {}} for seed in batch]
            plays = [
                play_session(served, chat, seed, total, engine.log, audit, **one)
                for seed, one in zip(batch, own, strict=True)
            ]
            await asyncio.gather(*plays)
    sampled = sum(len(turn.ids) for turn in engine.log)
    lost = sampled - total.counts["sampled"]
    assert lost >= 0
    if not total.did["hang up before"] + total.did["hang up within"]:
        assert lost == 0
    return total


def assert_right(total: Total) -> None:
    assert not total.wrong, f"{len(total.wrong)} faults, the first ones:\n" + "\n".join(total.wrong[:5])


async def test_random_sessions_train_each_sampled_token_at_most_once_and_where_it_was_sampled() -> None:
    sessions = int(os.environ.get("AGENTRL_GATEWAY_SESSIONS", "40"))
    total = await play_many(make_chat("qwen3"), range(sessions))
    assert_right(total)
    assert set(total.did) == set(DISTURBANCES)
    reasons = {name.removeprefix("reason/") for name, n in total.counts.items() if n and name.startswith("reason/")}
    expected = {"first", "extend", "fork", "retry", "edited", "compacted", "tools_changed", "new_agent"}
    assert reasons - {"undelivered"} == expected  # a gateway that cancels turns without a waiting agent has none
    assert total.counts["trained"] > 0.7 * total.counts["sampled"]


@pytest.mark.slow
async def test_a_thousand_random_sessions() -> None:
    assert_right(await play_many(make_chat("qwen3"), range(1000, 2000)))


async def test_split_samples_begin_with_the_rendering_of_their_request() -> None:
    total = await play_many(make_chat("qwen3", template_rewrite_policy="split"), range(5000, 5030))
    assert_right(total)
    assert total.counts["reason/template_rewrites"] > 10


@pytest.mark.parametrize("wire", nightly(WIRES, EVERYDAY))
async def test_an_undisturbed_agent_never_branches(wire: str) -> None:
    sessions = range(6000, 6020)
    total = await play_many(make_chat("qwen3"), sessions, wire=wire, chances={})
    assert_right(total)
    assert total.counts["reason/first"] == len(sessions)
    branches = {name for name in total.counts if name.startswith("reason/") and total.counts[name]}
    assert branches == {"reason/first", "reason/extend"}
    assert all(len(closed.samples) == 1 for closed in total.sessions)
    assert total.counts["trained"] == total.counts["sampled"]


def as_set(samples: list[Sample]) -> Counter[Any]:
    """Return the samples without fields that may depend on their order."""
    return Counter(
        (tuple(s.tokens), tuple(s.loss_mask or ()), tuple(s.rollout_log_probs or ()), s.reward, s.rollout_id)
        for s in samples
    )


@pytest.mark.parametrize("wire", nightly(WIRES, 1))
@pytest.mark.parametrize("seed", nightly(range(7000, 7004), 1))
async def test_the_order_of_parallel_requests_does_not_change_the_samples(wire: str, seed: int) -> None:
    chat, chances = make_chat("qwen3"), {"sub-agents": 0.5, "title": 0.3, "retry": 0.1, "compact": 0.1}
    found = []
    for order in (None, 1, 2):
        engine, total = LoggingEngine(chat, random_speech, order=order), Total()
        async with serving(chat, engine) as served:
            audit = Audit(engine.log)
            closed = await play_session(served, chat, seed, total, engine.log, audit, wire=wire, chances=chances)
        assert_right(total)
        found.append((as_set(closed.samples), total.did))
    assert found[1] == found[0]
    assert found[2] == found[0]


async def test_the_order_of_parallel_forks_does_not_change_what_trains() -> None:
    chat = make_chat("qwen3")
    found = []
    for order in (None, 3, 4):
        engine = LoggingEngine(chat, random_speech, order=order)
        async with serving(chat, engine) as served:
            closed = await play_forks(served, chat, engine)
        found.append((Counter(tuple(sample.tokens) for sample in closed), sum(sum(s.loss_mask or ()) for s in closed)))
    assert found[1] == found[0]
    assert found[2] == found[0]


async def play_forks(served: Served, chat: Chat, engine: LoggingEngine) -> list[Sample]:
    base, total, play = await served.open(index=8, group_index=2), Total(), Play({})
    main = AGENTS["chat"](served.agents, base, seed=8)
    play.agents.append(main)
    main.user("begin")
    ids = await main.turn()
    main.results(ids, ["seen"] * len(ids))
    main.user("and now")
    forks = [main.fork() for _ in range(4)]
    for number, fork in enumerate(forks):
        fork.user(f"way {number}")
    await asyncio.gather(*(play.agent(fork, depth=2) for fork in forks))
    closed = await check_session(served, chat, base, 8, play, total, Audit(engine.log), 0, "forks")
    assert_right(total)
    return closed.samples


# ---- each template --------------------------------------------------------------------------------------------

FEW_TEMPLATES = ("qwen3_training", "glm4moe", "gptoss")
MORE_TEMPLATES = (
    *("qwen2_5", "llama3_1", "lfm2_2_5", "muse_glimmer"),
    *("diffusion_gemma", "gemma4", "gemma4_v2", "gemma4_v5", "lfm2_2_5_vl", "lfm2_v2", "llama3_2", "nemotron_3_nano"),
    *("nemotron_3_ultra", "qwen3", "qwen3_5_nothink", "qwen3_5_think", "qwen3_6", "qwen3_8", "qwen3_instruct_2507"),
    *("qwen3_vl", "deepseekv3", "deepseek_r1_distill", "cohere2", "gemma3", "llama3_training", "phi3_5"),
)
TEMPLATES = nightly([*FEW_TEMPLATES, *MORE_TEMPLATES], FEW_TEMPLATES)
REASONED = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "reasoning_content": "r"}]


@pytest.mark.parametrize("name", TEMPLATES)
async def test_an_undisturbed_agent_never_branches_with_a_template(name: str) -> None:
    """The model writes what the template itself would. A template that cannot show calls gets only answers."""
    chat = make_chat(name)
    can, thought = chat.report.can, Thought.WITHOUT
    written: list[str] = []
    engine = LoggingEngine(chat, lambda rng, prompt, params: written.pop(), damage=False)
    async with serving(chat, engine) as served:
        for wire in WIRES:
            base = await served.open(index=9, group_index=2)
            system = "You act." if can.system else ""
            agent = AGENTS[wire](served.agents, base, system, TOOLS[:1] if can.tools else (), seed=name)
            agent.user("begin")
            for number in range(4):
                messages, tools = agent.prompts()[0]
                messages = normalise_messages(messages)
                written.append(
                    completion(chat, [*messages, _said(number, calls=can.tool_messages and can.tools)], tools, thought)
                )
                ids = await agent.turn()
                if ids:
                    agent.results(ids, [f"result {number}"] * len(ids))
                else:
                    agent.user(f"go on {number}")
            tree = await served.tree(base)
            assert [node["reason"] for node in tree["nodes"]] == ["first", "extend", "extend", "extend"], wire
            closed = await served.close(base, reward=0.5)
            audit = Audit(engine.log)
            for sample in closed.samples:
                audit.add(sample)
            assert audit.wrong == []
            assert len(closed.samples) == 1
            grown, exact = list(closed.samples[0].tokens), chat.report.predict("tool", [thought]) is Verdict.EXACT
            if (
                exact
                and chat.turn_parser.family.name != "none"
                and chat.report.predict("user", [thought]) is Verdict.EXACT
            ):
                messages, tools = agent.prompts()[0]
                for message in messages:  # agents strip leading and trailing spaces, which the gateway does not follow
                    message["content"] = (
                        message["content"].strip() if message["role"] == "assistant" else message["content"]
                    )
                assert chat.render_ids(messages, tools)[: len(grown)] == grown


def _said(number: int, *, calls: bool) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": f"answer {number}"}
    if calls and number % 2 == 0:
        function = {"name": "look", "arguments": {"q": f"é {number}"}}
        message |= {
            "content": "",
            "tool_calls": [{"id": f"call{number:05d}", "type": "function", "function": function}],
        }
    return message


# ---- the known traps, one by one ------------------------------------------------------------------------------


async def one_agent(wire: str, served: Served, **settings: Any) -> Agent:
    agent = AGENTS[wire](served.agents, await served.open(index=1, group_index=0), **settings)
    agent.user("begin")
    return agent


async def reasons(served: Served, agent: Agent) -> list[str]:
    return [node["reason"] for node in (await served.tree(agent.base))["nodes"]]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    "said",
    [
        "",
        "<think>\nonly a thought\n</think>\n\n",
        "  spaces at the edges \n\n",
        "a broken call\n<tool_call>\n{\"name\": \"look\", \"arguments\": {\"q\"",
        "<tool_call>\n{\"name\": \"look\", \"arguments\": {}}\n</tool_call>\nbroken too\n<tool_call>\nnothing\n</tool_call>",
        hermes(calls=[("look", {"q": 1.0, "b": {"z": 1, "a": 2.50}}), ("look", {"q": 1.0})]),
        hermes("why", "text", [("unknown_tool", {"q": "é\ud83d".encode("utf-8", "replace").decode()})]),
        '<tool_call>\n{"name": "look", "arguments": {"q": "\\ud83d"}}\n</tool_call>',
        "text of a control token: &lt;|im_end|&gt; \u0000 \u2028",
    ],
)  # fmt: skip
async def test_a_strange_turn_is_recognised_when_it_comes_back(wire: str, said: str) -> None:
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, lambda rng, prompt, params: said, damage=False)
    async with serving(chat, engine) as served:
        for seed in range(4):
            agent = await one_agent(wire, served, seed=seed, plain=seed == 0)
            for _ in range(3):
                ids = await agent.turn(stream=seed % 2 == 0)
                if ids:
                    agent.results(ids, ["seen"] * len(ids))
                else:
                    agent.user("and")
            assert await reasons(served, agent) == ["first", "extend", "extend"]


async def test_the_instructions_of_a_continued_response_are_not_added_again() -> None:
    """OpenAI's responses do not carry instructions over, so SDKs send them each time."""
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, lambda rng, prompt, params: "yes", damage=False)
    async with serving(chat, engine) as served:
        path = await served.open(index=1, group_index=0)
        body = {"model": "m", "instructions": "Act once.", "input": "begin", "tools": []}
        first = (await served.agents.post(f"{path}/v1/responses", json=body)).json()
        again = {**body, "input": "and", "previous_response_id": first["id"]}
        second = await served.agents.post(f"{path}/v1/responses", json=again)
        assert second.status_code == 200, second.text
        tree = await served.tree(path)
        assert [node["reason"] for node in tree["nodes"]] == ["first", "extend"]
        assert chat.decode(engine.log[-1].prompt).count("Act once.") == 1


async def test_a_response_may_be_continued_twice() -> None:
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, random_speech, damage=False)
    async with serving(chat, engine) as served:
        path = await served.open(index=1, group_index=0)
        first = (await served.agents.post(f"{path}/responses", json={"model": "m", "input": "begin"})).json()
        for text in ("one way", "other way"):
            body = {"model": "m", "input": text, "previous_response_id": first["id"]}
            assert (await served.agents.post(f"{path}/responses", json=body)).status_code == 200
        assert [node["reason"] for node in (await served.tree(path))["nodes"]] == ["first", "extend", "fork"]
        closed = await served.close(path, reward=1.0)
        audit = Audit(engine.log)
        for sample in closed.samples:
            audit.add(sample)
        assert audit.wrong == []
        assert closed.counts["trained"] == closed.counts["sampled"]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stream", [False, True])
async def test_an_undelivered_answer_does_not_train(wire: str, stream: bool) -> None:
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, random_speech, damage=False, gate=asyncio.Event())
    async with serving(chat, engine) as served:
        agent = await one_agent(wire, served)
        body = {**agent.body(), "stream": stream}
        lost = asyncio.ensure_future(agent.client.post(f"{agent.base}/{agent.path}", json=body))
        await engine.asking.wait()
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        assert engine.gate is not None
        engine.gate.set()
        await agent.turn()
        closed = await served.close(agent.base, reward=1.0)
        audit = Audit(engine.log)
        for sample in closed.samples:
            audit.add(sample)
        assert audit.wrong == []
        assert len(closed.samples) == 1
        assert closed.counts["trained"] == len(engine.log[-1].ids)
        assert closed.counts["sampled"] == closed.counts["trained"] + closed.counts.get("dropped/undelivered", 0)


async def test_an_answer_that_an_agent_throws_away_trains() -> None:
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, random_speech, damage=False)
    async with serving(chat, engine) as served:
        agent = await one_agent("chat", served)
        await agent.ask()
        await agent.turn()
        assert await reasons(served, agent) == ["first", "retry"]
        closed = await served.close(agent.base, reward=1.0)
        assert len(closed.samples) == 2
        assert closed.counts["trained"] == closed.counts["sampled"] == sum(len(turn.ids) for turn in engine.log)


async def test_an_assistant_message_of_another_author_never_trains() -> None:
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, random_speech, damage=False)
    async with serving(chat, engine) as served:
        agent = await one_agent("chat", served)
        await agent.turn()
        agent.restart(1)
        agent.history += [{"role": "assistant", "content": "I never said so."}, {"role": "user", "content": "go on"}]
        await agent.ask()
        assert (await reasons(served, agent))[1] == "edited"
        closed = await served.close(agent.base, reward=1.0)
        audit = Audit(engine.log)
        for sample in closed.samples:
            audit.add(sample)
        assert audit.wrong == []
        assert closed.counts["trained"] == sum(len(turn.ids) for turn in engine.log)


async def test_rewards_by_root_leave_the_others_untrained() -> None:
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, random_speech, damage=False)
    async with serving(chat, engine) as served:
        base = await served.open(index=4, group_index=1)
        agents = [AGENTS["chat"](served.agents, base, f"You are {name}.", seed=name) for name in "abc"]
        for agent in agents:
            agent.user("begin")
            await agent.turn()
        tree = await served.tree(base)
        roots = [root["number"] for root in tree["roots"]]
        assert [root["role"] for root in tree["roots"]] == ["main", "subagent", "subagent"]
        closed = await served.close(base, rewards={str(roots[0]): 1.0, str(roots[2]): -1.0})
        assert sorted(float(str(sample.reward)) for sample in closed.samples) == [
            -1,
            1,
        ]
        sampled = {root: sum(n["sampled_tokens"] for n in tree["nodes"] if n["root"] == root) for root in roots}
        assert closed.counts["dropped/unrewarded"] == sampled[roots[1]]
        assert closed.counts["trained"] == sampled[roots[0]] + sampled[roots[2]]
