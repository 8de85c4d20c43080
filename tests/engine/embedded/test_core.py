"""The batching loop against plain forward passes of transformers."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.engine.embedded.cpu_model import CpuModel
from agentrl.engine.embedded.model import load_model
from agentrl.engine.embedded.sequence import Wanted
from agentrl.engine.embedded.weights import WeightUpdater
from agentrl.modelfolder import read_json
from agentrl.serving.http import RequestError
from tests.engine.embedded.conftest import ARCHES
from tests.engine.embedded.driver import make_engine, make_job, prompt, reference_log_probs, run
from tests.support.nightly import nightly

Folder = Callable[..., Path]


@pytest.mark.parametrize("arch", ARCHES)
def test_log_probs_are_those_of_a_plain_forward(arch: str, folder: Folder, plain_model: Callable[..., Any]) -> None:
    engine = make_engine(folder(arch), slots=4)
    assert isinstance(engine.forward, CpuModel)
    jobs = [make_job(prompt(n, n), seed=n) for n in (1, 5, 90, 64, 65, 200, 7)]
    run(engine, *jobs)
    model = plain_model(arch)
    for job in jobs:
        assert len(job.output) == 12
        assert job.log_probs == pytest.approx(reference_log_probs(model, job), abs=1e-5)


@pytest.mark.parametrize("arch", ARCHES)
def test_log_probs_after_a_weight_update_from_disk(arch: str, folder: Folder, plain_model: Callable[..., Any]) -> None:
    engine = make_engine(folder(arch))
    before = make_job(prompt(40))
    run(engine, before)
    weights = WeightUpdater(engine.model)
    weights.write(engine, weights.read_folder(str(folder(arch, 1))), "new")
    after = make_job(prompt(40))
    run(engine, after)
    assert after.cached_tokens == 0
    assert after.versions == [("new", 0, 12)]
    assert after.log_probs == pytest.approx(reference_log_probs(plain_model(arch, 1), after), abs=1e-5)


@pytest.mark.parametrize(
    ("arch", "lacks"),
    [("qwen3", "lm_head.weight"), ("qwen3_moe", "lm_head.weight"), ("qwen3_moe", "model.layers.0.mlp.gate.weight")],
)
def test_a_folder_that_lacks_a_tensor_is_no_weight_update(
    arch: str, lacks: str, folder: Folder, tmp_path: Path
) -> None:
    given = shutil.copytree(folder(arch), tmp_path / "given")
    (given / "config.json").write_text(json.dumps({**read_json(given / "config.json"), "tie_word_embeddings": False}))
    tensors = load_file(given / "model.safetensors")
    tensors.setdefault("lm_head.weight", tensors["model.embed_tokens.weight"].clone())
    save_file(tensors, given / "model.safetensors", {"format": "pt"})
    weights = WeightUpdater(load_model(str(given), dtype="float32", device="cpu", trust_remote_code=False))
    assert {name for name, _ in weights.read_folder(str(given))} >= {"lm_head.weight"}
    del tensors[lacks]
    save_file(tensors, given / "model.safetensors", {"format": "pt"})
    with pytest.raises(RequestError, match=rf"lacks? .*{lacks}"):
        weights.read_folder(str(given))


def test_temperature_scales_the_reported_log_probs(folder: Folder, plain_model: Callable[..., Any]) -> None:
    engine = make_engine(folder())
    job = make_job(prompt(20), temperature=0.5, top_k=5, top_p=0.9, min_p=0.01)
    run(engine, job)
    assert job.log_probs == pytest.approx(reference_log_probs(plain_model(), job, 0.5), abs=1e-5)


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch(folder: Folder) -> None:
    params: list[dict[str, Any]] = [{}, {"top_p": 0.8}, {"top_k": 7, "min_p": 0.02}, {"temperature": 0.7}]
    alone = [make_job(prompt(30, i), seed=100 + i, **p) for i, p in enumerate(params)]
    for job in alone:
        run(make_engine(folder()), job)
    together = [make_job(prompt(30, i), seed=100 + i, **p) for i, p in enumerate(params)]
    others = [make_job(prompt(50 + i, 50 + i), seed=i) for i in range(5)]
    run(make_engine(folder()), *others, *together)
    assert [job.output for job in together] == [job.output for job in alone]


def test_a_conversation_extends_its_slot(folder: Folder, plain_model: Callable[..., Any]) -> None:
    engine = make_engine(folder())
    first = make_job(prompt(50))
    run(engine, first)
    second = make_job(first.prompt + first.output + prompt(10, 9))
    run(engine, second)
    assert second.cached_tokens == 50 + 12 - 1  # the last sampled token has no KV yet
    assert second.log_probs == pytest.approx(reference_log_probs(plain_model(), second), abs=1e-5)


def test_samples_of_one_prompt_share_its_prefill(folder: Folder, plain_model: Callable[..., Any]) -> None:
    engine = make_engine(folder())
    jobs = [make_job(prompt(150), seed=i) for i in range(6)]
    run(engine, *jobs)
    assert [job.cached_tokens for job in jobs] == [0] + [149] * 5
    assert len({tuple(job.output) for job in jobs}) > 1
    for job in jobs:
        assert job.log_probs == pytest.approx(reference_log_probs(plain_model(), job), abs=1e-5)


def test_a_retracted_sequence_goes_on_as_if_nothing_happened(folder: Folder) -> None:
    undisturbed = make_job(prompt(40), seed=5, max_new_tokens=30)
    run(make_engine(folder()), undisturbed)
    engine = make_engine(folder())
    job = make_job(prompt(40), seed=5, max_new_tokens=30)
    engine.add(job)
    for _ in range(10):
        engine.step()
    engine.pause("retract")
    assert not engine.step()
    assert engine.flush()
    engine.resume()
    run(engine)
    assert job.retractions == 1
    assert job.output == undisturbed.output
    assert job.log_probs == pytest.approx(undisturbed.log_probs, abs=1e-5)


def test_a_running_sequence_is_stamped_by_token_and_its_old_prefix_is_not_reused(folder: Folder) -> None:
    engine = make_engine(folder())
    job = make_job(prompt(40), max_new_tokens=20)
    engine.add(job)
    for _ in range(5):
        engine.step()
    engine.pause("in_place")
    engine.weights_changed()
    engine.version = "2"
    engine.resume()
    run(engine)
    assert job.versions == [("default", 0, 5), ("2", 5, 20)]
    late = make_job(job.prompt + job.output)
    run(engine, late)
    assert late.cached_tokens == 0


def test_an_exclusive_action_waits_for_the_running_and_goes_before_the_waiting(folder: Folder) -> None:
    engine = make_engine(folder(), slots=1)
    order: list[str] = []
    jobs = [make_job(prompt(10, i)) for i in range(2)]
    for i, job in enumerate(jobs):
        job.on_finish = lambda _, i=i: order.append(f"job {i}")
        engine.add(job)
    engine.step()
    engine.exclusive(lambda: order.append("update"))
    run(engine)
    assert order == ["job 0", "update", "job 1"]


def test_more_requests_than_slots_all_finish(folder: Folder) -> None:
    engine = make_engine(folder(), slots=3)
    jobs = [make_job(prompt(5 + i, i), seed=i, max_new_tokens=1 + i % 5) for i in range(20)]
    run(engine, *jobs)
    assert [len(job.output) for job in jobs] == [1 + i % 5 for i in range(20)]
    assert {job.finish["type"] for job in jobs if job.finish} == {"length"}


@pytest.mark.parametrize("start", [0, 3, 19])
def test_prompt_log_probs(start: int, folder: Folder, plain_model: Callable[..., Any]) -> None:
    engine = make_engine(folder(), chunk=8)
    ids = prompt(20)
    run(engine, make_job(ids))
    job = make_job(
        ids, want=Wanted(logprob_start_len=start, top_logprobs_num=2, token_ids_logprob=[3, 4]), max_new_tokens=2
    )
    run(engine, job)
    with torch.inference_mode():
        rows = plain_model()(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = [rows[i - 1, ids[i]].item() for i in range(start + 1, 20)]
    assert job.input_log_probs == pytest.approx(expected, abs=1e-5)
    assert job.cached_tokens <= start
    assert len(job.input_top) == len(job.input_ids_log_probs) == len(expected)
    assert len(job.output_top) == len(job.output_ids_log_probs) == 2


def test_penalties_bias_and_min_new_tokens(folder: Folder) -> None:
    engine = make_engine(folder())
    biased = make_job(prompt(10), logit_bias={"7": 100.0}, temperature=0)
    run(engine, biased)
    assert biased.output == [7] * 12
    varied = make_job(prompt(10), temperature=0, frequency_penalty=2.0, presence_penalty=2.0, repetition_penalty=1.5)
    run(engine, varied)
    plain = make_job(prompt(10), temperature=0)
    run(engine, plain)
    assert len(set(varied.output)) > len(set(plain.output))


def test_no_new_tokens(folder: Folder) -> None:
    engine = make_engine(folder())
    job = make_job(prompt(10), max_new_tokens=0, want=Wanted(logprob_start_len=0))
    run(engine, job)
    assert job.finish == {"type": "length", "length": 0}
    assert len(job.input_log_probs) == 9
    assert job.output == []


def test_what_siblings_have_in_common_is_read_once(folder: Folder, plain_model: Callable[..., Any]) -> None:
    engine, seen = make_engine(folder(), slots=5), set[tuple[int, ...]]()
    forward = engine.forward

    def noting(ids: Any, positions: Any, keep: Any, plan: Any, images: Any) -> Any:
        seen.add(tuple(plan.where[2:, : len(plan.singles)].flat))
        return forward(ids, positions, keep, plan, images)

    engine.forward = noting
    first = [make_job(prompt(150), seed=i, max_new_tokens=16 + 8 * i) for i in range(4)]
    other = make_job(prompt(100, 77), max_new_tokens=60)
    late = make_job(other.prompt[:90] + prompt(9, 3))  # copied into the first free slot, the siblings' root
    for job in (other, *first):
        engine.add(job)
    for _ in range(12):
        engine.step()
    run(engine, late)
    assert (0, 1, 1, 1, 1, 0, 0, 149, 149, 149) in seen
    again = [make_job(first[0].prompt[:70] + prompt(30, 5), max_new_tokens=30)]  # overwrites part of the shared prefix
    again += [make_job(job.prompt + job.output + prompt(5, 7), seed=9) for job in first[1:]]
    again += [make_job(prompt(60 + i, 60 + i), seed=i) for i in range(3)]
    run(engine, *again)
    for job in (other, late, *first, *again):
        assert job.log_probs == pytest.approx(reference_log_probs(plain_model(), job), abs=1e-5)


@pytest.mark.parametrize("seed", nightly(range(4), 1))
def test_prefix_sharing_changes_no_log_prob_under_random_load(
    seed: int, folder: Folder, plain_model: Callable[..., Any]
) -> None:
    """Siblings, prompts that continue other jobs, and retractions, in slots that are reused soon."""
    rng = random.Random(seed)
    engine, jobs = make_engine(folder(), slots=5), list[Any]()
    roots = [prompt(rng.randint(20, 60), root) for root in range(3)]
    for number in range(30):
        known = rng.choice(roots) if not jobs or rng.random() < 0.6 else (old := rng.choice(jobs)).prompt + old.output
        cut = known[: rng.randint(len(known) // 2, len(known))] if rng.random() < 0.3 else known[:200]
        jobs.append(make_job(cut + prompt(rng.randint(0, 3), number), seed=number, max_new_tokens=rng.randint(1, 12)))
        engine.add(jobs[-1])
        for _ in range(rng.choice((0, 0, 1, 3, 8))):
            engine.step()
        if rng.random() < 0.1:
            engine.pause("retract")
            engine.resume()
    run(engine)
    for job in jobs:
        assert job.log_probs == pytest.approx(reference_log_probs(plain_model(), job), abs=1e-5)
