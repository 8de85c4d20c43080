"""Broken weights: an error for those who ask, and no harm to those who come after."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.embedded.driver import make_engine, make_job, prompt, reference_log_probs, run


def test_nan_weights_end_requests_with_an_error_and_leave_no_trace(
    folder: Callable[..., Path], plain_model: Callable[..., Any]
) -> None:
    engine = make_engine(folder(), slots=4)
    state = {name: tensor.clone() for name, tensor in engine.model.state_dict().items()}
    with torch.no_grad():
        engine.model.get_input_embeddings().weight.fill_(math.nan)
    engine.weights_changed()
    broken = [make_job(prompt(200, i)) for i in range(4)]
    run(engine, *broken)
    assert {job.finish["status_code"] for job in broken if job.finish} == {500}
    engine.model.load_state_dict(state)
    engine.weights_changed()
    jobs = [make_job(prompt(10 + 20 * i, i)) for i in range(4)]
    run(engine, *jobs)
    for job in jobs:
        assert job.log_probs == pytest.approx(reference_log_probs(plain_model(), job), abs=1e-5)
