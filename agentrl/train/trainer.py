"""`TrainBackend`: the interface of a training framework to a run. A backend adds process groups and models.

1. Each trainer process has one backend object. All make the same calls in the same order, as most are collective.
2. Every rank gets the whole batch (in shared memory) and takes its own part by a common plan (`packing`).
3. Weights are exported with Hugging Face names and shapes, whatever the parallel layout.
4. Old log-probs are the engine's with `use_rollout_logprobs`. Else, with several optimizer steps per rollout, the
   trainer computes them before the first step. With one step they are the policy's own, and the ratio is 1.
5. Values are computed before the first step. On each step's samples, the critic steps before the actor.
6. A teacher of any size is a separate model on the device, and so is the reference unless it is the unadapted actor."""

import dataclasses
import gc
import random
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.ops.corrections import PREFIX, mismatch_metrics
from agentrl.algorithms.registry import algorithm_of
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.engine.weights import Bucket, TensorSpec, WeightGroup
from agentrl.errors import CheckpointError, TrainError, raised_as
from agentrl.lora import write_adapter
from agentrl.modelfolder import text_config
from agentrl.numerics.offload import OffloadedTensors
from agentrl.numerics.shared_handle import flattened_bucket
from agentrl.numerics.weight_group import WeightSender, views
from agentrl.runfolder import CRITIC, MANIFEST
from agentrl.train.batch import Prepared, TrainBatch
from agentrl.train.checkpoints import check_critic, foreign, latest, read_manifest, whole_folder
from agentrl.train.contracts import Device, Learners, ModelRole, RankInfo
from agentrl.train.float8 import EngineForm
from agentrl.train.forward_backward import ModelContext
from agentrl.train.hf import HFFolder
from agentrl.train.hf import write as write_hf
from agentrl.train.hooks import NO_HOOKS, TrainHooks
from agentrl.train.microbatches import OutputPositions
from agentrl.train.model_state import CriticModel, ModelState, TrainedModel, UnadaptedModel
from agentrl.train.network import Network, forward_flops
from agentrl.train.objective import estimate, step_inputs
from agentrl.train.ranks import Ranks, memory, memory_recorded, pick, profiled
from agentrl.train.saving import Saving
from agentrl.train.settings import TrainSettings

_ALLOCATIONS = 100_000  # number of newest allocations that `record_memory_history` keeps


class TrainBackend(ABC):
    """One rank of a trainer. All backends have the same arguments; `init` builds the models.

    A critic's separate processes compute `values`. The actor's `prepare` the batch with these, and both `train` on it.

    Args:
        settings, algorithm: settings of the trainer (`hf_checkpoint`: the starting weights) and the algorithm.
        rollout_temperature: the sampling temperature, by which logits are divided.
        total_steps: number of optimizer steps of the run; by default the learning rate's decay ends there.
        device: `cuda`, `cpu`, or `auto`: `cuda` if this machine has it.
        learners: the models that learn in this process. With `critic`, only `values`, `train` and checkpoints work.
        hooks: code that was written for another trainer; by default none."""

    network: ClassVar[type[Network]]
    actor: TrainedModel  # absent if this process trains the critic alone
    critic: CriticModel | None = None
    reference: ModelState | None = None
    teacher: ModelState | None = None
    _followed = False  # true after the reference was updated from the actor
    _sender: WeightSender | None = None
    _stream: Iterator[tuple[str, Tensor]]  # the remaining tensors of `share_weights`
    _shared: Tensor | None = None
    _saving: Saving | None = None
    _offloaded: OffloadedTensors | None = None
    _seconds: defaultdict[str, float]
    _details: Mapping[str, NDArray[np.float16]]

    @final
    def __init__(
        self,
        settings: TrainSettings,
        algorithm: AlgorithmSettings,
        *,
        rollout_temperature: float = 1.0,
        total_steps: int | None = None,
        device: Device = "auto",
        learners: Learners = "all",
        hooks: TrainHooks = NO_HOOKS,
    ) -> None:
        if settings.hf_checkpoint is None:
            raise TrainError("the trainer needs hf_checkpoint, the Hugging Face folder to start from")
        self.settings, self.algorithm, self.hooks = settings, algorithm_of(hooks.objective(algorithm)), hooks
        self.temperature, self.total_steps, self.device_kind = rollout_temperature, total_steps, device
        self.learners = learners
        self.folder = HFFolder(settings.hf_checkpoint)
        self.engine_form = EngineForm(self.folder)

    @abstractmethod
    def join(self, where: RankInfo) -> Ranks:
        """Join the process groups of all ranks, on `self.device`. Collective."""

    @abstractmethod
    def opened(self, folder: str | Path) -> HFFolder:
        """Open a model folder: Hugging Face's, or a torch_dist checkpoint (its config or `hf_checkpoint`'s)."""

    def check(self) -> None:
        """Raise the errors that `init` would raise for the models, by their configs alone."""
        settings, check = self.settings, self.network.check_model
        cuda = self.device_kind == "cuda" or (self.device_kind == "auto" and torch.cuda.is_available())
        if settings.record_memory_history and not cuda:
            raise TrainError("--record-memory-history records CUDA's memory, and the device is a CPU; leave it out")
        if settings.bf16 is None:
            settings = settings.model_copy(update={"bf16": cuda})
        if (weights := foreign(settings.load)) is not None:
            self.folder = self.opened(weights)
        check(self.folder, settings, values=False)
        if "ref_log_probs" in self.algorithm.reads:
            self._reference_folder(self.network.sizes_of(self.folder))
        if "teacher_log_probs" in self.algorithm.reads and settings.opd_teacher_load:
            check(self.opened(settings.opd_teacher_load), settings.of_critic, values=False)  # all of it, and no adapter
        if "values" in self.algorithm.reads:
            check(self._critic_folder(), settings.of_critic, values=True)

    def init(self, where: RankInfo) -> None:
        """Join the process group, build the models and the optimizer, and load the starting weights. Collective. Raises
        TrainError: the model or the layout cannot be trained. CheckpointError: a folder is not a readable model."""
        if (weights := foreign(self.settings.load)) is not None:
            self.folder = self.opened(weights)
        sizes = self.network.sizes_of(self.folder)  # a model that cannot be trained is refused before the ranks meet
        self.device = pick(self.device_kind, where.local_rank)
        if self.settings.record_memory_history:
            torch.cuda.memory._record_memory_history(max_entries=_ALLOCATIONS)
        if self.settings.bf16 is None:
            self.settings = self.settings.model_copy(update={"bf16": self.device.type == "cuda"})
        if self.settings.train_threads:
            torch.set_num_threads(self.settings.train_threads)
        torch.use_deterministic_algorithms(self.settings.deterministic_mode)
        self.ranks = self.join(where)
        nccl, hours = torch.distributed.get_backend() == "nccl", timedelta(hours=4)  # the wait for rank 0's files
        self._files = torch.distributed.new_group(backend="gloo", timeout=hours) if nccl else None
        self.seed(self.settings.seed)
        self._seconds = defaultdict(float)
        self.hooks.started()
        place = ModelContext(self.settings, self.ranks, self.device, self.temperature, self.hooks, self.network)
        if self.learners != "critic":
            total = None if self.total_steps is None else self.total_steps - self.settings.actor_starts
            self.actor = TrainedModel(self.folder, place, total)
            if "ref_log_probs" in self.algorithm.reads:
                adapted = self.settings.lora_rank is not None and self.settings.ref_load is None
                folder = self._reference_folder(sizes)
                self.reference = UnadaptedModel(self.actor) if adapted else ModelState(folder, place)
            if "teacher_log_probs" in self.algorithm.reads and self.settings.opd_teacher_load:
                self.teacher = ModelState(self.opened(self.settings.opd_teacher_load), place)
        if "values" in self.algorithm.reads and self.learners != "actor":
            self.critic = CriticModel(self._critic_folder(), place, self.total_steps)

    def _models(self) -> list[ModelState]:
        slots = (vars(self).get("actor"), self.critic, self.reference, self.teacher)
        return [slot for slot in slots if slot is not None]

    def seed(self, seed: int) -> None:
        """Seed this rank's random numbers."""
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)

    def _reference_folder(self, sizes: Mapping[str, object]) -> HFFolder:
        folder = self.opened(self.settings.ref_load) if self.settings.ref_load else self.folder
        if self.network.sizes_of(folder) != sizes:
            raise TrainError(f"ref_load {folder.path} has other sizes than hf_checkpoint {self.folder.path}")
        return folder

    def _critic_folder(self) -> HFFolder:
        folder = self.opened(self.settings.critic_load) if self.settings.critic_load else self.folder
        theirs, ours = (text_config(each.config).get("vocab_size") for each in (folder, self.folder))
        if theirs != ours:
            raise TrainError(
                f"critic_load {folder.path} has a vocabulary of {theirs}, hf_checkpoint {self.folder.path} one of {ours}; "
                "both must read the same tokens"
            )
        return folder

    def log_probs(
        self, batch: TrainBatch, model: ModelRole = "actor", rows: OutputPositions = "response"
    ) -> NDArray[np.float32]:
        """Return natural-log probabilities [R] of the response tokens of `batch`, 0 for tokens that `rows` leaves out,
        on every rank, at the rollout temperature. Collective. Raises TrainError: the run has no such model."""
        slot = {"actor": self.actor, "ref": self.reference, "teacher": self.teacher}[model]
        if slot is None:
            what, remedy = _ABSENT[model]
            raise TrainError(f"there is no {what} model: set {remedy} to have one loaded")
        prefix = "" if model == "actor" else f"{model}_"
        self.hooks.before_log_probs(slot.network.model, prefix)
        started = time.perf_counter()
        found = slot.log_probs(batch, rows)
        self._seconds[f"{prefix}log_probs"] += time.perf_counter() - started
        return found

    def values(self, batch: TrainBatch) -> NDArray[np.float32]:
        """Return the critic's values [R] before each trained token, 0 at other tokens, on every rank. Collective.
        Raises TrainError: this process has no critic."""
        if self.critic is None:
            raise TrainError(f"there is no critic: {self.algorithm.name} learns none, or it is elsewhere")
        self.hooks.before_log_probs(self.critic.network.model, "")
        return self.critic.values(batch)

    def train(self, batch: TrainBatch, step: int, prepared: Prepared | None = None) -> Mapping[str, float]:
        """Train on the batch of training step `step` (from 0): `num_steps_per_rollout` optimizer steps. Collective.

        The first `num_critic_only_steps` rollouts do not train the actor. `prepared` is by default `prepare(batch)`.

        Returns:
            Metrics (docs/metrics.md), the same on every rank except `perf/`. The loss and its statistics are means over
            the optimizer steps. `mismatch_metrics` are over tokens; with `use_rollout_logprobs`, of the first step
            only. `tokens` counts the trained ones, `perf/..._time` are seconds. `perf/actor_train_tflops` are those of
            one device, as if nothing were shared. Others are `steps`, `advantages/...` and `perf/...memory`.

        Raises TrainError: a token id is outside the vocabulary, or a loss or gradient is not finite; weights stay."""
        with memory_recorded(self.settings, self.ranks.rank), profiled(self.settings, step, self.ranks.rank):
            metrics = self._train(batch, step, prepared)
        if self.settings.reset_optimizer_states:
            for slot in self._models():
                if isinstance(slot, TrainedModel):
                    slot.optimizer.reset()
        every = self.settings.ref_update_interval
        if self.reference is not None and every and (step + 1) % every == 0:
            self.reference.become(self.actor)
            self._followed = True
        return {**metrics, **memory(self.device)}

    def _train(self, batch: TrainBatch, step: int, prepared: Prepared | None) -> dict[str, float]:
        started = time.perf_counter()
        self._seconds = defaultdict(float)
        computed, metrics = prepared or self.prepare(batch)
        count, first = self.settings.num_steps_per_rollout, self.settings.actor_starts
        algorithm, acts = self.algorithm, step * count >= first
        if acts:
            algorithm, self.algorithm = algorithm.adapted(metrics)
        learning = time.perf_counter()
        batch = with_computed(batch, computed)
        if self.learners != "critic":
            batch = self.hooks.prepared(batch, step, self.device)
        seen, history = np.full(len(batch.loss_mask), np.nan, np.float32), []
        for optim_step, indices in enumerate(batch.split(count), step * count):
            inputs = step_inputs(batch, indices, algorithm, self.ranks, self.device)
            found = {} if self.critic is None else self.critic.step(inputs, optim_step)
            if self.learners != "critic" and acts:
                found |= self.actor.step(inputs, optim_step - first)
                seen[batch.response_positions(indices)] = self.actor.seen
            history.append(found)
        self._details = _details(batch, seen)
        times = {f"perf/{name}_time": seconds for name, seconds in self._seconds.items()}
        if self.learners != "critic" and acts:
            times["perf/actor_train_time"] = time.perf_counter() - learning
            done = 3 * forward_flops(self.actor.shape, np.diff(batch.offsets)) / self.ranks.world
            times["perf/actor_train_tflops"] = done / times["perf/actor_train_time"] / 1e12
        apart = [{name: entry.pop(name) for name in [*entry] if name.startswith(PREFIX)} for entry in history]
        if self.algorithm.settings.use_rollout_logprobs:
            apart = apart[:1]  # later steps compare updated weights with the engine's
        keys = sorted({key for entry in history for key in entry})
        means = {key: float(np.mean([entry[key] for entry in history if key in entry])) for key in keys}
        means |= mismatch_metrics(apart)
        sizes = {"tokens": float(batch.loss_mask.sum()), "steps": float(len(history))}
        return {**means, **metrics, **algorithm.state, **sizes, **times, "train_seconds": time.perf_counter() - started}

    def details(self) -> Mapping[str, NDArray[np.float16]]:
        """Return arrays [R] over the response tokens of the last `train`, for inspection: `log_probs` before the step,
        `advantages`, and the outputs of models. NaN where the token did not train. The same on every rank."""
        return self._details

    def prepare(self, batch: TrainBatch, values: NDArray[np.float32] | None = None) -> Prepared:
        """Compute the inputs of `train`, the same on every rank; `values` are from a critic with separate processes.
        Collective. Raises TrainError: neither a model of this process nor the samples have what the algorithm reads."""
        found = self._computed(batch, values)
        batch = with_computed(batch, found)
        made = estimate(batch, self.algorithm, self.hooks.advantages(batch, self.algorithm))
        arrays = {"advantages": made.advantages, "returns": made.returns, "chosen": made.chosen}
        return Prepared({**found, **{k: v if v is None else v.numpy() for k, v in arrays.items()}}, made.metrics)

    def _computed(self, batch: TrainBatch, values: NDArray[np.float32] | None) -> dict[str, NDArray[np.float32]]:
        """Return the models' outputs for the batch before the first step, [R] each."""
        algorithm = self.algorithm
        reads, several = algorithm.reads | self.hooks.reads, self.settings.num_steps_per_rollout > 1
        found: dict[str, NDArray[np.float32]] = {}
        if algorithm.settings.use_rollout_logprobs:
            if batch.rollout_log_probs is None:
                raise TrainError("use_rollout_logprobs is set, but samples of the batch have no rollout_log_probs")
            found["old_log_probs"] = batch.rollout_log_probs
        elif "old_log_probs" in reads or (several and not algorithm.supervised):
            found["old_log_probs"] = self.log_probs(batch, "actor", "trained")
        if "ref_log_probs" in reads:
            found["ref_log_probs"] = self.log_probs(batch, "ref", "trained")
        if "teacher_log_probs" in reads and self.teacher is not None:
            found["teacher_log_probs"] = self.log_probs(batch, "teacher", "trained")
        elif "teacher_log_probs" in reads and batch.teacher_log_probs is not None:
            found["teacher_log_probs"] = batch.teacher_log_probs
        if "values" in reads:
            found["values"] = self.values(batch) if values is None else values
        if missing := sorted(reads - found.keys()):
            raise TrainError(
                f"{algorithm.name} reads {', '.join(missing)}, which neither a model of this run nor the samples have"
            )
        return found

    def weight_specs(self) -> Mapping[int, list[TensorSpec]]:
        """Return the specs of all tensors, by the rank that sends them in `broadcast_weights`; local and cheap."""
        return {rank: self.engine_form.specs(specs) for rank, specs in self.actor.network.specs().items()}

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield full tensors by HF name on rank 0. Other ranks must exhaust an empty iterator. Collective."""
        return self.actor.network.export()

    def init_weight_group(self, group: WeightGroup) -> None:
        """Join the group that takes weights to engines, if this rank is the sender. Blocks until all have joined."""
        if self.ranks.rank == group.sender:
            where = f"tcp://{group.address}:{group.port}"
            self._sender = WeightSender(group.backend, where, group.world_size, group.name, group.size)

    def broadcast_weights(self, buckets: Sequence[Bucket]) -> None:
        """Send all tensors of this rank to the engines, in the order of `weight_specs`, in the buckets of its group.
        Collective. Raises TrainError: a member was lost, or buckets are missing."""
        stream, sender = self.engine_form.tensors(self.actor.network.export(by_stage=True)), self._sender
        for specs in [bucket.tensors for bucket in buckets if sender is not None and bucket.group == sender.name]:
            assert sender is not None
            flat = sender.buffer(sum(spec.nbytes for spec in specs), self.device)
            for (_, view), (_, tensor) in zip(views(flat, specs), stream, strict=False):
                view.copy_(tensor)
            sender.send(flat)
        if sender is not None:
            sender.end()
        if next(stream, None) is not None:
            raise TrainError("broadcast_weights needs init_weight_group first, and buckets of all tensors")

    def share_weights(self, specs: Sequence[TensorSpec], *, first: bool, readers: int) -> list[str]:
        """Return one handle per rank, of a buffer on the rank's device with the tensors of `specs`. They are the next
        in the order of `weight_specs`; `first` restarts it. The next call overwrites the buffer; empty `specs` free it.
        Ranks from `readers` on give no handle, because a handle that is never opened is never freed. Collective."""
        if not specs:
            self._shared, self._stream = None, iter(())
            return []
        if first:
            self._stream = self.engine_form.tensors(self.actor.network.export(in_step=True))
        size = sum(spec.nbytes for spec in specs)
        if self._shared is None or self._shared.numel() < size:
            self._shared = torch.empty(size, dtype=torch.uint8, device=self.device)
        flat = self._shared[:size]
        for (_, view), (_, tensor) in zip(views(flat, specs), self._stream, strict=False):
            if self.ranks.rank == 0:
                view.copy_(tensor)
        torch.distributed.broadcast(flat, 0)
        if flat.is_cuda:
            torch.cuda.synchronize(self.device)
        handles = [""] * self.ranks.world
        own = flattened_bucket(flat, specs) if self.ranks.rank < readers else ""
        torch.distributed.all_gather_object(handles, own)
        return handles

    def close_weight_group(self) -> None:
        """Leave the group that `init_weight_group` joined, if any."""
        if self._sender is not None:
            self._sender.close()
            self._sender = None

    def offload(self) -> None:
        """Free the memory of models, gradients and optimizer states; idempotent. Raises TrainError: no space left."""
        if self._offloaded is not None:
            return
        parts = [slot.memory() for slot in self._models()]
        every = ([tensor for part in parts for tensor in part[which]] for which in (0, 1))
        # Tensors that --fsdp-cpu-offload keeps in host memory stay there.
        kept, anew = ([tensor for tensor in those if tensor.device.type == self.device.type] for those in every)
        with raised_as(TrainError, "the trainer's state could not be offloaded (TMPDIR, --no-offload-train)", OSError):
            self._offloaded = OffloadedTensors(kept, anew)

    def onload(self) -> None:
        """Restore the memory that `offload` freed, bit for bit, except gradients, which are zero; idempotent."""
        if self._offloaded is not None:
            self._offloaded.restore()
            self._offloaded = None

    def save(self, path: str | Path, step: int, critic: str | Path | None = None) -> None:
        """Write model, optimizer, random state and `step` atomically to the folder `path`. The critic's checkpoint is a
        folder in it. If separate processes have saved that folder as `critic`, it is moved there. With `async_save`, a
        thread writes a copy until `saved`. Collective. Raises CheckpointError: the checkpoint could not be written."""
        self.saved()
        if self.learners == "critic" and self.critic is not None:
            self._saving = self.critic.save(Path(path), step)
        else:
            part = self.critic or (None if critic is None else Path(critic))
            reference = self.reference if self._followed else None
            self._saving = self.actor.save(Path(path), step, part, reference, self.algorithm.state)
        if not self.settings.async_save:
            self.saved()

    def saved(self, *, wait: bool = True) -> bool:
        """Finish the checkpoint in progress; without `wait`, only if all ranks have written their files. Returns true
        if none is in progress now. Collective. Raises CheckpointError: the checkpoint could not be written."""
        if self._saving is None:
            return True
        if not wait:
            written = torch.tensor(float(self._saving.written()), device=self.device)
            torch.distributed.all_reduce(written, torch.distributed.ReduceOp.MIN)
            if not written.item():
                return False
        saving, self._saving = self._saving, None
        saving.finish()
        return True

    def load(self, path: str | Path) -> int:
        """Restore the checkpoint at `path`, or the newest one in that folder, under this or another parallel layout;
        returns its step. Collective. Raises CheckpointError: no complete checkpoint is there, it is damaged or of
        another model, or only one of checkpoint and run has a critic."""
        if (newest := latest(path)) is None:
            raise CheckpointError(
                f"{path}: no complete checkpoint here (a folder with {MANIFEST}, or one of such folders)"
            )
        check_critic(newest.path, wanted="values" in self.algorithm.reads)
        adapted = read_manifest(newest.path).get("algorithm", {})
        kept = {name: adapted[name] for name in self.algorithm.state if name in adapted}
        self.algorithm = self.algorithm.with_settings(kept)
        if self.critic is not None:
            self.critic.load(newest.path / CRITIC)
        if self.learners != "critic":
            self._followed = self.actor.load(newest.path, self.reference)
        return newest.step

    def save_hf(self, path: str | Path, *, served: bool = False) -> None:
        """Write a Hugging Face folder atomically. `served`: the engines read it next. Collective."""
        lora, adapter = self.actor.place.lora, self.actor.network.adapter()
        stream = iter(()) if served and lora else self.export_weights()
        if self.ranks.rank == 0:
            if served and not lora and self.engine_form.scaled:
                write_hf(path, self.engine_form.tensors(stream), source=self.engine_form.folder, quantized=True)
            elif not (served and lora):
                write_hf(path, stream, source=self.folder)
            if lora:
                with whole_folder(Path(path) if served else Path(path, "adapter")) as partial:
                    write_adapter(partial, adapter, lora, self.folder.path)
        else:
            for _ in stream:
                pass
        torch.distributed.barrier(self._files)
        if served:
            self.hooks.weights_written(str(path))
            torch.distributed.barrier(self._files)

    def close(self) -> None:
        """Leave all process groups. Collective."""
        self.close_weight_group()
        if hasattr(self, "ranks"):
            for slot in self._models():
                slot.close()
            self.ranks.leave()
            for models in ("ranks", "_files", "actor", "critic", "reference", "teacher"):
                vars(self).pop(models, None)
            # Models and process groups form cycles. Until collection, each gloo thread wakes a hundred times a second.
            gc.collect()


def with_computed(batch: TrainBatch, computed: Mapping[str, Any]) -> TrainBatch:
    """Return the batch with `Prepared.arrays`; without teacher log-probs in them, the samples' own are dropped."""
    return dataclasses.replace(batch, **{"teacher_log_probs": None, **computed})


def _details(batch: TrainBatch, log_probs: NDArray[np.float32]) -> dict[str, NDArray[np.float16]]:
    arrays, most = {**batch.arrays(), "log_probs": log_probs}, float(np.finfo(np.float16).max)
    shown = ("log_probs", "advantages", "values", "ref_log_probs", "teacher_log_probs")
    clipped = {name: np.clip(arrays[name], -most, most).astype(np.float16) for name in shown if name in arrays}
    return {name: np.where(batch.loss_mask == 1, half, np.float16(np.nan)) for name, half in clipped.items()}


_ABSENT = {"ref": ("reference", "use_kl_loss or kl_coef"), "teacher": ("teacher", "use_opd and opd_teacher_load")}
