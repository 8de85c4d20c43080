"""Simulated users: rules in their order, and an environment that forwards turns to another."""

from agentrl import Sample, Turn, tool
from agentrl.chat.messages import ToolCall
from agentrl.envs import ScriptedUser, SimulatedUser, UserEnvironment


async def test_rules_are_used_once_each_and_the_user_leaves_when_none_fits() -> None:
    user = ScriptedUser([("which order", "Order 17."), (r"order\b.*\?", "I said it.")])
    assert await user.reply("Which order is it?") == "Order 17."
    assert await user.reply("Which order is it?") == "I said it."
    assert await user.reply("Which order is it?") is None


class Talk(UserEnvironment):
    async def make_user(self, sample: Sample) -> SimulatedUser:
        return ScriptedUser([("name", str(sample.label))])

    @tool
    def double(self, x: int) -> int:
        """Twice a number."""
        return 2 * x


async def test_words_go_to_the_user_and_calls_to_the_tools() -> None:
    env = Talk()
    assert await env.reset(Sample(prompt="Hi.", label="Ann")) == [{"role": "user", "content": "Hi."}]
    step = await env.step(Turn(1, "<think>x</think>Your name?", "Your name?"))
    assert (step.messages, step.done) == ([{"role": "user", "content": "Ann"}], False)
    step = await env.step(Turn(2, "", "name", tool_calls=[ToolCall("c1", "double", {"x": 4})]))
    assert [message["content"] for message in step.messages] == ["8"]
    step = await env.step(Turn(3, "Your name?", "Your name?"))
    assert (step.done, step.stop_reason) == (True, "user_left")
