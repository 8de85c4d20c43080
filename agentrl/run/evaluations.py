"""What evaluations leave behind, and the settings by which two of them, or two lives of `agentrl rollout`, differ."""

import json
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import orjson

from agentrl.config import RunSettings
from agentrl.config.fields import all_fields
from agentrl.errors import SettingsError
from agentrl.observability.metrics import read_metrics
from agentrl.run.resuming import changed
from agentrl.runfolder import BELOW, EVALUATIONS, SETTINGS

_ROOMS = ("rollout", "data", "rm_hub")
_ONLY_HOW = [
    "num_rollout",
    "num_epoch",
    "*_timeout",
    "*_concurrency",
    "grader_*",
    "stall_warning",
    "prompt_data_check",
    "rollout_max_retries",
    "judge_api_key_env",
    "judge_cache_path",
    "max_staleness",
    "stale_groups",
    "partial_rollout",
    "mask_*",
    "over_sampling_batch_size",
]
_ONLY_EVALUATION = ["eval_*", "n_samples_per_eval_prompt"]


def deciding(shown: Mapping[str, Any], *, evaluation: bool) -> dict[str, Any]:
    """Those of the settings (as `RunSettings.shown` gives them) that decide what is played and how it is graded."""
    found = {name: value for room in _ROOMS for name, value in shown.get(room, {}).items()}
    found["hf_checkpoint"] = shown.get("train", {}).get("hf_checkpoint")
    but = _ONLY_HOW + ([] if evaluation else _ONLY_EVALUATION)
    return {name: value for name, value in found.items() if not any(fnmatchcase(name, pattern) for pattern in but)}


def write_evaluation(
    folder: Path, settings: RunSettings, number: int, checkpoint: str, name: str, metrics: Mapping[str, float]
) -> None:
    """Append the figures of one evaluation set to `evaluations.jsonl`, beside the settings that are not the defaults.

    Args:
        number: rollouts done before it; the number of an `agentrl eval` in its folder.
        checkpoint: whose weights played.
    """
    defaults = {name: field.default for name, field in all_fields().items()}
    chosen = deciding(settings.shown(), evaluation=True).items()
    row = {
        "time": time.time(),
        "step": number,
        "set": name,
        "checkpoint": checkpoint,
        "metrics": dict(metrics),
        "settings": {
            name: value for name, value in chosen if value != json.loads(json.dumps(defaults[name], default=str))
        },
    }
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
    if differ := changed(settings, "rollout", deciding(settings.shown(), evaluation=False)):
        raise SettingsError(
            f"--output-dir {settings.observability.output_dir}: its rollouts were made with other settings: "
            f"{', '.join(differ)}; choose another --output-dir, or go on there with the settings that it has"
        )
