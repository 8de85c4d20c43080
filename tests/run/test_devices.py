"""The trainers' number of threads if the settings do not set it."""

import os
from typing import Any

import pytest

from agentrl.config import RunSettings
from agentrl.run.autoconfig import resolve_threads


@pytest.mark.parametrize(
    ("given", "threads"),
    [
        ({}, 8),
        ({"max_staleness": 1}, 4),
        ({"actor_num_gpus_per_node": 2}, 4),
        ({"actor_num_gpus_per_node": 16}, 1),
        ({"max_staleness": 1, "rollout_num_gpus": 16}, 1),
        ({"train_threads": 3}, 3),
        ({"backend": "local"}, None),
        ({"ray_address": "10.0.0.1:6379"}, None),
        ({"device": "cuda"}, None),
    ],
)
def test_a_trainer_has_the_cores_that_nobody_else_computes_on(
    given: dict[str, Any], threads: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    assert resolve_threads(RunSettings.from_flat({"device": "cpu", **given})).train.train_threads == threads
