"""The team: the author of each sample, each member's reward, and that members are compared within their role."""

import os
import random
import re
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

from agentrl import Sample
from agentrl.algorithms.registry import algorithm_of
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.chat import Chat
from agentrl.config import Args, RunSettings
from agentrl.engine.pool import EnginePool
from agentrl.envs import Environments, load_environment
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.functions import GenerateFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import RolloutSettings
from agentrl.tiny.create import create
from agentrl.train.batch import TrainBatch
from agentrl.train.objective import estimate
from examples.multi_agent.lessons import TeamLessons
from examples.multi_agent.run import EXAMPLE, write_data
from examples.multi_agent.team import OPPONENT, ROLES, TEAM, opponent, said
from tests.examples.conftest import SIZE, Questions
from tests.rollout.scripted import OneBatch

CONFIG = Path("examples/multi_agent/cpu.yaml")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    create(folder, layers=1, hidden=32, corpus=TeamLessons().corpus())
    return folder


@pytest.mark.slow
async def test_members_are_samples_of_one_trajectory_and_compared_within_their_role(
    model: Path, server: str, pool: EnginePool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPPONENT, server)
    settings = RolloutSettings(rollout_batch_size=4, n_samples_per_prompt=SIZE, rollout_max_response_len=6)
    args = Args({**settings.model_dump(), "prompt_data": None})
    generate = GenerateFunction.load("examples.multi_agent.team:generate")
    environments = Environments.alone(load_environment("agentrl.demo.task:CalculatorEnv"), args)
    context = RolloutContext(settings, args, Chat.load(str(model)), pool, 1024, environments)
    player = GroupPlayer(context, Grader(settings, args, None), generate)
    groups = (await OneBatch(player, Questions(write_data(tmp_path, 0)[0])).run(0)).groups

    draw = random.Random(0)
    for group in groups:
        teams: dict[int | None, list[Sample]] = defaultdict(list)
        for sample in group:
            teams[sample.rollout_id].append(sample)
        assert len(teams) == SIZE
        for team in teams.values():
            assert [one.metadata["role"] for one in team] == list(ROLES)
            assert [{segment.turn for segment in one.segments} - {0} for one in team] == [{1}, {2}, {3}]
            assert {one.reward for one in team} <= {0.0, 1.0, TEAM, 1.0 + TEAM}
            assert all(said(one) == one.label for one in team if one.reward in (1.0, 1.0 + TEAM))
            for one in team:
                one.reward = draw.random()  # this model is untrained
    algorithm = algorithm_of(RunSettings.from_file(CONFIG).algorithm)
    batch = TrainBatch.from_samples(groups)
    found = estimate(batch, algorithm).advantages.numpy()
    samples = [sample for group in groups for sample in group]
    for group in groups:
        for role in ROLES:
            own = [
                i for i, s in enumerate(samples) if s.group_index == group[0].group_index and s.metadata["role"] == role
            ]
            got = [found[batch.response_slice(i)][batch.sample_loss_mask(i) == 1][0] for i in own]
            rewards = np.array([samples[i].reward for i in own], float)
            assert np.corrcoef(got, rewards)[0, 1] > 0.999, "relative to the role's own mean"
            assert abs(np.mean(got)) < 1e-5


def test_the_settings_give_each_role_its_own_baseline() -> None:
    assert isinstance(settings := RunSettings.from_file(CONFIG).algorithm, AlgorithmSettings)
    assert (settings.turn_credit, settings.gamma) == ("returns", 0.0)


async def test_the_opponent_has_the_calculator_and_no_part_in_the_run(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OPPONENT, server)
    once = await opponent("12*13", 7)
    assert once == await opponent("12*13", 7)
    assert re.fullmatch(r"(-?\d+)?", once)


def test_a_server_of_the_users_own_is_the_opponent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(OPPONENT, "http://127.0.0.1:1")
    with EXAMPLE.others(tmp_path, print) as flags:
        assert (list(flags), os.environ[OPPONENT]) == ([], "http://127.0.0.1:1")
    assert os.environ[OPPONENT] == "http://127.0.0.1:1"


async def test_most_skill_lessons_copy_a_number_with_a_digit_twice() -> None:
    """They need exact copying: 3779 must not become 3799."""
    lessons = TeamLessons().demonstrations("skill", 0)
    answers = [str((await anext(lessons))[-1]["content"]) for _ in range(200)]
    digits = [re.sub(r"\D", "", answer) for answer in answers]
    assert 0.6 < np.mean([len(set(number)) < len(number) for number in digits]) < 0.9
