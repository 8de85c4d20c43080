"""Vision models trained by FSDP: transformers' own numbers, sample by sample, with packing and shared prefixes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import CheckpointError, TrainError
from agentrl.train.backends import backend_class
from agentrl.train.batch import Picture, TrainBatch
from agentrl.train.contracts import RankInfo
from agentrl.train.hf import HFFolder
from tests.support.distributed import run_ranks
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model
from tests.support.vision import IMAGE_PAD, Kind, picture, tiny_vlm, unit
from tests.train.fsdp.seeing import DOUBLE, SeeingReference, image, make_batch, make_samples
from tests.train.megatron.helpers import PPO, backend, settings, timeless
from tests.train.megatron.helpers import make_batch as make_text

KINDS: list[Kind] = ["qwen3_5", "qwen2_5_vl", "qwen3_vl", "qwen3_5_moe"]
KL = AlgorithmSettings(use_kl_loss=True)
RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}


@pytest.fixture(scope="module", params=nightly(KINDS, 1))
def kind(request: pytest.FixtureRequest) -> Kind:
    return cast(Kind, request.param)


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("models") / kind, kind, tie_word_embeddings=False)


def chosen(folder: Path, **changes: Any) -> Any:
    return settings(folder, **{"train_backend": "fsdp", "clip_grad": 0.0, "max_tokens_per_gpu": 400, **changes})


def weights_of(made: Any) -> dict[str, torch.Tensor]:
    """Return copies of all weights of this process under transformers' names."""
    return {name: p.detach().cpu().clone() for name, p in made.actor.network.parameters().items()}


def tower(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor for name, tensor in weights.items() if ".visual." in name}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)


def test_log_probs_are_those_of_single_samples(kind: Kind, folder: Path) -> None:
    """Several images a sample, images in later turns, a sampled placeholder, and prefixes that end before an image."""
    batch = make_batch(kind)
    want = SeeingReference(folder, chosen(folder)).log_probs(batch).detach().numpy()
    for changes in ({}, {"share_prefixes": False}, {"max_tokens_per_gpu": 60}):
        with backend(chosen(folder, **changes)) as made:
            np.testing.assert_allclose(made.log_probs(batch), want, rtol=0, atol=1e-5)
            if not changes:  # 28 or 31 tokens of three prompts with one image; 20 before three different images
                plan = made.actor.plan(batch)
                assert plan.tokens - plan.distinct == sum(shared_tokens(batch))


def shared_tokens(batch: TrainBatch) -> list[int]:
    """Return the number of shared tokens of each group in `make_samples`, twice: each group has three samples."""
    prompts = batch.lengths - batch.response_lengths
    return [2 * int(prompts[0]), 2 * int(prompts[3]), 2 * int(prompts[6]), 2 * 21]  # 20 tokens and the mark of an image


@pytest.mark.parametrize(
    "changes", nightly([pytest.param({"train_vision": True}, id="trained"), pytest.param({}, id="frozen")], 1)
)
def test_gradients_are_those_of_float64(kind: Kind, folder: Path, changes: dict[str, Any]) -> None:
    batch, train = make_batch(kind), chosen(folder, **changes)
    reference = SeeingReference(folder, train, torch.float64)
    with backend(train) as made:
        want, metrics = reference.step(batch), made.train(batch, 0)
        for name in ("loss", "grad_norm"):
            assert metrics[name] == pytest.approx(want[name], rel=2e-5, abs=1e-6)
        found: dict[str, Any] = made.actor.network.parameters()
        for name, parameter in reference.model.named_parameters():
            if parameter.grad is None:
                assert ".visual." in name
                assert found[name].grad is None
                continue
            if name.endswith("embed_tokens.weight"):
                parameter.grad[IMAGE_PAD] += parameter.grad[DOUBLE]
                parameter.grad[DOUBLE] = 0
            bound = 3e-5 if ".linear_attn." in name else 1e-5  # transformers decays a state in float32, in any dtype
            most = bound * max(float(parameter.grad.abs().max()), 0.01)
            torch.testing.assert_close(found[name].grad.double(), parameter.grad, rtol=0, atol=most, msg=name)
        assert want["grad_norm"] > 0.1
        assert len(list(reference.model.parameters())) == len(found)


@pytest.mark.slow
def test_an_image_changes_no_bit_of_other_samples(kind: Kind, folder: Path) -> None:
    batch = make_batch(kind)
    with backend(chosen(folder)) as made:
        before = made.log_probs(batch)
        held: Any
        for number, (_, held) in enumerate(batch.pictures):
            other: Any = image(kind, 99, held.width // unit(kind), held.height // unit(kind))
            pictures = list(batch.pictures)
            pictures[number] = Picture(other.hash, other)
            after = made.log_probs(replace(batch, pictures=tuple(pictures)))
            sees = [number in batch.sample_images(i)[:, 0] for i in range(len(batch))]
            for i in range(len(batch)):
                own = batch.response_slice(i)
                if not sees[i]:
                    np.testing.assert_array_equal(after[own], before[own])
                else:
                    assert (after[own] != before[own]).any()


@pytest.mark.slow
def test_a_frozen_tower_is_equal_to_the_bit_after_ten_steps(kind: Kind, folder: Path, tmp_path: Path) -> None:
    """Engines do not get it, and the written folder has it unchanged."""
    batch, source = make_batch(kind), HFFolder(folder)
    with backend(chosen(folder, weight_decay=0.1), KL) as made:
        before = weights_of(made)
        for number in range(10):
            made.train(batch, number)
        after = weights_of(made)
        assert same(tower(before), tower(after))
        assert not same(before, after)
        sent = {spec.name for specs in made.weight_specs().values() for spec in specs}
        assert sent == {name for name, _ in made.export_weights()}
        assert sent == {name for name in source.files if "visual." not in name}
        made.save_hf(tmp_path / "out")
    written = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert same(after, dict(written.named_parameters()))
    assert HFFolder(tmp_path / "out").files.keys() == source.files.keys()


def test_with_train_vision_the_tower_learns_and_is_sent(kind: Kind, folder: Path, tmp_path: Path) -> None:
    with backend(chosen(folder, train_vision=True)) as made:
        before = weights_of(made)
        made.train(make_batch(kind), 0)
        after = weights_of(made)
        assert not any(after[name].equal(before[name]) for name in tower(before) if name.endswith("proj.weight"))
        assert {spec.name for specs in made.weight_specs().values() for spec in specs} == HFFolder(folder).files.keys()
        made.save_hf(tmp_path / "out")
    written = AutoModelForImageTextToText.from_pretrained(tmp_path / "out", dtype=torch.float32)
    assert same(after, dict(written.named_parameters()))


def test_where_only_the_tower_learns_a_batch_without_images_changes_nothing(kind: Kind, folder: Path) -> None:
    only = {"train_vision": True, "only_train_params_name_list": ("visual",)}
    with backend(chosen(folder, **only)) as made:
        before = weights_of(made)
        assert made.train(make_text(), 0)["grad_norm"] == 0
        assert same(weights_of(made), before)
        assert made.train(make_batch(kind), 1)["grad_norm"] > 0
        assert not same(tower(weights_of(made)), tower(before))


def test_a_tower_that_learns_resumes_from_before_its_first_image(kind: Kind, folder: Path, tmp_path: Path) -> None:
    train = chosen(folder, train_vision=True)
    with backend(train) as made:
        made.train(make_text(vocab=300), 0)
        made.save(tmp_path / "one", 1)
        want = made.train(make_batch(kind), 1)["loss"]
        end = weights_of(made)
    with backend(train) as made:
        assert made.load(tmp_path) == 1
        assert made.train(make_batch(kind), 1)["loss"] == want
        assert same(weights_of(made), end)


@pytest.mark.slow
@pytest.mark.parametrize("train_vision", nightly([True, False], 1))
def test_adapters_are_the_language_models_unless_the_tower_learns(
    kind: Kind, folder: Path, tmp_path: Path, train_vision: bool
) -> None:
    batch = make_batch(kind)
    with backend(chosen(folder, lora_rank=4, train_vision=train_vision), KL) as made:
        start = made.log_probs(batch)
        for number in range(2):
            made.train(batch, number)
        adapter = made.actor.network.adapter()
        assert any(".visual." in name for name in adapter) is train_vision
        assert any(".language_model." in name for name in adapter)
        np.testing.assert_array_equal(made.log_probs(batch, "ref"), start)
        learned = made.log_probs(batch)
        made.save_hf(tmp_path / "out")
    with backend(chosen(tmp_path / "out")) as merged:
        np.testing.assert_allclose(merged.log_probs(batch), learned, rtol=0, atol=1e-5)
    assert np.abs(learned - start).max() > 1e-3


@pytest.mark.parametrize(
    "changes", nightly([pytest.param({"train_vision": True}, id="trained"), pytest.param({}, id="frozen")], 1)
)
def test_a_resumed_run_is_equal_to_the_bit(kind: Kind, folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    batch, train = make_batch(kind), chosen(folder, **changes)
    with backend(train) as made:
        made.train(batch, 0)
        made.save(tmp_path, 0)
        assert made.saved()
        want = timeless(made.train(make_batch(kind, 1), 1))
        weights = weights_of(made)
    with backend(train) as resumed:
        assert resumed.load(tmp_path) == 0
        assert timeless(resumed.train(make_batch(kind, 1), 1)) == want
        assert same(weights_of(resumed), weights)
    other = chosen(folder, train_vision=not train.train_vision)
    with backend(other) as made, pytest.raises(CheckpointError, match="train_vision"):
        made.load(tmp_path)


CASES: dict[str, tuple[AlgorithmSettings, dict[str, Any]]] = {
    "frozen": (KL, {}),
    "trained": (KL, {"train_vision": True}),
    "recomputed": (KL, {"train_vision": True, **RECOMPUTED}),
    "one image": (KL, {"train_vision": True, "max_tokens_per_gpu": 60}),
    "adapter": (KL, {"train_vision": True, "lora_rank": 4}),
    "critic": (PPO, {"train_vision": True}),
    "offload": (KL, {"fsdp_cpu_offload": True}),
    "bf16": (KL, {"bf16": True}),
}


def test_each_image_is_fetched_once_and_its_pixels_are_made_once(kind: Kind, folder: Path) -> None:
    fetched: list[Any] = []

    def stored(held: Any) -> Any:
        def fetch() -> Any:
            fetched.append(held)
            return held

        return fetch

    batch = make_batch(kind).with_parts(stored)
    with backend(chosen(folder, num_steps_per_rollout=2), KL) as made:
        made.log_probs(batch)
        made.train(batch, 0)
        assert len(fetched) == 2 * len(batch.pictures)  # the actor's and the reference's
        made.log_probs(batch.select([0]))
        assert len(fetched) == 2 * len(batch.pictures)


def played(made: Any, kind: Kind) -> dict[str, Any]:
    batch = make_batch(kind)
    before = made.log_probs(batch)
    metrics = [timeless(made.train(batch, number)) for number in range(2)]
    weights = {name: tensor.float().numpy().copy() for name, tensor in made.export_weights()}
    return {"log_probs": before, "loss": [m["loss"] for m in metrics], "weights": weights}


def in_two_processes(rank: int, root: str, kind: Kind, names: tuple[str, ...]) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    out = {}
    for name in names:
        algorithm, changes = CASES[name]
        with backend(chosen(Path(root) / "model", **changes), algorithm, RankInfo(rank, 2, rank)) as made:
            single = made.log_probs(make_batch(kind).select([0]))  # the other process has an empty microbatch
            out[name] = played(made, kind) | {"single": single}
            batch = make_batch(kind)
            plan = made.actor.plan(batch)
            own = {int(n) for samples in plan.ranks[rank] for i in samples for n in batch.sample_images(i)[:, 0]}
            see: Any = made.actor.forward_backward.packer.see
            assert set(see.__self__.made) == {batch.pictures[n].hash for n in own}
            blind = [[any(len(batch.sample_images(i)) for i in mb) for mb in each] for each in plan.ranks]
            out[name]["alone"] = any(one != other for one, other in zip(*blind, strict=True))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("which", KINDS)
def test_two_processes_are_one(tmp_path: Path, which: Kind) -> None:
    """Also if one process has no image in its microbatch: both must gather the sharded weights."""
    names = tuple(name for name in CASES if (which, name) != ("qwen3_5_moe", "bf16"))  # which chooses other experts
    tiny_vlm(tmp_path / "model", which)
    found, other = run_ranks(in_two_processes, 2, str(tmp_path), which, names)
    for name in names:
        algorithm, changes = CASES[name]
        with backend(
            chosen(tmp_path / "model", **changes | {"bf16": False, "fsdp_cpu_offload": False}), algorithm
        ) as made:
            want = played(made, which)
        # In bf16 another shape of the same product rounds differently, and the reference is in float32.
        same, near = (5e-2, 2e-1) if name == "bf16" else (1e-5, 1e-5)
        np.testing.assert_allclose(found[name]["log_probs"], want["log_probs"], rtol=0, atol=near)
        np.testing.assert_array_equal(found[name]["log_probs"], other[name]["log_probs"])
        single = found[name]["single"]
        np.testing.assert_allclose(single, found[name]["log_probs"][: len(single)], rtol=0, atol=same)
        assert found[name]["loss"] == other[name]["loss"]
        assert found[name]["alone"] or name != "one image"  # a microbatch has images on one rank, none on the other
        assert found[name]["weights"].keys() == want["weights"].keys()
        if name != "bf16":
            assert found[name]["loss"] == pytest.approx(want["loss"], rel=1e-5, abs=1e-5)
            for tensor, value in found[name]["weights"].items():
                np.testing.assert_allclose(value, want["weights"][tensor], rtol=0, atol=1e-5, err_msg=tensor)


def test_pixels_that_samples_bring_are_trained_as_files_are(kind: Kind, folder: Path) -> None:
    """slime's form: `multimodal_train_inputs`, at the runs of placeholders. The sampled placeholder is no image."""
    from agentrl.modelfolder import ImageTokens
    from agentrl.numerics.vision import Vision

    vision, groups = Vision.load(folder), make_samples(kind)
    assert vision is not None
    want = TrainBatch.from_samples(groups)
    for group in groups:
        for sample in group:
            held = [sample.images[span.hash] for span in sample.image_spans]
            sample.multimodal_train_inputs = vision.pixels(held) if held else None
            sample.images, sample.image_spans = {}, []
    batch = TrainBatch.from_samples(groups, image_tokens=ImageTokens.of(folder))
    np.testing.assert_array_equal(batch.image_spans, want.image_spans)
    np.testing.assert_array_equal(batch.observation_ids, want.observation_ids)
    with backend(chosen(folder)) as made:
        np.testing.assert_array_equal(made.log_probs(batch), made.log_probs(want))


def test_what_does_not_fit_is_refused_by_name(kind: Kind, folder: Path, tmp_path: Path) -> None:
    batch = make_batch(kind)
    small = batch.pictures[0].held
    large: Any = type(small).from_bytes(picture(5 * unit(kind), 5 * unit(kind)))  # type: ignore[union-attr]
    wrong = replace(batch, pictures=(Picture(large.hash, large), *batch.pictures[1:]))
    with backend(chosen(folder)) as made, pytest.raises(TrainError, match="6 placeholder ids.*its pixels make 25"):
        made.log_probs(wrong)
    blind = make_tiny_model(tmp_path / "blind", "qwen3")
    with backend(chosen(blind)) as made, pytest.raises(TrainError, match="trained as a model that sees none"):
        made.log_probs(replace(batch, tokens=np.minimum(batch.tokens, 500)))
    for where, changes, reason in (
        (folder, {"train_backend": "megatron"}, f"{kind} models see images; megatron trains text models alone"),
        (folder, {"true_on_policy_mode": True}, f"{kind} sees images, and their features"),
        (folder, {"lora_rank": 2, "target_modules": ("qkv",)}, "only the vision tower has them; set --train-vision"),
        (blind, {"train_vision": True}, "is a qwen3, of which no weights for images"),
    ):
        train = chosen(where, **changes)
        with pytest.raises(TrainError, match=reason):
            backend_class(train.train_backend)(train, AlgorithmSettings()).check()
    backend_class("fsdp")(chosen(folder), AlgorithmSettings()).check()
    for file in folder.iterdir():
        if file.name != "preprocessor_config.json":
            (tmp_path / file.name).symlink_to(file)
    with pytest.raises(CheckpointError, match="expected preprocessor_config.json"):
        backend_class("fsdp")(chosen(tmp_path), AlgorithmSettings()).check()
