"""The run's folder: the names of its files, and its lock.

1. All file names of a run are in this module. A training run uses `--output-dir` itself. `agentrl rollout` and
   `agentrl eval` write into separate folders below it, so they never change a training run.
2. One process at a time uses a folder: the folder is locked before a file in it is written."""

import errno
import fcntl
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from agentrl.errors import SettingsError
from agentrl.files import write_atomic

METRICS, SETTINGS = "metrics.jsonl", "settings.json"
STARTED_FROM = "hf_checkpoint.txt"  # the absolute path of --hf-checkpoint
MANIFEST = "manifest.json"  # the file that makes a checkpoint's folder complete
LEDGER = "ledger.sqlite"  # the outcome of each group
TRAJECTORIES, DEMONSTRATIONS = "trajectories.sqlite", "demonstrations.jsonl"  # samples for the viewer, and for SFT
EVALUATIONS = "evaluations.jsonl"  # the metrics of every evaluation

CRITIC = "critic"  # the critic's folder in a checkpoint, with the layout of a checkpoint

# The folder of each command below the output folder.
BELOW: Mapping[str, str] = {"train": "", "rollout": "rollouts", "eval": "evaluation"}


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. The same folder given to `agentrl train` again resumes the run."""

    path: Path
    checkpoints: Path  # the folder that checkpoints are written to
    load: Path  # the folder that is searched for a checkpoint if `checkpoints` has none

    @classmethod
    @contextmanager
    def open(
        cls, output_dir: str, settings: str, command: str = "train", *, save: str | None = None, load: str | None = None
    ) -> "Iterator[RunFolder]":
        """Create and lock the folder, and write the resolved settings (JSON) into it. `command`: the running command, a
        key of `BELOW`. `save`: folder of checkpoints, by default in the run's folder. `load`: by default as `save`.
        Raises SettingsError: the folder cannot be created or written, or another process uses it."""
        path = _absolute(output_dir) / BELOW[command]
        checkpoints = _absolute(save) if save else path / "checkpoints"
        try:
            for each in (_absolute(output_dir), path):
                each.mkdir(0o700, parents=True, exist_ok=True)
            (path / "logs").mkdir(exist_ok=True)
            lock = (path / ".lock").open("ab")
        except OSError as error:
            raise _unwritable(path, error) from error
        with lock:
            _lock(lock, path)
            folder = cls(path, checkpoints, _absolute(load) if load else checkpoints)
            try:
                folder._write(SETTINGS, settings)
            except OSError as error:
                raise _unwritable(path, error) from error
            yield folder

    def _write(self, name: str, text: str) -> None:
        write_atomic(self.path / name, text + "\n")

    def write_processes(self, processes: Mapping[str, Sequence[int]]) -> None:
        """Write the ids of the run's processes, by role, to `processes.json`."""
        self._write("processes.json", json.dumps(processes))

    def started_from(self, model: str) -> None:
        """Record the model's absolute path: the run may be viewed with another working directory."""
        self._write(STARTED_FROM, str(_absolute(model)))

    def wrote_model_of(self, checkpoint: Path) -> None:
        """Record, in `exported.json`, that `model` is the export of this checkpoint."""
        self._write("exported.json", json.dumps(_identity(checkpoint)))

    def has_model_of(self, checkpoint: Path) -> bool:
        """Return true if `model` is certainly the export of this checkpoint. A wrong false costs a new export."""
        try:
            same = json.loads((self.path / "exported.json").read_text()) == _identity(checkpoint)
        except (OSError, json.JSONDecodeError):
            return False
        return same and (self.model / "config.json").is_file() and any(self.model.glob("*.safetensors"))

    @property
    def ledger(self) -> Path:
        """The ledger of the run's groups."""
        return self.path / LEDGER

    @property
    def trajectories(self) -> Path:
        """The trajectory store, for the viewer."""
        return self.path / TRAJECTORIES

    @property
    def logs(self) -> Path:
        """Logs of the engines, and the output of the Ray library."""
        return self.path / "logs"

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder."""
        return self.path / "model"

    def checkpoint(self, step: int) -> Path:
        """Return the folder of the checkpoint that covers rollouts up to `step`."""
        return self.checkpoints / f"rollout_{step:06d}"


def _absolute(path: str) -> Path:
    return Path(os.path.expanduser(path)).resolve()


def _identity(checkpoint: Path) -> dict[str, object]:
    """Return a checkpoint's folder and time of completion: a resumed run may write another checkpoint to the folder."""
    return {"checkpoint": str(checkpoint), "completed_ns": (checkpoint / MANIFEST).stat().st_mtime_ns}


def _unwritable(path: Path, error: OSError, flag: str = "--output-dir") -> SettingsError:
    said = f"written: {error.strerror}"
    if error.errno == errno.ENOENT:
        said = f"made: {path.parent} takes no new folder"
    return SettingsError(f"{flag} {path} cannot be {said}; choose another folder")


def check_writable(flag: str, path: str | Path) -> None:
    """Check that a folder can be created and written. A new folder is removed again. Raises SettingsError: the folder
    cannot be created or written, or another process has locked it. The message names the flag and the reason."""
    folder = _absolute(str(path))
    made, probe = list[Path](), folder / f".probe.{os.getpid()}"
    try:
        made = [one for one in (folder, *folder.parents) if not one.exists()]
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
        if (lock := folder / ".lock").is_file():
            with lock.open("ab") as file:
                _lock(file, folder)
    except OSError as error:
        raise _unwritable(made[-1] if made else folder, error, flag) from error
    finally:
        with suppress(OSError):
            for one in made:
                one.rmdir()


def _lock(file: IO[bytes], folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        said = f"--output-dir {folder} is in use by another agentrl process"
        raise SettingsError(f"{said}; wait for it or choose another folder") from error
