"""The run's folder: what lies where, and how a run is recognised when it is started again."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunSettings
from agentrl.errors import SettingsError


@dataclass(frozen=True, slots=True)
class RunFolder:
    """Paths of one run. The same folder given again resumes the run."""

    path: Path
    checkpoints: Path
    """Where checkpoints are written."""
    load: Path
    """Where the newest checkpoint is looked for."""

    @classmethod
    def open(cls, settings: RunSettings) -> "RunFolder":
        """Make the folder and write the resolved settings into it.

        Raises:
            SettingsError: it cannot be made or written.
        """
        path = Path(settings.observability.output_dir).expanduser().resolve()
        save = Path(settings.train.save).expanduser().resolve() if settings.train.save else path / "checkpoints"
        load = Path(settings.train.load).expanduser().resolve() if settings.train.load else save
        try:
            path.mkdir(parents=True, exist_ok=True)
            (path / "logs").mkdir(exist_ok=True)
            draft = path / f".settings.{os.getpid()}.json"
            draft.write_text(settings.model_dump_json(indent=2) + "\n")
            os.replace(draft, path / "settings.json")
        except OSError as error:
            raise SettingsError(
                f"--output-dir {path} cannot be written: {error.strerror}; choose another folder"
            ) from error
        return cls(path, save, load)

    def write_processes(self, processes: Mapping[str, Sequence[int]]) -> None:
        """Write the process ids of this life of the run, by role, to `processes.json`."""
        draft = self.path / f".processes.{os.getpid()}.json"
        draft.write_text(json.dumps(processes) + "\n")
        os.replace(draft, self.path / "processes.json")

    @property
    def logs(self) -> Path:
        """Logs of the engines."""
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
