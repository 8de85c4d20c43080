"""Broken weights end in an error for their own requests and do not harm later ones; the numbers of the kernels."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.engine.embedded import cpu_model, kernels
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


@settings(max_examples=60)
@given(st.integers(0, 9), st.integers(1, 40), st.integers(8, 50), st.booleans())
def test_products_are_right_and_the_same_for_any_number_of_rows(count: int, deep: int, wide: int, apart: bool) -> None:
    draw = np.random.default_rng(count * wide + deep)
    rows, weight = (draw.standard_normal((size, deep), dtype=np.float32) for size in (count, wide))
    found = np.full((count, wide), math.nan, np.float32)
    for low, top in [(0, 8), (8, wide)] if apart and wide >= 16 else [(0, wide)]:
        kernels.product(rows, weight, found, low, top)
    np.testing.assert_allclose(found, rows.astype(np.float64) @ weight.T, rtol=1e-4, atol=1e-5)
    for i in range(count):
        alone = np.empty((1, wide), np.float32)
        kernels.product(rows[i : i + 1], weight, alone, 0, wide)
        assert alone.tobytes() == found[i].tobytes()


def test_threads_share_heads_and_products(
    folder: Callable[..., Path], plain_model: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    jobs = [make_job(prompt(10 + 20 * i, i)) for i in range(4)]
    run(make_engine(folder(), slots=4), *jobs)
    for job in jobs:
        assert job.log_probs == pytest.approx(reference_log_probs(plain_model(), job), abs=1e-5)
    rows, weight, bias = torch.randn(50, 200), torch.randn(301, 200), torch.randn(301)
    found = cpu_model._product(weight, bias)(rows.numpy())
    np.testing.assert_allclose(found, (rows @ weight.T + bias).numpy(), rtol=1e-4, atol=1e-4)


def test_kernels_are_compiled_where_nothing_can_be_kept() -> None:
    space: dict[str, Any] = {}
    exec("def twice(x): return 2 * x", space)  # has no file, and so no folder beside it
    assert kernels.compiled("f8(f8)")(space["twice"])(2.0) == 4
