"""The cost of a rollout's training: operations, seconds, memory, and a profile if requested."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from agentrl.algorithms import AlgorithmSettings
from agentrl.train.network import forward_flops
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings


@pytest.mark.parametrize("arch", ["qwen3", "llama"])
def test_operations_are_those_that_torch_counts(arch: Arch, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / arch, arch)
    with backend(settings(folder)) as made:
        shape, length = made.actor.shape, 48
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    attention = 2 * length**2 * shape.channels  # torch computes the masked half too
    assert forward_flops(shape, np.array([length])) == counted.get_total_flops() - attention / 2
    both = forward_flops(shape, np.array([length, length]))
    assert both == 2 * forward_flops(shape, np.array([length]))


def test_a_rollout_says_what_it_took_and_is_profiled_where_that_was_asked_for(tmp_path: Path) -> None:
    folder, batch = make_tiny_model(tmp_path / "model"), make_batch(groups=1)
    train = settings(
        folder,
        num_steps_per_rollout=2,
        use_pytorch_profiler=True,
        profile_step_start=1,
        profile_step_end=2,
        profile_dir=str(tmp_path / "profile"),
    )
    with backend(train, AlgorithmSettings(use_kl_loss=True)) as made:
        rows = [made.train(batch, rollout) for rollout in range(2)]
        shape = made.actor.shape
    for row in rows:
        done = 3 * forward_flops(shape, np.diff(batch.offsets))
        assert row["perf/actor_train_tflops"] * row["perf/actor_train_time"] == pytest.approx(done / 1e12)
        parts = [row[f"perf/{name}_time"] for name in ("log_probs", "ref_log_probs", "actor_train")]
        assert 0 < sum(parts) <= row["train_seconds"]
        assert 0.01 < row["perf/trainer_memory"] < 1000
    (trace,) = (tmp_path / "profile").iterdir()
    assert trace.name == "rollout_1_rank_0.json"
    assert {"aten::mm", "[memory]"} <= {event.get("name") for event in json.loads(trace.read_text())["traceEvents"]}
