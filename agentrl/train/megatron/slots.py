"""Models in one trainer process: a slot is one model with everything that belongs to it.

1. `ModelSlot` computes log-probabilities: a model, its weight map and its passes. It stays as it was loaded, on the
   device: the reference model.
2. `TrainedSlot` also learns: gradient buffers, an optimizer, and its part of a checkpoint: the actor.
3. `CriticSlot` learns values instead of log-probabilities, by its own learning rate.
4. Slots share the `Place` and nothing else, so another model is another slot.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.ops.mismatch import check_agreement
from agentrl.errors import CheckpointError, TrainError
from agentrl.train.batch import TrainBatch
from agentrl.train.checkpoints import Identity
from agentrl.train.contracts import WeightSpec
from agentrl.train.hf import HFFolder
from agentrl.train.hooks import TrainHooks
from agentrl.train.megatron.data import Packer, Rows, inputs_of
from agentrl.train.megatron.families import family_of, shape_of
from agentrl.train.megatron.layout import Layout
from agentrl.train.megatron.model import (
    build_model,
    keep_gradients_flowing,
    transformer_config,
    unwrap,
)
from agentrl.train.megatron.optimizer import Optimizer, data_parallel
from agentrl.train.megatron.rope import Rope
from agentrl.train.megatron.step import Passes
from agentrl.train.megatron.weights import WeightMap
from agentrl.train.objective import StepInputs
from agentrl.train.packing import Plan, plan
from agentrl.train.settings import PATTERNS, TrainSettings
from agentrl.train.tree import Prefixes


@dataclass(frozen=True, slots=True)
class Place:
    """What the slots of a process have in common."""

    settings: TrainSettings
    layout: Layout
    device: torch.device
    temperature: float
    hooks: TrainHooks


class ModelSlot:
    """A model as it lies in `folder`, on the device, without gradients."""

    ends_in_values: ClassVar[bool] = False

    def __init__(self, folder: HFFolder, place: Place) -> None:
        self.place, self.shape = place, shape_of(folder.config)
        if self.ends_in_values:
            self.shape = dataclasses.replace(self.shape, tied=False)
        family, layout, device = family_of(folder.config), place.layout, place.device
        self.config = transformer_config(self.shape, family, place.settings, device)
        self.weights = WeightMap(family, self.shape, layout, values=self.ends_in_values)
        model = build_model(self.config, self.shape, family, layout, device, place.hooks, values=self.ends_in_values)
        self.weights.load(model, folder)
        self.model: Any = self._wrapped(model)
        self.rope, dtype = Rope.of(folder.config), self.config.params_dtype
        packer = Packer(layout, device, self.rope, dtype, place.settings.sequence_parallel)
        score = (place.temperature, place.hooks, place.settings.true_on_policy_mode)
        self.passes = Passes(self.model, self.config, packer, self.shape.vocab, *score)

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        return model.requires_grad_(False)

    def plan(self, batch: TrainBatch) -> Plan:
        """Who computes what of `batch`, the same on every rank."""
        chosen, dp = self.place.settings, self.place.layout.dp
        inputs = inputs_of(batch)
        self.rope.check(max(map(len, inputs), default=0))
        prefixes = Prefixes.of(inputs) if chosen.share_prefixes else None
        return plan(list(map(len, inputs)), prefixes, chosen, dp, self.shape.attention_crossover)

    def log_probs(self, batch: TrainBatch, rows: Rows) -> NDArray[np.float32]:
        """Natural-log probabilities [R] in the batch's flat response layout, 0 where `rows` leaves out, on every rank."""
        return self.passes.log_probs(batch, self.plan(batch), rows)

    @torch.no_grad()
    def become(self, other: ModelSlot) -> None:
        """Take over the weights of a slot of the same sizes."""
        theirs = other.parameters()
        for name, parameter in self.parameters().items():
            parameter.copy_(theirs[name])

    @property
    def _metadata(self) -> dict[str, Any]:
        return {
            "distrib_optim_sharding_type": "fully_reshardable",
            "chained_optim_avoid_prefix": True,
            "singleton_local_shards": False,
            "dp_cp_group": self.place.layout.dp_cp_group,
            "non_homogeneous_layers": bool(frozen(self.place.settings)),  # one layer may learn and its neighbour not
        }

    def weights_state(self, prefix: str = "") -> dict[str, Any]:
        """Megatron's sharded state of the model, under names that begin with `prefix`."""
        state: dict[str, Any] = unwrap(self.model).sharded_state_dict(prefix=prefix, metadata=self._metadata)
        return state

    def take(self, state: dict[str, Any], prefix: str = "") -> None:
        """Take over a loaded `weights_state`."""
        unwrap(self.model).load_state_dict({name.removeprefix(prefix): v for name, v in state.items()}, strict=True)

    def parameters(self) -> dict[str, Any]:
        """This rank's parameters by megatron's names."""
        return dict(unwrap(self.model).named_parameters())

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """What must come back as it was after somebody else had the device's memory, and what is computed anew."""
        model = unwrap(self.model)
        return [*model.parameters(), *model.buffers()], []

    def weight_specs(self) -> list[WeightSpec]:
        """What `export` yields, in its order."""
        return self.weights.specs(self.config.params_dtype)

    def export(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under HF names on rank 0, an empty stream elsewhere. Collective."""
        return self.weights.export(self.parameters(), self.config.params_dtype, only)


class TrainedSlot(ModelSlot):
    """A model that learns; `total_steps` as the backend's.

    Attributes:
        seen: the log-probs [R] of the last step's tokens before the step, 0 where masked, on every rank.
    """

    seen: NDArray[np.float32]

    def __init__(self, folder: HFFolder, place: Place, total_steps: int | None) -> None:
        super().__init__(folder, place)
        self.optimizer = Optimizer(self.model, place.settings, place.layout, total_steps)

    def _wrapped(self, model: torch.nn.Module) -> torch.nn.Module:
        if frozen(self.place.settings):
            learning = self.weights.learning(self.place.settings)
            for name, parameter in unwrap(model).named_parameters():
                parameter.requires_grad_(name in learning)
            keep_gradients_flowing(model)
        return data_parallel(model, self.config, self.place.settings)

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        kept, _ = super().memory()
        gradients = [p.main_grad for p in unwrap(self.model).parameters() if p.requires_grad]
        for part in (chained.optimizer for chained in self.optimizer.inner.chained_optimizers):
            kept += [p for group in part.param_groups for p in group["params"]]
            kept += [value for entry in part.state.values() for value in entry.values() if torch.is_tensor(value)]
        return kept, gradients

    def zero_grad(self) -> None:
        """Forget the last step's gradients."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()

    def step(self, batch: TrainBatch, inputs: StepInputs, algorithm: Algorithm, number: int) -> dict[str, float]:
        """Take optimizer step `number` (from 0) on the whole of `batch`; returns the loss and its statistics.

        Raises:
            TrainError: the loss or the gradient is not finite, or the engine's log-probs are too far from the trainer's; the
                weights are as before.
        """
        self.zero_grad()
        before = 0 if self.ends_in_values else self.place.settings.actor_starts
        self.place.hooks.before_step(before + number, self.model, self.optimizer.inner)
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
        return Identity(dataclasses.asdict(self.shape), kind)

    @property
    def stepped(self) -> bool:
        """Whether the optimizer has state, which it gets with its first step."""
        return any(len(part.optimizer.state) > 0 for part in self.optimizer.inner.chained_optimizers)

    def state(self, *, stepped: bool, is_loading: bool) -> dict[str, Any]:
        """Megatron's sharded state of the model and, if `stepped`, of the optimizer. Collective.

        Raises:
            CheckpointError: megatron cannot lay out the optimizer's state.
        """
        state, metadata = {"model": self.weights_state()}, self._metadata
        if stepped:
            inner = self.optimizer.inner
            try:
                state["optimizer"] = inner.sharded_state_dict(state["model"], is_loading=is_loading, metadata=metadata)
            except AssertionError as error:
                raise CheckpointError(
                    f"the optimizer's state has no form that a checkpoint can hold ({error or 'its parts disagree'}); "
                    "earlier checkpoints are whole"
                ) from error
        return state

    def restore(self, loaded: dict[str, Any], *, stepped: bool) -> None:
        """Take over a loaded `state`; without optimizer state, as before the first step."""
        self.take(loaded["model"])
        inner = self.optimizer.inner
        if stepped:
            inner.load_state_dict(loaded["optimizer"])
            return
        for part in inner.chained_optimizers:
            part.optimizer.state.clear()
        inner.reload_model_params()  # the master copies are the loaded weights


def frozen(settings: TrainSettings) -> dict[str, list[str]]:
    """The patterns that keep parameters from learning, by setting; empty where all learn."""
    found = {name: list(getattr(settings, name)) for name in PATTERNS}
    return {name: patterns for name, patterns in found.items() if patterns}


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
