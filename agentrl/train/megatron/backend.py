"""`MegatronBackend`: the train backend on megatron.core, with gloo on the CPU and NCCL on GPUs.

1. All ranks make the same calls in the same order; every call but `weight_specs` is collective.
2. Every rank has the whole batch and computes the same plan from it, so nothing is scattered. Results (log-probs,
   metrics) are the same on every rank.
3. Old log-probs: the engine's with `use_rollout_logprobs`; else, with several optimizer steps a rollout, the
   trainer's own pass before the first of them; with one step the policy itself (the ratio is 1 by definition, and a
   pass over the batch is saved).
4. The reference, and a teacher of any size, are models of their own that stay on the device: they cost the memory of
   the weights alone, and their passes move none of them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.ops.mismatch import PREFIX, mismatch_metrics
from agentrl.algorithms.registry import algorithm_of
from agentrl.errors import TrainError
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import ModelRole, RankInfo, TrainBackend, WeightSpec
from agentrl.train.hf import HFFolder
from agentrl.train.hf import write as write_hf
from agentrl.train.megatron import checkpoint
from agentrl.train.megatron import device as devices
from agentrl.train.megatron.data import Rows
from agentrl.train.megatron.families import ModelShape, family_of
from agentrl.train.megatron.layout import Layout
from agentrl.train.megatron.slots import ModelSlot, Place, TrainedSlot
from agentrl.train.megatron.weight_group import WeightGroup


class MegatronBackend(TrainBackend):
    """One rank of the trainer: the actor's slot, the reference's where the objective needs one, and what is done with them."""

    reference: ModelSlot | None = None
    teacher: ModelSlot | None = None
    _group: WeightGroup | None = None

    # ---- start --------------------------------------------------------------------------------------------

    def init(self, where: RankInfo) -> None:
        family_of(self.folder.config)  # a model that cannot be trained is refused before the ranks meet
        devices.prepare()
        self.device = devices.pick(self.device_kind, where.local_rank)
        if self.settings.bf16 is None:
            self.settings = self.settings.model_copy(update={"bf16": self.device.type == "cuda"})
        if self.settings.train_threads:
            torch.set_num_threads(self.settings.train_threads)
        self.layout = Layout.join(self.settings, where, self.device)
        self._seed()
        place = Place(self.settings, self.layout, self.device, self.temperature)
        self.actor = TrainedSlot(self.folder, place, self.total_steps)
        if self.algorithm.needs_reference:
            self.reference = ModelSlot(self._reference_folder(), place)
        if self.algorithm.needs_teacher and self.settings.opd_teacher_load:
            self.teacher = ModelSlot(HFFolder(self.settings.opd_teacher_load), place)

    def _seed(self) -> None:
        seed = self.settings.seed + 100 * self.layout.pp_rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        model_parallel_cuda_manual_seed(seed)

    def _reference_folder(self) -> HFFolder:
        folder = HFFolder(self.settings.ref_load or self.folder.path)
        if ModelShape.from_config(folder.config) != self.actor.shape:
            raise TrainError(f"ref_load {folder.path} has other sizes than hf_checkpoint {self.folder.path}")
        return folder

    # ---- log-probs ----------------------------------------------------------------------------------------

    def log_probs(self, batch: TrainBatch, model: ModelRole = "actor") -> NDArray[np.float32]:
        return self._log_probs(batch, model, "response")

    def _log_probs(self, batch: TrainBatch, model: ModelRole, rows: Rows) -> NDArray[np.float32]:
        slot = {"actor": self.actor, "ref": self.reference, "teacher": self.teacher}[model]
        if slot is None:
            what, remedy = _ABSENT[model]
            raise TrainError(f"there is no {what} model: set {remedy} to have one loaded")
        return slot.log_probs(batch, rows)

    # ---- training -----------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """See `Training.train`.

        Returns:
            Means over the optimizer steps: `loss`, `grad_norm`, `lr`, `pg_clipfrac`, `ppo_kl`, `entropy`, `kl_loss`
            and the other statistics of the loss; `advantages/mean`, `std`, `max` and `min`; over tokens,
            `train_rollout_logprob_abs_diff` and the rest of `mismatch_metrics`: the engine's log-probs beside the
            trainer's before the first step (with `use_rollout_logprobs` only the first step's tokens, for want of
            others); `tokens` trained in all; `steps`.
        """
        started = time.perf_counter()
        self._check_ids(batch, self.actor, self.folder.path)
        if self.teacher is not None:
            self._check_ids(batch, self.teacher, self.settings.opd_teacher_load)
        parts = list(batch.split(self.settings.num_steps_per_rollout))
        arrays, advantages = self._per_token(batch, len(parts))
        history = []
        for number, indices in enumerate(parts):
            history.append(self._one_step(batch, indices, arrays, step + number))
        apart = [{name: entry.pop(name) for name in [*entry] if name.startswith(PREFIX)} for entry in history]
        if self.algorithm.use_rollout_logprobs:
            apart = apart[:1]  # after the first update the model is no longer the one that generating is compared with
        tokens = sum(entry.pop("tokens") for entry in history)
        keys = sorted({key for entry in history for key in entry})
        metrics = {key: float(np.mean([entry[key] for entry in history if key in entry])) for key in keys}
        seconds = time.perf_counter() - started
        metrics |= mismatch_metrics(apart)
        return {**metrics, **advantages, "tokens": tokens, "steps": float(len(parts)), "train_seconds": seconds}

    @staticmethod
    def _check_ids(batch: TrainBatch, slot: ModelSlot, folder: object) -> None:
        """An embedding would read past its end, or under tensor parallelism silently give zeros."""
        highest, vocab = int(batch.tokens.max(initial=0)), slot.shape.vocab
        if highest >= vocab:
            raise TrainError(
                f"the samples hold token id {highest}, but the vocabulary of {folder} has {vocab}; "
                "were they made with another model's tokenizer?"
            )

    def _per_token(self, batch: TrainBatch, num_steps: int) -> tuple[dict[str, Tensor], Mapping[str, float]]:
        """Flat float32 [R] arrays over the whole batch, fixed before the first step, and metrics of the advantages."""
        from agentrl.train.objective import estimate

        algorithm = algorithm_of(self.algorithm)
        reads = algorithm.reads
        found: dict[str, NDArray[np.float32]] = {}
        if batch.rollout_log_probs is not None:
            found["rollout_log_probs"] = batch.rollout_log_probs
        if self.algorithm.use_rollout_logprobs:
            if batch.rollout_log_probs is None:
                raise TrainError("use_rollout_logprobs is set, but samples of the batch have no rollout_log_probs")
            found["old_log_probs"] = batch.rollout_log_probs
        elif "old_log_probs" in reads or (num_steps > 1 and not algorithm.supervised):
            found["old_log_probs"] = self._log_probs(batch, "actor", "trained")
        if "ref_log_probs" in reads:
            found["ref_log_probs"] = self._log_probs(batch, "ref", "trained")
        if "teacher_log_probs" in reads and self.teacher is not None:
            found["teacher_log_probs"] = self._log_probs(batch, "teacher", "trained")
        elif "teacher_log_probs" in reads and batch.teacher_log_probs is not None:
            found["teacher_log_probs"] = batch.teacher_log_probs
        if missing := sorted(reads - found.keys()):
            raise TrainError(
                f"{algorithm.name} reads {', '.join(missing)}, which neither a model of this run nor the samples have"
            )
        arrays = {name: torch.from_numpy(array.copy()) for name, array in found.items()}
        found_advantages = estimate(batch, arrays, algorithm)
        arrays["advantages"] = found_advantages.advantages
        return {name: array.to(self.device) for name, array in arrays.items()}, found_advantages.metrics

    def _one_step(
        self, batch: TrainBatch, indices: NDArray[np.int64], arrays: Mapping[str, Tensor], number: int
    ) -> dict[str, float]:
        from agentrl.train.objective import step_inputs

        algorithm = algorithm_of(self.algorithm)
        part, inputs = step_inputs(batch, indices, arrays, algorithm)
        work = self.actor.plan(part)
        self.actor.zero_grad()
        metrics = self.actor.passes.gradients(part, work, inputs, algorithm)
        if not math.isfinite(metrics["loss"]):
            raise TrainError(
                f"optimizer step {number}: the loss of {algorithm.origin} is {metrics['loss']}; the weights were left "
                "as they are. Look at the batch's log-probs, advantages and rewards"
            )
        try:
            return metrics | self.actor.optimizer.step(number)
        except TrainError as error:
            raise TrainError(f"{algorithm.origin}: {error}") from error

    # ---- weights out --------------------------------------------------------------------------------------

    def weight_specs(self) -> list[WeightSpec]:
        return self.actor.weight_specs()

    def export_weights(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        return self.actor.export(only)

    def init_weight_group(
        self,
        master_addr: str,
        master_port: int,
        world_size: int,
        group_name: str = "agentrl_weights",
        backend: str | None = None,
    ) -> None:
        if self.layout.rank == 0:
            kind = backend or ("nccl" if self.device.type == "cuda" else "gloo")
            self._group = WeightGroup(kind, f"tcp://{master_addr}:{master_port}", world_size, 0, group_name)

    def broadcast_weights(self, buckets: Sequence[Sequence[str]] | None = None) -> None:
        names = [name for bucket in buckets for name in bucket] if buckets is not None else None
        if names is not None:
            chosen = set(names)
            if names != [name for name in self.actor.weights.names() if name in chosen]:
                raise TrainError("broadcast_weights takes names in the order of weight_specs, each once")
        for _, tensor in self.export_weights(names):
            if self._group is None:
                raise TrainError("broadcast_weights needs init_weight_group first")
            self._group.broadcast(tensor)

    def close_weight_group(self) -> None:
        if self._group is not None:
            self._group.close()
            self._group = None

    # ---- what lasts ---------------------------------------------------------------------------------------

    def save(self, path: str | Path, step: int) -> None:
        checkpoint.save(Path(path), self.actor, step)

    def load(self, path: str | Path) -> int:
        return checkpoint.load(Path(path), self.actor)

    def save_hf(self, path: str | Path) -> None:
        stream = self.export_weights()
        if self.layout.rank == 0:
            write_hf(path, stream, source=self.folder)
        else:
            for _ in stream:
                pass
        torch.distributed.barrier()

    def close(self) -> None:
        self.close_weight_group()
        if hasattr(self, "layout"):
            self.layout.leave()
            del self.layout


_ABSENT = {"ref": ("reference", "use_kl_loss or kl_coef"), "teacher": ("teacher", "use_opd and opd_teacher_load")}

_BACKEND: type[TrainBackend] = MegatronBackend
"""For the type checker: every method of the contract is there."""
