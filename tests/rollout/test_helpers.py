"""The helpers for custom generate functions: every conversation its own seeds and its own sample."""

from dataclasses import replace
from typing import Annotated

import anyio
import pytest

from agentrl import Environment, Sample, tool
from agentrl.chat import Chat, ToolCall
from agentrl.engine.wire import FinishReason
from agentrl.errors import ContextOverflow, EngineFailure, EngineRejected, EnvFailure, ToolFailure
from agentrl.rm_hub import final_answer
from agentrl.rollout.helpers import Recorder, build_loss_mask, execute_tool, generate_single, recording
from agentrl.rollout.loop import RolloutStats
from agentrl.tools import Injected
from tests.rollout.scripted import ScriptedEngine, make_context
from tests.rollout.test_loop import Store, build

END = "<|im_end|>"


class SeedsEngine(ScriptedEngine):
    """Remembers the sampling seeds that it was sent."""

    def __init__(self, chat: Chat) -> None:
        super().__init__(chat, [f"fine{END}"])
        self.seeds: list[int | None] = []

    async def generate(self, input_ids, params, **options):
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


async def test_side_by_side_conversations_are_told_apart_by_their_list(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [f"fine{END}"])
    samples = [Sample(index=i, prompt=[{"role": "user", "content": f"question {i}"}]) for i in range(3)]
    async with recording(recorder(chat, engine, 0)):

        async def one(sample: Sample, wait_for: anyio.Event, done: anyio.Event) -> None:
            await wait_for.wait()
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


async def test_a_conversation_that_could_be_several_samples_is_refused(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [f"fine{END}"])
    async with recording(recorder(chat, engine, 0)):
        for at in range(2):
            await generate_single([{"role": "user", "content": f"question {at}"}])
        with pytest.raises(EnvFailure, match=r"2 recorded conversations could be sample 7's.*build_loss_mask"):
            build_loss_mask(Sample(index=7, prompt="question 0"))


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
    """Cuts every answer short, as a real engine does when it is paused."""

    async def generate(self, input_ids, params, **options):
        answer = await super().generate(input_ids, params, **options)
        cut = {"ids": answer.ids[:1], "log_probs": answer.log_probs[:1], "weight_versions": (("3", 0, 1),)}
        return replace(answer, finish_reason=FinishReason("abort"), **cut)


async def test_an_aborted_answer_is_no_finished_turn(chat: Chat) -> None:
    with pytest.raises(EngineFailure, match="aborted the request"):
        async with recording(recorder(chat, AbortingEngine(chat, [f"fine{END}"]), 0)):
            await generate_single([{"role": "user", "content": "hello"}])


async def test_the_engines_own_limit_is_an_overflow(chat: Chat) -> None:
    refusal = EngineRejected("too long", status=400, kind="context_overflow")
    with pytest.raises(ContextOverflow, match="too long"):
        async with recording(recorder(chat, ScriptedEngine(chat, [refusal]), 0)):
            await generate_single([{"role": "user", "content": "hello"}])


async def test_a_conversation_that_outgrows_the_context_keeps_what_was_written(chat: Chat) -> None:
    async def generate(args, sample, params):
        conversation = [{"role": "user", "content": "hello"}]
        while True:
            await generate_single(conversation)
            conversation.append({"role": "user", "content": "and then? " * 20})

    loop, _ = build(chat, [f"fine{END}"], generate=generate, environment=None)
    sample = (await loop.run(0)).groups[0][0].validate()
    assert sample.metadata["failure"]["blame"] == "overflow"
    assert not sample.remove_sample
    assert sum(sample.loss_mask or ()) == sum(
        len(chat.encode(f"fine{END}")) for s in sample.segments if s.origin == "model"
    )
    assert sum(sample.loss_mask or ()) > 0


async def test_a_close_that_fails_does_not_hide_a_deadline(chat: Chat) -> None:
    class BadClose(Environment):
        async def close(self) -> None:
            raise OSError("cannot close")

    async def generate(args, sample, params):
        if sample.index == 0:
            await anyio.sleep_forever()
        raise ToolFailure("cannot go on")

    loop, _ = build(chat, [], generate=generate, environment=BadClose, trajectory_timeout=0.2, rollout_max_retries=0)
    stats = RolloutStats()
    group = await loop.runner.group(Store().lease(1, 0)[0], evaluation=False, stats=stats)
    assert stats.failures == {"timeout/timeout_timeout": 1, "tool/tool": 1}
    assert all("cannot close" in s.metadata["close_failure"] for s in group)


async def test_a_conversation_leaves_what_the_default_loop_leaves(chat: Chat) -> None:
    @tool
    async def add(a: int, b: int) -> int:
        """A sum."""
        return a + b

    class Adding(Environment):
        tools = (add,)

    context = make_context(chat, ScriptedEngine(chat, [f"I add.{END}", f"It is 5.{END}"]), Adding)
    sample = Sample(index=0, prompt=[{"role": "user", "content": "2+3?"}])
    conversation = list(sample.prompt)
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
