"""The rollout worker: one async Ray actor that owns the data, the ledger, the engine client and the rollout loop."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import ray

from agentrl.cluster.runtime import enter_workspace
from agentrl.config import RunSettings
from agentrl.engine import WeightGroup, WeightUpdate
from agentrl.run.metrics import rollout_metrics
from agentrl.run.rollouts import RolloutSession
from agentrl.train.batch import TrainBatch


@ray.remote
class RolloutWorker:
    """Generates, grades, evaluates, and hands weights to the engines."""

    def __init__(self, settings: RunSettings, folder: str, run_folder: str) -> None:
        enter_workspace(folder)
        self._settings, self._run_folder = settings, Path(run_folder)
        self._session: RolloutSession
        self._opened = False

    async def start(self, engine_urls: Sequence[str], checkpoint_step: int | None) -> dict[str, Any]:
        """Open everything.

        Args:
            engine_urls: the engines.
            checkpoint_step: the last rollout that the loaded checkpoint covers; None for a fresh start.
        """
        self._session = RolloutSession(self._settings, self._run_folder, engine_urls)
        self._opened = True
        await self._session.open()
        recovery = self._session.open_feed(checkpoint_step)
        return {"replayed": len(recovery.replayed), "released": len(recovery.released)}

    async def pid(self) -> int:
        """The process id."""
        return os.getpid()

    @ray.method(num_returns=2)
    async def generate(self, rollout_id: int) -> tuple[TrainBatch | None, dict[str, Any]]:
        """Generate rollout `rollout_id`.

        Returns:
            The train batch (kept in the object store until the trainers take it; None if the data ended), and a dict with `group_ids`,
            `metrics` and `ended` (the data has come to its end before the batch was full).
        """
        settings = self._settings
        result = await self._session.rollout(rollout_id)
        metrics = rollout_metrics(result.groups, result.stats, settings.rollout.reward_key)
        full = len(result.groups) >= settings.rollout.rollout_batch_size
        supervised = settings.algorithm.loss_type == "sft_loss"
        key = settings.rollout.reward_key
        batch = TrainBatch.from_samples(result.groups, key, supervised=supervised) if full else None
        ids = [group[0].group_index for group in result.groups]
        return batch, {"group_ids": ids, "metrics": metrics, "ended": not full}

    async def evaluate(self, step: int) -> dict[str, float]:
        """Play all evaluation sets with the engines' current weights."""
        return await self._session.evaluate(step)

    async def trained(self, group_ids: list[int], rollout_id: int) -> None:
        """The optimizer has taken the rollout's steps."""
        self._session.feed.trained(group_ids, rollout_id)

    async def checkpointed(self, rollout_id: int) -> None:
        """A durable checkpoint covers everything up to `rollout_id`."""
        self._session.feed.checkpointed(rollout_id)

    # ---- weights ------------------------------------------------------------------------------------------

    async def join_weight_group(self, group: WeightGroup) -> None:
        """Have every engine join the process group that weights are broadcast in; the trainer is rank 0."""
        await self._session.client.join_weight_group(group)

    async def receive_weights(self, update: WeightUpdate, version: str) -> None:
        """Give every engine new weights."""
        await self._session.client.receive(update, version)

    async def leave_weight_group(self, group: str) -> None:
        """Have every engine leave the process group."""
        await self._session.client.leave_weight_group(group)

    # ---- the end ------------------------------------------------------------------------------------------

    async def close(self) -> None:
        """Close the environment, the client and the ledger."""
        if self._opened:
            with anyio.move_on_after(10, shield=True):
                await self._session.close()
