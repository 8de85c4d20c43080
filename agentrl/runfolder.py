"""The run's folder: what lies where, and how a run is recognised when it is started again.

A training run lives in `output_dir` itself; `agentrl rollout` and `agentrl eval` write into folders of their own
below it, so that they never touch a run. One process at a time: the folder is locked before anything is written.
"""

import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import Purpose, RunSettings
from agentrl.errors import SettingsError
from agentrl.train.checkpoints import MANIFEST

_BELOW: dict[Purpose, str] = {"train": "", "rollout": "rollouts", "eval": "evaluation"}


def _identity(checkpoint: Path) -> dict[str, object]:
    """Which checkpoint it is: where, and when it was completed, as a later life may write another one there."""
    return {"checkpoint": str(checkpoint), "completed_ns": (checkpoint / MANIFEST).stat().st_mtime_ns}


def _unwritable(path: Path, error: OSError, flag: str = "--output-dir") -> SettingsError:
    return SettingsError(f"{flag} {path} cannot be written: {error.strerror}; choose another folder")


def _make_place(folder: Path) -> None:
    """Make the folder of `--save` and write into it once: the first checkpoint may be hours away."""
    probe = folder / f".probe.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise _unwritable(folder, error, "--save") from error


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. The same folder given to `agentrl train` again resumes the run."""

    path: Path
    checkpoints: Path
    """Where checkpoints are written."""
    load: Path
    """Where a checkpoint is looked for when `checkpoints` has none."""

    @classmethod
    @contextmanager
    def open(cls, settings: RunSettings, purpose: Purpose = "train") -> "Iterator[RunFolder]":
        """Make and lock the folder, and write the resolved settings into it.

        Raises:
            SettingsError: it cannot be made or written, or another process is using it.
        """
        path = Path(settings.observability.output_dir).expanduser().resolve() / _BELOW[purpose]
        save = Path(settings.train.save).expanduser().resolve() if settings.train.save else path / "checkpoints"
        load = Path(settings.train.load).expanduser().resolve() if settings.train.load else save
        if purpose == "train" and settings.train.save:
            _make_place(save)
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            lock = (path / ".lock").open("ab")
        except OSError as error:
            raise _unwritable(path, error) from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise SettingsError(
                    f"--output-dir {path} is in use by another agentrl process; wait for it or choose another folder"
                ) from error
            cls._write_settings(path, settings)
            yield cls(path, save, load)

    @staticmethod
    def _write_settings(path: Path, settings: RunSettings) -> None:
        try:
            draft = path / f".settings.{os.getpid()}.json"
            draft.write_text(settings.model_dump_json(indent=2) + "\n")
            os.replace(draft, path / "settings.json")
        except OSError as error:
            raise _unwritable(path, error) from error

    def write_processes(self, processes: Mapping[str, Sequence[int]]) -> None:
        """Write the process ids of this life of the run, by role, to `processes.json`."""
        draft = self.path / f".processes.{os.getpid()}.json"
        draft.write_text(json.dumps(processes) + "\n")
        os.replace(draft, self.path / "processes.json")

    def wrote_model_of(self, checkpoint: Path) -> None:
        """Write down, in `exported.json`, that `model` is the export of this checkpoint."""
        draft = self.path / f".exported.{os.getpid()}.json"
        draft.write_text(json.dumps(_identity(checkpoint)) + "\n")
        os.replace(draft, self.path / "exported.json")

    def has_model_of(self, checkpoint: Path) -> bool:
        """Whether `model` is there and is the export of this checkpoint. When in doubt, no: it can be written again."""
        try:
            same = json.loads((self.path / "exported.json").read_text()) == _identity(checkpoint)
        except (OSError, json.JSONDecodeError):
            return False
        return same and (self.model / "config.json").is_file() and any(self.model.glob("*.safetensors"))

    def forget_ledger(self) -> None:
        """Remove the ledger of an earlier life: generating without training has nothing to resume."""
        for file in self.path.glob("ledger.sqlite*"):
            file.unlink()

    @property
    def logs(self) -> Path:
        """Logs of the engines, and what Ray's library writes."""
        return self.path / "logs"

    @property
    def weights(self) -> Path:
        """Weights on their way to the engines by disk."""
        return self.path / "weights"

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "model"

    def checkpoint(self, rollout_id: int) -> Path:
        """The folder of the checkpoint that covers rollouts up to `rollout_id`."""
        return self.checkpoints / f"rollout_{rollout_id:06d}"
