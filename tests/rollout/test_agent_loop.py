"""The default generate: the author of each token, when it ends, and that `close` is always called."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import anyio
import pytest

from agentrl import Environment, Sample, Status, Step, tool
from agentrl.buffer.codec import decode_group, encode_group
from agentrl.chat import Chat
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.envs import Turn
from agentrl.errors import ContextOverflow, EngineFailure, EnvFailure, ToolFailure
from agentrl.rm_hub import final_answer
from agentrl.rm_hub.combine import StepRewards, Weighted, combine
from agentrl.rollout.agent_loop import run_environment
from agentrl.sample import Message, Origin
from agentrl.tools import Tool
from tests.rollout.scripted import Reply, ScriptedEngine, make_context
from tests.support.assets import chat_templates
from tests.support.chats import interrupted
from tests.support.tiny_models import make_tiny_model
from tests.support.virtual_time import virtual_time

END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "double", "arguments": {"x": 21}}\n</tool_call>' + END


@tool
def double(x: int) -> int:
    """Twice a number."""
    return 2 * x


@tool
def shout(text: str) -> str:
    """Repeats a text, with half of an emoji."""
    return text + "! \ud83d"


class DoubleEnv(Environment):
    tools = [double]
    max_turns = 3
    closed = 0

    async def reward(self, sample: Sample) -> float:
        return 1.0

    async def close(self) -> None:
        type(self).closed += 1


async def play(
    chat: Chat,
    replies: Sequence[Reply],
    environment: type[Environment] = DoubleEnv,
    context_length: int = 2048,
    **settings: Any,
) -> tuple[Sample, ScriptedEngine]:
    engine = ScriptedEngine(chat, replies)
    context = make_context(chat, engine, environment, context_length, **settings)
    samples = await run_environment(context, Sample(prompt="What is 21*2?", index=0), context.params())
    return samples[0].validate(), engine


async def test_mask_is_one_exactly_on_what_the_engine_returned(chat: Chat) -> None:
    sample, engine = await play(chat, [CALL, f"It is 42.{END}"])
    assert sample.status is Status.COMPLETED
    assert sample.reward == 1.0
    assert [s.origin for s in sample.segments] == [Origin.MODEL, Origin.ENV, Origin.MODEL]
    model_ids = chat.encode(CALL) + chat.encode(f"It is 42.{END}")
    assert sample.loss_mask is not None
    assert [t for t, m in zip(sample.tokens[sample.prompt_length :], sample.loss_mask, strict=True) if m] == model_ids
    # Every request is the whole trajectory so far, id by id.
    first, second = engine.calls[0][1], engine.calls[1][1]
    assert first == sample.tokens[: sample.prompt_length]
    assert second == sample.tokens[: len(second)]
    assert "42" in chat.decode(second[len(first) + len(chat.encode(CALL)) :])
    assert sample.weight_versions == ["3"]
    assert sample.metadata["counters"]["tool_ok"] == 1


async def test_an_answer_that_looks_like_a_broken_call_is_the_answer_that_is_graded(chat: Chat) -> None:
    text = "So: <tool_call>\n{12}\n</tool_call>"
    context = make_context(chat, ScriptedEngine(chat, [text + END]), Environment, rm_type="exact_match")
    [sample] = await run_environment(context, Sample(prompt="6 + 6?"), context.params(), grade=False)
    assert sample.metadata["messages"][-1]["content"].split() == text.split()
    assert final_answer(sample) == sample.metadata["messages"][-1]["content"]


async def test_turn_limit_truncates(chat: Chat) -> None:
    sample, engine = await play(chat, [CALL])
    assert sample.status is Status.TRUNCATED
    assert len(engine.calls) == 3


async def test_token_limit_truncates(chat: Chat) -> None:
    sample, _ = await play(chat, [f"a long answer without an end{END}"], rollout_max_response_len=4)
    assert sample.status is Status.TRUNCATED
    assert sum(sample.loss_mask or ()) == 4


async def test_the_context_is_never_overrun(chat: Chat) -> None:
    prompt = len((await play(chat, [f"x{END}"]))[0].tokens)
    for room in (40, 60, 80, 100):
        sample, engine = await play(chat, [CALL], context_length=prompt + room)
        assert len(sample.tokens) < prompt + room
        assert sample.status is Status.TRUNCATED
        assert engine.calls


class Words(DoubleEnv):
    """Ends after its first tool call with its own last message."""

    async def step(self, turn: Turn) -> Step:
        step = await super().step(turn)
        return step if step.done else step.finish(stop_reason="solved")


LONG = f"a long answer without an end{END}"
STOPS: list[tuple[str, Status, list[str], dict[str, Any]]] = [
    ("done", Status.COMPLETED, [CALL, f"It is 42.{END}"], {}),
    ("max_turns", Status.TRUNCATED, [CALL], {}),
    ("length", Status.TRUNCATED, [LONG], {"rollout_max_response_len": 4}),
    ("solved", Status.COMPLETED, [CALL], {"environment": Words}),
]


@pytest.mark.parametrize(("reason", "status", "replies", "settings"), STOPS, ids=[row[0] for row in STOPS])
async def test_a_sample_says_why_it_stopped(
    chat: Chat, reason: str, status: Status, replies: list[str], settings: dict[str, Any]
) -> None:
    sample, _ = await play(chat, replies, **settings)
    assert (sample.stop_reason, sample.status) == (reason, status)
    assert Sample.from_dict(sample.to_dict()).stop_reason == reason
    (stored,) = decode_group(encode_group([sample]))
    assert stored.stop_reason == reason


async def test_an_answer_or_observation_that_fills_the_context_stops_for_it(chat: Chat) -> None:
    prompt = (await play(chat, [f"x{END}"]))[0].prompt_length
    for replies, room in (([LONG], 6), ([CALL], len(chat.encode(CALL)) + 4)):
        sample, _ = await play(chat, replies, context_length=prompt + room)
        assert (sample.stop_reason, sample.status) == ("context", Status.TRUNCATED)


async def test_a_prompt_that_does_not_fit_is_an_overflow(chat: Chat) -> None:
    with pytest.raises(ContextOverflow, match="the prompt has .* tokens, at most 18 fit"):
        await play(chat, [f"x{END}"], context_length=20)


@virtual_time
async def test_close_is_called_on_cancel(chat: Chat) -> None:
    DoubleEnv.closed = 0
    with anyio.move_on_after(0.2):
        await play(chat, [lambda: anyio.sleep_forever()])
    assert DoubleEnv.closed == 1


class RaisingEnv(DoubleEnv):
    async def step(self, turn: Turn) -> Step:
        raise KeyError("oops")


class WrongStepEnv(DoubleEnv):
    async def step(self, turn: Turn) -> Step:
        return "nonsense"  # type: ignore[return-value]


class WrongResetEnv(DoubleEnv):
    async def reset(self, sample: Sample) -> list[Message]:
        return "nonsense"  # type: ignore[return-value]


class HangingEnv(DoubleEnv):
    async def step(self, turn: Turn) -> Step:
        await anyio.sleep_forever()
        raise AssertionError


class SilentEnv(DoubleEnv):
    async def step(self, turn: Turn) -> Step:
        return Step()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        (RaisingEnv, r"RaisingEnv.step raised KeyError: 'oops' at .*test_agent_loop.py:\d+"),
        (
            WrongStepEnv,
            r"WrongStepEnv.step must return a Step, got .*; to go on as by default: return await super\(\).step\(turn\)",
        ),
        (WrongResetEnv, "WrongResetEnv.reset must return a list of messages"),
        (HangingEnv, "HangingEnv.step took longer than 0.2 s"),
        (SilentEnv, "returned no messages and done=False"),
    ],
)
@virtual_time
async def test_an_environments_own_fault_has_its_name_on_it(
    chat: Chat, environment: type[Environment], message: str
) -> None:
    with pytest.raises(EnvFailure, match=message):
        await play(chat, [CALL], environment, env_timeout=0.2)


async def test_a_tools_exception_is_an_observation(chat: Chat) -> None:
    @tool
    def double(x: int) -> int:
        """Twice a number."""
        raise RuntimeError("the backend is down")

    class BrokenToolEnv(DoubleEnv):
        tools = [double]

    sample, _ = await play(chat, [CALL, f"sorry{END}"], BrokenToolEnv)
    assert "the backend is down" in sample.response
    assert sample.metadata["counters"]["tool_raised"] == 1
    assert sample.status is Status.COMPLETED


async def test_half_a_surrogate_pair_from_model_or_tool_does_not_end_the_run(chat: Chat) -> None:
    class ShoutEnv(DoubleEnv):
        tools = [shout]

    calls = [
        f'<tool_call>\n{{"name": "{name}", "arguments": {{"text": "a \\ud83d"}}}}\n</tool_call>{END}'
        for name in ("shout", "x\\ud83d")
    ]
    sample, _ = await play(chat, [*calls, f"done{END}"], ShoutEnv)
    assert "a \ufffd! \ufffd" in sample.response
    assert decode_group(encode_group([sample]))[0].metadata == sample.metadata


@virtual_time
async def test_a_step_that_hangs_takes_its_time_too(chat: Chat) -> None:
    sample = Sample(prompt="What is 21*2?", index=0)
    context = make_context(chat, ScriptedEngine(chat, [CALL]), HangingEnv, env_timeout=0.2)
    with pytest.raises(EnvFailure, match="took longer"):
        await run_environment(context, sample, context.params())
    assert sample.non_generation_time >= 0.2
    assert sample.metadata["step_seconds"][0] >= 0.2
    assert 0 <= sample.metadata["generate_seconds"][0] < 0.2


async def test_a_failing_tool_can_be_caught_by_its_type(chat: Chat) -> None:
    def fail(x: int) -> int:
        raise RuntimeError("the backend is down")

    class Catching(DoubleEnv):
        tools = [Tool(fail, name="double", description="Twice.", on_failure="fail")]

        async def step(self, turn: Turn) -> Step:
            try:
                return await self.run_tools(turn)
            except ToolFailure as failure:
                return Step(done=True, info={failure.kind: 1})

    sample, _ = await play(chat, [CALL], Catching)
    assert sample.metadata["counters"] == {"tool_raised": 1}


class TwoVersions(ScriptedEngine):
    """Its weights are updated during a turn: all tokens but the first three have the next version."""

    spans: tuple[tuple[str, int, int], ...] | None = None

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **options: Any) -> Generation:
        answer = await super().generate(input_ids, params, **options)
        return replace(answer, weight_versions=self.spans or (("3", 0, 3), ("4", 3, len(answer.ids))))


async def test_an_answer_of_two_versions_keeps_both_at_the_right_tokens(chat: Chat) -> None:
    context = make_context(chat, TwoVersions(chat, [CALL, f"It is 42.{END}"]), DoubleEnv)
    (sample,) = await run_environment(context, Sample(prompt="What is 21*2?", index=0), context.params())
    sample.validate()
    model = [s for s in sample.segments if s.origin is Origin.MODEL]
    lengths = [len(chat.encode(text)) for text in (CALL, f"It is 42.{END}")]
    assert [(s.turn, s.version, s.end - s.start) for s in model] == [
        (turn, version, size) for turn, n in enumerate(lengths, 1) for version, size in (("3", 3), ("4", n - 3))
    ]
    assert all(s.version is None for s in sample.segments if s.origin is not Origin.MODEL)
    assert sample.weight_versions == ["3", "4"]


async def test_versions_that_do_not_cover_the_answer_are_the_engines_fault(chat: Chat) -> None:
    engine = TwoVersions(chat, [CALL])
    engine.spans = (("3", 0, 2),)
    context = make_context(chat, engine, DoubleEnv)
    with pytest.raises(EngineFailure, match=r"the engine's answer contradicts itself: .* do not cover \d+ ids"):
        await run_environment(context, Sample(prompt="What is 21*2?", index=0), context.params())


class Paying(DoubleEnv):
    """Rewards every other turn, continues the conversation, and gives the trajectory 0.75."""

    max_turns = 4

    async def step(self, turn: Turn) -> Step:
        return Step([{"role": "user", "content": "and?"}], reward=None if turn.index % 2 else turn.index / 10)

    async def reward(self, sample: Sample) -> float:
        return 0.75


async def test_step_rewards_have_one_entry_a_turn(chat: Chat) -> None:
    sample, _ = await play(chat, [f"fine{END}"], Paying)
    assert sample.metadata["step_rewards"] == [None, 0.2, None, 0.4]
    sample, _ = await play(chat, [CALL, f"fine{END}"])
    assert sample.metadata["step_rewards"] == [None, None]


async def test_a_turn_that_was_cut_has_an_entry_too(chat: Chat) -> None:
    sample, _ = await play(chat, [f"hm{END}", f"a long answer without an end{END}"], Paying, rollout_max_response_len=4)
    assert sample.metadata["step_rewards"] == [None, None]
    assert sample.status is Status.TRUNCATED


async def test_split_siblings_earn_the_trajectorys_reward_and_know_the_steps_before(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    chat = Chat.load(str(tmp_path), chat_template=chat_templates()["qwen3"], template_rewrite_policy="split")
    context = make_context(chat, ScriptedEngine(chat, [f"<think>\nhm\n</think>\n\nfine{END}"]), Paying)
    samples = await run_environment(context, Sample(prompt="go", index=7), context.params())
    assert [sample.reward for sample in samples] == [0.75] * 4
    assert [sample.rollout_id for sample in samples] == [7] * 4
    assert [sample.metadata["step_rewards"] for sample in samples] == [
        [None],
        [None, 0.2],
        [None, 0.2, None],
        [None, 0.2, None, 0.4],
    ]
    for turn, sample in enumerate(samples, 1):
        assert {s.turn for s in sample.validate().segments if s.origin is Origin.MODEL} == {turn}


class Compacting(Paying):
    """Restarts with a summary after its second turn."""

    async def step(self, turn: Turn) -> Step:
        if turn.index == 2:
            return Step(restart=[{"role": "user", "content": f"Summary of {turn.sample.response_length} tokens."}])
        return await super().step(turn)


async def test_a_step_may_begin_the_conversation_anew(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [f"fine{END}"])
    context = make_context(chat, engine, Compacting)
    first, second = await run_environment(context, Sample(prompt="go", index=7), context.params())
    assert (first.reward, second.reward, first.rollout_id, second.rollout_id) == (0.75, 0.75, 7, 7)
    assert (first.stop_reason, second.stop_reason) == ("restart", "max_turns")
    for sample, turns in ((first, {1, 2}), (second, {3, 4})):
        assert {s.turn for s in sample.validate().segments if s.origin is Origin.MODEL} == turns
    assert chat.decode(second.tokens[: second.prompt_length]).count("Summary of ") == 1
    prompts = [call[1] for call in engine.calls]
    assert prompts[2] == second.tokens[: second.prompt_length]
    assert prompts[3] == second.tokens[: len(prompts[3])]
    assert [message["role"] for message in second.metadata["messages"]] == [
        "user",
        "assistant",
        "user",
        "assistant",
        "user",
    ]


@pytest.mark.parametrize(
    "step",
    [Step(restart=[]), Step(restart=[{"role": "user", "content": "x"}], done=True), Step(restart="text")],  # type: ignore[arg-type]
)
async def test_a_restart_that_says_two_things_is_refused(chat: Chat, step: Step) -> None:
    class Wrong(DoubleEnv):
        async def step(self, turn: Turn) -> Step:
            return step

    with pytest.raises(EnvFailure, match="Wrong.step"):
        await play(chat, [f"fine{END}"], Wrong)


class OnlyPaid(Environment):
    """Rewards the turn in which the model stops; there is no other reward."""

    payment: ClassVar[Any] = 1.0

    async def step(self, turn: Turn) -> Step:
        return Step(done=True, reward=self.payment)


async def test_an_environment_may_reward_by_its_steps_alone(chat: Chat) -> None:
    sample, _ = await play(chat, [f"fine{END}"], OnlyPaid)
    assert (sample.reward, sample.metadata["step_rewards"]) == (1.0, [1.0])


@pytest.mark.parametrize("bad", [math.nan, True, "1"])
async def test_a_steps_reward_is_a_number(chat: Chat, bad: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnlyPaid, "payment", bad)
    with pytest.raises(EnvFailure, match=r"OnlyPaid.step: Step.reward must be a finite number or None, got"):
        await play(chat, [f"fine{END}"], OnlyPaid)


async def test_siblings_share_a_combined_rewards_credit(tmp_path: Path) -> None:
    class Combined(Paying):
        async def reward(self, sample: Sample) -> Any:
            return await combine(Weighted(lambda sample: 0.8), steps=StepRewards("average"))(self.args, sample)

    make_tiny_model(tmp_path)
    chat = Chat.load(str(tmp_path), chat_template=chat_templates()["qwen3"], template_rewrite_policy="split")
    context = make_context(chat, ScriptedEngine(chat, [f"<think>\nhm\n</think>\n\nfine{END}"]), Combined)
    samples = await run_environment(context, Sample(prompt="go", index=7), context.params())
    assert [sample.reward for sample in samples] == pytest.approx([1.4] * 4)
    for sample in samples:
        assert sample.metadata["step_credit"] == pytest.approx([0.2, 0.4, 0.2, 0.6])


class InterruptedEngine(ScriptedEngine):
    """An engine whose answers are each interrupted within the last character before the end token."""

    async def generate(self, input_ids: Sequence[int], params: SamplingParams, **more: Any) -> Generation:
        got = await super().generate(input_ids, params, **more)
        return interrupted(self.chat, got, len(got.ids) - 2)


@pytest.mark.parametrize("skips", [True, False])
async def test_the_text_of_an_interrupted_answer_is_that_of_its_ids(chat: Chat, skips: bool) -> None:
    engine = InterruptedEngine(chat, [f"Fine \U0001f642{END}"])
    context = make_context(chat, engine, DoubleEnv, rollout_skip_special_tokens=skips)
    (sample,) = await run_environment(context, Sample(prompt="Hello", index=0), context.params())
    assert sample.validate().response == ("Fine \U0001f642" if skips else f"Fine \U0001f642{END}")
