"""The shop: its policy, its users, and its demonstrations."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from agentrl import Sample, Turn
from agentrl.envs import Environment, ModelUser, load_environment
from agentrl.errors import EnvFailure
from agentrl.sample import Status
from agentrl.tiny.create import create
from examples.second_model import served
from examples.tau_bench.lessons import HABITS, ShopLessons, demonstrate
from examples.tau_bench.shop import make_case
from examples.tau_bench.user import user_of


async def played(case: dict[str, Any], messages: list[Any]) -> tuple[Environment, Sample, list[str]]:
    """Play an agent that says what the assistant of `messages` says. Returns what it received."""
    env, heard = load_environment("examples.tau_bench.shop:ShopEnv").create(), []
    sample = Sample(**{name: case[name] for name in ("prompt", "label", "metadata")})
    assert await env.reset(sample) == messages[:1]
    said = [message for message in messages if message["role"] == "assistant"]
    for index, message in enumerate(said, 1):
        for call in message.get("tool_calls", ()):
            outcome = await env.toolbox.run(call["function"]["name"], call["function"]["arguments"], state=env)
            heard.append(outcome.text)
        if not message.get("tool_calls"):
            step = await env.step(Turn(index, message["content"], message["content"], sample=sample))
            heard += [reply["content"] for reply in step.messages]
            assert step.done == (message is said[-1])
    return env, sample, heard


@pytest.mark.parametrize("kind", HABITS)
async def test_only_good_service_leaves_the_records_right(kind: Any) -> None:
    rng, right = random.Random(1), 0
    for _ in range(40):
        case = make_case(rng)
        messages = demonstrate(case, kind, rng)
        env, sample, heard = await played(case, messages)
        shown = [message["content"] for message in messages[1:] if message["role"] != "assistant"]
        assert heard == shown, "the lessons show what users and tools really say"
        right += await env.reward(sample) == 1.0
    expected = {"good": range(40, 41), "unchecked": range(10, 31)}
    assert right in expected.get(kind, range(1))


async def test_a_conversation_that_was_cut_off_is_worth_nothing() -> None:
    rng = random.Random(2)
    case = make_case(rng)
    env, sample, _ = await played(case, demonstrate(case, "good", rng))
    sample.status = Status.TRUNCATED
    assert await env.reward(sample) == 0.0


def test_held_out_orders_occur_in_no_training_case() -> None:
    rng = random.Random(3)
    orders = {
        split: {n for _ in range(300) for n in make_case(rng, split)["metadata"]["records"]}
        for split in ("train", "test")
    }
    assert not orders["train"] & orders["test"]
    assert set(json.loads(make_case(rng)["label"]).values()) & {"cancelled", "returned"}


@pytest.mark.slow
async def test_a_second_model_may_be_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    create(tmp_path / "model", layers=1, hidden=32, corpus=ShopLessons().corpus())
    with served(tmp_path / "model", tmp_path / "logs") as url:
        monkeypatch.setenv("USER_URL", url)
        user = user_of(Sample(metadata={"wish": "Take it back.", "order": "1234"}))
        assert isinstance(user, ModelUser)
        reply = await user.reply("Which order is it?")
    assert reply is None or isinstance(reply, str)
    assert [message["role"] for message in user.messages] == ["system", "assistant", "user", "assistant"]
    assert "1234" in user.messages[0]["content"]
    with pytest.raises(EnvFailure, match="the user's model at .* gave no answer"):
        await user.reply("Are you there?")
