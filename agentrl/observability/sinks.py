"""Additional metrics sinks. `--metrics-sinks module:function` opens a sink; `agentrl.observability.sinks` has sinks for
MLflow and trackio. `--prometheus-port` serves the newest values.

A sink of your own:

    @contextmanager
    def to_queue(run: MetricsRun) -> Iterator[Sink]:
        with connect(run.folder.name) as queue:  # also closed if the run fails: then `yield` raises its error
            yield lambda step, at, metrics: queue.send(step, metrics)"""

import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agentrl.errors import SettingsError, install, raised_as
from agentrl.plugins import load_object, user_code

_log = logging.getLogger(__name__)
Sink = Callable[[int, float, Mapping[str, float]], None]
"""Takes one step's metrics: the step, Unix seconds, and numbers by name."""


@dataclass(frozen=True, slots=True)
class MetricsRun:
    """The run that a sink is opened for."""

    folder: Path  # the run's folder; a sink may store the id of its own run there
    resume_step: int  # first step of this process, above 0 after a resume; this and later steps may be logged again

    def known_id(self, file: str) -> str | None:
        """Return the text of `file` in the folder, if the run was resumed and has the file."""
        path = self.folder / file
        return path.read_text().strip() if self.resume_step > 0 and path.is_file() else None


OpenSink = Callable[[MetricsRun], AbstractContextManager[Sink]]


def open_sink(path: str, run: MetricsRun, opened: ExitStack) -> Sink:
    """Open the sink that `path` names; `opened` closes it. Raises PluginError: it is not found, or its code raised."""
    what = f"--metrics-sinks {path!r}"
    opener: OpenSink = load_object(path, what="--metrics-sinks")
    with user_code(what):
        sink = (context := opener(run)).__enter__()

    def close(kind: type[BaseException] | None, *raised: Any) -> None:
        try:
            with user_code(what):
                context.__exit__(kind, *raised)
        except Exception as error:
            if kind is None:
                raise
            _log.warning("%s", error)  # the run's own error is raised

    opened.push(close)

    def write(step: int, at: float, metrics: Mapping[str, float]) -> None:
        with user_code(what):
            sink(step, at, metrics)

    return write


def package(name: str, user: str, remedy: str) -> AbstractContextManager[None]:
    """Import a package in this block. Raises SettingsError: the package, which `user` needs, is not installed."""
    return raised_as(SettingsError, f"{user} needs the package {name}: {remedy}", ImportError, shown="")


@contextmanager
def mlflow(run: MetricsRun) -> Iterator[Sink]:
    """Log to MLflow, set up by MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME. A resume continues the same run."""
    with package("mlflow-skinny", "the sink of MLflow", install("metrics")):
        from mlflow.entities import Metric
        from mlflow.tracking import MlflowClient
    import mlflow as library

    with library.start_run(run_id=run.known_id("mlflow_id"), run_name=run.folder.name) as active:
        (run.folder / "mlflow_id").write_text(active.info.run_id)
        client = MlflowClient()

        def write(step: int, at: float, metrics: Mapping[str, float]) -> None:
            rows = [Metric(_name(name, "/. _-"), value, int(at * 1000), step) for name, value in metrics.items()]
            client.log_batch(active.info.run_id, metrics=rows)

        yield write


@contextmanager
def trackio(run: MetricsRun) -> Iterator[Sink]:
    """Log to trackio, set up by TRACKIO_DIR. The project is agentrl; the run has the folder's name."""
    with package("trackio", "the sink of trackio", "pip install trackio"):
        import trackio as library
    library.init(project="agentrl", name=run.folder.name, resume="allow" if run.resume_step > 0 else "never")
    try:
        yield lambda step, _at, metrics: library.log(dict(metrics), step=max(step, 0))
    finally:
        library.finish()


def prometheus(host: str, port: int, run: str, opened: ExitStack) -> Sink:
    """Serve the newest value of each metric at `/metrics` as `agentrl_rollout_reward{run="..."}`, with `agentrl_step`
    and `agentrl_logged_at` (Unix seconds). Raises SettingsError: the package is missing, or the port is taken."""
    with package("prometheus-client", "--prometheus-port", install("metrics")):
        from prometheus_client import CollectorRegistry, Gauge, start_http_server
    registry, gauges = CollectorRegistry(), dict[str, Gauge]()
    with raised_as(SettingsError, f"--prometheus-port {port}: cannot listen on {host}", OSError):
        server, thread = start_http_server(port, host, registry)
    opened.callback(thread.join)
    opened.callback(server.server_close)
    opened.callback(server.shutdown)

    def write(step: int, at: float, metrics: Mapping[str, float]) -> None:
        for name, value in {**metrics, "step": step, "logged_at": at}.items():
            if (key := f"agentrl_{_name(name, '_')}") not in gauges:
                gauges[key] = Gauge(key, name, ["run"], registry=registry)
            gauges[key].labels(run).set(value)

    write(-1, time.time(), {})
    return write


def _name(name: str, also: str) -> str:
    return re.sub(rf"[^A-Za-z0-9{re.escape(also)}]", "_", name)
