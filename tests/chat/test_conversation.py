"""The one place where a trajectory grows: tokens and masks, space, splits, and clients recognized by their messages."""

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.chat import AppendResult, Conversation
from agentrl.errors import ContextOverflow, SampleError
from agentrl.sample import Message, Origin, Sample, SpecInfo, Status
from tests.support.chats import make_chat
from tests.support.conversations import TOOLS

USER = {"role": "user", "content": "hi"}
RESULT = {"role": "tool", "content": "R"}
CALL = '<tool_call>\n{"name": "run_sql", "arguments": {"query": "select 1"}}\n</tool_call>'
END = "<|im_end|>"
THINK = "<think>\nhmm\n</think>\n\n"


def begin(policy: Any = "keep", name: str = "qwen3", **limits: int) -> Conversation:
    chat = make_chat(name, template_rewrite_policy=policy)
    return Conversation(chat, Sample(index=4, prompt="hi"), [USER], TOOLS, **limits)


def write(talk: Conversation, text: str) -> list[int]:
    ids = make_chat("qwen3").encode(text)
    talk.append_model_turn(ids, [-0.5] * len(ids), "v1", text=text)
    return ids


def test_tokens_segments_mask_and_messages_end_to_end() -> None:
    talk, chat = begin(), make_chat("qwen3")
    texts = [THINK + CALL + END, "<think>cut", "Done." + END]
    ids = [write(talk, texts[0])]
    for text in texts[1:]:
        assert talk.append_messages([RESULT]) is AppendResult.FITS
        ids.append(write(talk, text))
    sample = talk.sample.validate()
    model, env, close = Origin.MODEL, Origin.ENV, Origin.CLOSE
    assert [(s.origin, s.turn) for s in sample.segments] == [
        (model, 1),
        (env, 1),
        (model, 2),
        (close, 2),
        (env, 2),
        (model, 3),
    ]
    response = sample.tokens[sample.prompt_length :]
    parts = [response[s.start : s.end] for s in sample.segments]
    assert [part for part, s in zip(parts, sample.segments, strict=True) if s.origin is model] == ids
    assert chat.decode(parts[3]) == "</think>" + END
    assert chat.decode(response) == sample.response
    assert sample.loss_mask == [
        int(s.origin is model) for s, part in zip(sample.segments, parts, strict=True) for _ in part
    ]
    assert [m["role"] for m in talk.messages] == ["user", "assistant", "tool", "assistant", "tool", "assistant"]
    assert (talk.turns, talk.length, talk.earlier) == (3, len(sample.tokens), [])


def test_an_answer_of_two_versions_keeps_both_at_their_tokens() -> None:
    talk = begin()
    ids = make_chat("qwen3").encode("one two three" + END)
    talk.append_model_turn(ids, [-0.5] * len(ids), [("a", 0, 2), ("b", 2, len(ids))], text="one two three" + END)
    talk.append_messages([USER])
    write(talk, "four" + END)
    written = [(s.version, s.turn, s.end - s.start) for s in talk.sample.segments if s.origin is Origin.MODEL]
    assert written[:2] == [("a", 1, 2), ("b", 1, len(ids) - 2)]
    assert written[2][:2] == ("v1", 2)
    assert talk.sample.weight_versions == ["a", "b", "v1"]
    with pytest.raises(SampleError, match="do not cover 2 ids"):
        begin().append_model_turn(ids[:2], [-0.5] * 2, [("a", 0, 1)], text="one two")


def test_it_is_full_when_the_next_turn_would_have_no_token() -> None:
    free = begin()
    write(free, "yes" + END)
    assert free.append_messages([USER]) is AppendResult.FITS
    for length, shown in ((free.length + 2, AppendResult.FITS), (free.length + 1, AppendResult.OUT_OF_CONTEXT)):
        talk = begin(context_length=length)
        write(talk, "yes" + END)
        before = list(talk.sample.tokens)
        assert talk.append_messages([USER]) is shown
        assert (talk.sample.tokens == before) is (shown is AppendResult.OUT_OF_CONTEXT)
        assert talk.room == length - free.length - 1
        assert talk.length == free.length
        assert len(talk.messages) == 3


def test_a_prompt_that_leaves_no_room_is_an_overflow_and_leaves_the_sample_alone() -> None:
    length = begin().length
    assert begin(context_length=length + 2).room == 1
    assert begin(prompt_limit=length).length == length
    for limits in ({"context_length": length + 1}, {"prompt_limit": length - 1}):
        sample = Sample()
        with pytest.raises(
            ContextOverflow, match=f"the prompt has {length} tokens, at most {length - 1} fit"
        ) as caught:
            Conversation(make_chat("qwen3"), sample, [USER], TOOLS, **limits)
        assert caught.value.kind == "prompt_too_long"
        assert sample == Sample()


def test_a_split_goes_on_in_a_sibling_and_leaves_what_was_counted() -> None:
    talk = begin("split")
    write(talk, THINK + "Hello." + END)
    first = talk.sample
    first.metadata = {"counters": {"n": 1}, "step_rewards": [0.5], "own": {"kept": [1]}}
    first.spec_info, first.non_generation_time = SpecInfo(1, 2, 3, 4), 2.0
    tokens = list(first.tokens)
    assert talk.append_messages([USER]) is AppendResult.SPLIT
    assert talk.earlier == [first]
    assert (first.status, first.rollout_id, first.tokens) == (Status.COMPLETED, 4, tokens)
    second = talk.sample
    assert (second.status, second.rollout_id, second.index) == (Status.PENDING, 4, 4)
    assert second.metadata == {"step_rewards": [0.5], "own": {"kept": [1]}}
    assert second.metadata["own"] is not first.metadata["own"]
    assert (second.spec_info, second.non_generation_time) == (SpecInfo(), 0.0)
    history = [USER, {"role": "assistant", "content": "Hello.", "reasoning_content": "hmm"}, USER]
    assert second.tokens == make_chat("qwen3").render_ids(history, TOOLS)
    write(talk, "Fine." + END)
    assert [s.turn for s in second.segments] == [2]
    assert len(talk.messages) == 4


def test_a_split_that_does_not_fit_is_no_split() -> None:
    free = begin("split")
    write(free, THINK + "Hello." + END)
    free.append_messages([USER])
    talk = begin("split", context_length=free.length + 1)
    write(talk, THINK + "Hello." + END)
    assert talk.append_messages([USER]) is AppendResult.OUT_OF_CONTEXT
    assert talk.earlier == []


def test_a_restart_closes_the_sample_and_begins_with_other_messages() -> None:
    talk = begin()
    write(talk, THINK + CALL + END)
    first, tokens = talk.sample, list(talk.sample.tokens)
    summary = [USER, {"role": "user", "content": "So far: select 1."}]
    assert talk.restart(summary) is AppendResult.SPLIT
    assert talk.earlier == [first]
    assert (first.status, first.stop_reason, first.rollout_id, first.tokens) == (
        Status.COMPLETED,
        "restart",
        4,
        tokens,
    )
    assert [message["role"] for message in first.metadata["messages"]] == ["user", "assistant"]
    assert talk.sample.tokens == make_chat("qwen3").render_ids(summary, TOOLS)
    assert (talk.length, [m["content"] for m in talk.messages]) == (
        len(talk.sample.tokens),
        ["hi", "So far: select 1."],
    )
    write(talk, "Fine." + END)
    assert [s.turn for s in talk.sample.validate().segments] == [2]
    assert talk.append_messages([USER]) is AppendResult.FITS
    write(talk, "Yes." + END)
    assert talk.restart([{"role": "user", "content": "long " * 3000}]) is AppendResult.SPLIT
    short = begin(context_length=200)
    write(short, "Hello." + END)
    before = list(short.sample.tokens)
    assert short.restart([{"role": "user", "content": "long " * 3000}]) is AppendResult.OUT_OF_CONTEXT
    assert (short.sample.tokens, short.earlier) == (before, [])


# ---- known by content -----------------------------------------------------------------------------------------------


def told(policy: Any = "keep") -> Conversation:
    """Make a conversation that has called a tool, seen its result and answered."""
    talk = begin(policy)
    for text, shown in ((THINK + CALL + END, RESULT), ("It is 1." + END, None)):
        write(talk, text)
        talk.record_shown_text(text.removesuffix(END))
        if shown:
            talk.append_messages([shown])
    return talk


SENT: list[Message] = [
    USER,
    {"role": "assistant", "content": THINK + CALL},
    RESULT,
    {"role": "assistant", "content": "It is 1."},
]
NEW: list[Message] = [{"role": "user", "content": "and?"}, {"role": "user", "content": "please"}]


def parsed(messages: list[Message]) -> list[Message]:
    call = {"id": "call00001", "type": "function", "function": {"name": "run_sql", "arguments": '{"query":"select 1"}'}}
    turn = {"role": "assistant", "content": None, "reasoning": "hmm", "tool_calls": [call]}
    return [turn if m == SENT[1] else m for m in messages]


def parts(messages: list[Message]) -> list[Message]:
    return [{**m, "content": [{"type": "text", "text": m["content"]}], "name": None} for m in messages]


FORMS: list[Callable[[list[Message]], list[Message]]] = [
    list,
    copy.deepcopy,
    lambda messages: json.loads(json.dumps(messages)),
    parsed,
    parts,
]


@given(st.sampled_from(FORMS), st.integers(0, 2))
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_whole_history_in_any_form_is_recognised(form: Callable[[Any], Any], count: int) -> None:
    new = NEW[:count]
    assert told().continued([*form(SENT), *new]) == new


@pytest.mark.parametrize(
    "sent",
    [
        SENT[:1],
        SENT[:3],
        [SENT[0], *SENT[2:], *NEW],
        [SENT[0], {"role": "assistant", "content": "Something else."}, *SENT[2:], *NEW],
        [SENT[0], {**SENT[1], "role": "user"}, *SENT[2:], *NEW],
        [{"role": "user", "content": "hello"}, *SENT[1:], *NEW],
        [*SENT[:2], {"role": "tool", "content": "S"}, SENT[3], *NEW],
        [*SENT, NEW[0], {"role": "assistant", "content": "Not mine."}, NEW[1]],
        [],
    ],
)
def test_another_history_is_another_conversation(sent: list[Message]) -> None:
    assert told().continued(sent) is None


def test_a_call_in_another_form_is_no_other_call() -> None:
    other = copy.deepcopy(parsed(SENT))
    other[1]["tool_calls"][0]["function"]["arguments"] = '{"query": "select 2"}'
    assert told().continued([*other, *NEW]) is None
    talk = begin()
    write(talk, THINK + CALL + END)
    talk.record_shown_text("")  # a client that gets content and calls separately, and keeps no reasoning
    for messages, new in ((parsed(SENT), [RESULT]), (other, None)):
        turn = {key: value for key, value in messages[1].items() if key != "reasoning"}
        assert talk.continued([USER, turn, RESULT]) == new


def test_a_turn_that_was_not_told_yet_is_waited_for() -> None:
    talk = begin()
    assert talk.continued([USER, *NEW]) is None
    write(talk, "yes" + END)
    assert talk.continued([USER, {"role": "assistant", "content": "yes"}, *NEW]) is None
    talk.record_shown_text("yes")
    assert talk.continued([USER, {"role": "assistant", "content": "yes"}, *NEW]) == NEW


@pytest.mark.parametrize("turns", [SENT[1:2], [], [{"role": "assistant", "content": "cut"}] * 2])
def test_its_own_list_may_hold_the_models_turns_in_any_form(turns: list[Message]) -> None:
    sent = [USER, *turns, RESULT, *turns, *NEW]
    assert told().continued(sent, same_list=True) == NEW
    assert told().continued([*sent[:-2], *SENT[3:]], same_list=True) == []
    assert told().continued([USER, *turns, *NEW], same_list=True) is None


def test_what_cannot_fit_by_its_length_alone_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    talk = begin(context_length=1000)
    write(talk, "yes" + END)
    before, huge = list(talk.sample.tokens), "word " * 1_000_000
    monkeypatch.setattr(talk._session, "extend", lambda _: pytest.fail("it was tokenized"))
    assert talk.append_messages([{"role": "user", "content": huge}]) is AppendResult.OUT_OF_CONTEXT
    assert talk.sample.tokens == before
    assert talk.messages[-1]["content"] == huge
    with pytest.raises(ContextOverflow, match=r"the prompt has at least \d+ tokens, at most 998 fit"):
        Conversation(make_chat("qwen3"), Sample(), [{"role": "user", "content": huge}], context_length=1000)


@given(st.text(max_size=300))
def test_the_least_number_of_tokens_is_never_above_the_number(text: str) -> None:
    chat = make_chat("qwen3")
    assert chat.least_tokens([{"role": "user", "content": text}]) <= len(chat.encode(text))
