"""Parts that need no training: log-probs, packing, RoPE, families, the weight group."""

from __future__ import annotations

import datetime
import importlib
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from transformers import AutoModelForCausalLM

from agentrl.engine.weights import Bucket, TensorSpec, WeightGroup, buckets
from agentrl.errors import TrainError
from agentrl.numerics.weight_group import WeightReceiver, views
from agentrl.run.training import free_port
from agentrl.train import logprobs
from agentrl.train.contracts import RankInfo
from agentrl.train.hf import HFFolder
from agentrl.train.megatron.attention import Rope
from agentrl.train.megatron.device import uncompiled
from agentrl.train.megatron.families import FAMILIES, ModelFamily, ShardLayout, family_of, shape_of
from agentrl.train.microbatches import Packer, inputs_of
from agentrl.train.network import CostShape, attention_crossover
from agentrl.train.packing import make_plan
from agentrl.train.tree import SharedPrefixes
from tests.support.distributed import run_ranks
from tests.support.logits import entropy_from_logits, log_probs_from_logits
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings

CPU = torch.device("cpu")


@pytest.mark.parametrize("cuda", [False, True])
def test_megatrons_functions_are_compiled_on_gpus_alone(monkeypatch: pytest.MonkeyPatch, cuda: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    compiled: Any = torch.compile
    with uncompiled():
        assert (torch.compile is compiled) == cuda
        if not cuda:
            assert torch.compile(abs) is abs
            assert torch.compile(dynamic=True)(abs) is abs
    assert torch.compile is compiled


@pytest.mark.parametrize("chunk", [1, 30, 1 << 25])
@pytest.mark.parametrize("padding", [0, 3])
def test_log_probs_and_entropy_match_torch(
    monkeypatch: pytest.MonkeyPatch, one_rank: dist.ProcessGroup, chunk: int, padding: int
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(7, 11 + padding, generator=generator, requires_grad=True)
    targets = torch.randint(0, 11, (7,), generator=generator)
    got = logprobs.token_log_probs(logits, targets, group=one_rank, vocab=11, temperature=0.7)
    weights = torch.randn(2, 7, generator=generator)
    torch.autograd.backward((got[0] * weights[0] + got[1] * weights[1]).sum())
    gradient, logits.grad = logits.grad, None
    log_p = (logits[:, :11] / 0.7).log_softmax(-1)
    want = log_p.gather(-1, targets[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)
    torch.autograd.backward((want[0] * weights[0] + want[1] * weights[1]).sum())
    torch.testing.assert_close(got[0], want[0])
    torch.testing.assert_close(got[1], want[1])
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-5, atol=1e-6)


def test_banned_tokens_count_nothing(one_rank: dist.ProcessGroup) -> None:
    logits = torch.tensor([[0.5, -torch.inf, 2.0, -torch.inf], [1.0, 0.0, 3.0, -2.0]], requires_grad=True)
    targets, weights = torch.tensor([2, 0]), torch.tensor([[1.5, -2.0], [30.0, -4.0]])
    got = logprobs.token_log_probs(logits, targets, group=one_rank, vocab=4, temperature=0.7)
    (got[0] * weights[0] + got[1] * weights[1]).sum().backward()
    gradient, logits.grad = logits.grad, None
    want = log_probs_from_logits(logits / 0.7, targets), entropy_from_logits(logits / 0.7)
    (want[0] * weights[0] + want[1] * weights[1]).sum().backward()
    torch.testing.assert_close(got, want)
    assert gradient is not None
    assert gradient.isfinite().all()
    torch.testing.assert_close(gradient, logits.grad, rtol=1e-5, atol=1e-6)


SETS = [[3, 0, 7], [], [5], list(range(11)), [10, 4], [2, 9, 8, 6], [1, 0, 5, 10, 3]]
"""The sampling support of seven rows of eleven tokens; the second row is not truncated."""


def truncated_rows(rank: int = 0, ranks: int = 1, padding: int = 0) -> tuple[torch.Tensor, ...]:
    """Return log-probs, entropies and the gradient of a sum of both over this rank's columns of logits."""
    generator = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(7, 14, generator=generator)[:, : 11 + padding]
    weights = torch.randn(2, 7, generator=generator)
    if ranks == 0:  # the reference: softmax over each row's own columns alone, in plain float64
        wide = logits[:, :11].double().requires_grad_()
        rows = [(wide[i, ids] / 0.7).log_softmax(-1) for i, ids in enumerate(_sets())]
        got = torch.stack([row[0] for row in rows]), torch.stack([-(row.exp() * row).sum() for row in rows])
    else:
        wide = logits.chunk(ranks, -1)[rank].clone().requires_grad_()
        kept = logprobs.SamplingSupport(
            torch.tensor([i for row in SETS for i in row]), torch.tensor([0, *np.cumsum(list(map(len, SETS)))])
        )
        targets = torch.tensor([ids[0] for ids in _sets()])
        group = dist.group.WORLD
        assert group is not None
        got = logprobs.token_log_probs(wide, targets, group=group, vocab=11, temperature=0.7, kept=kept)
    (got[0] * weights[0] + got[1] * weights[1]).sum().backward()
    assert wide.grad is not None
    return got[0].detach(), got[1].detach(), wide.grad


def _sets() -> list[list[int]]:
    return [row or list(range(11)) for row in SETS]


@pytest.mark.parametrize("chunk", [1, 30, 1 << 25])
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.usefixtures("one_rank")
def test_log_probs_among_kept_sets_match_plain_float64(
    monkeypatch: pytest.MonkeyPatch, chunk: int, padding: int
) -> None:
    monkeypatch.setattr(logprobs, "CHUNK_ELEMENTS", chunk)
    got, want = truncated_rows(padding=padding), truncated_rows(ranks=0)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours[..., : theirs.size(-1)].double(), theirs, rtol=1e-5, atol=2e-6)
    outside = torch.ones(7, 11 + padding, dtype=torch.bool)
    for i, ids in enumerate(_sets()):
        outside[i, ids] = False
    assert not got[2][outside].any()


def truncated_in_two_processes(rank: int, meet: str) -> list[NDArray[Any]]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)
    return [tensor.numpy().copy() for tensor in truncated_rows(rank, 2, padding=1)]


@pytest.mark.timeout(900)
def test_log_probs_among_kept_sets_are_the_same_under_tensor_parallelism(tmp_path: Path) -> None:
    first, second = run_ranks(truncated_in_two_processes, 2, str(tmp_path / "meet"))
    want = [tensor.numpy() for tensor in truncated_rows(ranks=0)]
    for got in (first, second):
        np.testing.assert_allclose(got[0], want[0], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.concatenate([first[2], second[2]], -1)[:, :11], want[2], rtol=1e-5, atol=2e-6)


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    cp=st.sampled_from([1, 2, 3]),
    dp=st.integers(1, 3),
    rows=st.sampled_from(["trained", "response"]),
    shares=st.booleans(),
)
def test_every_output_is_on_one_rank_and_points_at_its_predecessor(
    seed: int, cp: int, dp: int, rows: Any, shares: bool
) -> None:
    batch = make_batch(groups=3, per_group=2, seed=seed)
    prefixes = SharedPrefixes.of(inputs_of(batch)) if shares else None
    alignment = 2 * cp if cp > 1 else 1
    work = make_plan(batch.lengths.tolist(), dp, prefixes=prefixes, max_tokens=60, alignment=alignment)
    seen = []
    flat_targets = np.concatenate([batch.sample_tokens(i)[-batch.response_lengths[i] :] for i in range(len(batch))])
    before = np.concatenate([batch.sample_tokens(i)[-batch.response_lengths[i] - 1 : -1] for i in range(len(batch))])
    for rank in range(dp):
        for cp_rank in range(cp):
            where: Any = SimpleNamespace(dp_rank=rank, cp=cp, cp_rank=cp_rank)
            packer = Packer(where, CPU)
            for mb in packer.microbatches(batch, work, rows):
                flat = mb.response_index.numpy()
                np.testing.assert_array_equal(mb.targets.numpy(), flat_targets[flat])
                np.testing.assert_array_equal(mb.tokens[0, mb.rows].numpy(), before[flat])
                seen.append(flat)
    wanted = np.flatnonzero(batch.loss_mask) if rows == "trained" else np.arange(len(batch.loss_mask))
    np.testing.assert_array_equal(np.sort(np.concatenate(seen)), wanted)


@given(ranks=st.sampled_from([1, 2, 4]), layout=st.sampled_from(list(ShardLayout)), bias=st.booleans())
def test_cutting_and_joining_are_inverse(ranks: int, layout: ShardLayout, bias: bool) -> None:
    shape = shape_of(
        {"model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 12, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 2, "vocab_size": 13}
    )  # fmt: skip
    rest = () if bias and layout is ShardLayout.QKV else (8,)
    sizes = {
        ShardLayout.QKV: [16, 8, 8],
        ShardLayout.GATED: [12, 12],
        ShardLayout.JOINED: [24],
        ShardLayout.VOCAB: [13],
    }.get(layout, [8])
    tensors = [torch.randn(n, *rest) for n in sizes]
    parts = [layout.split(tensors, rank, ranks, shape) for rank in range(ranks)]
    assert len({part.shape for part in parts}) == 1
    for got, want in zip(layout.merge(parts, shape), tensors, strict=True):
        assert torch.equal(got, want)


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64},
    "yarn": {"factor": 8.0, "original_max_position_embeddings": 32, "beta_fast": 16.0},
    "longrope": {"factor": 4.0, "original_max_position_embeddings": 80, "short_factor": [1.0, 1.5, 2, 2.5, 3, 3.5, 4, 5],
                 "long_factor": [9.0] * 8},
    "dynamic": {"factor": 2.0},
}  # fmt: skip


@pytest.mark.parametrize("kind", ROPES)
def test_every_rope_of_transformers_is_the_models(tmp_path: Path, kind: str) -> None:
    rope = {"rope_type": kind, "rope_theta": 5e5, **ROPES[kind]}
    folder = make_tiny_model(tmp_path / "m", "llama", rope_parameters=rope, context_length=100)
    model = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.from_numpy(make_batch(groups=1).sample_tokens(0).astype(np.int64))
    assert (found := Rope.of(HFFolder(folder).config)).factor == model.model.rotary_emb.attention_scaling
    assert torch.equal(found.frequencies, model.model.rotary_emb.inv_freq)
    want = (model(ids[None]).logits[0, :-1] / 0.8).log_softmax(-1).gather(-1, ids[1:, None])[:, 0].detach()
    with backend(settings(folder)) as made:
        got = made.log_probs(make_batch(groups=1))[make_batch(groups=1).response_slice(0)]
    np.testing.assert_allclose(got, want[-len(got) :].numpy(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("arch", "changes", "why"),
    [
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "longrope", **ROPES["longrope"], "original_max_position_embeddings": 20}}, "rope type longrope"),
        ("llama", {"rope_parameters": {"rope_theta": 1e4, "rope_type": "dynamic", **ROPES["dynamic"]}, "context_length": 20}, "rope type dynamic"),
        ("mistral", {"sliding_window": 20}, "sliding_window"),
        ("qwen2", {"sliding_window": 20, "use_sliding_window": True, "max_window_layers": 1}, "sliding_window"),
    ],
)  # fmt: skip
def test_samples_beyond_where_length_matters_are_refused(tmp_path: Path, arch: Arch, changes: Any, why: str) -> None:
    """Longer than a window, or than the length at which frequencies change. Up to there the model is the same."""
    config = HFFolder(make_tiny_model(tmp_path / "m", arch, **changes)).config
    family_of(config)
    with backend(settings(tmp_path / "m")) as made:
        made.actor.network.check(20)
        with pytest.raises(TrainError, match=f"a sample has 21 tokens before its last, but with the {why} .* only 20"):
            made.actor.network.check(21)
        with pytest.raises(TrainError, match=why):
            made.log_probs(make_batch())


def test_what_cannot_be_trained_is_refused_by_name() -> None:
    with pytest.raises(TrainError, match="'gemma'"):
        family_of({"model_type": "gemma"})
    for family in FAMILIES:
        for key in family.refuse:
            with pytest.raises(TrainError, match=key):
                family_of({"model_type": family.model_type, key: True})
    with pytest.raises(TrainError, match="rope type 'twisted' cannot be trained"):
        Rope.of({"model_type": "llama", "rope_parameters": {"rope_type": "twisted", "rope_theta": 1e4}})
    with pytest.raises(TrainError, match="not one of a llama model"):
        family_of({"model_type": "llama", "hidden_size": "wide"})


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_act": "gelu"}, "llama models with hidden_act='gelu' cannot be trained"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}}, "partial_rotary_factor=0.25"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types=.*chunked_attention"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    ],
)
def test_a_config_that_computes_something_else_is_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = make_tiny_model(tmp_path / "m", "llama")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(TrainError, match=words), backend(settings(folder)):
        pass
    for family in FAMILIES:
        same = {"layer_types": ["full_attention"] * 2, "hidden_act": "silu", "partial_rotary_factor": 1.0}
        assert family_of({**config, **same, "model_type": family.model_type}).model_type == family.model_type


READ = set(
    [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "rope_parameters",
        "max_position_embeddings",
        "hidden_act",
        "layer_types",
        "attention_bias",
        "mlp_bias",
        "sliding_window",
        "qkv_bias",
        "num_experts",
        "num_local_experts",
        "num_experts_per_tok",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "n_shared_experts",
        "decoder_sparse_step",
        "mlp_only_layers",
        "mlp_layer_types",
        "first_k_dense_replace",
        "norm_topk_prob",
        "routed_scaling_factor",
        "n_group",
        "topk_group",
        "use_qk_norm",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
        "rope_interleave",
    ]
)
"""Keys that the tables express, or that are refused if they contradict the tables."""
WITHOUT_EFFECT = {
    "_attn_implementation": "how, not what",
    "initializer_range": "of weights that are loaded",
    "output_router_logits": "for a loss of transformers' own",
    "router_aux_loss_coef": "for a loss of transformers' own",
    "attention_dropout": "off in rollouts, and so in training",
    "pad_token_id": "an embedding's row without gradient, of a token that no sample holds",
}


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.model_type)
def test_every_key_that_transformers_reads_is_known(family: ModelFamily) -> None:
    name = family.like or family.model_type
    module = importlib.import_module(f"transformers.models.{name}.modeling_{name}")
    found = set(re.findall(r"(?<!pre_trained_)config(?:\.|, \")(\w+)", inspect.getsource(module)))
    assert "hidden_act" in found
    assert found - READ <= set(WITHOUT_EFFECT)


def test_the_crossover_is_where_attention_costs_as_much_as_the_matrices() -> None:
    weights = 4 * (8 * 8 + 2 * 8 * 4 + 8 * 8 + 3 * 8 * 24) + 8 * 100
    assert attention_crossover(CostShape(vocab=100, matrices=weights, channels=0)) is None
    n = attention_crossover(CostShape(vocab=100, matrices=weights, channels=2 * 4 * 8))
    assert n is not None
    assert attention_operations(n) <= 2 * n * weights
    assert attention_operations(n + 1) > 2 * (n + 1) * weights


def attention_operations(tokens: int) -> int:
    """Count for 4 layers with 8 channels: two products of 2 n^2 operations a channel, halved because of causality."""
    return 4 * 8 * 2 * tokens**2


def send_or_receive(rank: int, folder: str, port: int, kind: str) -> dict[str, NDArray[np.float32]]:
    """Rank 0 is a trainer of one process. Rank 1 takes the place of an engine, and returns what it received."""
    told = [TensorSpec(*spec) for spec in json.loads((Path(folder) / "specs.json").read_text())]
    cut = buckets(told, 100_000)
    assert 2 < len(cut) < len(told)
    sizes = [sum(spec.nbytes for spec in bucket) for bucket in cut]
    name = f"weights_{port}"
    if rank == 0:
        with backend(settings(Path(folder))) as made:
            with pytest.raises(TrainError, match="init_weight_group first"):
                made.broadcast_weights([])
            made.init_weight_group(WeightGroup(0, max(sizes), "127.0.0.1", port, 2, name, kind, 1, ()))
            for _ in range(2):
                made.broadcast_weights([Bucket(name, bucket) for bucket in cut])
            return {name: tensor.numpy().copy() for name, tensor in made.export_weights()}
    timeout = datetime.timedelta(seconds=60)
    where = f"tcp://127.0.0.1:{port}"
    group = WeightReceiver(backend=kind, address=where, world_size=2, rank=1, name=name, timeout=timeout)
    received: dict[str, NDArray[np.float32]] = {}
    for _ in range(2):
        for bucket, size in zip(cut, sizes, strict=True):
            received |= {n: t.numpy().copy() for n, t in views(group.receive(size, CPU), bucket)}
    group.close()
    return received


@pytest.mark.parametrize("kind", ["gloo", "shared_memory"])
def test_an_engine_in_the_weight_group_receives_every_tensor(tmp_path: Path, kind: str) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen2")
    with backend(settings(folder)) as made:
        (folder / "specs.json").write_text(json.dumps(made.weight_specs()[0]))
    sent, received = run_ranks(send_or_receive, 2, str(folder), free_port(), kind)
    assert sent.keys() == received.keys()
    assert all(np.array_equal(sent[name], received[name]) for name in sent)
    assert not list(Path("/dev/shm").glob("weights_*"))


def sent_by_stages(rank: int, folder: str, port: int, meeting: int) -> dict[str, NDArray[np.float32]]:
    """Ranks 0 and 1 are pipeline stages. Rank 2 takes the place of an engine, in a group with each of them."""
    groups = [(f"stage_{sender}", port + sender) for sender in range(2)]
    if rank < 2:
        where = RankInfo(rank, 2, rank, "127.0.0.1", meeting)
        with backend(settings(Path(folder), pipeline_model_parallel_size=2), where=where) as made:
            every = {sender: buckets(specs, 100_000) for sender, specs in made.weight_specs().items()}
            plan = [Bucket(groups[sender][0], bucket) for sender, cut in every.items() for bucket in cut]
            if rank == 0:
                Path(folder, "plan.json").write_text(json.dumps(plan))
            for sender, (name, at) in enumerate(groups):
                made.init_weight_group(WeightGroup(sender, 1 << 20, "127.0.0.1", at, 2, name, "gloo", 1, ()))
            made.broadcast_weights(plan)
            return {name: tensor.numpy().copy() for name, tensor in made.export_weights()}
    common: dict[str, Any] = {"backend": "gloo", "world_size": 2, "rank": 1, "timeout": datetime.timedelta(seconds=120)}
    members = {name: WeightReceiver(address=f"tcp://127.0.0.1:{at}", name=name, **common) for name, at in groups}
    received: dict[str, NDArray[np.float32]] = {}
    for name, told in json.loads(Path(folder, "plan.json").read_text()):
        specs = [TensorSpec(*spec) for spec in told]
        flat = members[name].receive(sum(spec.nbytes for spec in specs), CPU)
        received |= {tensor: view.numpy().copy() for tensor, view in views(flat, specs)}
    return received


def test_each_pipeline_stage_sends_its_own_weights(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3_moe")
    port = free_port()
    whole, _, received = run_ranks(sent_by_stages, 3, str(folder), port, free_port())
    assert {name for name, _ in json.loads((folder / "plan.json").read_text())} == {"stage_0", "stage_1"}
    assert whole.keys() == received.keys()
    assert all(np.array_equal(whole[name], received[name]) for name in whole)
