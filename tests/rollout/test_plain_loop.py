"""The runner against a plain loop that plays one trajectory after another: the same tokens, masks and rewards."""

from pathlib import Path

import anyio
import pytest

from agentrl import Environment, Sample, Step
from agentrl.chat import Chat
from agentrl.chat.session import ChatSession
from agentrl.config import Args
from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import SamplingParams
from agentrl.envs import Environments, Turn
from agentrl.rollout.context import RolloutContext, turn_seed
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import RolloutSettings
from tests.rollout.scripted import OneBatch, Store
from tests.support.tiny_models import VOCAB_SIZE, make_tiny_model

TURNS, LENGTH, SEED = 3, 6, 5


class Talking(Environment):
    """Answers every turn with its last token, after different times. Even ids earn a reward."""

    max_turns = TURNS

    async def step(self, turn: Turn) -> Step:
        await anyio.sleep(turn.ids[-1] % 3 / 1000)  # so that trajectories overtake each other
        return Step(messages=answer(turn.ids[-1]))

    async def reward(self, sample: Sample) -> float:
        return earned(sample.tokens[-1])


def answer(last: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"you ended with {last}"}]


def earned(last: int) -> float:
    return float(last % 2 == 0)


async def plain_loop(
    chat: Chat, pool: EnginePool, samples: list[Sample], stops: tuple[int, ...]
) -> list[tuple[list[int], list[int], float]]:
    """Return (tokens, loss mask, reward) of each sample, by 30 lines that do a rollout's work one request at a time."""
    played = []
    for sample in samples:
        session = ChatSession(chat, [{"role": "user", "content": str(sample.prompt)}])
        tokens, mask = list(session.prompt_ids), list[int]()
        for turn in range(1, TURNS + 1):
            params = SamplingParams(
                temperature=1.0,
                max_new_tokens=LENGTH,
                stop_token_ids=stops,
                no_stop_trim=True,
                sampling_seed=turn_seed(SEED, sample, turn),
            )
            generation = await pool.generate(tokens, params)
            session.append_model_turn(generation.ids)
            tokens += generation.ids
            mask += [1] * len(generation.ids)
            if generation.finish_reason.type == "length" or turn == TURNS:
                break
            delta = session.extend(answer(generation.ids[-1]))
            tokens += delta.close + delta.env
            mask += [0] * len(delta.close + delta.env)
        played.append((tokens, mask, earned(tokens[-1])))
    return played


@pytest.mark.timeout(120)
async def test_many_at_once_are_what_each_alone_would_be(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    chat = Chat.load(str(tmp_path))
    settings = RolloutSettings(
        rollout_batch_size=6,
        n_samples_per_prompt=4,
        rollout_max_response_len=LENGTH,
        rollout_seed=SEED,
        # Otherwise most turns of a random model would reach their limit.
        rollout_stop_token_ids=tuple(range(100, 400)),
    )
    engine = EngineSettings(embedded_slots=8)
    async with (
        in_process(engine, tmp_path) as url,
        EnginePool([url], engine, vocab_size=VOCAB_SIZE) as pool,
    ):
        args = Args({**settings.model_dump(), "prompt_data": None})
        context = RolloutContext(settings, args, chat, pool, 512, Environments.alone(Talking, args))
        store = Store(size=4)
        batch = await OneBatch(GroupPlayer(context, Grader(settings, args)), store).run(0)
        fresh = [sample for group in Store(size=4).lease(6, 0) for sample in group]
        stops = (*chat.stop_token_ids, *settings.rollout_stop_token_ids)
        alone = await plain_loop(chat, pool, fresh, stops)
    together = [sample for group in batch.groups for sample in group]
    assert [(s.tokens, s.loss_mask, s.reward) for s in together] == alone
    assert len({tuple(s.tokens[s.prompt_length :]) for s in together}) > 12, "different seeds give different answers"
    assert len({max(part.turn for part in s.segments) for s in together}) > 1, "some end sooner than others"
