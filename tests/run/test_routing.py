"""Routing replay from the engine to the trainer's gradients."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.algorithms import AlgorithmSettings
from agentrl.config import RunSettings
from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import SamplingParams
from agentrl.errors import SampleError, SettingsError, TrainError
from agentrl.run.rollouts import make_batch as batch_of_run
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import RankInfo
from tests.support.distributed import run_ranks
from tests.support.nightly import nightly
from tests.support.runs import RunKit
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import TEMPERATURE, Reference, backend, by_hub_name, gradients, make_batch, settings

EXPERTS, TOPK, LAYERS = 8, 3, 3


def mixture(folder: Path, arch: Arch = "qwen3_moe", tie: float | None = None, layers: int = LAYERS) -> Path:
    """Make a model of three layers with 8 experts, 3 of them chosen; the first layer is dense.

    With a `tie`, pairs of experts have the same router weights except for this difference, whose sign decides which
    one is the third.
    """
    number = "num_experts" if arch == "qwen3_moe" else "n_routed_experts"
    sizes: dict[str, Any] = {number: EXPERTS, "num_experts_per_tok": TOPK, "layers": layers}
    sizes |= {"n_group": 1, "topk_group": 1} if arch == "deepseek_v3" else {}
    make_tiny_model(folder, arch, tie_word_embeddings=False, **sizes)
    weights = load_file(file := folder / "model.safetensors")
    for name, router in weights.items():
        if tie is not None and name.endswith("mlp.gate.weight"):
            router[1::2] = router[::2] * (1 + tie)
    save_file(weights, file, {"format": "pt"})
    return folder


async def play(model: Path, *, turns: int = 2) -> list[Sample]:
    """Play four conversations of two turns with a common beginning, and an observation between the turns."""
    own = EngineSettings(embedded_slots=4, embedded_dtype="float32")
    samples = []
    async with (
        in_process(own, model) as url,
        EnginePool([url], own, vocab_size=512) as pool,
    ):
        for index in range(4):
            sample = Sample(index=index, group_index=0, reward=float(index % 2))
            sample.set_prompt_tokens([10, *range(100, 130), 60 + index, 61])
            for turn in range(1, turns + 1):
                start = 0 if sample.rollout_routed_experts is None else len(sample.rollout_routed_experts)
                asked = SamplingParams(temperature=TEMPERATURE, max_new_tokens=12, ignore_eos=True)
                got = await pool.generate(list(sample.tokens), replace(asked, routed_experts_start_len=start))
                sample.append_model(got.ids, got.log_probs, got.weight_versions, turn=turn, routed=got.routed)
                assert len(sample.rollout_routed_experts) == len(sample.tokens) - 1
                sample.append_observation([70, 71], turn=turn)
            samples.append(sample)
    return samples


@pytest.mark.parametrize("kind", nightly(["megatron", "fsdp"], 1))
async def test_the_trainer_agrees_with_an_engine_that_chose_other_experts(tmp_path: Path, kind: str) -> None:
    ours, theirs = mixture(tmp_path / "ours", tie=1e-6), mixture(tmp_path / "theirs", tie=-1e-6)
    batch = TrainBatch.from_samples([await play(theirs)], routed=True)
    trained, said = batch.loss_mask == 1, batch.rollout_log_probs
    assert said is not None
    last = [batch.sample_routing(i)[-3] for i in range(len(batch))]
    assert (np.stack(last) == -1).all()  # the last sampled token and everything after it
    with backend(settings(ours, train_backend=kind, max_tokens_per_gpu=400)) as made:
        assert np.abs(made.log_probs(batch) - said)[trained].max() < 1e-5
        assert np.abs(made.log_probs(replace(batch, routed_experts=None)) - said)[trained].max() > 0.1
        metrics = made.train(batch, 0)
        assert metrics["train_rollout_logprob_abs_diff"] < 1e-5
        assert metrics["computed_tokens_share"] < 0.8


def routed(batch: TrainBatch, experts: int = EXPERTS, topk: int = TOPK, layers: int = LAYERS) -> TrainBatch:
    """Replace the routing by experts that no router would choose, equal for equal prefixes; the first layer: dense."""
    rows = np.full((len(batch.tokens), layers, topk), -1, np.int16)
    for i in range(len(batch)):
        ids = batch.sample_tokens(i)
        for at in range(len(ids) - 1):
            rng = np.random.default_rng(ids[: at + 1].tolist())
            chosen = [np.zeros(topk), *(rng.permutation(experts)[:topk] for _ in range(layers - 1))]
            rows[batch.offsets[i] + at] = np.stack(chosen)
    return replace(batch, routed_experts=tuple(np.split(rows.reshape(len(rows), -1), batch.offsets[1:-1])))


class Routed(Reference):
    """transformers' own model, whose routers use the given choice for a sample."""

    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        parts = []
        for i in range(len(batch)):
            rows = torch.from_numpy(batch.sample_routing(i).astype(np.int64)).view(-1, LAYERS, TOPK)
            with self._told(rows):
                parts.append(super().log_probs(batch.select([i])))
        return torch.cat(parts)

    @contextmanager
    def _told(self, rows: torch.Tensor) -> Iterator[None]:
        def tell(layer: int, router: Any, _args: Any, out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            own = out[2]
            chosen = torch.where(rows[:, layer] < 0, own, rows[:, layer])
            sigmoid = hasattr(router, "e_score_correction_bias")
            scores = (out[0].sigmoid() if sigmoid else out[0].softmax(-1)).gather(1, chosen)
            return out[0], scores / scores.sum(-1, keepdim=True) * getattr(router, "routed_scaling_factor", 1), chosen

        layers = enumerate(self.model.model.layers)
        found = [(number, layer.mlp.gate) for number, layer in layers if hasattr(layer.mlp, "gate")]
        hooks = [router.register_forward_hook(functools.partial(tell, number)) for number, router in found]
        yield
        for hook in hooks:
            hook.remove()


@pytest.mark.parametrize(
    ("kind", "arch", "changes"),
    nightly(
        [
            ("megatron", "qwen3_moe", {"recompute_granularity": "full", "recompute_method": "uniform"}),
            ("fsdp", "glm4_moe", {}),
            ("megatron", "glm4_moe", {}),
            ("megatron", "deepseek_v3", {}),
            ("fsdp", "qwen3_moe", {"recompute_granularity": "full", "recompute_method": "uniform"}),
        ],
        1,
    ),
)
def test_gradients_go_through_the_scores_of_the_chosen(
    tmp_path: Path, kind: str, arch: Arch, changes: dict[str, Any]
) -> None:
    folder = mixture(tmp_path / arch, arch)
    changes |= {"recompute_num_layers": 1} if changes else {}
    train = settings(folder, train_backend=kind, clip_grad=0.0, **changes)
    batch, reference = routed(make_batch()), Routed(folder, train, AlgorithmSettings())
    with backend(train) as made:
        np.testing.assert_allclose(made.log_probs(batch), reference.log_probs(batch).detach(), rtol=0, atol=1e-5)
        want, metrics = reference.step(batch), made.train(batch, 0)
        assert metrics["loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-6)
        assert metrics["grad_norm"] == pytest.approx(want["grad_norm"], rel=1e-5)
        theirs = {name: p.grad for name, p in reference.model.named_parameters() if p.grad is not None}
        hub = by_hub_name(theirs)
        for name, gradient in gradients(made) if kind == "megatron" else ():
            torch.testing.assert_close(gradient, hub[name], rtol=1e-4, atol=2e-6, msg=name)
        for name, parameter in made.actor.network.model.named_parameters() if kind == "fsdp" else ():
            torch.testing.assert_close(parameter.grad, theirs[name], rtol=1e-4, atol=2e-6, msg=name)


EP = {"expert_model_parallel_size": 2}
LAYOUTS: dict[str, dict[str, Any]] = {
    "ep2": EP,
    "tp2_ep2": {"tensor_model_parallel_size": 2, "sequence_parallel": True, **EP, "expert_tensor_parallel_size": 1},
    "pp2": {
        "pipeline_model_parallel_size": 2,
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
    },
    "cp2_ep2": {"context_parallel_size": 2, **EP},
    "fsdp": {"train_backend": "fsdp"},
}


def numbers(made: Any) -> tuple[np.ndarray[Any, Any], list[float], float]:
    """Return log-probs after two steps, the steps' metrics, and the share of the routing that this rank fetched."""
    batch = routed(make_batch(), layers=4)
    whole, fetched = sum(batch.sample_routing(i).nbytes for i in range(len(batch))), list[int]()

    def stored(own: Any) -> Any:
        return lambda: fetched.append(own.nbytes) or own  # type: ignore[func-returns-value]

    batch = batch.with_parts(stored)
    metrics = [made.train(batch, number) for number in range(2)]
    fetched.clear()
    log_probs = made.log_probs(batch)
    return log_probs, [m[name] for m in metrics for name in ("loss", "grad_norm")], sum(fetched) / whole


def in_processes(rank: int, folder: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    out = {}
    for name, changes in LAYOUTS.items():
        with backend(settings(Path(folder), **changes), where=RankInfo(rank, 2, rank)) as made:
            out[name] = numbers(made)
    return out


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_layout_replays_the_same(tmp_path: Path) -> None:
    folder = mixture(tmp_path, layers=4)
    with backend(settings(folder)) as made:
        want = numbers(made)
    ranks = run_ranks(in_processes, 2, str(folder))
    for name, got in ranks[0].items():
        np.testing.assert_allclose(got[0], want[0], rtol=0, atol=1e-5, err_msg=name)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6, err_msg=name)
        shares = [rank[name][2] for rank in ranks]
        assert sum(shares) == pytest.approx(1 if name in ("ep2", "fsdp") else 2)
        assert max(shares) < (0.7 if name in ("ep2", "fsdp") else 1.1)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["megatron", "fsdp"])
def test_a_run_replays(tmp_path: Path, kind: str) -> None:
    kit = RunKit.make(tmp_path)
    mixture(tmp_path / "model")
    flags: dict[str, object] = {"backend": "local", "train_backend": kind, "use_rollout_routing_replay": True}
    run = kit.start(kit.arguments("run", num_rollout=2, **flags))
    assert run.wait() == 0, run.output
    assert max(row["train/train_rollout_logprob_abs_diff"] for row in run.metrics()) < 1e-5


def test_what_cannot_be_replayed_is_refused(tmp_path: Path) -> None:
    dense, sparse = make_tiny_model(tmp_path / "dense"), mixture(tmp_path / "sparse")
    chosen = {"env": "env.py:AddEnv", "use_rollout_routing_replay": True, "engine": "sglang"}
    with pytest.raises(SettingsError, match="--use-rollout-routing-replay: the model's config.json has no experts"):
        RunSettings.from_flat({"hf_checkpoint": str(dense), **chosen}).check_complete("train")
    complete = RunSettings.from_flat({"hf_checkpoint": str(sparse), **chosen}).check_complete("train")
    assert complete.engine.sglang_options == {"enable_return_routed_experts": True}
    sample = Sample(index=3, reward=1.0)
    sample.set_prompt_tokens([1])
    sample.append_model([2], [-0.1])
    with pytest.raises(
        SampleError, match="sample index=3: rollout_routed_experts has 0 rows, and 1 tokens come before"
    ):
        batch_of_run(complete, [[sample]], {}, 0)
    batch = routed(make_batch(groups=1))
    first, *others = [batch.sample_routing(i) for i in range(len(batch))]
    wrong = first.copy()
    wrong[2, -1] = wrong[2, -2]
    with backend(settings(sparse)) as made:
        with pytest.raises(TrainError, match="must name 3 different ones of 8 experts"):
            made.log_probs(replace(batch, routed_experts=(wrong, *others)))
        with pytest.raises(TrainError, match="say 8 experts a token, and the model has 3 layers with 3 each"):
            made.log_probs(replace(batch, routed_experts=tuple(rows[:, :8] for rows in (first, *others))))
