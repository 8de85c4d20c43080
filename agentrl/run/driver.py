"""The run's driver: carries out the actions of the schedule with the given parts, until the planned end."""

import json
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext, suppress
from functools import partial
from pathlib import Path

import anyio

from agentrl.config import RunSettings
from agentrl.config.placement import ClusterSettings
from agentrl.engine.weights import WHOLE
from agentrl.errors import CheckpointError, DataError, ungrouped
from agentrl.files import remove_folder
from agentrl.observability.metrics import MetricsLogger, read_metrics
from agentrl.observability.progress import Progress, counted
from agentrl.observability.verdict import verdict_lines
from agentrl.run.autoconfig import resolve_device, resolve_threads
from agentrl.run.preflight import prepared, resumed
from agentrl.run.protocols import Batch, Components, Start, WeightTransfer, within
from agentrl.run.resuming import changed
from agentrl.run.schedule import Cadence, Do, actions
from agentrl.run.signals import stopped_by_sigterm
from agentrl.runfolder import METRICS, RunFolder
from agentrl.tasks import alongside
from agentrl.train.checkpoints import foreign, latest


def train(settings: RunSettings, start: Start) -> int:
    """Run the whole training; resumes if the run's folder holds a checkpoint. Returns the exit code. If the run is
    finished and its model is written, nothing is started. `start`: `agentrl.cluster.start` or `agentrl.run.local.start`."""
    with Progress(settings.observability, total=settings.rollout.num_rollout) as progress:
        began = time.monotonic()
        # Prints no line: if the check fails, its error is the only output.
        progress.phase("checking the settings, the model and the data")
        settings, notes = prepared(settings, "train")
        progress.plan(settings.rollout.num_rollout)
        settings = resolve_threads(resolve_device(settings))
        differs = changed(settings)
        with open_folder(settings) as folder:
            progress.ready("settings, model and data checked", began)
            if differs:
                notes.append(f"the run in {folder.path} goes on with changed settings: {', '.join(differs)}")
            progress.note(*notes)
            _train(settings.replace(save=str(folder.checkpoints)), folder, progress, start)
            progress.note(f"the model is in {folder.model}; curves and trajectories: agentrl view {folder.path}")
            if (metrics := folder.path / METRICS).is_file():  # the user may have moved the file of a finished run
                progress.note(*verdict_lines(read_metrics(metrics)))
    return 0


def open_folder(settings: RunSettings, command: str = "train") -> AbstractContextManager[RunFolder]:
    """Open and lock the folder that the settings name, and write the settings into it."""
    place, train = settings.observability.output_dir, settings.train
    return RunFolder.open(place, json.dumps(settings.shown(), indent=2), command, save=train.save, load=train.load)


def _train(settings: RunSettings, folder: RunFolder, progress: Progress, start: Start) -> None:
    found = resumed(settings)
    first = 0 if found is None else found.step + 1
    progress.resume(first)
    if found is None and (taken := foreign(settings.train.load)) is not None:
        progress.note(f"the weights are those of {taken}; its optimizer's state and place in the data are not read")
    with suppress(CheckpointError):  # a damaged one is not read either
        if found is not None and settings.train.load and (other := latest(folder.load)) not in (None, found):
            progress.note(f"--load {other.path} is not read: the run goes on from its own checkpoint {found.path}")
    if found is not None and first >= settings.rollout.num_rollout:
        progress.note(
            f"nothing left to train: the newest checkpoint ({found.path}) covers {counted(first, 'rollout')}, and --num-rollout is "
            f"{settings.rollout.num_rollout}; to go on from there, give a larger one"
        )
        if folder.has_model_of(found.path):
            return
        progress.note("the model of that checkpoint is not written yet: starting once more for that")

    if first and settings.rollout.eval_interval is None and settings.rollout.evaluates:
        progress.note("a resumed run evaluates only with --eval-interval")

    async def run() -> None:
        with MetricsLogger(settings.observability, folder.path, resume_step=first) as logger:
            async with start(settings, folder, found, progress) as parts:
                await Driver(settings, parts, folder, logger, progress).run(first)

    with stopped_by_sigterm():
        anyio.run(run, backend_options={"use_uvloop": True})


def cadence(settings: RunSettings, *, engines: bool = True) -> Cadence:
    """Return how often each action is due. Without engines, no weights are sent and nothing is evaluated."""
    rollout, train = settings.rollout, settings.train
    return Cadence(
        steps=rollout.num_rollout,
        send=settings.cluster.update_weights_interval if engines else None,
        evaluate=rollout.eval_interval if engines else None,
        evaluate_first=engines and rollout.eval_before_train and rollout.evaluates,
        save=train.save_interval,
    )


_ENGINES = {Do.NEXT_BATCH: WHOLE, Do.EVALUATE: WHOLE, Do.TRAIN: frozenset[str]()}
_ENGINES |= dict.fromkeys((Do.SEND, Do.SAVE, Do.EXPORT), frozenset({"weights"}))


class DeviceSharing:
    """Gives the devices' memory (`--colocate`) to the next part that needs it. Trainer memory is offloaded while engines
    generate, and the reverse. A weight update needs the trainer and the engines' weights. Writing checkpoints and the model
    needs both too: the engines keep the weights that were just sent."""

    def __init__(self, settings: ClusterSettings, parts: Components) -> None:
        self._settings, self._parts = settings, parts
        self._before: frozenset[str] | None = None

    async def before(self, do: Do) -> None:
        """Return when `do` may begin."""
        generates = _ENGINES[do] == WHOLE
        if self._parts.weights is None or self._before == _ENGINES[do]:
            return
        self._before = _ENGINES[do]
        with within(self._settings.start_timeout, "taking turns on the devices (--colocate)"):
            if generates and self._settings.offload_train:
                await self._parts.trainer.offload()
            if self._settings.offload_rollout:
                await self._parts.rollouts.set_resident_memory(_ENGINES[do])
            if not generates and self._settings.offload_train:
                await self._parts.trainer.onload()


_MIN_ESS, _MISMATCH_STEPS = 0.7, 2
"""The driver warns if the effective sample size is below `_MIN_ESS` in `_MISMATCH_STEPS` steps in a row."""


class Driver:
    """The executor of a schedule, action by action. `parts` are already started; the driver does not stop them."""

    def __init__(
        self, settings: RunSettings, parts: Components, folder: RunFolder, logger: MetricsLogger, progress: Progress
    ) -> None:
        self._settings, self._limits, self._parts, self._folder = settings, settings.cluster, parts, folder
        self._logger, self._progress = logger, progress
        self._batch: Batch | None = None
        self._saving: int | None = None
        self._began = self._waited = 0.0
        self._version = 0  # of the trainer's weights
        self._far_apart = 0
        self._evaluating: anyio.Event | None = None

    async def run(self, first: int = 0) -> None:
        """Run from step `first` to the planned end, or to the end of the data. Waits for each action in turn: a batch unblocks
        training, training unblocks the weight update, and the update lets the coordinator lease under the new version."""
        self._sharing = DeviceSharing(self._settings.cluster, self._parts)
        self._first = first
        often = cadence(self._settings, engines=self._parts.weights is not None)
        calls = {Do.SEND: self._send, Do.NEXT_BATCH: self._next_batch, Do.TRAIN: self._train}
        calls |= {Do.EVALUATE: self._evaluate, Do.SAVE: self._save, Do.EXPORT: self._export}
        with ungrouped():
            async with anyio.create_task_group() as self._beside:
                for action in actions(often, first, data_ended=lambda: self._batch is None):
                    await self._sharing.before(action.do)
                    await calls[action.do](action.step)

    async def _send(self, version: int) -> None:
        assert self._parts.weights is not None
        self._version = version
        self._progress.phase("sending weights")
        with within(self._limits.weight_sync_timeout, "the weight update"):
            await self._parts.weights.send(version)
            await self._parts.rollouts.updated(version)

    async def _next_batch(self, step: int) -> None:
        self._began = time.monotonic()
        if step == self._first:
            self._progress.begin(f"rollout {step + 1}, the first after the checkpoint" if step else "first rollout")
        self._progress.phase(f"rollout {step + 1}: generating")
        with within(self._limits.rollout_timeout, f"generating rollout {step}"):
            async with self._weights_kept(Do.NEXT_BATCH):
                self._batch = await self._parts.rollouts.next_batch(step)
        if self._batch is None and step == 0:
            raise DataError("the data ended before the first batch was full; give more, or lower --rollout-batch-size")
        if self._batch is None:
            self._progress.note(f"the data has ended after {counted(step, 'rollout')}, before another full batch")
        self._waited = time.monotonic() - self._began

    async def _train(self, step: int) -> None:
        batch, self._batch = self._batch, None
        assert batch is not None
        self._progress.phase(f"rollout {step + 1}: training")
        began = time.monotonic()
        with within(self._limits.train_timeout, f"the training of rollout {step}"):
            metrics = await self._parts.trainer.train(batch, step)
        self._version = step + 1
        with within(self._limits.start_timeout, "recording the training"):
            details = await self._parts.trainer.details() if self._settings.buffer.keep_trajectories else None
            await self._parts.rollouts.trained(batch.group_ids, step, details)
        await self._saved(wait=False)
        now = time.monotonic()
        times = {"wait_seconds": self._waited, "train_seconds": now - began, "step_seconds": now - self._began}
        times["wait_time_ratio"] = self._waited / max(now - self._began, 1e-9)
        named = {k if k.startswith("perf/") else f"train/{k}": v for k, v in metrics.items()}
        self._log(step, {**batch.metrics, **named, **{f"perf/{name}": value for name, value in times.items()}})

    async def _evaluate(self, step: int) -> None:
        if self._evaluating is not None:
            await self._evaluating.wait()
        if step < 0:
            self._progress.begin("evaluating before training")
        else:
            self._progress.phase("evaluating")
        if self._parts.eval_weights is not None:
            with within(self._limits.weight_sync_timeout, "the weight update of the engines that evaluate"):
                await self._parts.eval_weights.send(step + 1)
        if self._settings.rollout.eval_while_training:
            self._evaluating = anyio.Event()
            self._beside.start_soon(self._figures_of, step, self._evaluating)
        else:
            async with self._weights_kept(Do.EVALUATE):
                await self._figures_of(step)

    async def _figures_of(self, step: int, ended: anyio.Event | None = None) -> None:
        """Evaluate with the weights that the engines have."""
        with within(self._limits.rollout_timeout, "evaluating"):
            metrics = await self._parts.rollouts.evaluate(step + 1)
        self._log(step, metrics)
        if ended is not None:
            ended.set()

    def _weights_kept(self, do: Do) -> AbstractAsyncContextManager[None]:
        """During the block, send the weights again if all engines were restarted and only the trainer has the weights."""
        weights = self._parts.weights

        async def watch(weights: WeightTransfer) -> None:
            while True:
                await anyio.sleep(self._settings.engine.engine_probe_interval)
                if await weights.lost():
                    with anyio.CancelScope(shield=True):
                        self._progress.note("all engines were started again: sending them the weights once more")
                        await self._sharing.before(Do.SEND)
                        with within(self._limits.weight_sync_timeout, "the weight update"):
                            await weights.send(self._version)
                            await self._parts.rollouts.updated(self._version)
                        await self._sharing.before(do)

        return nullcontext() if weights is None else alongside(partial(watch, weights))

    async def _save(self, step: int) -> None:
        if self._evaluating is not None:  # a resume from this checkpoint does not repeat the evaluation
            await self._evaluating.wait()
        self._progress.phase(f"rollout {step + 1}: saving")
        if self._settings.train.save_hf is not None:  # first: a run that resumes from the checkpoint would not write it
            with within(self._limits.train_timeout, "writing the model"):
                await self._parts.trainer.save_hf(Path(self._settings.train.save_hf.format(rollout_id=step)))
        await self._saved(wait=True)
        with within(self._limits.start_timeout, "copying the ledger"):
            await self._parts.rollouts.saving()
        with within(self._limits.train_timeout, "saving the checkpoint"):
            await self._parts.trainer.save(self._folder.checkpoint(step), step)
        self._saving = step
        await self._saved(wait=not self._settings.train.async_save)

    async def _saved(self, *, wait: bool) -> None:
        """Record a pending checkpoint that is complete, and delete checkpoints beyond `--keep-checkpoints`."""
        if self._saving is None:
            return
        with within(self._limits.train_timeout, "saving the checkpoint"):
            if not await self._parts.trainer.saved(wait=wait):
                return
        step, self._saving = self._saving, None
        with within(self._limits.start_timeout, "recording the checkpoint"):
            await self._parts.rollouts.checkpointed(step)
        if keep := self._settings.train.keep_checkpoints:
            path = self._folder.checkpoint(step)
            found = path.parent.glob("rollout_" + "[0-9]" * 6)
            # Only folders with a checkpoint's name are deleted, and never the new checkpoint.
            for old in sorted(folder for folder in found if folder.is_dir() and folder.name <= path.name)[:-keep]:
                remove_folder(old)

    async def _export(self, step: int) -> None:
        await self._saved(wait=True)
        self._progress.phase("writing the model")
        with within(self._limits.train_timeout, "writing the model"):
            await self._parts.trainer.save_hf(self._folder.model)
        if (written := latest(self._folder.checkpoints) or latest(self._folder.load)) is not None:
            self._folder.wrote_model_of(written.path)

    def _log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics; warn once for each series of steps in which the engine's probabilities were far from the trainer's."""
        self._logger.log(step, metrics)
        self._progress.step(step, metrics)
        if (ess := metrics.get("train/mismatch_ess")) is None:
            return  # these are the metrics of an evaluation
        self._far_apart = self._far_apart + 1 if ess < _MIN_ESS else 0
        if self._far_apart == _MISMATCH_STEPS:
            self._progress.note(
                f"train/mismatch_ess is {ess:.2f}: the weights that sampled these tokens are far from the trained ones, and the "
                "reward may collapse; lower --max-staleness or --lr, or correct with --use-tis"
            )
