"""Recorded requests of Claude Code, Codex, opencode and others give the expected trees.

The data are requests in their recorded structure, with filler instead of texts, and the model's answer to each.
`defaults` are the parts that the requests of one conversation share. Requests of programs that rewrite their history
are written by hand.
"""

import copy
import functools
import json
import random
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.acceptance_engine import Audit, LoggingEngine, hermes, tree_faults
from tests.gateway.acceptance_gateway import Served, serving
from tests.support.agent_clients import Json, join_chat, join_messages, join_responses
from tests.support.chats import make_chat

FOLDER = Path(__file__).parent / "data"
RECORDED = sorted(file.stem for file in FOLDER.glob("*.json"))
JOIN = {"messages": join_messages, "responses": join_responses, "completions": join_chat}


@functools.cache
def recorded(name: str) -> Any:
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def requests(name: str) -> list[tuple[str, dict[str, str], Json, str]]:
    """Return (path, headers, body, model's turn) of each request; the version in Claude Code's billing line varies."""
    found, data = [], recorded(name)
    for number, request in enumerate(data["requests"]):
        shared = data["defaults"][request["of"]]
        own = {key: value for key, value in request.items() if key not in ("of", "says", "headers")}
        body = copy.deepcopy({**shared["body"], **own})
        if isinstance(body.get("system"), list):
            body["system"][0]["text"] = body["system"][0]["text"].replace("VARIES", f"c{number}")
        said = request["says"]
        calls = [(name, arguments) for name, arguments in said["calls"]]
        text = hermes(said.get("reasoning"), said["content"], calls)
        found.append((shared["path"], {**shared["headers"], **request.get("headers", {})}, body, text))
    return found


async def replay(name: str, served: Served, engine_says: list[str], base: str) -> None:
    for path, headers, body, said in requests(name):
        engine_says.append(said)
        response = await served.agents.post(f"{base}/{path}", json=body, headers=headers)
        assert response.status_code == 200, response.text
        if body.get("stream"):
            JOIN[path.partition("?")[0].rsplit("/", 1)[1]](response.text)


@pytest.mark.parametrize("name", RECORDED)
async def test_a_recorded_agent_has_its_tree(name: str) -> None:
    chat, data, says = make_chat("qwen3"), recorded(name), list[str]()
    engine = LoggingEngine(chat, lambda rng, prompt, params: says.pop(), damage=False)
    async with serving(chat, engine) as served:
        base = await served.open(index=5, group_index=1)
        await replay(name, served, says, base)
        tree = await served.tree(base)
        nodes = tree["nodes"]
        numbers = [node["number"] for node in nodes]
        for node, (reason, parent) in zip(nodes, data["nodes"], strict=True):
            assert node["reason"] in reason.split("|"), (node, reason)
            assert parent == "any" or node["parent"] == (None if parent is None else numbers[parent]), node
            assert node["delivered"]
        roles = [root["role"] for root in tree["roots"]]
        assert roles == (data["roles"] or ["main"] * len(roles))
        parents = {node["parent"] for node in nodes}
        leaves = [node for node in nodes if node["number"] not in parents]
        assert len(leaves) == data["branches"]
        for request, node in zip(data["requests"], nodes, strict=True):
            assert node["finish"] == ("calls" if request["says"]["calls"] else "stop")
        closed = await served.close(base, reward=1.0)
        assert tree_faults(tree, closed.counts, closed.samples) == []
        audit = Audit(engine.log)
        for sample in closed.samples:
            audit.add(sample)
        assert audit.wrong == []
        side = {root["number"] for root in tree["roots"] if root["role"] == "side"}
        assert len(closed.samples) == sum(leaf["root"] not in side for leaf in leaves)
        assert closed.counts["requests"] == len(data["requests"])
        for ignored in data.get("ignored", ()):
            assert closed.counts[f"ignored/{ignored}"] > 0


@pytest.mark.parametrize("name", RECORDED)
async def test_the_prompt_of_a_recorded_agent_has_every_text_once_and_in_order(name: str) -> None:
    chat, says = make_chat("qwen3"), list[str]()
    engine = LoggingEngine(chat, lambda rng, prompt, params: says.pop(), damage=False)
    async with serving(chat, engine) as served:
        await replay(name, served, says, await served.open(index=5, group_index=1))
    for (_, _, body, _), turn in zip(requests(name), engine.log, strict=True):
        prompt, at = chat.decode(turn.prompt), 0
        for texts in shown(body):
            ends = [at]
            for text in texts:
                assert text in prompt, f"{text!r} is lost"
                found = prompt.find(text, at)
                assert found >= 0, f"{text!r} is out of order"
                ends.append(found + len(text))
            at = max(ends)


def shown(body: Json) -> list[list[str]]:
    """Return the texts of a request in order, without the billing line. The results of one turn are sorted."""
    groups: list[list[str]] = []
    results = False

    def visit(value: Any) -> None:
        nonlocal results
        if isinstance(value, list):
            for item in value:
                visit(item)
        elif isinstance(value, dict) and value.get("type") != "reasoning":
            kind = value.get("type")
            if kind == "tool_result" or kind == "function_call_output" or value.get("role") == "tool":
                if not results:
                    groups.append([])
                results = True
                groups[-1] += [text for text in _texts(value) if text]
            elif isinstance(value.get("content"), list):
                visit(value["content"])
            else:
                results = False
                groups.extend([text] for text in _texts(value) if text)

    visit([block for block in body.get("system") or [] if not block["text"].startswith("x-anthropic-billing-header:")])
    visit(body.get("messages") or body.get("input"))
    return groups


def _texts(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value.strip()]
    if isinstance(value, list):
        return [text for item in value for text in _texts(item)]
    return [text for key in ("content", "text", "output") for text in _texts(value.get(key) or "")]


async def test_agents_that_share_a_gateway_do_not_share_trees() -> None:
    chat, says = make_chat("qwen3"), list[str]()
    engine = LoggingEngine(chat, lambda rng, prompt, params: says.pop(), damage=False)
    async with serving(chat, engine) as served:
        bases = [await served.open(index=number, group_index=0) for number in range(2)]
        for base in bases:
            await replay("opencode", served, says, base)
        trees = [await served.tree(base) for base in bases]
        assert [[n["reason"] for n in tree["nodes"]] for tree in trees] == [
            [r for r, _ in recorded("opencode")["nodes"]]
        ] * 2


async def test_all_recorded_agents_count_and_list_models() -> None:
    """The programs' requests other than turns."""
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, lambda rng, prompt, params: "yes", damage=False)
    async with serving(chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        path, headers, body, _ = requests("claude_code")[0]
        body = {key: body[key] for key in ("model", "messages", "system", "tools")}
        counted = await served.agents.post(f"{base}/v1/messages/count_tokens?beta=true", json=body, headers=headers)
        assert counted.status_code == 200
        sent = await served.agents.post(f"{base}/{path}", json={**body, "max_tokens": 9}, headers=headers)
        assert sent.status_code == 200
        assert counted.json() == {"input_tokens": len(engine.log[0].prompt)}
        assert sent.json()["usage"]["input_tokens"] + sent.json()["usage"].get("cache_read_input_tokens", 0) == len(
            engine.log[0].prompt
        )
        for method in ("HEAD", "GET"):
            for tail in ("", "/v1"):
                assert (await served.agents.request(method, base + tail)).status_code == 200, (method, tail)
        models = (await served.agents.get(f"{base}/v1/models")).json()
        assert models["data"]
        for name in ("policy", "claude-sonnet-4-5", "Qwen/Qwen3-8B", "a%2Fb"):
            assert (await served.agents.get(f"{base}/v1/models/{name}")).status_code == 200, name
        assert len((await served.tree(base))["nodes"]) == 1


# ---- mutations ------------------------------------------------------------------------------------------------

JUNK: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1.5, 1e308, 2**70, "", "x", "\u0000", [], {}, [None], {"a": None}, [[]], ["x"]),
    *(
        {"type": "text"},
        {"type": "text", "text": 3},
        {"role": "user"},
        [{"type": "image"}],
        "assistant",
        "system",
        "tool",
    ),
    *({"type": "function"}, {"function": {}}, {"role": "tool", "content": "x"}, "\ud83d", "x" * 2000),
)


def mutate(value: Any, rng: random.Random) -> Any:
    """Return a copy with one to four random changes anywhere in it."""
    value = copy.deepcopy(value)
    for _ in range(rng.randint(1, 4)):
        places = list(_places(value))
        holder, key = rng.choice(places)
        kind = rng.randrange(5)
        if kind == 0:
            del holder[key]
        elif kind == 1:
            holder[key] = copy.deepcopy(rng.choice(JUNK))
        elif kind == 2:
            other, at = rng.choice(places)
            holder[key] = (
                copy.deepcopy(other[at]) if (at in other if isinstance(other, dict) else at < len(other)) else 0
            )
        elif kind == 3 and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(holder[key]))
        elif isinstance(holder, dict):
            holder[rng.choice(["type", "role", "content", "name", "n", "extra"])] = copy.deepcopy(rng.choice(JUNK))
        if not value:
            break
    return value


def _places(value: Any) -> Any:
    keys = range(len(value)) if isinstance(value, list) else list(value) if isinstance(value, dict) else ()
    for key in keys:
        yield value, key
        yield from _places(value[key])


PYTHON_ERRORS = (
    "Traceback",
    "object is not",
    "NoneType",
    "object has no attribute",
    "unhashable",
    "KeyError",
    "TypeError",
)


async def mutated(seeds: range) -> None:
    chat = make_chat("qwen3")
    engine = LoggingEngine(chat, lambda rng, prompt, params: "yes", damage=False)
    asked = [(path, body) for name in RECORDED for path, _, body, _ in requests(name)]
    async with serving(chat, engine) as served:
        base = await served.open(index=0, group_index=0)
        for seed in seeds:
            rng = random.Random(seed)
            path, body = rng.choice(asked)
            text = json.dumps(mutate(body, rng))
            if rng.random() < 0.05:
                text = text[: rng.randrange(len(text))]
            kind = {"Content-Type": "application/json"}
            response = await served.agents.post(f"{base}/{path}", content=text.encode(), headers=kind)
            assert response.status_code in (200, 400, 404), (seed, response.status_code, response.text)
            if response.status_code != 200:
                said = response.json()["error"]["message"]
                assert said, seed
                assert not any(word in said for word in PYTHON_ERRORS), (seed, said)
        tree = await served.tree(base)
        closed = await served.close(base, reward=1.0)
        assert tree_faults(tree, closed.counts, closed.samples) == []
        audit = Audit(engine.log)
        for sample in closed.samples:
            audit.add(sample)
        assert audit.wrong == []


async def test_mutated_requests_are_answered_or_refused() -> None:
    await mutated(range(300))


@pytest.mark.slow
async def test_many_mutated_requests_are_answered_or_refused() -> None:
    for start in range(10_000, 20_000, 1000):
        await mutated(range(start, start + 1000))
