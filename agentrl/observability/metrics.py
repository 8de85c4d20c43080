"""Metrics of a run: one logger, several sinks.

1. `metrics.jsonl` is always written: one flushed JSON object per `log` call, with `step` and `time`. A value that is
   not finite is null, with its text under `nonfinite`. Other sinks: TensorBoard, Weights & Biases, those of `sinks`.
2. Resuming at a step atomically drops the rows of that step and later ones."""

import math
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import DataError, install, raised_as
from agentrl.files import replacing
from agentrl.observability.settings import ObservabilitySettings
from agentrl.observability.sinks import MetricsRun, Sink, open_sink, package, prometheus
from agentrl.runfolder import METRICS


class MetricsLogger(AbstractContextManager["MetricsLogger"]):
    """Sends a step's metrics to all sinks; a context manager that closes them."""

    def __init__(self, settings: ObservabilitySettings, folder: str | Path, *, resume_step: int = 0) -> None:
        """Open the sinks that the settings ask for. `folder`: the run's folder, created if missing. `resume_step`: the
        first step of this process; rows of this step and later steps are dropped. Raises SettingsError: a sink's
        package is not installed. Raises DataError: an existing metrics file is malformed."""
        self._interval = settings.log_interval
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        run = MetricsRun(folder, resume_step)
        with ExitStack() as opened:
            self._sinks = [_jsonl(folder / METRICS, resume_step, opened)]
            if settings.use_tensorboard:
                where = settings.tensorboard_dir or folder / "tensorboard"
                self._sinks.append(_tensorboard(where, resume_step, opened))
            if settings.use_wandb:
                self._sinks.append(_wandb(settings, run, opened))
            if settings.prometheus_port is not None:
                self._sinks.append(prometheus(settings.prometheus_host, settings.prometheus_port, folder.name, opened))
            self._sinks += [open_sink(path, run, opened) for path in settings.metrics_sinks]
            self._opened = opened.pop_all()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write one step's metrics. Steps between log intervals are skipped, but never those with `eval/` metrics."""
        if step % self._interval and not any(name.startswith("eval/") for name in metrics):
            return
        at = time.time()
        plain = {name: float(value) for name, value in metrics.items()}
        for sink in self._sinks:
            sink(step, at, plain)

    def __exit__(self, *raised: Any) -> None:
        self._opened.__exit__(*raised)


def _jsonl(path: Path, resume_step: int, opened: ExitStack) -> Sink:
    """Open `metrics.jsonl`: append-only during a run, truncated on resume."""
    if path.exists():
        kept = [row for row in read_metrics(path) if row["step"] < resume_step] if resume_step > 0 else []
        with replacing(path) as draft:
            draft.write_bytes(b"".join(map(_line, kept)))
    file = opened.enter_context(path.open("ab"))

    def write(step: int, at: float, metrics: Mapping[str, float]) -> None:
        file.write(_line({"step": step, "time": at, **metrics}))
        file.flush()

    return write


def _tensorboard(folder: str | Path, resume_step: int, opened: ExitStack) -> Sink:
    """Open event files with TensorBoard's own writer, which needs neither torch nor TensorFlow."""
    with package("tensorboard", "--use-tensorboard", f"{install('train')}, or pass --no-use-tensorboard"):
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
    writer = opened.enter_context(closing(EventFileWriter(str(folder))))
    start = SessionLog(status=SessionLog.START)
    writer.add_event(Event(wall_time=time.time(), step=max(resume_step, 0), session_log=start))

    def write(step: int, at: float, metrics: Mapping[str, float]) -> None:
        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        writer.add_event(Event(wall_time=at, step=step, summary=Summary(value=values)))
        writer.flush()

    return write


def _wandb(settings: ObservabilitySettings, of: MetricsRun, opened: ExitStack) -> Sink:
    """Open a Weights & Biases run. Its id is stored in the folder, so that a resume continues the same run."""
    with package("wandb", "--use-wandb", f"{install('wandb')}, or leave it out"):
        import wandb
    run = wandb.init(**wandb_arguments(settings, of.folder, of.known_id("wandb_id")))
    opened.push(lambda kind, *_: run.finish(exit_code=1 if kind else None))
    (of.folder / "wandb_id").write_text(str(run.id))
    # W&B's own counter must never go back, and an evaluation before training has step -1.
    return lambda step, at, metrics: run.log({**metrics, "rollout": step})


def wandb_arguments(settings: ObservabilitySettings, folder: Path, known: str | None) -> dict[str, Any]:
    """Return the arguments of `wandb.init`. A run with a `known` id keeps its name and group."""
    place = Path(settings.wandb_dir or folder)
    place.mkdir(parents=True, exist_ok=True)  # without this folder, wandb uses a temporary one
    suffix = f"_{secrets.token_hex(3)}" if settings.wandb_random_suffix else ""
    named = {"group": settings.wandb_group, "name": settings.wandb_name}
    named = {} if known and suffix else {what: text and text + suffix for what, text in named.items()}
    own = {"project": settings.wandb_project, "entity": settings.wandb_team, "mode": settings.wandb_mode}
    server = {"base_url": settings.wandb_host} if settings.wandb_host else None
    return {**own, "dir": str(place), "settings": server, "id": known, "resume": "allow", **named}


def read_metrics(path: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a `metrics.jsonl`, with non-finite values restored. A truncated last line is skipped. Raises
    DataError: the file does not exist, or a line is not a JSON object with a `step`."""
    what = f"{path}: no such file; a run writes it into its --output-dir"
    with raised_as(DataError, what, FileNotFoundError, shown=""):
        lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):
        with raised_as(DataError, f"{path} line {number}: not valid JSON", orjson.JSONDecodeError):
            row = orjson.loads(line)
        if not isinstance(row, dict) or not isinstance(row.get("step"), int):
            raise DataError(f"{path} line {number}: expected a JSON object with an integer step")
        for name, text in row.pop("nonfinite", {}).items():
            row[name] = float(text)
        yield row


def _line(row: Mapping[str, Any]) -> bytes:
    odd = {name: str(value) for name, value in row.items() if isinstance(value, float) and not math.isfinite(value)}
    return orjson.dumps({**row, "nonfinite": odd} if odd else row, option=orjson.OPT_APPEND_NEWLINE)
