"""Episodes with a scripted model, and checks of their masks."""

from collections.abc import Sequence
from typing import Any

from agentrl import Environment, Sample
from agentrl.chat import Chat
from agentrl.envs import Environments, EnvSpec
from agentrl.rollout.agent_loop import run_environment
from tests.rollout.scripted import END, ScriptedEngine, make_context


async def play(
    chat: Chat, kind: type[Environment], group: int, answers: Sequence[str], **arguments: Any
) -> tuple[Sample, list[str]]:
    """Play one episode. Returns the sample of group `group`, and the ids that the model read before each turn. The
    masked tokens must be those that the engine returned, in order, and each request must be the sample so far."""
    engine = ScriptedEngine(chat, [f"{answer}{END}" for answer in answers])
    context = make_context(chat, engine, kind, 1 << 16)
    assert context.environments is not None
    context.environments.update(Environments({"": EnvSpec(kind, context.args, arguments)}))
    first = Sample(group_index=group, index=group)
    sample = (await run_environment(context, first, context.params()))[0].validate()
    turns = len(engine.calls)
    said = [chat.encode(f"{answer}{END}") for answer in [*answers, *[answers[-1]] * turns][:turns]]
    assert sample.loss_mask is not None
    behind = sample.tokens[sample.prompt_length :]
    assert [t for t, m in zip(behind, sample.loss_mask, strict=True) if m] == [t for ids in said for t in ids]
    assert sum(sample.loss_mask) == sum(map(len, said))
    assert all(ids == sample.tokens[: len(ids)] for _, ids in engine.calls)
    contents = [message["content"] for message in sample.metadata["messages"] if message["role"] == "user"]
    return sample, contents
