"""Checkpoints on one process: bit-exact resume, interruptions, wrong models; export of Hugging Face folders."""

from __future__ import annotations

import dataclasses
import errno
import json
import pickle
import shutil
import threading
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import CheckpointError
from agentrl.run.training import free_port
from agentrl.train import checkpoints
from agentrl.train.checkpoints import latest
from agentrl.train.contracts import RankInfo
from agentrl.train.hf import HFFolder
from agentrl.train.megatron import device
from agentrl.train.saving import Background, WriteFiles
from agentrl.train.trainer import TrainBackend
from tests.support.distributed import run_ranks
from tests.support.nightly import nightly
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import PPO, REPEATABLE, backend, make_batch, settings, timeless


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def exported(made: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in made.export_weights()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize(
    "changes",
    nightly(
        [
            {"bf16": True, "use_distributed_optimizer": True},
            {},
            {"bf16": True},
            {"use_distributed_optimizer": True},
            {"optimizer": "muon", "muon_lr": 1e-2},
            {"lr_warmup_iters": 4, "lr_decay_style": "cosine", "lr_decay_iters": 8, "weight_decay": 0.1},
        ],
        1,
    ),
    ids=lambda changes: "+".join(changes) or "plain",
)
def test_resume_equals_uninterrupted_to_the_bit(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    train = settings(folder, **REPEATABLE, **changes)
    batches = [make_batch(seed=seed) for seed in range(4)]
    with backend(train) as made:
        for number in range(2):
            made.save(tmp_path / "all" / "one", number)
            made.train(batches[number], number)
        made.save(tmp_path / "all" / "one", 2)
        want = [made.train(batches[number], number)["loss"] for number in (2, 3)]
        end, noise = exported(made), torch.rand(3)
    with backend(train) as made:
        torch.rand(100)
        assert made.load(tmp_path / "all") == 2
        assert [made.train(batches[number], number)["loss"] for number in (2, 3)] == want
        assert same(exported(made), end)
        assert torch.equal(torch.rand(3), noise)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Return a gate that the threads that write checkpoints wait for."""
    opened, submit = threading.Event(), Background.submit

    def held(background: Background, files: WriteFiles) -> Any:
        return submit(background, lambda: opened.wait() and files())

    monkeypatch.setattr(Background, "submit", held)
    return opened


@pytest.mark.parametrize(
    "changes",
    nightly(
        [
            {"train_backend": "fsdp"},
            pytest.param({"train_backend": "fsdp", "bf16": True}, marks=pytest.mark.slow),
            {"bf16": True, "use_distributed_optimizer": True},
            pytest.param({"optimizer": "muon", "muon_lr": 1e-2}, marks=pytest.mark.slow),
            pytest.param({"critic_lr": 1e-3}, marks=pytest.mark.slow),
        ],
        1,
    ),
    ids=lambda changes: "+".join(changes),
)
def test_a_checkpoint_written_in_the_background_is_of_the_step_it_was_begun_at(
    folder: Path, tmp_path: Path, gate: threading.Event, changes: dict[str, Any]
) -> None:
    algorithm = PPO if "critic_lr" in changes else None
    train = settings(folder, async_save=True, **REPEATABLE, **changes)
    with backend(train, algorithm) as made:
        made.train(make_batch(), 0)
        made.save(tmp_path / "one", 1)
        want = [timeless(made.train(make_batch(seed=seed), seed)) for seed in (1, 2)]
        end = exported(made)
        assert latest(tmp_path) is None
        assert not made.saved(wait=False)
        gate.set()
        assert made.saved()
        made.save(tmp_path / "two", 2)
    with backend(train, algorithm) as made:
        assert made.load(tmp_path) == 1  # the second was not finished
        assert [timeless(made.train(make_batch(seed=seed), seed)) for seed in (1, 2)] == want
        assert same(exported(made), end)


def test_a_failure_in_the_background_is_told_when_the_checkpoint_is_due(
    folder: Path, tmp_path: Path, gate: threading.Event
) -> None:
    with backend(settings(folder, async_save=True)) as made:
        made.save(tmp_path / "one", 1)
        partial = tmp_path / ".one.partial"
        shutil.rmtree(partial)
        partial.touch()  # no folder can be made there
        gate.set()
        with pytest.raises(CheckpointError, match=r"one could not be written, with [\d.]+ MiB free"):
            made.saved()
        assert latest(tmp_path) is None
        partial.unlink()
        made.save(tmp_path / "one", 2)
        assert made.saved()
        assert made.load(tmp_path) == 2


def test_a_disk_that_is_full_when_the_last_file_is_written_is_named(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with backend(settings(folder, critic_lr=1e-3), PPO) as made:
        with monkeypatch.context() as patched:
            patched.setattr(checkpoints, "_contents", full)  # which the manifest holds
            with pytest.raises(CheckpointError, match="critic could not be written, with .* No space left") as raised:
                made.save(tmp_path / "one", 1)
        assert str(raised.value).count("could not be written") == 1
        assert latest(tmp_path) is None
        made.save(tmp_path / "one", 2)
        assert made.load(tmp_path) == 2


def test_a_checkpoint_has_the_adapted_entropy_coefficient(folder: Path, tmp_path: Path) -> None:
    objective = AlgorithmSettings(entropy_target=99.0, entropy_coef=0.001, entropy_coef_step=0.001)
    with backend(settings(folder), objective) as made:
        applied = [made.train(make_batch(seed=number), number)["entropy_coef"] for number in range(2)]
        made.save(tmp_path / "two", 1)
        applied.append(made.train(make_batch(seed=2), 2)["entropy_coef"])
    assert applied == pytest.approx([0.001, 0.002, 0.003])
    with backend(settings(folder), objective) as made:
        made.load(tmp_path / "two")
        assert made.train(make_batch(seed=2), 2)["entropy_coef"] == pytest.approx(0.003)


@pytest.mark.parametrize("kind", ["megatron", "fsdp"])
def test_a_resumed_run_has_the_adam_of_its_own_settings(folder: Path, tmp_path: Path, kind: str) -> None:
    with backend(settings(folder, train_backend=kind)) as made:
        made.train(make_batch(), 0)
        made.save(tmp_path / "one", 1)
    with backend(settings(folder, train_backend=kind, adam_beta1=0.5, adam_beta2=0.7, adam_eps=1e-2)) as made:
        made.load(tmp_path / "one")
        made.train(make_batch(), 1)
        groups = [group for part in made.actor.optimizer.parts for group in part.param_groups]
        assert {(*group["betas"], group["eps"]) for group in groups} == {(0.5, 0.7, 1e-2)}


@pytest.mark.parametrize(
    "changes",
    nightly([{"bf16": True}, {"bf16": True, "use_distributed_optimizer": True}], 1),
    ids=lambda changes: "+".join(changes),
)
def test_a_checkpoint_from_before_the_first_step_undoes_what_was_learned(
    folder: Path, tmp_path: Path, changes: dict[str, Any]
) -> None:
    batch, other = make_batch(), make_tiny_model(tmp_path / "other", "qwen3", seed=7)
    changes = {**REPEATABLE, **changes}
    with backend(settings(folder, **changes)) as made:
        made.save(tmp_path / "start", 0)
        made.train(batch, 0)
        want = exported(made)
    with backend(settings(other, **changes)) as made:
        made.train(batch, 0)
        made.load(tmp_path / "start")
        made.train(batch, 0)
        assert same(exported(made), want)


def test_newest_complete_checkpoint_is_found_and_interrupted_ones_are_not(folder: Path, tmp_path: Path) -> None:
    assert latest(tmp_path) is None
    assert latest(tmp_path / "absent") is None
    with backend(settings(folder)) as made:
        for step in (9, 10, 11):
            made.save(tmp_path / f"step_{step}", step)
        (tmp_path / "step_11" / "manifest.json").unlink()
        shutil.copytree(tmp_path / "step_10", tmp_path / ".step_12.partial")
        found = latest(tmp_path)
        assert found is not None
        assert (found.path.name, found.step) == ("step_10", 10)
        assert made.load(tmp_path) == 10
        with pytest.raises(CheckpointError, match="no complete checkpoint"):
            made.load(tmp_path / "step_11")
        made.train(make_batch(), 10)
        made.save(tmp_path / "step_10", 20)
        assert made.load(tmp_path) == 20
    assert not list(tmp_path.glob(".step_10*"))


def test_a_damaged_checkpoint_is_named(folder: Path, tmp_path: Path) -> None:
    with backend(settings(folder)) as made:
        made.save(tmp_path / "step_1", 1)
        largest = max((tmp_path / "step_1").rglob("*.distcp"), key=lambda file: file.stat().st_size)
        largest.write_bytes(largest.read_bytes()[:1000])
        with pytest.raises(CheckpointError, match="step_1 is damaged: .*move it away"):
            made.load(tmp_path)


def test_a_checkpoint_of_another_model_is_refused_with_the_difference(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen3", layers=3, hidden_size=32)
    with backend(settings(other)) as made:
        made.save(tmp_path / "checkpoint", 1)
    with backend(settings(folder)) as made:
        with pytest.raises(CheckpointError, match="hidden is 32 there and 64 here.*layers is 3 there and 2 here"):
            made.load(tmp_path / "checkpoint")
        made.save(tmp_path / "adam", 1)
    with backend(settings(folder, optimizer="muon")) as made, pytest.raises(CheckpointError, match="'adam' there"):
        made.load(tmp_path / "adam")


def test_optimizer_state_that_cannot_be_saved_is_our_own_error(folder: Path, tmp_path: Path) -> None:
    with backend(settings(folder, use_distributed_optimizer=True)) as made:
        made.save(tmp_path / "step_0", 0)
        made.train(make_batch(), 0)
        first = next(iter(made.actor.optimizer.inner.chained_optimizers[0].optimizer.state.values()))
        first["step"] += 1
        with pytest.raises(CheckpointError, match="optimizer's state has no form"):
            made.save(tmp_path / "step_1", 1)
        assert made.load(tmp_path) == 0


def resume_where_cuda_is(_rank: int, folder: str, bf16: bool) -> tuple[float, float]:
    """Run two lives of a run on a machine that reports CUDA. Without CUDA, the CPU's needs are set separately."""
    cuda: Any = torch.cuda
    if not cuda.is_available():
        answer, cuda.is_available = cuda.is_available, lambda: True
        device.prepare()
        cuda.is_available = answer
        device.run_without_cuda()
    train = settings(Path(folder) / "m", bf16=bf16, use_distributed_optimizer=True)
    with backend(train) as made:
        made.save(f"{folder}/checkpoint", 0)
        assert made.load(f"{folder}/checkpoint") == 0
        made.train(make_batch(), 0)
        made.save(f"{folder}/checkpoint", 1)
        want = made.train(make_batch(seed=1), 1)["loss"], made.train(make_batch(seed=2), 2)["loss"]
    with backend(train) as made:
        assert made.load(f"{folder}/checkpoint") == 1
        got = made.train(make_batch(seed=1), 1)["loss"], made.train(make_batch(seed=2), 2)["loss"]
    assert got == want
    return got


@pytest.mark.slow
@pytest.mark.parametrize("bf16", [False, True])
def test_the_distributed_optimizer_resumes_on_a_gpu_without_transformer_engine(tmp_path: Path, bf16: bool) -> None:
    make_tiny_model(tmp_path / "m", "qwen3")
    assert all(np.isfinite(run_ranks(resume_where_cuda_is, 1, str(tmp_path), bf16, fresh=True)[0]))


CUT = {"use_distributed_optimizer": True, "tensor_model_parallel_size": 2}


def save_both(rank: int, folder: str, port: int, second: int) -> float:
    """Save the optimizer's parts from two tensor-parallel processes, and then again for every layout."""
    where = RankInfo(rank=rank, world_size=2, local_rank=rank, master_port=port)
    with backend(settings(Path(folder) / "m", **CUT), where=where) as made:
        made.train(make_batch(), 0)
        made.save(f"{folder}/parts", 1)
    train = settings(Path(folder) / "m", **CUT, dist_ckpt_optim_fully_reshardable=True)
    with backend(train, where=dataclasses.replace(where, master_port=second)) as made:
        assert made.load(f"{folder}/parts") == 1
        made.save(f"{folder}/whole", 1)
        return float(made.train(make_batch(seed=1), 1)["grad_norm"])


@pytest.mark.slow
def test_parts_of_the_optimizer_load_under_the_same_cuts_and_a_whole_state_under_all(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "m", "qwen3")
    want = run_ranks(save_both, 2, str(tmp_path), free_port(), free_port())[0]
    with backend(settings(tmp_path / "m", use_distributed_optimizer=True)) as made:
        with pytest.raises(CheckpointError, match=r"'tp': 2.*'tp': 1.*--dist-ckpt-optim-fully-reshardable"):
            made.load(tmp_path / "parts")
        assert made.load(tmp_path / "whole") == 1
        assert made.train(make_batch(seed=1), 1)["grad_norm"] == pytest.approx(want, rel=1e-5)


@pytest.mark.parametrize(("arch", "tied"), nightly(product(["qwen3", "qwen2", "llama"], [True, False]), 2))
def test_hugging_face_round_trip_is_exact(tmp_path: Path, arch: Arch, tied: bool) -> None:
    source = HFFolder(make_tiny_model(tmp_path / "in", arch, tie_word_embeddings=tied))
    with backend(settings(source.path)) as made:
        specs = made.weight_specs()[0]
        names = []
        for (name, tensor), (want, dtype, shape) in zip(made.export_weights(), specs, strict=True):
            assert (name, str(tensor.dtype), list(tensor.shape)) == (want, f"torch.{dtype}", shape)
            assert torch.equal(tensor.cpu(), source.tensor(name))
            names.append(name)
        made.save_hf(tmp_path / "out")
    assert set(names) == set(source.files) - ({"lm_head.weight"} if tied else set())
    written = HFFolder(tmp_path / "out")
    assert all(torch.equal(written.tensor(name), source.tensor(name)) for name in names)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (source.path / "tokenizer.json").read_bytes()


def test_written_folders_load_in_transformers(folder: Path, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with backend(settings(folder, bf16=True)) as made:
        made.train(make_batch(), 0)
        made.save_hf(tmp_path / "out")
        weights = exported(made)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model.dtype == torch.bfloat16
    state = model.state_dict()
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert AutoTokenizer.from_pretrained(tmp_path / "out").encode("dog")


class Payload:
    """Unpickling it makes a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


@pytest.mark.parametrize(
    ("train_backend", "file"), nightly([("megatron", ".metadata"), ("megatron", "common.pt"), ("fsdp", ".metadata")], 2)
)
def test_nothing_in_a_foreign_checkpoint_is_executed(
    folder: Path, tmp_path: Path, train_backend: str, file: str
) -> None:
    evil, path = tmp_path / "executed", tmp_path / "all" / "one"
    with backend(settings(folder, train_backend=train_backend)) as made:
        made.train(make_batch(seed=0), 0)
        made.save(path, 1)
        before = exported(made)
        if file == "common.pt":
            torch.save({"args": Payload(evil)}, path / file)
        else:
            (path / file).write_bytes(pickle.dumps(Payload(evil)))
        manifest = json.loads((path / "manifest.json").read_text())
        del manifest["files"]  # an attacker writes matching digests
        (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(CheckpointError, match="one could not be loaded"):
            made.load(tmp_path / "all")
        assert same(before, exported(made))
    assert not evil.exists()
