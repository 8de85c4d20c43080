"""torch_dist checkpoints, with megatron-core's own model as the foreign trainer and transformers as the reference."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from megatron.core import dist_checkpointing
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig
from torch.distributed.checkpoint.metadata import MetadataIndex
from transformers import AutoModelForCausalLM

from agentrl.algorithms import AlgorithmSettings
from agentrl.cli.main import run
from agentrl.errors import CheckpointError
from agentrl.train import torch_dist
from agentrl.train.contracts import RankInfo
from agentrl.train.convert import convert
from agentrl.train.hf import HFFolder
from agentrl.train.megatron import device
from agentrl.train.megatron.folder import opened
from agentrl.train.megatron.layout import ParallelLayout
from tests.support.nightly import nightly
from tests.support.tiny_models import Arch, make_tiny_model
from tests.test_modelfolder import Hostile
from tests.train.megatron.helpers import backend, make_batch, settings

IDS = torch.arange(4, 24)[None]


def stock(source: HFFolder, vocab: int, **mixture: Any) -> Any:
    """Make Megatron's own model of a tiny model's sizes, with random weights."""
    c = source.config
    config = TransformerConfig(
        num_layers=c["num_hidden_layers"],
        hidden_size=c["hidden_size"],
        ffn_hidden_size=c["intermediate_size"],
        num_attention_heads=c["num_attention_heads"],
        num_query_groups=c["num_key_value_heads"],
        kv_channels=c["head_dim"],
        normalization="RMSNorm",
        layernorm_epsilon=c["rms_norm_eps"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        qk_layernorm=True,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.2,
        **mixture,
    )
    spec: Any = get_gpt_layer_local_spec(qk_layernorm=True, normalization="RMSNorm")
    if mixture:
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm")
    base = (c.get("rope_parameters") or c)["rope_theta"]
    rotary = {"position_embedding_type": "rope", "rotary_base": int(base)}
    model = GPTModel(config, spec, vocab, 64, share_embeddings_and_output_weights=False, **rotary)
    for name, parameter in model.named_parameters():
        if "layernorm" in name:
            torch.nn.init.normal_(parameter, 1.0, 0.2)
    return model.eval()


def logits(model: Any) -> torch.Tensor:
    """Return Megatron's logits of `IDS`."""
    n, where = IDS.size(1), "cuda" if torch.cuda.is_available() else "cpu"  # its rotary embedding is always there
    given = IDS, torch.arange(n)[None], torch.ones(1, 1, n, n).triu(1).bool()
    with torch.no_grad():
        found: torch.Tensor = model.to(where)(*(tensor.to(where) for tensor in given))
    return found.cpu()


def judged(folder: Path) -> torch.Tensor:
    """Return transformers' logits of `IDS`."""
    with torch.no_grad():
        found: torch.Tensor = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(IDS).logits
    return found


@pytest.fixture
def source(tmp_path: Path) -> HFFolder:
    return HFFolder(make_tiny_model(tmp_path / "hf", "qwen3", tie_word_embeddings=False))


@pytest.fixture
def joined(source: HFFolder) -> Any:
    device.prepare()
    layout = ParallelLayout.join(settings(source.path), RankInfo(), torch.device("cpu"))
    torch.manual_seed(0)
    model_parallel_cuda_manual_seed(0)
    yield layout
    layout.leave()


@pytest.mark.parametrize("stacked", nightly([True, False], 1))
def test_a_foreign_checkpoint_becomes_a_folder(
    joined: ParallelLayout, source: HFFolder, tmp_path: Path, stacked: bool
) -> None:
    model, root = stock(source, vocab=640), tmp_path / "foreign"  # with a padded vocabulary
    (root / "iter_0000010").mkdir(parents=True)
    form = {"non_homogeneous_layers": not stacked}
    state = {"model": model.sharded_state_dict(metadata=form), "args": {"num_layers": 2}}
    dist_checkpointing.save(state, str(root / "iter_0000010"))
    (root / "latest_checkpointed_iteration.txt").write_text("10\n")
    said = ["convert", str(root), str(tmp_path / "out"), "--to", "hf", "--hf-checkpoint", str(source.path)]
    assert run(said) == 0
    assert set(HFFolder(tmp_path / "out").files) == set(source.files)
    torch.testing.assert_close(judged(tmp_path / "out"), logits(model)[..., :512], rtol=0, atol=1e-5)


def test_what_is_written_is_loaded_by_megatron(joined: ParallelLayout, source: HFFolder, tmp_path: Path) -> None:
    assert run(["convert", str(source.path), str(tmp_path / "out"), "--to", "torch_dist"]) == 0
    model, written = stock(source, vocab=640), tmp_path / "out" / "release"
    assert dist_checkpointing.check_is_distributed_checkpoint(str(written))
    loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(written))
    model.load_state_dict(loaded["model"])
    torch.testing.assert_close(logits(model)[..., :512], judged(source.path), rtol=0, atol=1e-5)
    assert (loaded["args"].num_layers, loaded["checkpoint_version"]) == (2, 3.0)
    back = opened(tmp_path / "out", None)
    assert all(torch.equal(back.tensor(name), source.tensor(name)) for name in source.files)


def test_a_mixture_is_written_as_megatron_has_it(joined: ParallelLayout, tmp_path: Path) -> None:
    """Separate layers, as content_metadata says and a list of layers makes them; experts are stacked."""
    source = HFFolder(make_tiny_model(tmp_path / "moe", "qwen3_moe", tie_word_embeddings=False))
    assert run(["convert", str(source.path), str(tmp_path / "out"), "--to", "torch_dist"]) == 0
    experts = {"num_moe_experts": 4, "moe_ffn_hidden_size": 48, "moe_layer_freq": [0, 1], "moe_router_topk": 2}
    model = stock(source, 512, **experts, moe_router_load_balancing_type="none")
    state = model.sharded_state_dict()
    norm = "decoder.layers.1.pre_mlp_layernorm.weight"
    state[norm].key = norm  # in layers of Transformer Engine; the local ones name it like a dense layer's
    written = str(tmp_path / "out" / "release")
    assert dist_checkpointing.load_content_metadata(written) == {
        "non_homogeneous_layers": True,
        "singleton_local_shards": False,
    }
    model.load_state_dict(dist_checkpointing.load({"model": state}, written)["model"])
    torch.testing.assert_close(logits(model), judged(source.path), rtol=0, atol=1e-5)


@pytest.mark.parametrize("arch", nightly(get_args(Arch), 4))
def test_every_family_goes_there_and_back(tmp_path: Path, arch: Arch) -> None:
    source = HFFolder(make_tiny_model(tmp_path / "hf", arch))
    assert run(["convert", str(source.path), str(tmp_path / "stored"), "--to", "torch_dist"]) == 0
    back = opened(tmp_path / "stored", None)
    assert set(back.files) == set(source.files) - {"lm_head.weight"}  # tied
    for name in back.files:
        assert torch.equal(back.tensor(name), source.tensor(name))
        assert back.tensor(name).dtype == source.tensor(name).dtype
    written = tmp_path / "written"
    assert run(["convert", str(tmp_path / "stored"), str(written), "--to", "hf"]) == 0
    assert {file.name for file in written.iterdir()} == {file.name for file in source.path.iterdir()}
    assert run(["convert", str(written), str(tmp_path / "again"), "--to", "torch_dist"]) == 0


@pytest.mark.parametrize("kind", ["megatron", "fsdp"])
def test_a_run_starts_from_foreign_weights(
    source: HFFolder, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen3", seed=7, tie_word_embeddings=False)
    stored = str(tmp_path / "stored")
    assert run(["convert", str(other), stored, "--to", "torch_dist"]) == 0
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / "stored" / name).unlink()  # as slime's converter leaves it
    want, batch = HFFolder(other), make_batch(groups=1, per_group=2)
    loss = AlgorithmSettings(use_kl_loss=True)
    with backend(settings(source.path, load=str(other), train_backend=kind)) as made:
        assert all(torch.equal(tensor.cpu(), want.tensor(name)) for name, tensor in made.export_weights())
    with backend(settings(source.path, load=stored, ref_load=stored, train_backend=kind), loss) as made:
        assert all(torch.equal(tensor.cpu(), want.tensor(name)) for name, tensor in made.export_weights())
        np.testing.assert_array_equal(made.log_probs(batch), made.log_probs(batch, "ref"))
        made.train(batch, 0)
        moved = dict(made.export_weights())
        made.save(tmp_path / "stored" / "rollout_00000", 0)
    capsys.readouterr()
    said = run(["convert", stored, str(tmp_path / "ours"), "--to", "hf", "--hf-checkpoint", str(source.path)])
    assert said == (2 if kind == "fsdp" else 0)
    if kind == "fsdp":
        assert "a checkpoint of train_backend fsdp; --save-hf" in capsys.readouterr().err
        return
    ours = HFFolder(tmp_path / "ours")  # a checkpoint of ours takes precedence
    assert all(torch.equal(ours.tensor(name), tensor.cpu()) for name, tensor in moved.items())


def test_what_cannot_be_read_is_named(source: HFFolder, tmp_path: Path) -> None:
    stored = tmp_path / "stored"
    assert run(["convert", str(source.path), str(stored), "--to", "torch_dist"]) == 0
    with pytest.raises(CheckpointError, match="stored exists already"):
        convert(source.path, stored, "hf", None, lambda things, _: things)
    (stored / "config.json").write_text(json.dumps(source.config | {"head_dim": 10}))
    with pytest.raises(CheckpointError, match=r"linear_qkv\.weight \[\d+, 64\] does not fit .*config\.json"):
        opened(stored, None).tensor("model.layers.0.self_attn.k_proj.weight")
    (stored / "config.json").write_text(json.dumps(source.config | {"num_hidden_layers": 3, "layer_types": None}))
    with pytest.raises(CheckpointError, match=r"is stacked \(2,\), and by .* \(3,\)"):
        opened(stored, None)
    (stored / "config.json").write_text(json.dumps(source.config | {"vocab_size": 600}))
    with pytest.raises(CheckpointError, match=r"embeddings of \(512, 64\), and by .* would be \(600, 64\)"):
        opened(stored, None)
    (stored / "config.json").write_text(json.dumps(source.config | {"model_type": "qwen2"}))
    with pytest.raises(
        CheckpointError, match=r"q_proj\.bias.* of a qwen2 model, which would be called decoder\.layers\.self"
    ):
        opened(stored, None)
    (stored / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"no config\.json in it; .*--hf-checkpoint"):
        opened(stored, None)
    (stored / "latest_checkpointed_iteration.txt").write_text("7")
    with pytest.raises(CheckpointError, match="iter_0000007 is not a torch_dist checkpoint"):
        opened(stored, source.path)


def test_pieces_are_put_together_and_damage_is_noticed(tmp_path: Path) -> None:
    whole = torch.arange(24.0).reshape(2, 4, 3)
    pieces = {"w": whole[:, :2], "w2": whole[:, 2:]}
    part = [torch_dist.TensorPiece(name, (), (), tensor) for name, tensor in pieces.items()]
    torch_dist.write(tmp_path, part, {})
    file = tmp_path / ".metadata"
    metadata: Any = pickle.loads(file.read_bytes())
    entry, places = metadata.state_dict_metadata["w"], metadata.storage_data
    chunk = type(entry.chunks[0])(torch.Size([0, 2, 0]), torch.Size([2, 2, 3]))
    places[MetadataIndex("w", chunk.offsets)] = places[MetadataIndex("w2", [0, 0, 0])]
    entry.size, entry.chunks = whole.shape, [*entry.chunks, chunk]
    file.write_bytes(pickle.dumps(metadata))
    stored = torch_dist.TorchDist(tmp_path)
    assert torch.equal(stored.read("w"), whole)
    assert torch.equal(stored.read("w", (1,)), whole[1])
    entry.chunks = [chunk]
    file.write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="w cannot be read .*12 of 24 numbers are there"):
        torch_dist.TorchDist(tmp_path).read("w")
    (tmp_path / "__0_0.distcp").write_bytes(b"")
    with pytest.raises(CheckpointError, match="w2 cannot be read"):
        stored.read("w2")


def test_what_a_metadata_file_would_run_is_not_run(tmp_path: Path) -> None:
    (tmp_path / ".metadata").write_bytes(pickle.dumps(Hostile(tmp_path / "ran")))
    with pytest.raises(CheckpointError, match="not a torch_dist checkpoint's"):
        torch_dist.TorchDist(tmp_path)
    assert not (tmp_path / "ran").exists()
