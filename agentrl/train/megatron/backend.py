"""`MegatronBackend`: the train backend on megatron.core, with gloo on the CPU and NCCL on GPUs.

1. All ranks make the same calls in the same order; every call but `weight_specs` is collective.
2. Every rank has the whole batch and computes the same plan from it, so nothing is scattered. Results (log-probs,
   metrics) are the same on every rank.
3. Old log-probs: the engine's with `use_rollout_logprobs`; else, with several optimizer steps a rollout, the
   trainer's own pass before the first of them; with one step the policy itself (the ratio is 1 by definition, and a
   pass over the batch is saved).
4. The reference model is a second set of weights on the CPU, swapped in for its pass.
"""

from __future__ import annotations

import contextlib
import math
import random
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.registry import algorithm_of
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.errors import TrainError
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import ModelRole, RankInfo
from agentrl.train.hf import HFFolder
from agentrl.train.hf import write as write_hf
from agentrl.train.megatron import checkpoint, memory
from agentrl.train.megatron import device as devices
from agentrl.train.megatron.data import Rows
from agentrl.train.megatron.families import ModelShape, family_of
from agentrl.train.megatron.layout import Layout
from agentrl.train.megatron.weight_group import WeightGroup
from agentrl.train.megatron.weights import WeightMap, copy_to_cpu, swapped_in
from agentrl.train.packing import plan
from agentrl.train.settings import TrainSettings


class MegatronBackend:
    """One rank of the trainer; implements `TrainBackend`.

    Args:
        settings: the trainer's settings; `hf_checkpoint` names the starting weights.
        algorithm: the objective's settings.
        rollout_temperature: the sampling temperature, by which logits are divided.
        total_steps: optimizer steps of the whole run, where the learning rate's decay ends by default.
        device: `cuda`, `cpu`, or whichever this machine has.
    """

    def __init__(
        self,
        settings: TrainSettings,
        algorithm: AlgorithmSettings,
        *,
        rollout_temperature: float = 1.0,
        total_steps: int | None = None,
        device: Literal["auto", "cuda", "cpu"] = "auto",
    ) -> None:
        if settings.hf_checkpoint is None:
            raise TrainError("the trainer needs hf_checkpoint, the Hugging Face folder to start from")
        self.settings, self.algorithm = settings, algorithm
        self.temperature, self.total_steps = rollout_temperature, total_steps
        self.device_kind = device
        self.folder = HFFolder(settings.hf_checkpoint)
        self._reference: dict[str, Tensor] | None = None
        self._group: WeightGroup | None = None

    # ---- start --------------------------------------------------------------------------------------------

    def init(self, where: RankInfo) -> None:
        """Join the process group, build model and optimizer, and load the starting weights. Collective.

        Raises:
            TrainError: the model or the layout cannot be trained.
            CheckpointError: the starting folder is not a readable model.
        """
        devices.prepare()
        self.device = devices.pick(self.device_kind, where.local_rank)
        if self.settings.train_threads:
            torch.set_num_threads(self.settings.train_threads)
        family, self.shape = family_of(self.folder.config), ModelShape.from_config(self.folder.config)
        self.layout = Layout.join(self.settings, where, self.device)
        self._seed()

        from agentrl.train.megatron.model import build_model, transformer_config
        from agentrl.train.megatron.optimizer import Optimizer, data_parallel
        from agentrl.train.megatron.step import Passes

        config = transformer_config(self.shape, family, self.settings, self.device)
        model = build_model(config, self.shape, self.layout, self.device)
        self.weights = WeightMap(family, self.shape, self.layout)
        self.weights.load(model, self.folder)
        if self.algorithm.needs_reference:
            self._load_reference(model)
        self.model: Any = data_parallel(model, config, self.settings)
        self.optimizer = Optimizer(self.model, self.settings, self.layout, self.total_steps)
        self.passes = Passes(self.model, config, self.layout, self.shape.vocab, self.temperature, self.device)

    def _seed(self) -> None:
        from megatron.core.tensor_parallel import random as megatron_random

        seed = self.settings.seed + 100 * self.layout.pp_rank
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        megatron_random.model_parallel_cuda_manual_seed(seed)

    def _load_reference(self, model: torch.nn.Module) -> None:
        """Keep this rank's part of the reference weights on the CPU."""
        from agentrl.train.megatron.model import unwrap

        other = self.settings.ref_load is not None and Path(self.settings.ref_load) != self.folder.path
        if other:
            folder = HFFolder(self.settings.ref_load or "")
            if ModelShape.from_config(folder.config) != self.shape:
                raise TrainError(f"ref_load {folder.path} has other sizes than hf_checkpoint {self.folder.path}")
            self.weights.load(model, folder)
        self._reference = copy_to_cpu(dict(unwrap(model).named_parameters()))
        if other:
            self.weights.load(model, self.folder)

    # ---- log-probs ----------------------------------------------------------------------------------------

    def compute_log_probs(self, batch: TrainBatch, model: ModelRole = "actor") -> NDArray[np.float32]:
        """Natural-log probabilities [R] of all response tokens, in the batch's flat layout, on every rank."""
        return self._log_probs(batch, model, "response")

    def _log_probs(self, batch: TrainBatch, model: ModelRole, rows: Rows) -> NDArray[np.float32]:
        work = plan(batch.lengths.tolist(), self.settings, self.layout.dp)
        with self._weights_of(model):
            return self.passes.log_probs(batch, work, rows)

    @contextlib.contextmanager
    def _weights_of(self, model: ModelRole) -> Iterator[None]:
        """The model with the reference's weights inside the block, for `ref`."""
        if model == "actor":
            yield
            return
        if self._reference is None:
            raise TrainError("there is no reference model: set use_kl_loss or kl_coef to have one loaded")
        with swapped_in(self._parameters(), self._reference):
            yield

    # ---- training -----------------------------------------------------------------------------------------

    def train(self, batch: TrainBatch, step: int) -> Mapping[str, float]:
        """Train on one rollout's batch: `num_steps_per_rollout` optimizer steps. Collective.

        Args:
            batch: the rollout's samples.
            step: optimizer steps taken before this call.

        Returns:
            Means over the optimizer steps: `loss`, `grad_norm`, `lr`, `pg_clipfrac`, `ppo_kl`, `entropy`, `kl_loss`
            and the other statistics of the loss; `train_rollout_logprob_abs_diff`, the mean absolute difference
            between the trainer's and the engine's log-probs of trained tokens, in the first step (before any update); `tokens` trained in all; `steps`.

        Raises:
            TrainError: a token id outside the vocabulary; or a non-finite loss or gradient, and the weights are then as
                before the failed step.
        """
        started = time.perf_counter()
        self._check_ids(batch)
        parts = list(batch.split(self.settings.num_steps_per_rollout))
        arrays = self._per_token(batch, len(parts))
        history = []
        for number, indices in enumerate(parts):
            history.append(self._one_step(batch, indices, arrays, step + number))
        for later in history[1:]:
            # After the first update the trainer's policy is no longer the one that generated.
            later.pop("train_rollout_logprob_abs_diff", None)
        tokens = sum(entry.pop("tokens") for entry in history)
        keys = sorted({key for entry in history for key in entry})
        metrics = {key: float(np.mean([entry[key] for entry in history if key in entry])) for key in keys}
        seconds = time.perf_counter() - started
        return metrics | {"tokens": tokens, "steps": float(len(parts)), "train_seconds": seconds}

    def _check_ids(self, batch: TrainBatch) -> None:
        """An embedding would read past its end, or under tensor parallelism silently give zeros."""
        highest = int(batch.tokens.max(initial=0))
        if highest >= self.shape.vocab:
            raise TrainError(
                f"the samples hold token id {highest}, but the vocabulary of {self.folder.path} has {self.shape.vocab}; "
                "were they made with another model's tokenizer?"
            )

    def _per_token(self, batch: TrainBatch, num_steps: int) -> dict[str, Tensor]:
        """Flat float32 [R] arrays over the whole batch, fixed before the first step."""
        from agentrl.train.objective import advantages

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
        if missing := sorted(reads - found.keys()):
            raise TrainError(f"{algorithm.name} reads {', '.join(missing)}, for which this backend has no model")
        arrays = {name: torch.from_numpy(array.copy()) for name, array in found.items()}
        arrays["advantages"] = advantages(batch, arrays, algorithm)
        return {name: array.to(self.device) for name, array in arrays.items()}

    def _one_step(
        self, batch: TrainBatch, indices: NDArray[np.int64], arrays: Mapping[str, Tensor], number: int
    ) -> dict[str, float]:
        from agentrl.train.objective import step_inputs

        algorithm = algorithm_of(self.algorithm)
        part, inputs = step_inputs(batch, indices, arrays, algorithm)
        work = plan(part.lengths.tolist(), self.settings, self.layout.dp)
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        metrics = self.passes.gradients(part, work, inputs, algorithm)
        if not math.isfinite(metrics["loss"]):
            raise TrainError(
                f"optimizer step {number}: the loss is {metrics['loss']}; the weights were left as they are. "
                "Look at the batch's log-probs, advantages and rewards"
            )
        if "train_rollout_logprob_abs_diff" in metrics:
            metrics["train_rollout_logprob_abs_diff"] /= max(metrics["tokens"], 1.0)
        return metrics | self.optimizer.step(number)

    # ---- weights out --------------------------------------------------------------------------------------

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's parameters, and of what is exported."""
        return torch.bfloat16 if self.settings.bf16 else torch.float32

    def weight_specs(self) -> list[tuple[str, str, list[int]]]:
        """(name, dtype name, shape) of every exported tensor in export order; local and cheap."""
        return [(info.name, info.dtype, list(info.shape)) for info in self.weights.infos(self.dtype)]

    def export_weights(self, only: Collection[str] | None = None) -> Iterator[tuple[str, Tensor]]:
        """Full tensors under HF names, on rank 0; elsewhere an empty stream that must be exhausted. Collective.

        `only` restricts it to these HF names (the same on every rank).
        """
        wanted = set(only) if only is not None else None
        for name, tensor in self.weights.export(self._parameters(), self.dtype, wanted):
            if wanted is None or name in wanted:
                yield name, tensor

    def export_gradients(self) -> Iterator[tuple[str, Tensor]]:
        """The last step's gradients (float32, after clipping) as `export_weights` gives weights. Collective.

        For diagnosis and tests; raises `TrainError` under the distributed optimizer, where no rank has them all.
        """
        if self.settings.use_distributed_optimizer:
            raise TrainError(
                "gradients cannot be exported with use_distributed_optimizer: each rank has a part of them"
            )
        gradients = {name: p.main_grad for name, p in self._parameters().items()}
        yield from self.weights.export(gradients, torch.float32)

    def _parameters(self) -> dict[str, Any]:
        from agentrl.train.megatron.model import unwrap

        return dict(unwrap(self.model).named_parameters())

    def save_hf(self, path: str | Path) -> None:
        """Write a Hugging Face folder (weights, config, tokenizer files) atomically. Collective."""
        stream = self.export_weights()
        if self.layout.rank == 0:
            write_hf(path, stream, source=self.folder)
        else:
            _exhaust(stream)
        torch.distributed.barrier()

    def init_weight_group(
        self,
        master_addr: str,
        master_port: int,
        world_size: int,
        group_name: str = "agentrl_weights",
        backend: str | None = None,
    ) -> None:
        """Rank 0 opens the group over which engines receive weights, as its rank 0; elsewhere a no-op.

        Blocks until all `world_size` members have joined, so ask the engines to join at the same time.
        """
        if self.layout.rank == 0:
            kind = backend or ("nccl" if self.device.type == "cuda" else "gloo")
            self._group = WeightGroup.join(kind, master_addr, master_port, world_size, 0, group_name)

    def broadcast_weights(self, buckets: Sequence[Sequence[str]] | None = None) -> None:
        """Send weights to the engines, tensor by tensor in the order of `weight_specs`. Collective.

        Args:
            buckets: the HF names as the engines were told to expect them; None sends all. Their borders do not
                matter to the sender, their order must be that of `weight_specs`.

        Raises:
            TrainError: no group was opened, or the names are in another order.
        """
        names = [name for bucket in buckets for name in bucket] if buckets is not None else None
        if names is not None:
            chosen = set(names)
            if names != [name for name in self.weights.names() if name in chosen]:
                raise TrainError("broadcast_weights takes names in the order of weight_specs, each once")
        for _, tensor in self.export_weights(names):
            if self._group is None:
                raise TrainError("broadcast_weights needs init_weight_group first")
            self._group.broadcast(tensor)

    def close_weight_group(self) -> None:
        """Leave the group that `init_weight_group` opened, if any."""
        if self._group is not None:
            self._group.close()
            self._group = None

    # ---- checkpoints and memory ---------------------------------------------------------------------------

    def save(self, path: str | Path, step: int = 0) -> None:
        """Write model, optimizer, random state and `step` into the folder `path`, whole or not at all. Collective."""
        checkpoint.save(Path(path), self.model, self.optimizer.inner, self.layout, self._identity(), step)

    def load(self, path: str | Path) -> int:
        """Restore what `save` wrote, under this or another layout; returns its step. Collective.

        `path` is a checkpoint, or a folder of checkpoints of which the newest complete one is taken.

        Raises:
            CheckpointError: nothing complete there, or it is of another model.
        """
        return checkpoint.load(Path(path), self.model, self.optimizer.inner, self.layout, self._identity())

    def _identity(self) -> checkpoint.Identity:
        chosen = self.settings
        return checkpoint.Identity(self.shape, chosen.optimizer, chosen.use_distributed_optimizer, chosen.bf16)

    def offload(self) -> None:
        """Move weights and optimizer state to the CPU and free the GPU's memory; a no-op on CPU."""
        memory.offload(self.model, self.optimizer.inner)

    def onload(self) -> None:
        """Undo `offload`."""
        memory.onload(self.model, self.optimizer.inner)

    def close(self) -> None:
        """Leave all process groups. Collective."""
        self.close_weight_group()
        if hasattr(self, "layout"):
            self.layout.leave()
            del self.layout


def _exhaust(stream: Iterator[object]) -> None:
    for _ in stream:
        pass
