"""The record of a session in a Sample: every turn with its end, with a maximum size."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pytest
from pydantic import ValidationError

from agentrl.chat import Chat
from agentrl.engine.wire import SamplingParams
from agentrl.gateway import record
from agentrl.gateway.contracts import Refusal
from agentrl.gateway.record import MAX_TEXT, SessionRecord
from agentrl.gateway.server import Gateway
from agentrl.gateway.sessions import Session
from agentrl.gateway.wires import WIRES
from agentrl.sample import Sample
from tests.gateway.turns import CHAT, read
from tests.rollout.scripted import END, ScriptedEngine
from tests.support.tiny_models import make_tiny_model

T = TypeVar("T")
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
LONG = "é" * 3 * MAX_TEXT


@pytest.fixture
def session(tmp_path: Path) -> Session:
    make_tiny_model(tmp_path)
    chat = Chat.load(str(tmp_path))
    gateway = Gateway(chat, ScriptedEngine(chat, [f"{LONG}{END}"]), context_length=20_000)
    return gateway.open(Sample(index=0, rollout_id=0), SamplingParams())


async def at_once(work: Callable[..., T], *args: Any, size: int | None = None) -> T:
    return work(*args)


async def ask(session: Session, *texts: str, delivered: bool = True, **more: Any) -> None:
    """Send a request of a user's texts with the model's answers between them."""
    messages: list[dict[str, str]] = []
    for text in texts:
        answer = [{"role": "assistant", "content": LONG}] if messages else []
        messages += [*answer, {"role": "user", "content": text}]
    node, _ = await session.turn(read(CHAT, {"model": "m", "messages": messages, **more}), 0, at_once)
    node.delivered = node.delivered or delivered


async def test_every_turn_is_recorded_and_each_dropped_one_with_its_reason(session: Session) -> None:
    await ask(session, "a title")
    await ask(session, "the task", tools=[TOOL])
    await ask(session, "the task", "go on", tools=[TOOL], delivered=False)
    await ask(session, "the task", "go on", tools=[TOOL])
    await ask(session, "another", tools=[TOOL])
    session.refusals.append(Refusal("no\ud800"))
    samples = session.close({1: 1.0})
    found = SessionRecord.model_validate(orjson.loads(orjson.dumps(session.record)))
    assert [(turn.number, turn.parent, turn.reason, turn.dropped) for turn in found.turns] == [
        (0, None, "first", "side"),
        (1, None, "new_agent", ""),
        (2, 1, "extend", "undelivered"),
        (3, 1, "undelivered", ""),
        (4, None, "new_agent", "unrewarded"),
    ]
    assert [turn.role for turn in found.turns] == ["side", "main", "", "", "subagent"]
    assert found.refused == ["no?"]
    dropped = Counter[str]()
    for turn in found.turns:
        dropped[f"dropped/{turn.dropped}" if turn.dropped else "trained"] += turn.sampled_tokens
        assert turn.text == ("é" * MAX_TEXT if turn.dropped else "")
    assert dropped == {name: n for name, n in session.counts.items() if name in dropped}
    assert [sample.metadata["gateway"]["nodes"] for sample in samples] == [[1, 3]]
    assert found.turns[1].prompt_tokens == samples[0].prompt_length


async def test_a_record_is_bounded(session: Session, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "MAX_TURNS", 2)
    for text in "abcd":
        await ask(session, text)
    session.close()
    found = SessionRecord.model_validate(session.record)
    assert ([turn.number for turn in found.turns], found.left_out) == ([0, 1], 2)
    assert {turn.role for turn in found.turns} == {"main", "side"}


TURN = {"number": 0, "reason": "first", "prompt_tokens": 1, "sampled_tokens": 1}


@pytest.mark.parametrize(
    "turns",
    [
        [TURN, TURN],
        [{**TURN, "parent": 0}],
        [{**TURN, "number": 3}, {**TURN, "number": 4, "parent": 5}],
        [{**TURN, "number": number} for number in range(501)],
        [{**TURN, "reason": None}],
        {},
    ],
    ids=["twice", "its own parent", "before its parent", "too many", "another type", "no list"],
)
def test_a_record_that_is_no_tree_is_refused(turns: Any) -> None:
    with pytest.raises(ValidationError):
        SessionRecord.model_validate({"turns": turns})


async def test_a_named_agent_that_begins_like_the_main_agent_is_a_sub_agent(session: Session) -> None:
    head, tools = [{"role": "user", "content": "The folder is /workspace."}], {"model": "m", "tools": [TOOL]}
    spawned = {"x-codex-parent-thread-id": "1"}
    for thread, task in (("1", "Delegate."), ("2", "Help."), ("3", "Help.")):
        body = {**tools, "messages": [*head, {"role": "user", "content": task}]}
        asked = WIRES[CHAT].read(body, {"thread-id": thread, **(spawned if thread != "1" else {})})
        node, _ = await session.turn(asked, 0, at_once)
        node.delivered = True
    assert [(node.reason, node.agent) for node in session.tree.nodes.values()] == [
        ("first", ""),
        ("new_agent", "2"),
        ("new_agent", "3"),
    ]
    assert list(session.tree.roots().values()) == ["main", "subagent", "subagent"]
    assert len(session.close(1.0)) == 3


async def test_only_the_last_turn_of_a_conversation_ends_at_a_full_context(session: Session) -> None:
    await ask(session, "the task", tools=[TOOL])
    for rest in (["go on", "x" * 100_000], ["x" * 100_000]):
        with pytest.raises(Refusal, match="prompt is too long"):
            await ask(session, "the task", *rest, tools=[TOOL])
        await ask(session, "the task", *rest[:-1], "sum up", tools=[TOOL])
    with pytest.raises(Refusal, match="prompt is too long"):
        await ask(session, "the task", "sum up", "x" * 100_000, tools=[TOOL])
    reasons = {tuple(sample.metadata["gateway"]["nodes"]): sample.stop_reason for sample in session.close(1.0)}
    assert sorted(reasons.values()) == ["context", *["done"] * (len(reasons) - 1)]
