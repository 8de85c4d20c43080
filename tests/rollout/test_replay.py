"""Finished samples from a data source are used unchanged."""

from typing import Any

import pytest

from agentrl import Sample, Status
from agentrl.chat import Chat
from agentrl.errors import EnvFailure
from tests.rollout.scripted import END, EchoEnv, Store, build


class Replay(Store):
    """Returns groups as a buffer of finished samples does."""

    reward: float | None = 7.0
    mask: list[int] | None = None

    def lease(self, n: int, step: int) -> list[list[Sample]]:
        groups = super().lease(n, step)
        for sample in (s for group in groups for s in group):
            sample.set_prompt_tokens([1, 2])
            sample.append_model([3], [-0.5], "0", text="as it was")
            sample.reward, sample.status = self.reward, Status.COMPLETED
            sample.metadata["counters"] = {"tool_calls": 3}
            sample.loss_mask = self.mask or sample.loss_mask
        return groups


@pytest.mark.parametrize("form", ["environment", "sample", "group"])
async def test_they_are_not_generated_again(chat: Chat, form: str) -> None:
    async def per_sample(args: Any, sample: Sample, params: object) -> None:
        raise AssertionError

    async def whole(args: Any, samples: list[Sample]) -> None:
        raise AssertionError

    generate = {"environment": None, "sample": per_sample, "group": whole}[form]
    loop, engine = build(chat, [f"x{END}"], generate=generate, store=Replay(), rollout_batch_size=1)
    sample = (await loop.run(0)).groups[0][0]
    assert not engine.calls
    assert (sample.response, sample.reward, sample.status) == ("as it was", 7.0, Status.COMPLETED)
    assert sample.metadata == {"counters": {"tool_calls": 3}}


async def test_one_without_a_reward_is_graded(chat: Chat) -> None:
    store = Replay()
    store.reward = None
    loop, _ = build(chat, [], environment=EchoEnv, store=store, reward=lambda args, sample: 2.0)
    assert (await loop.run(0)).groups[0][0].reward == 2.0


async def test_one_that_is_misaligned_is_refused(chat: Chat) -> None:
    store = Replay()
    store.mask = [1, 1]
    loop, _ = build(chat, [], store=store)
    with pytest.raises(EnvFailure, match="the data source returned a misaligned sample"):
        await loop.run(0)
