"""The custom generate and reward examples of slime's API reference, with only their imports changed."""

from pathlib import Path

from agentrl import Environment, Sample, Status, tool
from agentrl.chat import Chat
from agentrl.rollout.functions import GenerateFunction, RewardFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from tests.rollout.scripted import OneBatch, ScriptedEngine, Store, make_context

HERE = Path(__file__).parent / "api_reference"
END = "<|im_end|>"
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 15, "b": 27}}\n</tool_call>' + END


@tool
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


class AddEnv(Environment):
    tools = [add]


async def test_the_examples_run(chat: Chat) -> None:
    engine = ScriptedEngine(chat, [CALL, f"42{END}"])
    context = make_context(chat, engine, AddEnv, rollout_batch_size=2, n_samples_per_prompt=2, max_turns=5)
    generate = GenerateFunction.load(str(HERE / "custom_generate.py"))
    reward = RewardFunction.load(str(HERE / "custom_rm.py"), group=False)

    class Labelled(Store):
        def lease(self, n: int, step: int) -> list[list[Sample]]:
            groups = super().lease(n, step)
            for group in groups:
                for sample in group:
                    sample.label = "42"
            return groups

    runner = GroupPlayer(context, Grader(context.settings, context.args, reward), generate)
    result = await OneBatch(runner, Labelled()).run(0)
    for group in result.groups:
        for sample in group:
            sample.validate()
            assert sample.reward == 1.0
            assert sample.status is Status.COMPLETED
            assert sample.loss_mask is not None
            model = [t for t, m in zip(sample.tokens[-sample.response_length :], sample.loss_mask, strict=True) if m]
            assert model == chat.encode(CALL) + chat.encode(f"42{END}")
            assert "42" in chat.decode(sample.tokens)


async def test_batched_rewards_of_the_reference(chat: Chat) -> None:
    reward = RewardFunction.load(str(HERE / "custom_rm.py"), group=True)
    samples = [Sample(response="a", label="a"), Sample(response="b", metadata={"answer": "c"})]
    assert await reward(None, samples) == [1.0, 0.0]
