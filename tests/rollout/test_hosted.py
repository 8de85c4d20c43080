"""Trajectories of a hosted model: the same environments, conversations in messages, and no token ids."""

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentrl import Environment, Sample, Status, Step
from agentrl.buffer.codec import decode_group, encode_group
from agentrl.config import Args
from agentrl.engine.hosted import HostedModel
from agentrl.engine.settings import EngineSettings
from agentrl.envs import Turn
from agentrl.errors import EngineRejected, EnvFailure, SampleError
from agentrl.groups import Group
from agentrl.observability.trajectories import describe_sample, id_texts
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.filters import judged
from agentrl.rollout.functions import GenerateFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.helpers import generate_single
from agentrl.rollout.hosted import NoChat
from agentrl.rollout.rewards import Grader
from agentrl.rollout.stats import describe
from agentrl.train.batch import TrainBatch
from tests.engine.faults import FaultyServer, Reply, serving, status
from tests.engine.test_hosted import CALL, completion
from tests.rollout.scripted import make_context
from tests.rollout.test_agent_loop import DoubleEnv
from tests.support.vision import picture

DOUBLE = {**CALL, "function": {"name": "double", "arguments": '{"x": 21}'}}
CALLS = status(200, completion("tool_calls", tool_calls=[DOUBLE]))
SAYS = status(200, completion(content="It is 42."))


class Seen(DoubleEnv):
    """The reward shows what its step method received."""

    async def reset(self, sample: Sample) -> list[dict[str, Any]]:
        self.turns: list[Turn] = []
        return [{"role": "system", "content": "Be exact."}, *await super().reset(sample)]

    async def step(self, turn: Turn) -> Step:
        self.turns.append(turn)
        return await super().step(turn)

    async def reward(self, sample: Sample) -> float:
        assert [turn.content for turn in self.turns] == ["", "It is 42."]
        assert [list(turn.ids) for turn in self.turns] == [[], []]
        return float(sample.response == "42\nIt is 42.")


@asynccontextmanager
async def playing(
    *script: Reply,
    environment: type[Environment] = DoubleEnv,
    generate: Any = None,
    more: Mapping[str, Any] | None = None,
    **settings: Any,
) -> AsyncIterator[tuple[GroupPlayer, FaultyServer]]:
    async with serving(*script) as server:
        given = {"engine_retry_backoff": 0.0, "engine_max_retries": 0}
        own = EngineSettings(engine="openai", base_url=f"{server.url}/v1", hosted_model="big", **given)
        async with HostedModel(own) as model:
            context: RolloutContext = make_context(NoChat.as_chat(), model, environment, **settings)  # type: ignore[arg-type]
            context = replace(context, args=Args({**context.args._values, **(more or {})}))
            function = generate and GenerateFunction.of(generate, "mine")
            yield GroupPlayer(context, Grader(context.settings, context.args), function), server


async def played(*script: Reply, **settings: Any) -> tuple[Sample, FaultyServer]:
    async with playing(*script, **settings) as (player, server):
        sample = Sample(prompt="What is 21*2?", index=0, group_index=0)
        (found,) = await player.group([sample], evaluation=False)
    return found.validate(), server


async def test_the_same_environment_and_tools_play() -> None:
    sample, server = await played(CALLS, SAYS, environment=Seen)
    assert (sample.status, sample.stop_reason, sample.reward) == (Status.COMPLETED, "done", 1.0)
    first, second = server.generates
    assert [message["role"] for message in first["messages"]] == ["system", "user"]
    assert first["tools"][0]["function"]["name"] == "double"
    assert second["messages"][2:] == [
        {"role": "assistant", "content": None, "tool_calls": [DOUBLE]},
        {"role": "tool", "tool_call_id": "c7", "content": "42"},
    ]
    assert first["seed"] != second["seed"]
    assert sample.metadata["messages"][-1] == {"role": "assistant", "content": "It is 42."}
    assert sample.metadata["tools"] == first["tools"]


async def test_a_sample_has_no_token_ids_and_says_who_played_it() -> None:
    sample, server = await played(CALLS, SAYS)
    assert sample.hosted == f"big at {server.url}/v1"
    assert (sample.tokens, sample.response_length, sample.loss_mask, sample.rollout_log_probs) == ([], 0, None, None)
    (stored,) = decode_group(encode_group([sample]))
    assert stored == sample
    (row,) = describe([sample], None)
    assert (row["turns"], row["response_length"], row["tool_ok"]) == (2, 6, 1)


async def test_a_group_is_kept_and_cannot_be_trained() -> None:
    sample, _ = await played(CALLS, SAYS)
    assert judged([sample], None, None).keep
    for supervised in (False, True):
        with pytest.raises(SampleError, match=r"hosted model big at .* no token ids to train on; .*agentrl sft"):
            TrainBatch.from_samples([[sample]], supervised=supervised)


async def test_limits_and_lengths_end_a_trajectory() -> None:
    assert (await played(CALLS))[0].stop_reason == "max_turns"
    sample, _ = await played(status(200, completion("length", content="It is")))
    assert (sample.stop_reason, sample.status) == ("length", Status.TRUNCATED)


async def test_a_failure_leaves_the_messages_and_no_tokens() -> None:
    sample, _ = await played(CALLS, status(200, completion("content_filter")))
    assert sample.metadata["failure"]["kind"] == "content_filter"
    assert (sample.tokens, sample.remove_sample, sample.reward) == ([], True, 0.0)
    assert [message["role"] for message in sample.metadata["messages"]] == ["user", "assistant", "tool"]


async def test_what_the_server_refuses_ends_the_run_once() -> None:
    async with playing(status(403, b'{"error": "no such plan"}')) as (player, server):
        with pytest.raises(EngineRejected, match="answered 403: no such plan"):
            await player.group([Sample(prompt="x", index=0, group_index=0)], evaluation=True)
    assert len(server.generates) == 1


async def test_unreadable_calls_are_answered_by_the_environment() -> None:
    bad = {**DOUBLE, "function": {"name": "double", "arguments": "21"}}
    sample, server = await played(status(200, completion(tool_calls=[bad])), SAYS)
    assert sample.metadata["counters"]["tool_broken"] == 1
    said = server.generates[1]["messages"]
    assert said[1] == {"role": "assistant", "content": "double 21"}
    assert said[2] == {"role": "user", "content": "Error: the tool call could not be read: double 21"}


async def mine(args: Any, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    sample.response = await generate_single([{"role": "user", "content": "x"}])
    return sample


async def mine_whole(args: Any, samples: Group) -> Group:
    await generate_single([{"role": "user", "content": "x"}])
    return samples


@pytest.mark.parametrize("generate", [mine, mine_whole])
async def test_a_generate_function_is_told_why_it_cannot_play(generate: Any) -> None:
    async with playing(SAYS, generate=generate) as (player, server):
        with pytest.raises(EnvFailure, match="gives no token ids and no log-probs") as raised:
            await player.group([Sample(prompt="x", index=0, group_index=0)], evaluation=False)
    assert raised.value.kind == "hosted_no_tokens"
    assert server.generates == []


async def test_pages_show_the_messages() -> None:
    sample, _ = await played(CALLS, SAYS, environment=Seen)
    shown = describe_sample(sample, id_texts)
    assert [(part.kind, part.turn, text_of(part.tokens)) for part in shown.parts] == [
        ("prompt", 0, "Be exact."),
        ("prompt", 0, "What is 21*2?"),
        ("model", 1, 'double {"x": 21}'),
        ("env", 1, "42"),
        ("model", 2, "It is 42."),
    ]
    assert "id" not in shown.parts[-1].tokens[0].note


def text_of(tokens: Sequence[Any]) -> str:
    return "".join(token.text for token in tokens)


async def test_the_runs_limits_of_images_hold(tmp_path: Path) -> None:
    class Looks(DoubleEnv):
        async def reset(self, sample: Sample) -> list[dict[str, Any]]:
            parts = [{"type": "image", "image": f"{at}.png"} for at in range(2)]
            return [{"role": "user", "content": [*parts, {"type": "text", "text": "What?"}]}]

    for at in range(2):
        (tmp_path / f"{at}.png").write_bytes(picture(30, 20, at))
    given: dict[str, Any] = {"image_root": str(tmp_path), "image_max_count": 2}
    sample, _ = await played(SAYS, environment=Looks, more=given)
    assert len(sample.images) == 2
    with pytest.raises(EnvFailure, match="has 2 images, at most 1"):
        await played(SAYS, environment=Looks, more={**given, "image_max_count": 1}, failure_policy={"env": "raise"})
