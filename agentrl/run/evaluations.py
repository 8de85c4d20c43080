"""What evaluations leave behind, and the settings by which two lives of `agentrl rollout` differ."""

import time
from collections.abc import Mapping
from pathlib import Path

import orjson

from agentrl.config import RunSettings
from agentrl.config.fields import all_fields
from agentrl.errors import SettingsError
from agentrl.observability.metrics import read_metrics
from agentrl.run.resuming import changed
from agentrl.runfolder import BELOW, EVALUATIONS, SETTINGS

_PLAYED = ("rollout", "data", "rm_hub")
"""The rooms whose settings decide what is played and how it is graded."""


def write_evaluation(folder: Path, number: int, checkpoint: str, name: str, metrics: Mapping[str, float]) -> None:
    """Append the figures of one evaluation set to `evaluations.jsonl`.

    Args:
        number: rollouts done before it; the number of an `agentrl eval` in its folder.
        checkpoint: whose weights played.
    """
    row = {"time": time.time(), "step": number, "set": name, "checkpoint": checkpoint, "metrics": dict(metrics)}
    with (folder / EVALUATIONS).open("ab") as file:
        file.write(orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def evaluations_in(folder: Path) -> int:
    """The number of the next `agentrl eval` in its folder."""
    file = folder / EVALUATIONS
    return max((row["step"] + 1 for row in read_metrics(file)), default=0) if file.is_file() else 0


def refuse_others(settings: RunSettings) -> None:
    """Refuse to go on with a folder of rollouts under settings that play or grade in another way.

    Raises:
        SettingsError: names what differs, and what to do.
    """
    folder = Path(settings.observability.output_dir).expanduser() / BELOW["rollout"]
    if not (folder / SETTINGS).is_file() and (others := next(folder.glob("*.jsonl"), None)) is not None:
        raise SettingsError(
            f"{others} is there, and {SETTINGS} of the run that wrote it is not; choose another --output-dir"
        )
    played = {name for name, field in all_fields().items() if field.section in _PLAYED}
    if differ := changed(settings, "rollout", played | {"hf_checkpoint"}):
        raise SettingsError(
            f"--output-dir {settings.observability.output_dir}: its rollouts were made with other settings: "
            f"{', '.join(differ)}; choose another --output-dir, or go on there with the settings that it has"
        )
