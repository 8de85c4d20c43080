"""The run's driver: generate, train, record, send weights, until the planned rollout.

The order of the records makes every moment safe to be killed at: the ledger says `trained` before the checkpoint
that contains the step is written, and a resume takes back what no checkpoint proves.
"""

import shutil
import time
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from agentrl.buffer.dump import load_rollout
from agentrl.cluster.quiet import library_output, stopped_by_sigterm
from agentrl.config import RunSettings
from agentrl.errors import DataError
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.progress import Progress, counted
from agentrl.run.devices import resolve_device
from agentrl.run.preflight import preflight
from agentrl.runfolder import RunFolder
from agentrl.train.batch import TrainBatch
from agentrl.train.checkpoints import latest

if TYPE_CHECKING:
    from agentrl.cluster.placement import Cast


def train(settings: RunSettings) -> int:
    """Run the whole training; resumes if the run's folder holds a checkpoint. Returns the exit code.

    A run that is finished, its model written, is left as it is: nothing is started.
    """
    settings.check_complete("train")
    if find_spec("ray") is None:
        raise ModuleNotFoundError("No module named 'ray'", name="ray")
    with Progress(settings.observability, total=settings.rollout.num_rollout) as progress:
        began = time.monotonic()
        # No line for this: a mistake that it finds is the only thing to read.
        progress.phase("checking the settings, the model and the data")
        preflight(settings, "train")
        settings = resolve_device(settings)
        with RunFolder.open(settings) as folder:
            progress.ready("settings, model and data checked", began)
            _train(settings, folder, progress)
            progress.note(f"the model is in {folder.model}")
    return 0


def _train(settings: RunSettings, folder: RunFolder, progress: Progress) -> None:
    found = latest(folder.checkpoints) or latest(folder.load)
    first = 0 if found is None else found.step + 1
    progress.resume(first)
    if found is not None and first >= settings.rollout.num_rollout:
        progress.note(
            f"nothing left to train: the newest checkpoint covers {counted(first, 'rollout')}, and --num-rollout is "
            f"{settings.rollout.num_rollout}; to go on from there, give a larger one"
        )
        if folder.has_model_of(found.path):
            return
        progress.note("the model of that checkpoint is not written yet: starting once more for that")
    checkpoint = None if found is None else (str(found.path), found.step)
    # Ray is slow to import, and nothing above needs it.
    from agentrl.cluster.placement import assemble

    with (
        library_output(folder.logs / "ray.log"),
        stopped_by_sigterm(),
        MetricsLogger(settings.observability, folder.path, resume_step=first) as logger,
        assemble(settings, folder, checkpoint, progress) as cast,
    ):
        TrainLoop(cast, logger, progress).run(first)
    if (written := latest(folder.checkpoints) or latest(folder.load)) is not None:
        folder.wrote_model_of(written.path)


class TrainLoop:
    """The synchronous loop: one rollout, then its optimizer steps, then the next."""

    def __init__(self, cast: "Cast", logger: MetricsLogger, progress: Progress) -> None:
        self.cast, self.logger, self.progress = cast, logger, progress
        self.settings = cast.settings

    def run(self, first: int) -> None:
        """From rollout `first` to the planned end, or to the end of the data."""
        settings, last = self.settings, self.settings.rollout.num_rollout - 1
        self._send_weights(first)
        if first == 0 and settings.rollout.eval_before_train:
            self._evaluate(-1)
        if first <= last:
            self.progress.begin(
                "first rollout" if first == 0 else f"rollout {first + 1}, the first after the checkpoint"
            )
        done = covered = evaluated = first - 1
        for rollout_id in range(first, last + 1):
            if not self._rollout(rollout_id):
                break
            done = rollout_id
            # The evaluation comes before the checkpoint: a resume repeats both or neither.
            evaluating = self._evaluates(rollout_id, last)
            if _due(settings.cluster.update_weights_interval, rollout_id) or evaluating or rollout_id == last:
                self._send_weights(rollout_id + 1)
            if evaluating:
                self._evaluate(rollout_id)
                evaluated = rollout_id
            if _due(settings.train.save_interval, rollout_id):
                self._checkpoint(rollout_id)
                covered = rollout_id
        if evaluated < done and self._evaluates(done, done):
            # The data ended before the planned rollout.
            self._send_weights(done + 1)
            self._evaluate(done)
        if covered < done:
            self._checkpoint(done)
        self.progress.phase("writing the model")
        self.cast.trainers.call("save_hf", str(self.cast.folder.model), what="writing the model")

    def _rollout(self, rollout_id: int) -> bool:
        """One rollout and its training; False when the data has come to its end."""
        started = time.monotonic()
        self.progress.phase(f"rollout {rollout_id + 1}: generating")
        batch, info = self._generate(rollout_id)
        if info["ended"]:
            return False
        self.progress.phase(f"rollout {rollout_id + 1}: training")
        trained_at = time.monotonic()
        steps = rollout_id * self.settings.train.num_steps_per_rollout
        metrics = self.cast.trainers.call("train", batch, steps, what=f"the training of rollout {rollout_id}")
        if self.cast.worker is not None:
            record = self.cast.worker.trained.remote(info["group_ids"], rollout_id)
            self.cast.ask(record, what="recording the training")
        now = time.monotonic()
        times = {"perf/train_seconds": now - trained_at, "perf/step_seconds": now - started}
        self._log(rollout_id, {**info["metrics"], **{f"train/{k}": v for k, v in metrics.items()}, **times})
        return True

    def _generate(self, rollout_id: int) -> tuple[Any, dict[str, Any]]:
        if self.cast.worker is None:
            return self._load_dump(rollout_id)
        batch, info = self.cast.worker.generate.remote(rollout_id)
        return batch, self.cast.ask_rollouts(info, what=f"generating rollout {rollout_id}")

    def _load_dump(self, rollout_id: int) -> tuple[TrainBatch, dict[str, Any]]:
        template = self.settings.cluster.load_debug_rollout_data
        assert template is not None
        groups = load_rollout(template, rollout_id)
        if not groups:
            raise DataError(f"--load-debug-rollout-data {template}: rollout {rollout_id} holds no groups")
        supervised = self.settings.algorithm.loss_type == "sft_loss"
        batch = TrainBatch.from_samples(groups, self.settings.rollout.reward_key, supervised=supervised)
        return batch, {"group_ids": [], "metrics": {}, "ended": False}

    def _checkpoint(self, rollout_id: int) -> None:
        self.progress.phase(f"rollout {rollout_id + 1}: saving")
        path = self.cast.folder.checkpoint(rollout_id)
        self.cast.trainers.call("save", str(path), rollout_id, what="saving the checkpoint")
        if self.cast.worker is not None:
            self.cast.ask(self.cast.worker.checkpointed.remote(rollout_id), what="recording the checkpoint")
        if keep := self.settings.train.keep_checkpoints:
            for old in sorted(path.parent.glob("rollout_*"))[:-keep]:
                shutil.rmtree(old)

    def _send_weights(self, version: int) -> None:
        if self.cast.sync is not None:
            self.progress.phase("sending weights")
            self.cast.sync.send(version)

    def _evaluate(self, rollout_id: int) -> None:
        if self.cast.worker is None or not self.settings.rollout.eval_prompt_data:
            return
        if rollout_id < 0:
            self.progress.begin("evaluating before training")
        else:
            self.progress.phase("evaluating")
        metrics = self.cast.ask_rollouts(self.cast.worker.evaluate.remote(rollout_id + 1), what="evaluating")
        self._log(rollout_id, metrics)

    def _evaluates(self, rollout_id: int, last: int) -> bool:
        """At the interval, and after the last rollout: the model that is written is one that was evaluated."""
        interval = self.settings.rollout.eval_interval
        return interval is not None and (_due(interval, rollout_id) or rollout_id == last)

    def _log(self, rollout_id: int, metrics: dict[str, float]) -> None:
        self.logger.log(rollout_id, metrics)
        self.progress.step(rollout_id, metrics)


def _due(interval: int | None, rollout_id: int) -> bool:
    return interval is not None and (rollout_id + 1) % interval == 0
