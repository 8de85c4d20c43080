"""Sinks other than the built-in ones: a user's own, Prometheus over HTTP, and MLflow and trackio if installed."""

from __future__ import annotations

import math
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from agentrl.errors import PluginError, SettingsError
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.settings import ObservabilitySettings
from agentrl.observability.sinks import MetricsRun, Sink
from agentrl.run.training import free_port

_seen: list[Any] = []


@contextmanager
def noting(run: MetricsRun) -> Iterator[Sink]:
    _seen.append(run)
    yield lambda step, _at, metrics: _seen.append((step, dict(metrics)))
    _seen.append("closed")


@contextmanager
def broken(_run: MetricsRun) -> Iterator[Sink]:
    def write(step: int, _at: float, _metrics: object) -> None:
        raise ValueError(f"step {step}")

    yield write


def logger(folder: Path, resume_step: int = 0, **changes: Any) -> MetricsLogger:
    return MetricsLogger(ObservabilitySettings(use_tensorboard=False, **changes), folder, resume_step=resume_step)


def test_a_sink_of_the_users_gets_each_step_and_is_closed(tmp_path: Path) -> None:
    _seen.clear()
    with logger(tmp_path / "run", metrics_sinks=(f"{__name__}:noting",), log_interval=2) as made:
        for step in range(3):
            made.log(step, {"rollout/reward": step / 2})
    assert _seen == [
        MetricsRun(tmp_path / "run", 0),
        (0, {"rollout/reward": 0.0}),
        (2, {"rollout/reward": 1.0}),
        "closed",
    ]


def test_a_sink_that_raises_is_named(tmp_path: Path) -> None:
    with logger(tmp_path, metrics_sinks=(f"{__name__}:broken",)) as made, pytest.raises(PluginError) as raised:
        made.log(3, {"a": 1.0})
    assert "--metrics-sinks" in str(raised.value)
    assert "test_sinks:broken" in str(raised.value)
    assert "ValueError: step 3" in str(raised.value)
    with pytest.raises(PluginError, match="--metrics-sinks"):
        logger(tmp_path, metrics_sinks=("agentrl.observability.sinks:absent",))


@contextmanager
def closing_badly(_run: MetricsRun) -> Iterator[Sink]:
    yield lambda step, at, metrics: None
    raise OSError("closed twice")


@contextmanager
def asking(_run: MetricsRun) -> Iterator[Sink]:
    try:
        yield lambda step, at, metrics: None
    except ValueError as error:  # and goes on
        _seen.append(str(error))


def test_a_sink_that_cannot_be_closed_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(PluginError, match="--metrics-sinks .*test_sinks:closing_badly' raised OSError: closed twice"),
        logger(tmp_path, metrics_sinks=(f"{__name__}:closing_badly",)),
    ):
        pass


def test_a_sink_is_told_that_the_run_failed_and_cannot_hide_it(tmp_path: Path) -> None:
    _seen.clear()
    with (
        pytest.raises(ValueError, match="the trainer died"),
        logger(tmp_path, metrics_sinks=(f"{__name__}:asking",)),
    ):
        raise ValueError("the trainer died")
    assert _seen == ["the trainer died"]


def scraped(port: int) -> dict[str, tuple[float, dict[str, str]]]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
        return {s.name: (s.value, s.labels) for family in families for s in family.samples}


def test_prometheus_scrapes_the_newest_values(tmp_path: Path) -> None:
    port = free_port()
    with logger(tmp_path / "city", prometheus_port=port) as made:
        assert scraped(port)["agentrl_step"] == (-1.0, {"run": "city"})
        made.log(0, {"rollout/reward": 0.25, "rollout/pass@1": 0.5})
        made.log(1, {"rollout/reward": 0.75, "train/loss": math.nan})
        found = scraped(port)
        assert found["agentrl_rollout_reward"] == (0.75, {"run": "city"})
        assert found["agentrl_rollout_pass_1"][0] == 0.5
        assert math.isnan(found["agentrl_train_loss"][0])
        assert found["agentrl_step"][0] == 1.0
        with pytest.raises(SettingsError, match=f"--prometheus-port {port}: cannot listen on 127.0.0.1"):
            logger(tmp_path / "other", prometheus_port=port)
        with logger(tmp_path / "other", prometheus_host="127.0.0.2", prometheus_port=port):
            assert scraped(port)["agentrl_step"][1] == {"run": "city"}
    with logger(tmp_path / "city", prometheus_port=port):  # the port is free again
        assert scraped(port)["agentrl_step"][0] == -1.0


def test_mlflow_has_the_steps_and_a_resume_goes_on_with_its_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = pytest.importorskip("mlflow.tracking")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    sinks = {"metrics_sinks": ("agentrl.observability.sinks:mlflow",)}
    for first, resume in ((0, 0), (2, 2)):
        with logger(tmp_path / "run", resume, **sinks) as made:
            for step in (first, first + 1):
                made.log(step, {"rollout/reward": step / 4, "rollout/pass@1": 0.5})
    client = tracking.MlflowClient()
    (run,) = client.search_runs(["0"])
    assert run.info.run_name == "run"
    history = client.get_metric_history(run.info.run_id, "rollout/reward")
    assert [(metric.step, metric.value) for metric in history] == [(0, 0.0), (1, 0.25), (2, 0.5), (3, 0.75)]
    assert "rollout/pass_1" in run.data.metrics
    assert run.info.status == "FINISHED"
    with pytest.raises(ValueError, match="died"), logger(tmp_path / "run", 4, **sinks):
        raise ValueError("died")
    assert client.get_run(run.info.run_id).info.status == "FAILED"


def test_trackio_is_closed_if_the_run_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _seen.clear()
    library = SimpleNamespace(init=lambda **_: None, finish=lambda: _seen.append("closed"))
    monkeypatch.setitem(sys.modules, "trackio", library)
    sinks = ("agentrl.observability.sinks:trackio",)
    with pytest.raises(ValueError, match="died"), logger(tmp_path, metrics_sinks=sinks):
        raise ValueError("died")
    assert _seen == ["closed"]


def test_trackio_has_the_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trackio = pytest.importorskip("trackio")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    with logger(tmp_path / "run", metrics_sinks=("agentrl.observability.sinks:trackio",)) as made:
        made.log(0, {"rollout/reward": 0.25})
        made.log(1, {"rollout/reward": 0.5})
    run = trackio.Api().runs("agentrl")[0]
    assert run.name == "run"
