"""Numbers: broken weights, which end in an error for those who ask and do no harm to those who come after; the kernels'."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.engine.embedded import kernels
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


def test_silu_is_right_to_rounding() -> None:
    gates = np.concatenate([np.linspace(-100, 100, 10_001), [-0.0, math.nan]]).astype(np.float32)
    found = np.empty((1, len(gates)), np.float32)
    kernels.gated(np.concatenate([gates, np.ones_like(gates)])[None], found)
    expected = torch.nn.functional.silu(torch.from_numpy(gates).double()).numpy()
    np.testing.assert_allclose(found[0], expected, rtol=3e-7, atol=1e-35)


def test_threads_share_the_heads(
    folder: Callable[..., Path], plain_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    jobs = [make_job(prompt(10 + 20 * i, i)) for i in range(4)]
    run(make_engine(folder(), slots=4), *jobs)
    for job in jobs:
        assert job.log_probs == pytest.approx(reference_log_probs(plain_model(), job), abs=1e-5)


def test_kernels_are_compiled_where_nothing_can_be_kept() -> None:
    space: dict[str, Any] = {}
    exec("def twice(x): return 2 * x", space)  # has no file, and so no folder beside it
    assert kernels._compiled("f8(f8)")(space["twice"])(2.0) == 4
