"""Demonstrations: their content, and that as samples they equal the template's rendering token for token."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from agentrl import tiny
from agentrl.chat import Chat
from agentrl.chat.demonstration import assistant_turn, to_sample
from agentrl.demo.task import CalculatorEnv, make_problem, score
from agentrl.sample import Message, Origin
from examples.tiny_models.calculator import CalculatorLessons, Kind, demonstrate

LESSONS = CalculatorLessons()
TOOLS = LESSONS.tools()


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Chat:
    folder: Path = tmp_path_factory.mktemp("demo")
    tiny.create(folder, corpus=LESSONS.corpus())
    return Chat.load(str(folder))


async def taken(phase: str, count: int, seed: int = 0) -> list[list[Message]]:
    stream = LESSONS.demonstrations(phase, seed)  # type: ignore[arg-type]
    return [await anext(stream) for _ in range(count)]


async def test_skill_demonstrations_use_the_tool_and_are_right() -> None:
    for messages in await taken("skill", 100):
        assert [message["role"] for message in messages] == ["user", "assistant", "tool", "assistant"]
        assert score(messages[-1]["content"], messages[2]["content"]) == 1.0


async def test_habits_are_mostly_bad_and_reproducible() -> None:
    conversations = await taken("habit", 400)
    assert conversations == await taken("habit", 400)
    assert conversations != await taken("habit", 400, seed=1)
    used = Counter(len(messages) for messages in conversations)
    assert 0.35 < used[2] / 400 < 0.65, "about half answer without the tool"
    assert any(m[2]["content"].startswith("Error: ") for m in conversations if len(m) == 4)


@pytest.mark.parametrize("kind", ["good", "guess", "wrong_name", "mistyped", "miscopied"])
async def test_demonstrations_parse_back_and_match_the_template(chat: Chat, kind: Kind) -> None:
    rng, toolbox = random.Random(kind), CalculatorEnv().toolbox
    for _ in range(10):
        problem = make_problem(rng)
        messages = await demonstrate(problem, kind, rng, toolbox)
        for at, message in enumerate(messages):
            if message["role"] != "assistant":
                continue
            parsed = chat.parse(assistant_turn(chat, messages, at, TOOLS)[0], TOOLS)
            assert not parsed.broken
            want = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", ())]
            assert [(call.name, call.arguments) for call in parsed.tool_calls] == want
            assert parsed.content == message["content"]
        sample = to_sample(chat, messages, TOOLS)
        sample.validate()
        rendered = chat.render_ids(messages, TOOLS, generation_prompt=False)
        assert rendered[: len(sample.tokens)] == sample.tokens
        assert chat.decode(rendered[len(sample.tokens) :]) == "\n", "only the template's last newline is missing"
        assert (score(messages[-1]["content"], str(problem.answer)) == 1.0) == (kind == "good")


async def test_the_mask_covers_the_assistant_turns_with_their_end_token(chat: Chat) -> None:
    messages = (await taken("skill", 1))[0]
    sample = to_sample(chat, messages, TOOLS)
    start = len(sample.tokens) - sample.response_length
    ids = sample.tokens[start:]
    assert sample.loss_mask is not None
    written = [chat.decode(ids[s.start : s.end]) for s in sample.segments if s.origin is Origin.MODEL]
    assert written == [assistant_turn(chat, messages, at, TOOLS)[0] + "<|im_end|>" for at in (1, 3)]
    assert sum(sample.loss_mask) == sum(s.end - s.start for s in sample.segments if s.origin is Origin.MODEL)
    assert all(a.end == b.start for a, b in pairwise(sample.segments))


async def test_prompts_of_the_demo_are_short(chat: Chat) -> None:
    lengths = [len(to_sample(chat, messages, TOOLS).tokens) for messages in await taken("skill", 50)]
    assert max(lengths) < 160, "short sequences are what makes the demo fast"
