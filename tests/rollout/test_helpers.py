"""The helpers for custom generate functions: every conversation has its own seeds and its own sample."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import anyio
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from agentrl import Environment, Sample, tool
from agentrl.chat import Chat, ToolCall
from agentrl.engine.wire import FinishReason, Generation, SamplingParams
from agentrl.errors import ContextOverflow, EngineFailure, EngineRejected, EnvFailure, ToolFailure
from agentrl.rm_hub import final_answer
from agentrl.rollout.helpers import Recorder, build_loss_mask, execute_tool, generate_single, recording
from agentrl.rollout.stats import Tally
from agentrl.sample import Message
from agentrl.tools import Injected
from tests.rollout.scripted import ScriptedEngine, Store, build, make_context
from tests.support.assets import chat_templates
from tests.support.tiny_models import make_tiny_model
from tests.support.virtual_time import virtual_time

END = "<|im_end|>"


class SeedsEngine(ScriptedEngine):
    """Records the sampling seeds of its requests."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat, [f"fine{END}"])
        self.seeds: list[int | None] = []

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **options: Any) -> Generation:
        self.seeds.append(params.sampling_seed)
        return await super().generate(input_ids, params, **options)


def recorder(chat: Chat, engine: ScriptedEngine, index: int, attempt: int = 0) -> Recorder:
    context = make_context(chat, engine)
    return Recorder(context, context.params(), Sample(group_index=0, index=index, metadata={"attempt": attempt}))


async def test_seeds_differ_between_samples_attempts_conversations_and_turns(chat: Chat) -> None:
    engine = SeedsEngine(chat)
    for index, attempt in ((0, 0), (1, 0), (0, 1)):
        async with recording(recorder(chat, engine, index, attempt)):
            for _ in range(2):
                conversation = [{"role": "user", "content": "hello"}]
                await generate_single(conversation)
                conversation.append({"role": "user", "content": "and?"})
                await generate_single(conversation)
    assert None not in engine.seeds
    assert len(set(engine.seeds)) == len(engine.seeds) == 12


async def test_the_same_sample_gets_the_same_seeds_again(chat: Chat) -> None:
    engine = SeedsEngine(chat)
    for _ in range(2):
        async with recording(recorder(chat, engine, 5)):
            await generate_single([{"role": "user", "content": "hello"}])
    assert engine.seeds[0] == engine.seeds[1]


async def test_parallel_conversations_are_distinguished_by_their_list(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [f"fine{END}"])
    samples = [Sample(index=i, prompt=[{"role": "user", "content": f"question {i}"}]) for i in range(3)]
    async with recording(recorder(chat, engine, 0)):

        async def one(sample: Sample, wait_for: anyio.Event, done: anyio.Event) -> None:
            await wait_for.wait()
            assert isinstance(sample.prompt, list)
            await generate_single(sample.prompt)
            done.set()

        events = [anyio.Event() for _ in range(4)]
        async with anyio.create_task_group() as tasks:
            for at, sample in enumerate(samples):  # the last sample goes first
                tasks.start_soon(one, sample, events[3 - at - 1], events[3 - at])
            events[0].set()
        for sample in samples:
            sample.loss_mask = build_loss_mask(sample)
    for at, sample in enumerate(samples):
        assert f"question {at}" in chat.decode(sample.tokens)


async def test_an_answer_appended_as_text_is_refused_with_the_message_to_append(chat: Chat) -> None:
    async with recording(recorder(chat, ScriptedEngine(chat, [f"fine{END}"]), 0)):
        conversation: list[Any] = [{"role": "user", "content": "hello"}]
        conversation.append(await generate_single(conversation))
        with pytest.raises(EnvFailure, match=r"message 1 is a str; append \{'role': 'assistant', 'content': ...\}"):
            await generate_single(conversation)


class Asked:
    """A client of `generate_single` that sends its conversation in one of several forms."""

    def __init__(self, first: str) -> None:
        self.messages: list[Message] = [{"role": "user", "content": first}]

    async def send(self, way: str) -> str:
        sent = self.messages
        if way == "copied":
            sent = list(self.messages)
        elif way == "rebuilt":
            sent = json.loads(json.dumps(self.messages))
        elif way == "parts":
            sent = [{**m, "content": [{"type": "text", "text": m["content"]}]} for m in self.messages]
        answer = await generate_single(sent)
        self.messages.append({"role": "assistant", "content": answer})
        return answer

    def say(self, content: str) -> None:
        self.messages.append({"role": "user", "content": content})


WAYS = st.sampled_from(["the list", "copied", "rebuilt", "parts"])


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ways=st.lists(WAYS, min_size=1, max_size=4))
def test_the_way_a_conversation_is_sent_changes_no_token(chat: Chat, ways: list[str]) -> None:
    async def play(ways: list[str]) -> Sample:
        sample, engine = (
            Sample(index=0),
            ScriptedEngine(chat, [f"fine{END}", f"<think>hm</think> well {END}", f"ok{END}"]),
        )
        async with recording(recorder(chat, engine, 0)):
            asked = Asked("hello")
            for turn, way in enumerate(ways):
                await asked.send(way)
                asked.say(f"and {turn}?")
            build_loss_mask(sample)
        return sample.validate()

    plain, other = anyio.run(play, ["the list"] * len(ways)), anyio.run(play, ways)
    assert other.tokens == plain.tokens
    assert other.segments == plain.segments
    assert other.segments[-1].turn == len(ways)


async def test_a_conversation_continued_from_an_earlier_point_is_a_new_one(chat: Chat) -> None:
    used = recorder(chat, ScriptedEngine(chat, [f"fine{END}"]), 0)
    async with recording(used):
        asked = Asked("hello")
        await asked.send("the list")
        start = list(asked.messages)
        asked.say("and?")
        await asked.send("the list")
        branch = [*start, {"role": "user", "content": "or?"}]
        await generate_single(branch)
        await generate_single([*branch, {"role": "assistant", "content": "fine"}, {"role": "user", "content": "why?"}])
        del asked.messages[2:]
        asked.say("on the same list")
        await asked.send("the list")
    turns = [record.talk.turns for record in used.records]
    assert turns == [2, 2, 1]
    prompts = [chat.decode(record.sample.tokens[: record.sample.prompt_length]) for record in used.records]
    assert "fine" not in prompts[0]
    assert all("fine" in prompt for prompt in prompts[1:])
    assert [sum(record.sample.loss_mask or ()) for record in used.records] == [
        n * len(chat.encode(f"fine{END}")) for n in turns
    ]


async def test_a_list_that_was_cut_back_goes_on_with_what_came_after_the_cut(chat: Chat) -> None:
    used = recorder(chat, ScriptedEngine(chat, [f"fine{END}"]), 0)
    async with recording(used):
        asked = Asked("hello")
        for _ in range(2):  # the same words again, from the first message on
            del asked.messages[1:]
            await asked.send("the list")
            asked.say("and?")
            await asked.send("the list")
    assert [record.talk.turns for record in used.records] == [2, 2]


@pytest.mark.parametrize("way", ["the list", "copied"])
async def test_conversations_with_the_same_words_are_told_apart(chat: Chat, way: str) -> None:
    samples = [Sample(index=number) for number in range(4)]
    async with recording(recorder(chat, ScriptedEngine(chat, [f"fine{END}"]), 0)):

        async def one(sample: Sample) -> None:
            asked = Asked("hello")
            await asked.send(way)
            build_loss_mask(sample)
            for _ in range(4 - (sample.index or 0)):  # the last goes first
                await anyio.lowlevel.checkpoint()
            asked.say(f"I am {sample.index}")
            await asked.send(way)
            build_loss_mask(sample)

        async with anyio.create_task_group() as tasks:
            for sample in samples:
                tasks.start_soon(one, sample)
    for sample in samples:
        assert f"I am {sample.index}" in chat.decode(sample.tokens)
        assert sample.validate().segments[-1].turn == 2


async def test_the_longest_beginning_wins(chat: Chat) -> None:
    used = recorder(chat, ScriptedEngine(chat, [f"fine{END}"]), 0)
    async with recording(used):
        short, long = Asked("hello"), Asked("hello")
        await short.send("the list")
        await long.send("the list")
        for asked in (long, short):
            asked.say("and?")
        await long.send("copied")  # both have the same tokens: either may continue
        long.say("more?")
        await long.send("copied")
        await short.send("the list")
    assert sorted(record.talk.turns for record in used.records) == [2, 3]


class TwoWays(ScriptedEngine):
    """Writes the same text with other tokens each time."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **options: Any) -> Generation:
        answer = await super().generate(input_ids, params, **options)
        if len(self.calls) % 2:
            return answer
        text = answer.text.removesuffix(END)
        ids = [token for char in text for token in self.chat.encode(char)] + self.chat.encode(END)
        return replace(answer, ids=ids, log_probs=[-0.25] * len(ids), weight_versions=(("3", 0, len(ids)),))


async def test_the_same_words_in_other_tokens_are_ambiguous_unless_the_list_or_the_task_says_which(chat: Chat) -> None:
    used = recorder(chat, TwoWays(chat, [f"The tool is called.{END}"]), 0)
    async with recording(used):
        first, second, third = Asked("hello"), Asked("hello"), Asked("other")
        for asked in (first, second):
            await asked.send("the list")
            asked.say("and?")
        assert used.records[0].sample.tokens != used.records[1].sample.tokens
        await third.send("the list")
        with pytest.raises(EnvFailure, match="2 conversations have the same messages and other tokens; pass the list"):
            await first.send("copied")
        await second.send("the list")
        await first.send("copied")
    assert [record.talk.turns for record in used.records] == [2, 2, 1]


async def test_a_history_that_the_template_would_rewrite_is_refused_and_what_was_written_stays(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    chat = Chat.load(str(tmp_path), chat_template=chat_templates()["qwen3"], template_rewrite_policy="split")
    used, sample = recorder(chat, ScriptedEngine(chat, [f"<think>\nhm\n</think>\n\nfine{END}"]), 0), Sample(index=0)
    async with recording(used):
        asked = Asked("hello")
        await asked.send("the list")
        asked.say("and?")
        with pytest.raises(EnvFailure, match="cannot split it; use --template-rewrite-policy keep"):
            await asked.send("the list")
        with pytest.raises(EnvFailure, match="nothing new in the conversation"):
            await asked.send("the list")
        used.rescue(sample)
    assert sum(sample.loss_mask or ()) > 0


async def test_a_conversation_that_could_be_several_samples_is_refused(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [f"fine{END}"])
    async with recording(recorder(chat, engine, 0)):
        for at in range(2):
            await generate_single([{"role": "user", "content": f"question {at}"}])
        with pytest.raises(EnvFailure, match=r"2 recorded conversations could be sample 7's.*build_loss_mask"):
            build_loss_mask(Sample(index=7, prompt="question 0"))


class Hanging(ScriptedEngine):
    """Does not answer the call with this number."""

    hangs = 0

    async def generate(self, *given: Any, **options: Any) -> Any:
        if len(self.calls) == self.hangs:
            self.hangs = -1
            await anyio.sleep_forever()
        return await super().generate(*given, **options)


@pytest.mark.parametrize(("hangs", "copied"), [(0, False), (0, True), (1, False)])
async def test_a_call_that_ended_without_an_answer_may_be_made_again(chat: Chat, hangs: int, copied: bool) -> None:
    engine = Hanging(chat, [f"fine{END}"])
    engine.hangs, conversation, sample = hangs, [{"role": "user", "content": "hello"}], Sample(index=0)
    used = recorder(chat, engine, 0)
    async with recording(used):
        for _ in range(2):
            answer = None
            while answer is None:
                with anyio.move_on_after(0 if len(engine.calls) == engine.hangs else None):
                    answer = await generate_single(list(conversation) if copied else conversation)
            conversation += [{"role": "assistant", "content": "fine"}, {"role": "user", "content": "and?"}]
        assert used.claim(sample)
    assert sum(sample.loss_mask or ()) == 2 * len(chat.encode(f"fine{END}"))


async def test_asking_twice_with_nothing_new_is_refused(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [f"fine{END}"])
    conversation = [{"role": "user", "content": "hello"}]
    async with recording(recorder(chat, engine, 0)):
        await generate_single(conversation)
        with pytest.raises(EnvFailure, match="nothing new in the conversation"):
            await generate_single(conversation)


async def test_tools_that_keep_state_have_it_and_their_environment_is_closed(chat: Chat) -> None:
    class Counting(Environment):
        closed = 0

        @tool
        async def count(self) -> int:
            """How often it was called in this trajectory."""
            self.calls = getattr(self, "calls", 0) + 1
            return self.calls

        async def close(self) -> None:
            type(self).closed += 1

    @tool
    async def whose(state: Annotated[object, Injected]) -> str:
        """Whose call it is."""
        return type(state).__name__

    Counting.tools = (whose,)
    context = make_context(chat, ScriptedEngine(chat, [f"fine{END}"]), Counting)
    for _ in range(2):
        async with recording(Recorder(context, context.params(), Sample(group_index=0, index=0))):
            assert [await execute_tool(ToolCall("1", "count", {})) for _ in range(2)] == ["1", "2"]
            assert await execute_tool(ToolCall("1", "whose", {})) == "Counting"
    assert Counting.closed == 2


async def test_a_rows_own_tools_are_offered_and_parsed(chat: Chat) -> None:
    tool = {"name": "look_up", "description": "Looks up.", "parameters": {"type": "object", "properties": {}}}
    context = make_context(chat, ScriptedEngine(chat, [f"fine{END}"]))
    origin = Sample(group_index=0, index=0, metadata={"tools": [{"type": "function", "function": tool}]})
    sample = Sample(index=0)
    async with recording(Recorder(context, context.params(), origin)):
        await generate_single([{"role": "user", "content": "hello"}])
        build_loss_mask(sample)
    assert "look_up" in chat.decode(sample.tokens)


class AbortingEngine(ScriptedEngine):
    """Truncates every answer, as a real engine does when it is paused."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **options: Any) -> Generation:
        answer = await super().generate(input_ids, params, **options)
        ids, log_probs = answer.ids[:1], answer.log_probs[:1]
        versions, finish = (("3", 0, 1),), FinishReason("abort")
        return replace(answer, ids=ids, log_probs=log_probs, weight_versions=versions, finish_reason=finish)


async def test_an_aborted_answer_is_no_finished_turn(chat: Chat) -> None:
    with pytest.raises(EngineFailure, match="aborted the request"):
        async with recording(recorder(chat, AbortingEngine(chat, [f"fine{END}"]), 0)):
            await generate_single([{"role": "user", "content": "hello"}])


async def test_the_engines_own_limit_is_an_overflow(chat: Chat) -> None:
    refusal = EngineRejected("too long", status=400, kind="context_overflow")
    with pytest.raises(ContextOverflow, match="too long"):
        async with recording(recorder(chat, ScriptedEngine(chat, [refusal]), 0)):
            await generate_single([{"role": "user", "content": "hello"}])


@pytest.mark.parametrize("early", [False, True])
async def test_a_conversation_that_outgrows_the_context_keeps_what_was_written(chat: Chat, early: bool) -> None:
    async def generate(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        conversation = [{"role": "user", "content": "hello"}]
        while True:
            await generate_single(conversation)
            if early and not sample.tokens:
                build_loss_mask(sample)
            conversation.append({"role": "user", "content": "and then? " * 20})

    loop, _ = build(chat, [f"fine{END}"], generate=generate, environment=None)
    sample = (await loop.run(0)).groups[0][0].validate()
    assert sample.metadata["failure"]["blame"] == "overflow"
    assert not sample.remove_sample
    assert sum(sample.loss_mask or ()) == sum(
        len(chat.encode(f"fine{END}")) for s in sample.segments if s.origin == "model"
    )
    assert sum(sample.loss_mask or ()) > 0


@virtual_time
async def test_a_close_that_fails_does_not_hide_a_deadline(chat: Chat) -> None:
    class BadClose(Environment):
        async def close(self) -> None:
            raise OSError("cannot close")

    async def generate(args: Any, sample: Sample, params: dict[str, Any]) -> Sample:
        if sample.index == 0:
            await anyio.sleep_forever()
        raise ToolFailure("cannot go on")

    loop, _ = build(chat, [], generate=generate, environment=BadClose, trajectory_timeout=0.2, rollout_max_retries=0)
    tally = Tally()
    group = await loop.player.group(Store().lease(1, 0)[0], evaluation=False, tally=tally)
    assert tally.stats.failures == {"timeout/timeout_timeout": 1, "tool/tool": 1}
    assert all("cannot close" in s.metadata["close_failure"] for s in group)


async def test_a_conversation_leaves_what_the_default_loop_leaves(chat: Chat) -> None:
    @tool
    async def add(a: int, b: int) -> int:
        """A sum."""
        return a + b

    class Adding(Environment):
        tools = (add,)

    context = make_context(chat, ScriptedEngine(chat, [f"I add.{END}", f"It is 5.{END}"]), Adding)
    conversation: list[Message] = [{"role": "user", "content": "2+3?"}]
    sample = Sample(index=0, prompt=list(conversation))
    async with recording(Recorder(context, context.params(), Sample(group_index=0, index=0))):
        conversation.append({"role": "assistant", "content": await generate_single(conversation)})
        for arguments in ({"a": 2, "b": 3}, {"a": "x"}):
            shown = await execute_tool(ToolCall("1", "add", arguments))
            conversation.append({"role": "tool", "content": shown})
        await generate_single(conversation)
        sample.loss_mask = build_loss_mask(sample)
    assert [m["role"] for m in sample.metadata["messages"]] == ["user", "assistant", "tool", "tool", "assistant"]
    assert final_answer(sample) == "It is 5."
    counters = sample.metadata["counters"]
    assert (counters["tool_calls"], counters["tool_ok"], counters["tool_bad_arguments"]) == (2, 1, 1)
    assert sample.non_generation_time > 0


class Speculating(ScriptedEngine):
    """Reports how many tokens a draft model wrote, as engines with speculative decoding do."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **options: Any) -> Generation:
        answer = await super().generate(input_ids, params, **options)
        return replace(answer, meta_info={"spec_verify_ct": 1, "completion_tokens": len(answer.ids)})


async def test_turns_of_a_groups_samples_in_turn_leave_each_sample_whole(chat: Chat) -> None:
    """The second turn of each sample comes after `build_loss_mask`, and after the first turns of the others."""

    async def generate(args: Any, samples: list[Sample]) -> list[Sample]:
        talks = [[{"role": "user", "content": f"question {sample.index}"}] for sample in samples]
        for sample, talk in zip(samples, talks, strict=True):
            talk.append({"role": "assistant", "content": await generate_single(talk)})
            sample.loss_mask = build_loss_mask(sample)
        for sample, talk in zip(samples, talks, strict=True):
            talk.append({"role": "user", "content": "and?"})
            await generate_single(talk)
            sample.reward = 1.0
        samples[0].response = "my own"
        return samples

    first, second = f"first{END}", f"second {'word ' * 40}{END}"
    most = len(chat.encode(first))
    loop, _ = build(chat, [], generate=generate, environment=None, rollout_max_response_len=most, rollout_batch_size=1)
    engine = Speculating(chat, lambda key: [first, second])
    loop.player.context = replace(loop.player.context, client=engine)
    samples = (await loop.run(0)).groups[0]
    assert samples[0].response == "my own"
    for sample in samples:
        assert f"question {sample.index}" in chat.decode(sample.tokens)
        assert [segment.turn for segment in sample.segments if segment.origin == "model"] == [1, 2]
        assert sample.trained_tokens == 2 * most
        assert (sample.status, sample.stop_reason) == (Sample.Status.TRUNCATED, "length")
        assert (sample.spec_info.spec_verify_ct, sample.spec_info.completion_token_num) == (2, sample.trained_tokens)
        assert [message["role"] for message in sample.metadata["messages"]] == ["user", "assistant"] * 2
    assert re.search("first.*and.*second", samples[1].response, re.DOTALL)
