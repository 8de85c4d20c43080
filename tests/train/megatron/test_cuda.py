"""Tests that need a GPU: its attention kernel, bfloat16, and a run whose trainer uses the GPU.

All other tests of this folder train on the GPU, too, if there is one (in float32).
"""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.cli.main import main
from agentrl.errors import TrainError
from agentrl.train.kernels import AttentionBlocks, FlashOnCuda, attention, kernel_for
from agentrl.train.ranks import memory_recorded
from agentrl.train.settings import TrainSettings
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

HEADS, GROUPS, DIM, SCALE = 8, 2, 64, 0.125
TREES = {
    "one sequence": (AttentionBlocks(((0, 96, 0, 96),), causal=True),),
    "packed": (AttentionBlocks(((0, 40, 0, 40), (40, 96, 40, 96)), causal=True),),
    "a prefix and two": (
        AttentionBlocks(((0, 40, 0, 40), (40, 70, 40, 70), (70, 96, 70, 96)), causal=True),
        AttentionBlocks(((40, 70, 0, 40), (70, 96, 0, 40))),
    ),
    "a prefix apart": (
        AttentionBlocks(((0, 20, 0, 20), (20, 60, 20, 60), (60, 96, 60, 96)), causal=True),
        AttentionBlocks(((20, 60, 0, 20),)),
        AttentionBlocks(((60, 96, 20, 60),)),
    ),
}


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, parts: tuple[AttentionBlocks, ...]) -> torch.Tensor:
    seen = torch.zeros(len(q), len(k), dtype=torch.bool, device=q.device)
    for part in parts:
        for a, b, s, e in part.blocks:
            whole = torch.ones(b - a, e - s, dtype=torch.bool, device=q.device)
            seen[a:b, s:e] |= whole.tril() if part.causal else whole
    k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * SCALE
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~seen, -torch.inf).softmax(-1), v)


@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value_dim", [DIM, 40])
def test_flash_in_half_precision_is_one_softmax(tree: str, dtype: torch.dtype, value_dim: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(96, HEADS, DIM), (96, GROUPS, DIM), (96, GROUPS, value_dim), (96, HEADS, value_dim)]
    half = [torch.randn(shape, generator=generator).cuda().to(dtype) for shape in shapes]
    exact = [x.double() for x in half]
    found = []
    for (q, k, v, grad), own in ((half, True), (exact, False)):
        q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
        assert isinstance(kernel_for(q), FlashOnCuda) is own
        out = attention(q, k, v, TREES[tree], SCALE, FlashOnCuda()) if own else dense(q, k, v, TREES[tree])
        found.append([out, *torch.autograd.grad(out, (q, k, v), grad)])
    step = torch.finfo(dtype).eps
    for got, want in zip(*found, strict=True):
        assert (got.double() - want).abs().max() <= 8 * step * want.abs().max()


def test_bfloat16_learns_what_float32_learns(tmp_path: Path) -> None:
    folder, batch, seen = make_tiny_model(tmp_path / "m", "qwen3"), make_batch(), {}
    for bf16 in (False, True):
        with backend(settings(folder, bf16=bf16)) as made:
            before = made.log_probs(batch)
            norms = [made.train(batch, number)["grad_norm"] for number in range(5)]
            seen[bf16] = before, made.log_probs(batch) - before, norms
    exact, rough = seen[False], seen[True]
    assert np.abs(exact[0] - rough[0]).max() < 0.05
    assert np.corrcoef(exact[1], rough[1])[0, 1] > 0.95
    assert np.allclose(exact[2], rough[2], rtol=0.2)


def test_a_training_that_fails_names_a_snapshot_of_the_memory(tmp_path: Path) -> None:
    recorded = TrainSettings(record_memory_history=True, memory_snapshot_dir=str(tmp_path / "memory"))
    torch.cuda.memory._record_memory_history(max_entries=100)
    said = r"OutOfMemoryError: .*a snapshot of the GPU's memory is in .*rank_3\.pickle"
    with pytest.raises(TrainError, match=said), memory_recorded(recorded, 3):
        torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
    assert "segments" in pickle.loads((tmp_path / "memory" / "rank_3.pickle").read_bytes())


@pytest.mark.parametrize("trainer", ["megatron", "fsdp"])
@pytest.mark.parametrize("arch", ["qwen3", "qwen3_moe", "deepseek_v3"])
def test_a_run_whose_trainer_is_on_the_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arch: Arch, trainer: str
) -> None:
    monkeypatch.chdir(tmp_path)
    make_tiny_model(tmp_path / "model", arch)
    rows = [json.dumps({"prompt": f"{a} + {a} =", "label": str(a + a)}) for a in range(8)]
    Path("rows.jsonl").write_text("\n".join(rows))
    flags = "--hf-checkpoint model --prompt-data rows.jsonl --input-key prompt --label-key label --rm-type exact_match"
    sizes = "--num-rollout 3 --rollout-batch-size 4 --n-samples-per-prompt 4 --rollout-max-response-len 24"
    flags += f" {sizes} --backend local --device cuda --output-dir run --progress off --lr 1e-3 --no-bf16 --train-backend {trainer}"
    flags += " --use-rollout-routing-replay" if arch != "qwen3" else ""
    with pytest.raises(SystemExit) as ended:
        main(["train", *flags.split()])
    assert ended.value.code in (0, None)
    lines = [json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines()]
    gaps = [line["train/train_rollout_logprob_abs_diff"] for line in lines if "train/loss" in line]
    assert len(gaps) == 3
    assert max(gaps) < 1e-4
