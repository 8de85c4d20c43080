"""retrain's trainer, implemented by our runs, and its rollout function."""

import asyncio
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agentrl.cluster.launch import train
from agentrl.compat.retrain.config import TrainingConfig
from agentrl.compat.retrain.environments import EnvironmentBridge
from agentrl.compat.retrain.formats import DataFormatBridge, RawRolloutData
from agentrl.compat.retrain.rewards import RewardBridge
from agentrl.config import RunSettings
from agentrl.dumps import save_rollout
from agentrl.envs import ALONE, Environments, EnvSpec
from agentrl.errors import CheckpointError
from agentrl.observability.metrics import read_metrics
from agentrl.rollout.agent_loop import run_environment
from agentrl.rollout.helpers import current
from agentrl.run.preflight import load_chat, resumed
from agentrl.runfolder import METRICS
from agentrl.sample import Sample
from agentrl.train.checkpoints import latest
from agentrl.train.learning_rate import end_of_decay


class SlimeTrainerAdapter:
    """The run that a settings file asks for, in `output_dir`; each call continues from the newest checkpoint there.
    `settings`, by our flat names, override the file."""

    def __init__(self, config: TrainingConfig, **settings: Any) -> None:
        self.settings = config.settings(**settings).check_complete("train")

    async def train(self, total_training_iterations: int | None = None) -> dict[str, Any]:
        """Train up to this number of rollouts (default: the file's), and return the last metrics."""
        total = total_training_iterations
        return await self._run(self.settings if total is None else self.settings.replace(num_rollout=total))

    async def step(self, experience_batch: Sequence[RawRolloutData]) -> dict[str, Any]:
        """Train on another program's episodes, in successive groups of `n_samples_per_prompt`. Rewards are those of
        `reward_setup`, else the sums of the environment's rewards. Raises SampleError: an episode is invalid."""
        bridge = DataFormatBridge(load_chat(self.settings))
        setup = self.settings.compat.compat_options.get("reward_setup", {})
        samples = [bridge.rollout_to_sample(rollout, at) for at, rollout in enumerate(experience_batch)]
        size = self.settings.rollout.n_samples_per_prompt
        groups = [samples[at : at + size] for at in range(0, len(samples), size)]
        for group in groups if setup else ():
            for sample, reward in zip(group, await RewardBridge(**setup).rewards(None, group), strict=True):
                sample.reward = reward
        found, dumps = resumed(self.settings), str(Path(self.settings.observability.output_dir) / "experience")
        number = 0 if found is None else found.step + 1
        save_rollout(dumps, number, groups)
        train, total = self.settings.train, self.settings.rollout.num_rollout
        end = end_of_decay(train, (total or 0) * (train.num_steps_per_rollout or 0) or None)
        more = {"load_debug_rollout_data": dumps, "num_rollout": number + 1, "lr_decay_iters": end}
        return await self._run(self.settings.replace(**more))

    def save_checkpoint(self, checkpoint_directory: str) -> None:
        """Copy the newest checkpoint's folder into `checkpoint_directory`."""
        if (found := resumed(self.settings)) is None:
            raise CheckpointError("nothing was trained yet: there is no checkpoint to save")
        shutil.copytree(found.path, Path(checkpoint_directory) / found.path.name)

    def load_checkpoint(self, checkpoint_directory: str) -> None:
        """Continue from the newest checkpoint in the folder, if `output_dir` has none of its own. Raises
        CheckpointError: the folder has none, or the run has its own."""
        if latest(checkpoint_directory) is None:
            raise CheckpointError(f"{checkpoint_directory}: there is no complete checkpoint in it")
        train, place = self.settings.train, self.settings.observability.output_dir
        if (own := latest(Path(train.save or Path(place) / "checkpoints").expanduser())) is not None:
            raise CheckpointError(f"the run goes on from its own {own.path}; give it another output_dir")
        self.settings = self.settings.replace(load=checkpoint_directory)

    async def _run(self, settings: RunSettings) -> dict[str, Any]:
        await asyncio.to_thread(train, settings)
        rows = read_metrics(Path(settings.observability.output_dir) / METRICS)
        return {name: value for row in rows for name, value in row.items()}


class RolloutBridge:
    """Environment and rewards in one generate function: `--custom-generate-function-path file.py:generate`.
    `environment` is a class with retrain's form, or its path, and `config` its keyword arguments. Without `rewards` the
    reward is the sum of the environment's step rewards.

        generate = RolloutBridge(MyEnvironment, RewardBridge({"task_completion": {"weight": 1.0}})).generate"""

    def __init__(self, environment: Any, rewards: RewardBridge | None = None, config: dict[str, Any] | None = None):
        self._arguments, self._rewards = {"environment": environment, "config": config}, rewards

    async def generate(
        self, args: Any, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False
    ) -> list[Sample]:
        """Generate one episode into `sample`, and reward it, for training or evaluation."""
        played = Environments({ALONE: EnvSpec(EnvironmentBridge, args, self._arguments)})
        context = replace(current(), environments=played, evaluating=evaluation)
        params = replace(context.params(evaluation=evaluation), **sampling_params)
        samples = await run_environment(context, sample, params, grade=self._rewards is None)
        if self._rewards is not None:
            for member in samples:
                member.reward = await self._rewards.reward(args, member)
        return samples
