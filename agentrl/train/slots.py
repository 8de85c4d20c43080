"""Models in one trainer process: a slot is one model with everything that belongs to it.

Slots share the `Place` and nothing else, so another model is another slot. What a framework makes of a model is its `Network`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.ops.mismatch import check_agreement
from agentrl.errors import TrainError
from agentrl.train.batch import TrainBatch
from agentrl.train.checkpoints import Identity
from agentrl.train.hf import HFFolder
from agentrl.train.microbatches import Rows, inputs_of
from agentrl.train.network import Place, attention_crossover, frozen
from agentrl.train.objective import StepInputs
from agentrl.train.packing import Plan, make_plan
from agentrl.train.tree import Prefixes


class ModelSlot:
    """A model that stays as it lies in `folder`, on the device, without gradients: the reference, a teacher."""

    ends_in_values: ClassVar[bool] = False
    learns: ClassVar[bool] = False

    def __init__(self, folder: HFFolder, place: Place) -> None:
        self.place = place
        self.network = place.network(folder, place, values=self.ends_in_values, learns=self.learns)
        self.shape, self.passes = self.network.shape, self.network.passes

    def plan(self, batch: TrainBatch) -> Plan:
        """Who computes what of `batch`, the same on every rank."""
        chosen, dp = self.place.settings, self.place.ranks.dp
        inputs = inputs_of(batch)
        self.network.check(max(map(len, inputs), default=0))
        prefixes = Prefixes.of(inputs) if chosen.share_prefixes else None
        cp, most = chosen.context_parallel_size, chosen.max_tokens_per_gpu
        return make_plan(
            list(map(len, inputs)),
            dp,
            prefixes=prefixes,
            max_tokens=most and most * cp,
            micro_batch_size=chosen.micro_batch_size,
            alignment=2 * cp if cp > 1 else 1,  # context parallelism cuts each run of tokens into 2 * cp equal chunks
            balance=chosen.balance_data,
            attention_crossover=attention_crossover(self.shape),
        )

    def log_probs(self, batch: TrainBatch, rows: Rows) -> NDArray[np.float32]:
        """Natural-log probabilities [R] in the batch's flat response layout, 0 where `rows` leaves out, on every rank."""
        return self.passes.log_probs(batch, self.plan(batch), rows)

    @torch.no_grad()
    def become(self, other: ModelSlot) -> None:
        """Take over the weights of a slot of the same sizes."""
        theirs = other.network.parameters()
        for name, parameter in self.network.parameters().items():
            parameter.copy_(theirs[name])

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """As `Network.memory`, with the optimizer's where there is one."""
        return self.network.memory()


class Unadapted(ModelSlot):
    """The actor without its adapter: the reference of a run that trains one, at no cost of memory."""

    def __init__(self, actor: ModelSlot) -> None:
        self.place, self.network, self.shape, self.passes = actor.place, actor.network, actor.shape, actor.passes

    def log_probs(self, batch: TrainBatch, rows: Rows) -> NDArray[np.float32]:
        with self.network.unadapted():
            return super().log_probs(batch, rows)

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        return [], []


class TrainedSlot(ModelSlot):
    """A model that learns; `total_steps` as the backend's.

    Attributes:
        seen: the log-probs [R] of the last step's tokens before the step, 0 where masked, on every rank.
    """

    learns = True
    seen: NDArray[np.float32]

    def __init__(self, folder: HFFolder, place: Place, total_steps: int | None) -> None:
        super().__init__(folder, place)
        self.optimizer = self.network.optimizer(total_steps)

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        kept, anew = super().memory()
        return kept + self.optimizer.memory(), anew

    def step(self, batch: TrainBatch, inputs: StepInputs, algorithm: Algorithm, number: int) -> dict[str, float]:
        """Take optimizer step `number` (from 0) on the whole of `batch`; returns the loss and its statistics.

        Raises:
            TrainError: the loss or the gradient is not finite, or the engine's log-probs are too far from the trainer's; the
                weights are as before.
        """
        self.network.zero_grad()
        self.optimizer.inner.zero_grad()
        before = 0 if self.ends_in_values else self.place.settings.actor_starts
        self.place.hooks.before_step(before + number, self.network.model, self.optimizer.inner)
        metrics = self._gradients(batch, inputs, algorithm)
        if not math.isfinite(metrics["loss"]):
            raise TrainError(
                f"optimizer step {number}: the loss of {algorithm.origin} is {metrics['loss']}; the weights were left "
                "as they are. Look at the batch's log-probs, advantages and rewards"
            )
        check_agreement(metrics, self.place.settings.ci_train_rollout_logprob_abs_diff_threshold)
        try:
            return metrics | self.optimizer.step(number)
        except TrainError as error:
            raise TrainError(f"{algorithm.origin}: {error}") from error

    def _gradients(self, batch: TrainBatch, inputs: StepInputs, algorithm: Algorithm) -> dict[str, float]:
        metrics, self.seen = self.passes.gradients(batch, self.plan(batch), inputs, algorithm)
        return metrics

    # ---- its part of a checkpoint -------------------------------------------------------------------------

    @property
    def identity(self) -> Identity:
        """What a checkpoint must be of for this slot to take it."""
        s = self.place.settings
        kind: dict[str, Any] = {
            "optimizer": s.optimizer,
            "distributed_optimizer": s.use_distributed_optimizer,
            "bf16": s.bf16,
        }
        kind |= frozen(s)
        if s.lora_rank is not None:
            kind |= {"lora_rank": s.lora_rank, "lora_alpha": s.lora_alpha, "target_modules": list(s.target_modules)}
        return Identity(self.network.sizes, kind)

    def state(self, *, stepped: bool, is_loading: bool) -> dict[str, Any]:
        """The backend's state of the model and, if `stepped`, of the optimizer. Collective.

        Raises:
            CheckpointError: there is no form for the optimizer's state.
        """
        state = {"model": self.network.state()}
        if stepped:
            state["optimizer"] = self.optimizer.state(state["model"], is_loading=is_loading)
        return state

    def restore(self, loaded: dict[str, Any], *, stepped: bool) -> None:
        """Take over a loaded `state`; without optimizer state, as before the first step."""
        self.network.take(loaded["model"])
        self.optimizer.take(loaded["optimizer"] if stepped else None)


class CriticSlot(TrainedSlot):
    """A model that ends in one value a token, and learns it: PPO's critic (arXiv:1707.06347)."""

    ends_in_values = True

    def __init__(self, folder: HFFolder, place: Place, total_steps: int | None) -> None:
        super().__init__(folder, dataclasses.replace(place, settings=place.settings.of_critic), total_steps)

    def values(self, batch: TrainBatch) -> NDArray[np.float32]:
        """The value before each trained token [R] in the batch's flat response layout, 0 elsewhere, on every rank."""
        return self.passes.values(batch, self.plan(batch))

    def step(self, batch: TrainBatch, inputs: StepInputs, algorithm: Algorithm, number: int) -> dict[str, float]:
        try:
            found = super().step(batch, inputs, algorithm, number)
        except TrainError as error:
            raise TrainError(f"the critic: {error}") from None
        names = {"loss": "critic/loss", "grad_norm": "critic/grad_norm", "lr": "critic/lr"}
        return {names.get(name, name): value for name, value in found.items()}

    def _gradients(self, batch: TrainBatch, inputs: StepInputs, algorithm: Algorithm) -> dict[str, float]:
        return self.passes.value_gradients(batch, self.plan(batch), inputs, algorithm)
