"""Demonstrations as samples, with real templates: the parser reads back what is trained."""

import pytest

from agentrl.chat.demonstration import Turns, to_sample
from agentrl.errors import TemplateError
from agentrl.sample import Message, Origin
from tests.support.chats import make_chat
from tests.support.nightly import nightly

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        },
    }
]
CALL = {"id": "call00001", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}
CONVERSATION: list[Message] = [
    {"role": "user", "content": "What is 2 and 2? <|im_end|>"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call00001", "name": "add", "content": "4"},
    {"role": "assistant", "content": "It is 4."},
]


@pytest.mark.parametrize("name", nightly(["qwen3_training", "gptoss", "qwen2_5", "llama3_1", "gemma4_v5"], 2))
def test_the_mask_covers_what_the_template_lets_the_model_write(name: str) -> None:
    chat = make_chat(name)
    sample = to_sample(chat, CONVERSATION, TOOLS, index=3)
    sample.validate()
    start = len(sample.tokens) - sample.response_length
    turns = [sample.tokens[start + s.start : start + s.end] for s in sample.segments if s.origin is Origin.MODEL]
    ends = {"gptoss": ["<|call|>", "<|return|>"], "gemma4_v5": ["<|tool_response>", "<turn|>"]}
    assert [chat.decode(ids[-1:]) for ids in turns] == ends.get(name, [chat.decode(chat.stop_token_ids[:1])] * 2)
    first, last = (chat.parse(chat.decode(ids[:-1]), TOOLS) for ids in turns)
    assert [(call.name, call.arguments) for call in first.tool_calls] == [("add", {"a": 2})]
    assert last.content == "It is 4."
    assert sample.loss_mask is not None
    assert sum(sample.loss_mask) == sum(map(len, turns))
    rendered = chat.render_ids(CONVERSATION, TOOLS, generation_prompt=False)
    assert rendered[: len(sample.tokens)] == sample.tokens


@pytest.mark.parametrize("name", ["qwen3_training", "gptoss", "gemma4_v5"])
def test_an_end_token_that_the_assistant_writes_about_is_text(name: str) -> None:
    chat = make_chat(name)
    stop = chat.decode(chat.stop_token_ids[:1])
    messages: list[Message] = [
        {"role": "user", "content": "How does a turn end?"},
        {"role": "assistant", "content": f"A turn ends with {stop} like so."},
    ]
    sample = to_sample(chat, messages)
    wrote = sample.tokens[-sample.response_length :]
    assert [at for at, id_ in enumerate(wrote) if id_ in chat.stop_ids] == [len(wrote) - 1]
    assert stop in chat.decode(wrote[:-1])


def test_one_that_the_template_would_rewrite_is_not_cut_in_two() -> None:
    user = CONVERSATION[0]
    thought: Message = {"role": "assistant", "content": "4", "reasoning_content": "hm"}
    messages = [user, thought, user, thought]
    assert len(to_sample(make_chat("qwen3"), messages).segments) == 3
    with pytest.raises(TemplateError, match="before assistant message 3, and --template-rewrite-policy is 'split'"):
        to_sample(make_chat("qwen3", template_rewrite_policy="split"), messages)


@pytest.mark.parametrize("messages", [[], CONVERSATION[:1], CONVERSATION[:3]])
def test_it_must_end_with_the_assistant(messages: list[Message]) -> None:
    with pytest.raises(TemplateError, match="must end with an assistant message"):
        to_sample(make_chat("qwen2_5"), messages, TOOLS)


@pytest.mark.parametrize(
    ("marks", "turns", "learned"),
    [
        ((None, None), "all", (True, True)),
        ((None, None), "last", (False, True)),
        (({"loss": False}, None), "last", (False, True)),
        (({"train": True}, {"train": False}), "last", (True, False)),
        (({"weight": 0}, None), "all", (False, True)),
        (({"step_loss_mask": 1}, {"loss": False}), "all", (True, False)),
    ],
)
def test_marks_say_which_turns_are_learned(
    marks: tuple[dict[str, object] | None, ...], turns: Turns, learned: tuple[bool, ...]
) -> None:
    chat, (user, call, result, answer) = make_chat("qwen2_5"), CONVERSATION
    said = [user, {**call, **(marks[0] or {})}, result, {**answer, **(marks[1] or {})}]
    sample, plain = to_sample(chat, said, TOOLS, turns=turns).validate(), to_sample(chat, CONVERSATION, TOOLS)
    assert sample.tokens == plain.tokens
    assert sample.loss_mask is not None
    spans = [segment for segment in sample.segments if segment.origin is Origin.MODEL]
    assert [set(sample.loss_mask[span.start : span.end]) for span in spans] == [{int(yes)} for yes in learned]


def test_marks_that_contradict_each_other_are_refused() -> None:
    said = [*CONVERSATION[:3], {**CONVERSATION[3], "loss": True, "weight": 0}]
    with pytest.raises(TemplateError, match="message 3: 'loss' and 'weight' contradict each other"):
        to_sample(make_chat("qwen2_5"), said, TOOLS)
