"""The helpers for custom generate functions: every conversation its own seeds and its own sample."""

import anyio
import pytest

from agentrl import Sample
from agentrl.chat import Chat
from agentrl.errors import EnvFailure
from agentrl.rollout.helpers import Recorder, build_loss_mask, generate_single, recording
from tests.rollout.scripted import ScriptedEngine, make_context

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
        with recording(recorder(chat, engine, index, attempt)):
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
        with recording(recorder(chat, engine, 5)):
            await generate_single([{"role": "user", "content": "hello"}])
    assert engine.seeds[0] == engine.seeds[1]


async def test_side_by_side_conversations_are_told_apart_by_their_list(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [f"fine{END}"])
    samples = [Sample(index=i, prompt=[{"role": "user", "content": f"question {i}"}]) for i in range(3)]
    with recording(recorder(chat, engine, 0)):

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
    with recording(recorder(chat, engine, 0)):
        for at in range(2):
            await generate_single([{"role": "user", "content": f"question {at}"}])
        with pytest.raises(EnvFailure, match=r"2 recorded conversations could be sample 7's.*build_loss_mask"):
            build_loss_mask(Sample(index=7, prompt="question 0"))


async def test_asking_twice_with_nothing_new_is_refused(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [f"fine{END}"])
    conversation = [{"role": "user", "content": "hello"}]
    with recording(recorder(chat, engine, 0)):
        await generate_single(conversation)
        with pytest.raises(EnvFailure, match="nothing new in the conversation"):
            await generate_single(conversation)
