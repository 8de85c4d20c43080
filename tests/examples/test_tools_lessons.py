"""The tiny model that calls tools: it is trained on exactly what a run shows, and then it earns rewards."""

import random
from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.cli.main import run
from agentrl.observability.metrics import read_metrics
from agentrl.sample import Origin
from agentrl.tiny import create
from examples.tiny_models.tools import ToolLessons, conversation


def test_lessons_call_the_tool_that_the_prompt_offers(tmp_path: Path) -> None:
    lessons, rng = ToolLessons(), random.Random(0)
    create(
        tmp_path, layers=1, hidden=16, heads=2, kv_heads=1, vocab_size=768, corpus=lessons.corpus(), spaces_apart=True
    )
    chat = Chat.load(str(tmp_path))
    for _ in range(20):
        messages = conversation(rng)
        (tool,) = lessons.tools(messages)
        sample = to_sample(chat, messages, [tool]).validate()
        turns = [
            sample.tokens[sample.prompt_length + s.start :][: s.end - s.start]
            for s in sample.segments
            if s.origin is Origin.MODEL
        ]
        said = [chat.parse(chat.decode(ids[:-1]), [tool]) for ids in turns]
        for asked, call, answer in zip(messages[::4], said[::2], said[1::2], strict=True):
            (made,) = call.tool_calls
            assert isinstance(made.arguments, dict)
            (subject,) = made.arguments.values()
            assert made.name == tool["function"]["name"]
            assert [*made.arguments] == tool["function"]["parameters"]["required"]
            assert subject in asked["content"]
            assert answer.content.startswith(subject)


def test_a_name_is_the_same_ids_in_a_sentence_and_in_quotes(tmp_path: Path) -> None:
    create(
        tmp_path,
        layers=1,
        hidden=16,
        heads=2,
        kv_heads=1,
        vocab_size=768,
        corpus=ToolLessons().corpus(),
        spaces_apart=True,
    )
    chat = Chat.load(str(tmp_path))
    for name in ("Oslo", "Xanadu"):
        ids = chat.encode(name)
        for text in (f"people live in {name}?", f'"city": "{name}"'):
            assert ",".join(map(str, ids)) in ",".join(map(str, chat.encode(text)))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_new_project_earns_rewards_with_a_skilled_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["new", "my_env"]) == 0
    monkeypatch.chdir(tmp_path / "my_env")
    assert run(["init", "--skilled", "model"]) == 0
    assert run(["train", "--config", "run.yaml", "--progress", "off"]) == 0
    rows = list(read_metrics(Path("runs/first/metrics.jsonl")))
    used = [row["rollout/used_tool"] for row in rows if "rollout/used_tool" in row]
    rewards = [row["rollout/reward"] for row in rows if "rollout/reward" in row]
    assert used[0] > 0.4
    assert sum(rewards[-3:]) > sum(rewards[:3]) > 0.3
