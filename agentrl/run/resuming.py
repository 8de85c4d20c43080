"""The earlier contents of a run's folder: changed settings, changed prompts, and evaluations."""

import json
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import orjson

from agentrl.buffer.local import find_ledger
from agentrl.buffer.sqlite import read_meta
from agentrl.config import RunSettings
from agentrl.config.dry_run import render
from agentrl.config.fields import all_fields
from agentrl.data.source import RolloutDataSource
from agentrl.errors import SettingsError, raised_as
from agentrl.files import write_atomic
from agentrl.observability.metrics import read_metrics
from agentrl.runfolder import BELOW, EVALUATIONS, LEDGER, SETTINGS

_MAY_DIFFER = {"num_rollout", "num_epoch", "output_dir", "load", "progress", "device"}
_MAY_DIFFER |= {"train_threads", "embedded_threads", "rollout_max_concurrency", "rollout_workers"}
"""Settings whose change is not reported: the run's length, and settings for the machine and the terminal."""
_PLAYED = ("rollout", "data", "rm_hub")  # sections whose settings decide how rollouts are generated and graded


def changed(settings: RunSettings, command: str = "train", only: Collection[str] | None = None) -> list[str]:
    """Return `--lr 1e-06 -> 0.001` for each setting that differs from the earlier run in this folder; empty without an
    earlier run. `command`: the command of the folder, a key of `BELOW`. `only`: the settings to compare; default: all.
    Raises SettingsError: the earlier run's settings file is damaged."""
    if not (file := Path(settings.observability.output_dir).expanduser() / BELOW[command] / SETTINGS).is_file():
        return []
    what = f"{file}: the settings of the run cannot be read"
    remedy = "take the file away to go on without comparing them"
    with raised_as(SettingsError, what, OSError, ValueError, TypeError, AttributeError, shown=" ({})", remedy=remedy):
        before = {section: dict(values) for section, values in json.loads(file.read_bytes()).items()}
    now, given = json.loads(json.dumps(settings.shown())), settings.given()
    pairs = ((n, old, now[s][n]) for s, values in before.items() for n, old in values.items() if n in now.get(s, {}))
    return [
        f"--{name.replace('_', '-')} {render(old)} -> {render(new)}{'' if name in given else ' (not given)'}"
        for name, old, new in pairs
        if old != new and name not in _MAY_DIFFER and (only is None or name in only)
    ]


def covered(settings: RunSettings, command: str = "train") -> int:
    """Return the number of rollouts that checkpoints covered. Raises LedgerError: the run's ledger cannot be read."""
    return int(_meta(settings, command).get("checkpoint", -1)) + 1


def begun(settings: RunSettings, command: str = "train") -> bool:
    """Return true if the folder's run has finished a group. Raises LedgerError: its ledger cannot be read."""
    return covered(settings, command) > 0 or int(_meta(settings, command).get("stored", 0)) > 0


def _meta(settings: RunSettings, command: str) -> Mapping[str, str]:
    folder = Path(settings.observability.output_dir).expanduser() / BELOW[command]
    return read_meta(find_ledger(folder / LEDGER, settings.buffer.ledger_dir))


def check_prompts(settings: RunSettings) -> None:
    """Check that the earlier run's group numbers still mean the same prompts. Raises SettingsError: the data or its
    order differs. Raises LedgerError: the run's ledger cannot be read."""
    ledger = Path(settings.observability.output_dir).expanduser() / LEDGER
    own_source = settings.data.data_source_path is not None or settings.cluster.load_debug_rollout_data is not None
    if own_source or not (meta := read_meta(ledger)):
        return
    before = {key[9:]: json.loads(value) for key, value in meta.items() if key.startswith("identity.")}
    now = RolloutDataSource(settings.args.changed(prompt_data_check="lazy")).identity()
    if not begun(settings):
        now.pop("prompt_digest", None)  # rows may be mended before the first group is finished
    pairs = [(key, before[key], new) for key, new in now.items() if before.get(key, new) != new]
    if differ := [f"{key} was {render(old)} and is {render(new)}" for key, old, new in pairs]:
        raise SettingsError(
            f"--output-dir {settings.observability.output_dir}: its run has other prompts, or another order of them: "
            f"{', '.join(differ)}; go on with those that it began with, or choose another folder"
        )


def refuse_others(settings: RunSettings) -> None:
    """Check that the folder's rollouts were generated and graded alike. Raises SettingsError: a setting differs."""
    folder = Path(settings.observability.output_dir).expanduser() / BELOW["rollout"]
    if not (folder / SETTINGS).is_file() and (others := next(folder.glob("*.jsonl"), None)) is not None:
        raise SettingsError(f"{others} exists, and {SETTINGS} of its run is missing; choose another --output-dir")
    if (folder / LEDGER).is_file() and not begun(settings, "rollout"):
        return
    played = {name for name, field in all_fields().items() if field.section in _PLAYED and "eval_" not in name}
    if differ := changed(settings, "rollout", played | {"hf_checkpoint", "hosted_model", "hosted_options"}):
        raise SettingsError(
            f"--output-dir {settings.observability.output_dir}: its rollouts were made with other settings: "
            f"{', '.join(differ)}; choose another --output-dir, or go on there with the settings that it has"
        )


def write_evaluation(folder: Path, number: int, checkpoint: str, name: str, metrics: Mapping[str, float]) -> None:
    """Append the metrics of one evaluation set to `evaluations.jsonl`. `number`: rollouts trained before the
    evaluation, or the number of an `agentrl eval` in its folder. `checkpoint`: the evaluated weights."""
    row = {"time": time.time(), "step": number, "set": name, "checkpoint": checkpoint, "metrics": dict(metrics)}
    before = file.read_bytes() if (file := folder / EVALUATIONS).is_file() else b""
    whole = before[: before.rfind(b"\n") + 1]  # a full disk may have cut the last line
    write_atomic(file, whole + orjson.dumps(row, option=orjson.OPT_APPEND_NEWLINE))


def evaluations_in(folder: Path) -> int:
    """Return the number of the next `agentrl eval` in its folder."""
    file = folder / EVALUATIONS
    return max((row["step"] + 1 for row in read_metrics(file)), default=0) if file.is_file() else 0
