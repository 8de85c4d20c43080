"""The models of a trainer process: a `ModelState` is one model with everything that belongs to it.

1. Models share only the `ModelContext`; an `UnadaptedModel` shares all of the actor. `Network` is the framework's part.
2. The random state is restored only under the layout that saved it. Under other layouts the seed sets the state.
3. The critic's checkpoint is a folder in the actor's, whichever processes wrote it. A reference that was updated from
   the actor is in the actor's checkpoint; a reference that was never updated is loaded by `--ref-load`."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, cast

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from agentrl.algorithms.ops.corrections import check_agreement
from agentrl.errors import CheckpointError, TrainError, raised_as
from agentrl.runfolder import CRITIC
from agentrl.train.batch import TrainBatch
from agentrl.train.checkpoints import Identity, read_manifest, writing
from agentrl.train.forward_backward import ModelContext
from agentrl.train.hf import HFFolder
from agentrl.train.learning_rate import end_of_decay
from agentrl.train.microbatches import OutputPositions, inputs_of
from agentrl.train.network import Network, attention_crossover, frozen
from agentrl.train.objective import StepInputs
from agentrl.train.packing import PackingPlan, make_plan
from agentrl.train.saving import Background, Saving, last_line, write_errors
from agentrl.train.torch_dist import as_data
from agentrl.train.tree import SharedPrefixes

_REFERENCE = "reference"
_log = logging.getLogger(__name__)


class ModelState:
    """A frozen model, loaded from `folder` to the device without gradients: the reference or a teacher."""

    ends_in_values: ClassVar[bool] = False
    learns: ClassVar[bool] = False
    divisor = 1  # divides the microbatch sizes of the settings; above 1 after memory ran out

    def __init__(self, folder: HFFolder, place: ModelContext) -> None:
        self.folder, self.place = folder, place
        self.network = cast(type[Network], place.network)(folder, place, values=self.ends_in_values, learns=self.learns)
        self.shape, self.forward_backward = self.network.shape, self.network.forward_backward

    def plan(self, batch: TrainBatch) -> PackingPlan:
        """Return the packing plan, the same on all ranks. Raises TrainError: the model cannot be run on a sample."""
        if (highest := int(batch.tokens.max(initial=0))) >= self.shape.vocab:
            raise TrainError(
                f"the samples hold token id {highest}, but the vocabulary of {self.folder.path} has {self.shape.vocab}; "
                "were they made with another model's tokenizer?"
            )
        chosen, inputs = self.place.settings, inputs_of(batch)
        self.network.check(max(map(len, inputs), default=0))
        if len(batch.image_spans) and self.forward_backward.packer.see is None:
            raise TrainError(f"the samples have images, but {self.folder.path} is trained as a model that sees none")
        cp, most = chosen.context_parallel_size, chosen.max_tokens_per_gpu
        return make_plan(
            list(map(len, inputs)),
            self.place.ranks.dp,
            prefixes=SharedPrefixes.of(inputs) if chosen.share_prefixes else None,
            max_tokens=most and max(1, most * cp // self.divisor),
            micro_batch_size=max(1, chosen.micro_batch_size // self.divisor),
            alignment=2 * cp if cp > 1 else 1,  # context parallelism cuts each run of tokens into 2 * cp equal chunks
            balance=chosen.balance_data,
            attention_crossover=attention_crossover(self.shape),
        )

    def log_probs(self, batch: TrainBatch, rows: OutputPositions) -> NDArray[np.float32]:
        """Return natural-log probabilities [R] of response tokens, 0 for tokens that `rows` excludes, on every rank."""
        return self.forward_backward.log_probs(batch, self.plan(batch), rows)

    @torch.no_grad()
    def become(self, other: ModelState) -> None:
        """Copy the weights of another model of the same sizes."""
        theirs = other.network.parameters()
        for name, parameter in self.network.parameters().items():
            parameter.copy_(theirs[name])

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        """Return `Network.memory`, with the optimizer's tensors if the model learns."""
        return self.network.memory()

    def close(self) -> None:
        """Wait until a checkpoint in progress is written."""


class UnadaptedModel(ModelState):
    """The actor without its adapter: the reference of a LoRA run, which costs no memory. It replays no routing."""

    def __init__(self, actor: ModelState) -> None:
        self.folder, self.place = actor.folder, actor.place
        self.network, self.shape, self.forward_backward = actor.network, actor.shape, actor.forward_backward

    def log_probs(self, batch: TrainBatch, rows: OutputPositions) -> NDArray[np.float32]:
        with self.network.unadapted():
            return super().log_probs(dataclasses.replace(batch, routed_experts=None), rows)

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        return [], []


class TrainedModel(ModelState):
    """A model that learns; `total_steps` as in `TrainBackend`. `seen`: log-probs [R] of the last step's tokens before
    the step, 0 for tokens without an output, on every rank."""

    learns = True
    seen: NDArray[np.float32]

    def __init__(self, folder: HFFolder, place: ModelContext, total_steps: int | None) -> None:
        super().__init__(folder, place)
        self.optimizer = self.network.optimizer(total_steps)

    def memory(self) -> tuple[list[Tensor], list[Tensor]]:
        kept, anew = super().memory()
        return kept + self.optimizer.memory(), anew

    def step(self, inputs: StepInputs, number: int) -> dict[str, float]:
        """Take optimizer step `number` (from 0); returns the loss and its statistics. Raises TrainError: the loss or
        gradient is not finite, or the engine's log-probs differ too much. The weights are then unchanged."""
        self.network.zero_grad()
        self.optimizer.inner.zero_grad()
        before = 0 if self.ends_in_values else self.place.settings.actor_starts
        self.place.hooks.before_step(before + number, self.network.model, self.optimizer.inner)
        metrics, origin = self._gradients_that_fit(inputs, number), inputs.algorithm.origin
        if not math.isfinite(metrics["loss"]):
            raise TrainError(
                f"optimizer step {number}: the loss of {origin} is {metrics['loss']}; the weights were left "
                "as they are. Look at the batch's log-probs, advantages and rewards"
            )
        later = number % self.place.settings.num_steps_per_rollout > 0  # the rollout's first step changed the weights
        if not (later and inputs.algorithm.settings.use_rollout_logprobs):
            check_agreement(metrics, self.place.settings.ci_train_rollout_logprob_abs_diff_threshold)
        with raised_as(TrainError, origin, TrainError):
            return metrics | self.optimizer.step(number)

    def _gradients_that_fit(self, inputs: StepInputs, number: int) -> dict[str, float]:
        """Return `_gradients`. If memory runs out, retry once with smaller microbatches; later steps keep the size."""
        try:
            return self._gradients(inputs)
        except torch.OutOfMemoryError as error:
            said = str(error)  # only the text: the error's frames hold tensors of the failed pass
        failed = self.plan(inputs.batch)
        if self.place.ranks.world > 1 or all(len(mb) < 2 for own in failed.ranks for mb in own):
            raise TrainError(_too_large(number, said))
        while self.plan(inputs.batch) == failed:
            self.divisor *= 2
        _log.warning(
            "optimizer step %d ran out of memory; done again with 1/%d of the microbatch", number, self.divisor
        )
        if self.place.device.type == "cuda":
            torch.cuda.empty_cache()
        self.network.forget()
        self.optimizer.inner.zero_grad()
        try:
            return self._gradients(inputs) | {"out_of_memory": 1.0}
        except torch.OutOfMemoryError as error:
            raise TrainError(_too_large(number, str(error))) from error

    def _gradients(self, inputs: StepInputs) -> dict[str, float]:
        metrics, self.seen = self.forward_backward.gradients(self.plan(inputs.batch), inputs)
        return metrics

    @property
    def identity(self) -> Identity:
        """Return the properties that a checkpoint must share with this model."""
        s = self.place.settings
        kind: dict[str, Any] = {"optimizer": s.optimizer, "distributed_optimizer": s.use_distributed_optimizer}
        kind |= {"bf16": s.bf16, **frozen(s), **({"train_vision": True} if s.train_vision else {})}
        if s.lora_rank is not None:
            kind |= {"lora_rank": s.lora_rank, "lora_alpha": s.lora_alpha, "target_modules": list(s.target_modules)}
        return Identity(self.network.sizes, kind)

    @cached_property
    def _background(self) -> Background | None:
        return Background(self.place.settings.distributed_timeout_minutes) if self.place.settings.async_save else None

    def close(self) -> None:
        if (background := vars(self).get("_background")) is not None:
            background.shutdown()

    def save(
        self,
        path: Path,
        step: int,
        critic: TrainedModel | Path | None = None,
        reference: ModelState | None = None,
        algorithm: Mapping[str, float] | None = None,
    ) -> Saving:
        """Begin a checkpoint that replaces the one at `path`. The critic's is written into it or moved there.
        `algorithm` is `Algorithm.state`. With `async_save` the weights may change before the checkpoint is finished.
        Collective. Raises CheckpointError: it could not be written; earlier checkpoints stay."""
        ranks, settings = self.place.ranks, self.place.settings
        stepped = self.optimizer.stepped and not settings.no_save_optim
        reshardable = not settings.use_distributed_optimizer or settings.dist_ckpt_optim_fully_reshardable
        state = self._state(stepped, reference, is_loading=False, reshardable=reshardable)
        state["rng"] = self.network.random()
        manifest = {"step": step, "stepped": stepped, "layout": ranks.describe(), **dataclasses.asdict(self.identity)}
        manifest |= {
            "reshardable": reshardable,
            "algorithm": dict(algorithm or {}),
            "steps_per_rollout": settings.num_steps_per_rollout,
            "lr_wsd_decay_iters": settings.lr_wsd_decay_iters,
        }
        manifest |= {_REFERENCE: bool(reference), "lr_decay_end": end_of_decay(settings, self.optimizer.total_steps)}
        folder, leads = ExitStack(), ranks.rank == 0
        background = self._background
        with write_errors(path):
            partial = folder.enter_context(writing(path, manifest, leader=leads, barrier=dist.barrier))
            files = self.network.write(state, partial, background.group if background else None)
        if isinstance(critic, TrainedModel):
            part: Saving | Path | None = critic.save(partial / CRITIC, step)
        else:
            part = critic if leads else None
        return Saving(path, partial, folder, background.submit(files) if background else files, part)

    def load(self, path: Path, reference: ModelState | None = None) -> bool:
        """Restore the checkpoint at `path`; returns true if `reference` was in it. Collective. Raises CheckpointError:
        the checkpoint is incomplete, of another model, or damaged."""
        manifest = read_manifest(path)
        self.identity.check(path, manifest)
        stepped = manifest["stepped"]
        followed = reference if manifest.get(_REFERENCE) else None
        reshardable = manifest.get("reshardable", True)
        if stepped and not reshardable:
            self._check_cuts(path, manifest["layout"])
        state = self._state(stepped, followed, is_loading=True, reshardable=reshardable)
        if same_layout := manifest["layout"] == self.place.ranks.describe():
            state["rng"] = self.network.random()
        try:
            with as_data(path):
                loaded = self.network.read(state, path)
            self.network.take(loaded["model"])
            self.optimizer.take(loaded.get("optimizer"))
            if followed:
                followed.network.take(loaded[_REFERENCE], f"{_REFERENCE}.")
            if same_layout:
                self.network.restore_random(loaded["rng"])
        except (Exception, CheckpointException) as error:
            remedy = "if its files are damaged, move it away to resume from the checkpoint before it"
            raise CheckpointError(f"{path} could not be loaded: {last_line(error)}; {remedy}") from error
        return followed is not None

    def _check_cuts(self, path: Path, saved: dict[str, int]) -> None:
        """Raise CheckpointError if this run shards the model differently: the optimizer's shards would not fit."""
        both = saved, self.place.ranks.describe()
        cuts = [{name: size for name, size in layout.items() if name not in ("dp", "cp")} for layout in both]
        if cuts[0] != cuts[1]:
            raise CheckpointError(
                f"{path}: its optimizer state is for the layout {cuts[0]}, and this run has {cuts[1]}. Resume with that layout "
                "and --dist-ckpt-optim-fully-reshardable; its next checkpoint then loads under every layout"
            )

    def _state(
        self, stepped: bool, reference: ModelState | None, *, is_loading: bool, reshardable: bool
    ) -> dict[str, Any]:
        """Return the backend's state of the model, of the optimizer if `stepped`, and of a reference's weights."""
        state = {"model": self.network.state()}
        if stepped:
            state["optimizer"] = self.optimizer.state(state["model"], is_loading=is_loading, reshardable=reshardable)
        if reference is not None:
            state[_REFERENCE] = reference.network.state(f"{_REFERENCE}.")
        return state


def _too_large(number: int, said: str) -> str:
    return (
        f"optimizer step {number} ran out of memory: lower --max-tokens-per-gpu or --micro-batch-size, or set "
        f"--recompute-granularity ({said})"
    )


class CriticModel(TrainedModel):
    """PPO's critic (arXiv:1707.06347): a model that learns, with one value per token as its output."""

    ends_in_values = True

    def __init__(self, folder: HFFolder, place: ModelContext, total_steps: int | None) -> None:
        super().__init__(folder, dataclasses.replace(place, settings=place.settings.of_critic), total_steps)

    def values(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the values [R] before each trained token in the flat response layout, 0 elsewhere, on every rank."""
        return self.forward_backward.values(batch, self.plan(batch))

    def step(self, inputs: StepInputs, number: int) -> dict[str, float]:
        try:
            found = super().step(inputs, number)
        except TrainError as error:
            raise TrainError(f"the critic: {error}") from None
        names = {"loss": "critic/loss", "grad_norm": "critic/grad_norm", "lr": "critic/lr"}
        return {names.get(name, name): value for name, value in found.items()}

    def _gradients(self, inputs: StepInputs) -> dict[str, float]:
        return self.forward_backward.value_gradients(self.plan(inputs.batch), inputs)
