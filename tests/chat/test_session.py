"""Sessions: odd completions, history policies, segments and masks, and the cost of a turn."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat, ChatSession, Conversation, Thought, Verdict, normalise_messages
from agentrl.chat.template import Template
from agentrl.errors import SettingsError, TemplateError
from agentrl.sample import Sample
from tests.support.assets import chat_templates, qwen3_tokenizer_folder
from tests.support.chats import make_chat
from tests.support.conversations import TOOLS

USER = {"role": "user", "content": "hi"}
CALL = '<tool_call>\n{"name": "run_sql", "arguments": {"query": "select 1"}}\n</tool_call>'
END = "<|im_end|>"
THINK = "<think>\nhmm\n</think>\n\n"
AFTER = "\n<|im_start|>user\n<tool_response>\nR\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def answer(chat: Chat, completion: str | list[int], messages: Any = None) -> tuple[str, str]:
    """Return (close text, env text) of one model turn that a tool answers."""
    session = ChatSession(chat, [USER], TOOLS)
    ids = chat.encode(completion) if isinstance(completion, str) else completion
    session.append_model_turn(ids)
    delta = session.extend(messages or [{"role": "tool", "content": "R"}])
    return chat.decode(delta.close), chat.decode(delta.env)


@pytest.mark.parametrize(
    ("completion", "close", "env"),
    [
        (THINK + CALL + END, "", AFTER),
        (THINK + CALL, END, AFTER),
        (CALL[:-9], END, AFTER),
        ("<think>\nhm", "</think>" + END, AFTER),
        (CALL + END + "\n", "", AFTER[1:]),
        (CALL + END + "\nmore", "", AFTER),
        (CALL + " \n\n" + END, "", AFTER),
        (CALL + "<|endoftext|>", END, AFTER),
        ("", END, AFTER),
        (END, "", AFTER),
    ],
)
def test_odd_completions(completion: str, close: str, env: str) -> None:
    assert answer(make_chat("qwen3"), completion) == (close, env)


def test_ids_that_are_not_canonical_stay() -> None:
    chat = make_chat("qwen3")
    ids = [token for char in "Paris is big" for token in chat.encode(char)] + chat.encode(END)
    assert chat.encode(chat.decode(ids)) != ids
    assert answer(chat, ids)[1] == AFTER


def test_a_stop_that_opens_the_next_turn_is_never_dropped() -> None:
    chat = make_chat("glm4moe")
    tool = [{"role": "tool", "content": "R"}]
    call = "\n<tool_call>run_sql\n<arg_key>query</arg_key>\n<arg_value>x</arg_value>\n</tool_call>"
    assert answer(chat, call + "<|observation|>", tool)[1].startswith("\n<tool_response>")
    assert answer(chat, call + "<|user|>", tool)[1].startswith("<|observation|>\n<tool_response>")
    assert answer(chat, call, tool) == ("", "<|observation|>\n<tool_response>\nR\n</tool_response><|assistant|>")


def test_an_alias_stop_stands_for_the_templates_own() -> None:
    shown = answer(make_chat("gptoss"), "<|channel|>final<|message|>yes<|return|>", [USER])
    assert shown == ("", "<|start|>user<|message|>hi<|end|><|start|>assistant")


def test_tool_messages_get_the_calls_names_and_ids() -> None:
    chat = make_chat("qwen3")
    session = ChatSession(chat, [USER], TOOLS)
    turn = session.append_model_turn(chat.encode(THINK + CALL + "\n" + CALL + END))
    assert [call.id for call in turn.tool_calls] == ["call00001", "call00002"]
    session.extend([{"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}])
    results = session.messages[-2:]
    assert [(m["name"], m["tool_call_id"]) for m in results] == [("run_sql", "call00001"), ("run_sql", "call00002")]
    assert [call.id for call in session.append_model_turn(chat.encode(CALL + END)).tool_calls] == ["call00003"]


def test_the_trajectories_of_a_group_share_one_rendering_and_no_list(monkeypatch: pytest.MonkeyPatch) -> None:
    chat, rendered, render = make_chat("qwen3"), [], Template.render

    def counted(self: Template, messages: Any, *args: Any, **kwargs: Any) -> str:
        rendered.append(messages[-1]["content"])
        return render(self, messages, *args, **kwargs)

    monkeypatch.setattr(Template, "render", counted)
    for number in range(100):
        user = [{"role": "user", "content": f"the {number}th prompt of this test"}]
        for _ in range(8):
            session = ChatSession(chat, user, TOOLS)
            assert session.prompt_ids[-3:] == chat.encode("<|im_start|>assistant\n")
            session.prompt_ids.clear()
        assert ChatSession(chat, user).prompt_ids == chat.render_ids(user), "without tools it is another prompt"
    assert len(rendered) == 3 * 100


def test_a_prompt_that_is_no_json_is_rendered_each_time() -> None:
    chat = make_chat("qwen3")
    arguments = {1: 2}
    call = {"type": "function", "function": {"name": "run_sql", "arguments": arguments}}
    messages: list[Any] = [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "R"},
    ]
    first = ChatSession(chat, messages, TOOLS).prompt_ids
    arguments[1] = 3
    second = ChatSession(chat, messages, TOOLS).prompt_ids
    assert first != second
    assert second == chat.render_ids(messages, TOOLS)


def test_the_prompts_end_says_if_a_turn_begins_in_its_reasoning() -> None:
    """DeepSeek's template opens the reasoning after a user's message, and not after a tool's result."""
    chat = make_chat("deepseek_r1_distill")
    for cut, closed in (("", "<｜end▁of▁sentence｜>"), ("The answer", "")):
        session = ChatSession(chat, [USER], TOOLS)
        called = "x</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>run_sql\n```json\n{}\n```"
        turn = session.append_model_turn(chat.encode(called + "<｜tool▁call▁end｜><｜tool▁calls▁end｜>" + closed))
        assert (turn.reasoning, len(turn.tool_calls)) == ("x", 1)
        session.extend([{"role": "tool", "content": "R"}])
        turn = session.append_model_turn(chat.encode("It is <2>." + closed))
        assert (turn.reasoning, turn.content) == (None, "It is <2>.")
        assert session.fork().parser is session.parser
        assert "</think>" not in chat.decode(session.extend([USER]).close), cut
        assert session.append_model_turn(chat.encode("so</think>2")).reasoning == "so"


def test_the_reasoning_may_depend_on_any_part_of_a_conversation() -> None:
    source = "{% for m in messages %}{{ m.role ~ m.content }}<|im_end|>{% endfor %}{% if add_generation_prompt %}"
    source += "assistant{{ '<think></think>' if 'no_think' in messages[0].content else '<think>\nWell' }}{% endif %}"
    chat = Chat(make_chat("qwen3").tokenizer, chat_template=source)
    for said, opens in (("hi", True), ("hi <think>", True), ("no_think", False), ("no_think <think>", False)):
        ids = chat.render_ids([{"role": "user", "content": said}])
        assert chat.parser_after(ids).opens_reasoning == opens, said


def test_calls_out_of_order_are_errors() -> None:
    session = ChatSession(make_chat("qwen3"), [USER])
    with pytest.raises(TemplateError, match="extend was called before append_model_turn"):
        session.extend([USER])
    session.append_model_turn([])
    with pytest.raises(TemplateError, match="twice"):
        session.append_model_turn([])


def qwen3_with_reasoning(policy: Any) -> tuple[Chat, Any, Any]:
    chat = make_chat("qwen3", template_rewrite_policy=policy)
    session = ChatSession(chat, [USER])
    session.append_model_turn(chat.encode(THINK + "Hello." + END))
    return chat, session, [{"role": "user", "content": "and now?"}]


def test_policy_keep_keeps_what_was_sampled() -> None:
    chat, session, new = qwen3_with_reasoning("keep")
    delta = session.extend(new)
    assert delta.verdict is Verdict.REASONING_DROPPED
    assert delta.restart is None
    assert chat.decode(delta.env) == "\n<|im_start|>user\nand now?<|im_end|>\n<|im_start|>assistant\n"


def test_policy_split_restarts_with_the_templates_own_history() -> None:
    chat, session, new = qwen3_with_reasoning("split")
    delta = session.extend(new)
    assert (delta.close, delta.env) == ([], [])
    assert delta.restart is not None
    history = [USER, {"role": "assistant", "content": "Hello.", "reasoning_content": "hmm"}, *new]
    assert delta.restart == chat.render_ids(history)
    assert "hmm" not in chat.decode(delta.restart)
    session.append_model_turn(chat.encode("Fine." + END))
    after = session.extend([USER])
    assert after.restart is None
    assert after.verdict is Verdict.EXACT


def test_policy_split_counts_every_new_message() -> None:
    """A tool's result alone changes nothing. The user's message after the result drops the reasoning."""
    chat = make_chat("qwen3", template_rewrite_policy="split")
    for also, verdict in (([], Verdict.EXACT), ([USER], Verdict.REASONING_DROPPED)):
        session = ChatSession(chat, [USER], TOOLS)
        session.append_model_turn(chat.encode(THINK + CALL + END))
        delta = session.extend([{"role": "tool", "content": "R"}, *also])
        assert (delta.verdict, delta.restart is not None) == (verdict, bool(also))


def test_policy_fail_says_what_to_do() -> None:
    _, session, new = qwen3_with_reasoning("fail")
    with pytest.raises(TemplateError, match="choose 'keep' or 'split'"):
        session.extend(new)


@pytest.mark.parametrize("policy", ["split", "fail"])
def test_policies_do_nothing_where_history_is_exact(policy: Any) -> None:
    chat = make_chat("qwen3", template_rewrite_policy=policy)
    session = ChatSession(chat, [USER], TOOLS)
    for _ in range(3):
        session.append_model_turn(chat.encode(CALL + END))
        assert session.extend([{"role": "tool", "content": "R"}]).restart is None


def test_the_prompt_is_refused_with_the_templates_own_words() -> None:
    with pytest.raises(TemplateError, match="Conversation roles must alternate"):
        ChatSession(make_chat("gemma3"), [USER, USER])


class Counting:
    """A tokenizer that counts its input characters, to measure the cost of a turn without a clock."""

    is_fast = False

    def __init__(self, inner: Any) -> None:
        self.inner, self.characters = inner, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __len__(self) -> int:
        return len(self.inner)

    def encode(self, text: str, **options: Any) -> Any:
        self.characters += len(text)
        return self.inner.encode(text, **options)

    def decode(self, ids: list[int], **options: Any) -> Any:
        self.characters += len(ids)
        return self.inner.decode(ids, **options)


def test_a_turn_costs_the_same_at_any_history() -> None:
    """Encoded characters, decoded ids and rendered characters of a turn are constant from 1k to 32k tokens."""
    base = make_chat("qwen3")
    tokenizer = Counting(base.tokenizer)
    chat = Chat(tokenizer, chat_template=chat_templates()["qwen3"])
    turn = base.encode(THINK + CALL + END)
    result = {"role": "tool", "content": "row " * 200}

    def costs() -> Iterator[int]:
        talk = Conversation(chat, Sample(), [USER], TOOLS)
        while talk.length < 33_000:
            before = tokenizer.characters
            talk.append_model_turn(turn, [-0.5] * len(turn), "1", text="")
            talk.append_messages([result])
            yield tokenizer.characters - before

    seen = list(costs())
    assert len(seen) > 100
    assert len(set(seen)) == 1


def test_load_reads_a_folder(tmp_path: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).symlink_to(qwen3_tokenizer_folder() / name)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [151645, 151643]}))
    template = tmp_path / "mine.jinja"
    template.write_text(chat_templates()["qwen3"], encoding="utf-8")
    chat = Chat.load(str(tmp_path), chat_template=str(template), template_kwargs={"enable_thinking": False})
    assert chat.stop_token_ids == (151645, 151643)
    assert chat.vocab_size == 151669
    assert chat.decode(ChatSession(chat, [USER]).prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert chat.parse(CALL).tool_calls[0].name == "run_sql"
    assert Thought.WITHOUT in chat.thoughts(chat.parse("x"), "x")
    with pytest.raises(SettingsError, match=r"no file .*other\.jinja"):
        Chat.load(str(tmp_path), chat_template="other.jinja")
    with pytest.raises(SettingsError, match="no tokenizer"):
        Chat.load(str(tmp_path / "nothing-here"))
    with pytest.raises(SettingsError, match="keep, split or fail"):
        Chat(chat.tokenizer, chat_template="{{ 1 }}", template_rewrite_policy="forget")  # type: ignore[arg-type]
    with pytest.raises(TemplateError, match="does not compile"):
        Chat(chat.tokenizer, chat_template="{% if %}")


@pytest.mark.parametrize("depth", [50, 600, 5_000])
def test_calls_that_are_nested_too_deeply_are_broken(depth: int) -> None:
    """600 levels are valid JSON, but exceed Python's stack in a recursive walk over messages."""
    session = ChatSession(chat := make_chat("qwen3"), [{"role": "user", "content": "x"}])
    arguments = '{"a": ' + "[" * depth + "]" * depth + "}"
    call = f'<tool_call>\n{{"name": "f", "arguments": {arguments}}}\n</tool_call>'
    parsed = session.append_model_turn(chat.encode(call))
    assert (len(parsed.tool_calls), len(parsed.broken)) == ((1, 0) if depth == 50 else (0, 1))
    assert session.extend([{"role": "user", "content": "so?"}]).env
    given = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": arguments}}]}
    assert normalise_messages([given])[0]["tool_calls"][0]["function"]["name"] == "f"


def test_messages_that_are_nested_too_deeply_are_refused() -> None:
    deep: Any = {}
    for _ in range(600):
        deep = {"a": deep}
    with pytest.raises(TemplateError, match="message 0: .* more than 100 levels deep"):
        normalise_messages([{"role": "user", "content": "x", "extra": deep}])


def test_no_two_calls_of_a_session_have_the_same_id() -> None:
    chat = make_chat("qwen3")
    session = ChatSession(chat, [USER], TOOLS)
    ids = []
    for calls in (1, 2, 1, 1):
        ids += [call.id for call in session.append_model_turn(chat.encode(CALL * calls + END)).tool_calls]
        session.extend([{"role": "tool", "content": "R"}] * calls)
    assert len(set(ids)) == len(ids) == 5
