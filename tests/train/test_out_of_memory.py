"""Out of memory in a training step: the step is repeated with smaller microbatches, with the same result."""

import itertools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.errors import TrainError
from agentrl.train.trainer import TrainBackend
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import PPO, backend, make_batch, settings

KINDS: dict[str, dict[str, Any]] = {
    "megatron": {"train_backend": "megatron"},
    "megatron, distributed optimizer": {"train_backend": "megatron", "use_distributed_optimizer": True},
    "fsdp": {"train_backend": "fsdp"},
    "fsdp, sharded": {"train_backend": "fsdp", "fsdp_cpu_offload": True},
    "fsdp, recomputing": {
        "train_backend": "fsdp",
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
}


def run_out(made: Any, when: str, calls: tuple[int, ...]) -> Callable[[], int]:
    """Let these calls (from 1) of a part of the first layer run out of memory. Returns a function that counts calls."""
    count = [0]

    def fault(*_: Any) -> None:
        count[0] += 1
        if count[0] in calls:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    (part,) = (m for name, m in made.actor.network.model.named_modules() if name.endswith("layers.0.mlp"))
    if when == "forward":
        part.register_forward_pre_hook(fault)
    else:
        part.register_full_backward_pre_hook(fault)
    return lambda: count[0]


def gradients(made: Any) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in made.actor.network.parameters().items():
        gradient = getattr(tensor, "main_grad", tensor.grad)
        if gradient is not None:
            found[name] = (gradient.to_local() if hasattr(gradient, "to_local") else gradient).clone()
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3")


def steps(made: TrainBackend) -> list[tuple[dict[str, float], dict[str, torch.Tensor]]]:
    batch = make_batch()
    return [(dict(made.train(batch, number)), gradients(made)) for number in range(2)]


EVERYDAY = [("megatron", "backward"), ("fsdp, sharded", "backward")]


@pytest.mark.parametrize(("kind", "when"), nightly(itertools.product(KINDS, ["forward", "backward"]), 1))
def test_a_step_that_runs_out_of_memory_is_done_again_and_is_the_same(
    kind: str, when: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    chosen = settings(folder, **KINDS[kind])
    with backend(chosen) as made:
        want = steps(made)
    with backend(chosen) as made, caplog.at_level(logging.WARNING):
        run_out(made, when, calls=(2,))  # the first microbatch has left its gradients
        found = steps(made)
    assert [metrics.get("out_of_memory") for metrics, _ in found] == [1.0, None]
    assert "optimizer step 0 ran out of memory; done again with 1/2 of the microbatch" in caplog.text
    for (metrics, grads), (theirs, their_grads) in zip(found, want, strict=True):
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(theirs[name], rel=1e-6, abs=1e-7), name
        assert grads.keys() == their_grads.keys()
        for name, tensor in grads.items():
            torch.testing.assert_close(tensor, their_grads[name], rtol=0, atol=1e-6, msg=name)


def test_samples_that_are_counted_are_halved_too(folder: Path) -> None:
    chosen = settings(folder, use_dynamic_batch_size=False, max_tokens_per_gpu=None, micro_batch_size=4)
    with backend(chosen, PPO) as made:
        calls = run_out(made, "forward", calls=(2,))
        assert made.train(make_batch(), 0)["out_of_memory"] == 1.0
        assert made.actor.divisor == 2
        before = calls()
        made.train(make_batch(), 1)
        assert calls() - before == len(make_batch()) // 2


def test_a_step_that_cannot_be_smaller_says_what_to_do(folder: Path) -> None:
    batch = make_batch()
    with backend(settings(folder)) as made:
        before = {name: tensor.clone() for name, tensor in made.export_weights()}
        run_out(made, "forward", calls=tuple(range(1, 99)))
        with pytest.raises(TrainError, match="optimizer step 0 ran out of memory: lower --max-tokens-per-gpu"):
            made.train(batch, 0)
        assert all(torch.equal(before[name], tensor) for name, tensor in made.export_weights())
    alone = settings(folder, use_dynamic_batch_size=False, max_tokens_per_gpu=None, micro_batch_size=1)
    with backend(alone) as made:
        calls = run_out(made, "forward", calls=(1,))
        with pytest.raises(TrainError, match="or set --recompute-granularity"):
            made.train(batch, 0)
        assert calls() == 1
