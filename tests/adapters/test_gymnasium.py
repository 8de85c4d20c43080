"""`gymnasium:ID` against the real library: rewards and observations are the library's own for the same actions."""

import random
from pathlib import Path
from typing import Any

import pytest

from agentrl.buffer.reader import Filter, StoreReader
from agentrl.chat import Chat
from agentrl.config import Args
from agentrl.envs import Environments, load_environment
from agentrl.envs.base import Turn
from agentrl.errors import PluginError
from agentrl.sample import Sample
from tests.adapters.played import play
from tests.rollout.scripted import ScriptedEngine, make_context
from tests.support.runs import RunKit

gymnasium = pytest.importorskip("gymnasium")

REGISTERS = """
import gymnasium
from gymnasium import spaces

class Spell(gymnasium.Env):
    observation_space = spaces.Dict({"word": spaces.Text(8), "left": spaces.MultiDiscrete([3, 3])})
    action_space = spaces.Text(3, min_length=2, charset="ab")

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return {"word": "spell", "left": self.np_random.integers(0, 3, 2)}, {}

    def step(self, action):
        return {"word": action, "left": self.np_random.integers(0, 3, 2)}, len(action), action == "ab", False, {}

gymnasium.register("Spell-v0", Spell)
"""


def library(env_id: str, seed: int, actions: list[Any], **arguments: Any) -> tuple[list[str], float, bool]:
    """Play with the library alone. Returns observations, the sum of rewards, and true if the game ended the episode."""
    env = gymnasium.make(env_id, **arguments)
    seen, total = [str(env.reset(seed=seed)[0])], 0.0
    for action in actions:
        observation, reward, terminated, truncated, _ = env.step(action)
        seen.append(str(observation))
        total += float(reward)
        if terminated or truncated:
            break
    env.close()
    return seen, total, terminated


@pytest.mark.parametrize("episodes", [20, pytest.param(200, marks=pytest.mark.slow)])
async def test_episodes_have_the_librarys_observations_and_rewards(chat: Chat, episodes: int) -> None:
    kind, ends, rewards = load_environment("gymnasium:FrozenLake-v1"), set(), set()
    for group in range(episodes):
        drawn, limit = random.Random(group), 8 if group % 4 else 100
        actions = [drawn.choice((1, 2)) for _ in range(limit)]
        answers = [drawn.choice(("{}", "I go {}.", "In 2 moves: **{}**")).format(action) for action in actions]
        arguments = {"success_rate": 0.9, "max_episode_steps": limit}
        sample, said = await play(chat, kind, group, answers, **arguments)
        seen, total, terminated = library("FrozenLake-v1", group, actions, **arguments)
        assert [said[0].rsplit("\n\n")[-1], *said[1:]] == seen
        assert sample.reward == total
        assert sample.stop_reason == ("done" if terminated else "time_limit")
        ends.add(sample.stop_reason)
        rewards.add(sample.reward)
    assert (ends, rewards) == ({"done", "time_limit"}, {0.0, 1.0})


async def test_an_answer_without_a_valid_action_has_reward_0_and_changes_nothing(chat: Chat) -> None:
    kind = load_environment("gymnasium:FrozenLake-v1")
    wrong = ["left", "4", "-1", "1.5", "x2", ""]
    sample, said = await play(chat, kind, 3, [*wrong, *"111221"], is_slippery=False)
    assert said[1] == "There is no valid action in the answer. Answer with one whole number from 0 to 3."
    assert said[1 : len(wrong) + 1] == [said[1]] * len(wrong)
    assert sample.metadata["counters"]["invalid_actions"] == len(wrong)
    assert sample.metadata["step_rewards"][: len(wrong)] == [0.0] * len(wrong)
    seen, _, _ = library("FrozenLake-v1", 3, [1, 1, 1], is_slippery=False)
    assert said[len(wrong) + 1 :][: len(seen) - 1] == seen[1:]


@pytest.mark.parametrize("answer", ["9" * 30, "9" * 5000, f"2, then {'1' * 5000}"])
async def test_a_number_that_is_too_long_is_no_action(answer: str) -> None:
    env = load_environment("gymnasium:FrozenLake-v1").create()
    await env.reset(Sample(group_index=0))
    step = await env.step(Turn(index=1, text=answer, content=answer))
    await env.close()
    assert (step.reward, step.done, step.info) == (0.0, False, {"invalid_actions": 1})


async def test_the_first_message_has_the_rules_and_the_rendered_text(chat: Chat) -> None:
    kind = load_environment("gymnasium:FrozenLake-v1")
    _, said = await play(chat, kind, 0, ["1"] * 9, render_mode="ansi", is_slippery=False)
    assert "- 2: Move right" in said[0]
    assert "## Arguments" not in said[0]
    assert said[0].endswith("FFF\nFHFH\nFFFH\nHFFG\n")
    _, said = await play(chat, kind, 0, ["1"] * 9, instructions="Slide.")
    assert said[0].startswith("Slide.\n\nAnswer with one whole number")
    assert kind.max_turns == 100


async def test_texts_dicts_and_a_file_that_registers(chat: Chat, tmp_path: Any) -> None:
    (tmp_path / "spelling.py").write_text(REGISTERS)
    kind = load_environment(f"gymnasium:{tmp_path}/spelling.py:Spell-v0")
    sample, said = await play(chat, kind, 7, ["abc", "bb", "ab\n"])
    seen = gymnasium.make("Spell-v0").reset(seed=7)[0]
    assert said[0].endswith(f"left: {', '.join(map(str, seen['left'])).join('[]')}\nword: spell")
    assert "Answer with a text of 2 to 3 of the characters 'ab' and nothing else." in said[1]
    assert [sample.reward, sample.stop_reason, len(said)] == [4.0, "done", 4]


@pytest.mark.parametrize(
    ("env_id", "message"),
    [
        ("Pendulum-v1", r"its action space is Box\(.*expected Discrete or Text"),
        ("FrozenLake-v7", "Environment version `v7` for environment `FrozenLake` doesn't exist"),
        ("no_module_here:Some-v0", "no module 'no_module_here'"),
    ],
)
async def test_what_cannot_be_played_is_named_before_the_run(chat: Chat, env_id: str, message: str) -> None:
    async def start() -> None:
        kind = load_environment(f"gymnasium:{env_id}")
        await kind.setup(make_context(chat, ScriptedEngine(chat, []), kind).args)

    with pytest.raises(PluginError, match=message):
        await start()


def test_arguments_are_the_librarys() -> None:
    from agentrl.config import Args

    given = {"is_slippery": False, "map_name": "8x8"}
    loaded = Environments.load("gymnasium:FrozenLake-v1", given, Args({"env": None}))
    assert loaded[""].arguments == given


async def test_a_step_limit_of_the_arguments_is_the_limit_of_turns() -> None:
    for given, limit in ({"max_episode_steps": 300}, 300), ({"max_episode_steps": -1}, 1), ({}, 1):
        kind: Any = type("Lake", (load_environment("gymnasium:FrozenLake-v1"),), {"max_turns": 1})
        await kind.setup(Args({"env_args": given}))
        assert kind.max_turns == limit


async def test_two_uses_have_limits_of_their_own() -> None:
    paths = dict.fromkeys(("short", "long"), "gymnasium:FrozenLake-v1")
    loaded = Environments.load(paths, {"short": {"max_episode_steps": 2}}, Args({"env": paths}))
    for entry in loaded.values():
        await entry.kind.setup(entry.args)
    assert {name: entry.kind.max_turns for name, entry in loaded.items()} == {"short": 2, "long": 100}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_rollout_workers_train_with_a_file_that_registers(tmp_path: Path) -> None:
    kit = RunKit.make(tmp_path)
    (tmp_path / "spelling.py").write_text(REGISTERS)
    given: dict[str, Any] = {
        "prompt_data": None,
        "label_key": None,
        "rollout_workers": 2,
        "max_turns": 2,
        "num_rollout": 2,
    }
    load_environment(f"gymnasium:{tmp_path}/spelling.py:Spell-v0")  # this process makes it, too
    run = kit.start(kit.arguments(env="gymnasium:spelling.py:Spell-v0", **given))
    assert run.wait() == 0, run.output
    assert [row["workers/ready"] for row in run.metrics()] == [2, 2]
    with StoreReader(run.folder / "trajectories.sqlite") as reader:
        samples = [each for row in reader.query(Filter(equal={"kind": "train"})) for each in reader.group(row.key)]
    assert {sample.group_index for sample in samples} == set(range(8))
    for sample in samples:
        seed, prompt = sample.group_index, sample.metadata["messages"][0]["content"]
        seen = gymnasium.make("Spell-v0").reset(seed=seed)[0]
        assert prompt.endswith(f"left: {', '.join(map(str, seen['left'])).join('[]')}\nword: spell")
