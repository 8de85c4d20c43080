"""Images in the batching loop and in requests, against transformers' own forward pass."""

import base64
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import PIL.Image
import pytest
from safetensors.torch import load_file

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.cpu_model import CpuModel, forward_of
from agentrl.engine.embedded.images import ImageReader
from agentrl.engine.embedded.model import Vocabulary, load_model, read_config
from agentrl.engine.embedded.request import parse_generate
from agentrl.engine.embedded.sequence import SequenceState, Wanted
from agentrl.engine.embedded.weights import WeightUpdater
from agentrl.media import Image
from agentrl.numerics.vision import Vision
from agentrl.serving.http import RequestError
from tests.engine.embedded.driver import make_engine, make_job, run, seeing_log_probs, seeing_model
from tests.engine.embedded.driver import prompt as words
from tests.support.nightly import nightly
from tests.support.vision import IMAGE_PAD, VISION_END, VISION_START, Kind, picture, tiny_vlm

KINDS: tuple[Kind, ...] = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
Folder = Callable[..., Path]
Prompt = Sequence["int | Image"]


def image(width: int, height: int, seed: int = 0) -> Image:
    return Image.from_bytes(picture(width, height, seed))


RED, BLUE, WIDE = image(90, 70, 1), image(90, 70, 2), image(200, 60, 3)


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Folder:
    base = tmp_path_factory.mktemp("seeing")

    def get(kind: Kind, seed: int = 0) -> Path:
        path = base / f"{kind}-{seed}"
        return path if path.exists() else tiny_vlm(path, kind, seed, tie_word_embeddings=False)

    return get


@pytest.fixture(scope="session")
def plain(folder: Folder) -> Callable[..., Any]:
    return lambda kind, seed=0: seeing_model(folder(kind, seed))


class Driver:
    """An engine, and the reader of its images."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.engine: Engine = make_engine(folder, **options)
        vision = Vision.load(folder)
        assert vision is not None
        self.reader = ImageReader(self.engine.model, vision)

    def job(self, parts: Prompt, **params: Any) -> SequenceState:
        """Make a job whose images stand between their marks, with one placeholder each."""
        ids, urls, spans = list[int](), list[str](), list[list[int]]()
        for part in parts:
            if isinstance(part, Image):
                urls.append(part.url)
                spans.append([len(ids) + 1, len(ids) + 2])
                ids += [VISION_START, IMAGE_PAD, VISION_END]
            else:
                ids.append(part)
        whole, images = self.reader.read(ids, urls, spans)
        job = make_job(whole, **params)
        job.images = images
        return job


def reference(model: Any, job: SequenceState) -> list[float]:
    assert job.images is not None
    spans = [(each.start, each.end) for each in job.images.images]
    pixels = [each.pixels for each in job.images.images]
    return seeing_log_probs(model, job.prompt, job.output, spans, pixels)


def check(model: Any, *jobs: SequenceState) -> None:
    for job in jobs:
        assert len(job.output) == 12
        assert job.log_probs == pytest.approx(reference(model, job), abs=1e-5)


@pytest.mark.parametrize("kind", nightly(KINDS, 1))
def test_log_probs_are_those_of_a_plain_forward(kind: Kind, folder: Folder, plain: Callable[..., Any]) -> None:
    driver = Driver(folder(kind), slots=4, chunk=16)
    assert isinstance(driver.engine.forward, CpuModel) is not driver.engine.cache.stateful
    jobs = [
        driver.job([*words(5), RED, *words(7, 1)]),
        driver.job([RED, *words(3), WIDE, *words(40, 2), BLUE, *words(2)], seed=3),
        driver.job([*words(30, 4), WIDE, *words(1)], seed=4),
    ]
    texts = [make_job(words(n, n), seed=n) for n in (1, 20, 90)]
    run(driver.engine, *jobs, *texts)
    check(plain(kind), *jobs)
    alone = [make_job(words(n, n), seed=n) for n in (1, 20, 90)]
    for text, same in zip(texts, alone, strict=True):
        run(make_engine(folder(kind)), same)
        assert text.output == same.output


@pytest.mark.parametrize("kind", nightly(KINDS, 1))
def test_transformers_own_decoder_takes_images_too(kind: Kind, folder: Folder, plain: Callable[..., Any]) -> None:
    driver = Driver(folder(kind), slots=2, chunk=16)
    driver.engine.forward = forward_of(
        load_model(str(folder(kind)), dtype="float32", device="cpu", trust_remote_code=False), by_kernel=False
    )
    jobs = [driver.job([*words(5), RED, *words(7, 1), WIDE], seed=seed) for seed in (1, 2)]
    run(driver.engine, *jobs, make_job(words(9)))
    check(plain(kind), *jobs)


@pytest.mark.parametrize("kind", nightly(KINDS, 1))
def test_later_turns_bring_images_and_reuse_the_prefix(kind: Kind, folder: Folder, plain: Callable[..., Any]) -> None:
    driver, model = Driver(folder(kind), chunk=16), plain(kind)
    opening: list[int | Image] = [*words(5), RED, *words(7, 1)]
    first = driver.job(opening)
    run(driver.engine, first)
    second = driver.job([*opening, *first.output, WIDE, *words(4, 2), BLUE, *words(3)])
    third = driver.job([*opening, *first.output, BLUE, *words(4, 2)])
    run(driver.engine, second)
    run(driver.engine, third)
    assert second.cached_tokens == len(first.prompt) + 12 - 1
    shared = 0 if driver.engine.cache.stateful else len(first.prompt) + 12 + 1  # with the mark before the image
    assert third.cached_tokens == shared
    check(model, first, second, third)


@pytest.mark.parametrize("kind", nightly(KINDS, 1))
def test_another_image_is_another_prefix(kind: Kind, folder: Folder, plain: Callable[..., Any]) -> None:
    driver, model = Driver(folder(kind)), plain(kind)
    red, blue, again = (driver.job([*words(20), each, *words(20, 1)], seed=5) for each in (RED, BLUE, RED))
    for job in (red, blue, again):
        run(driver.engine, job)
    assert red.prompt == blue.prompt
    shared = [0, 0] if driver.engine.cache.stateful else [21, len(again.prompt) - 1]  # 21: to the mark before the image
    assert [blue.cached_tokens, again.cached_tokens] == shared
    assert again.output == red.output != blue.output
    check(model, red, blue, again)


@pytest.mark.parametrize("kind", nightly(KINDS, 1))
def test_a_placeholder_outside_the_spans_is_a_word(kind: Kind, folder: Folder, plain: Callable[..., Any]) -> None:
    driver, model = Driver(folder(kind)), plain(kind)
    stray = [*words(3), IMAGE_PAD, IMAGE_PAD, *words(2)]
    job = driver.job([*stray, RED, *stray, BLUE, IMAGE_PAD])
    after = driver.job([*stray, RED, *stray, WIDE, IMAGE_PAD])
    run(driver.engine, job)
    run(driver.engine, after)
    check(model, job, after)


@pytest.mark.parametrize("kind", nightly(KINDS, 1))
def test_turns_before_and_after_a_weight_update(kind: Kind, folder: Folder, plain: Callable[..., Any]) -> None:
    driver = Driver(folder(kind))
    opening: list[int | Image] = [*words(5), RED, *words(7, 1)]
    first = driver.job(opening)
    run(driver.engine, first)
    weights = WeightUpdater(driver.engine.model)
    weights.write(driver.engine, weights.read_folder(str(folder(kind, 1))), "1")
    second = driver.job([*opening, *first.output, RED, *words(3)])
    run(driver.engine, second)
    assert second.cached_tokens == 0
    check(plain(kind), first)
    check(plain(kind, 1), second)


@pytest.mark.parametrize("kind", nightly(KINDS, 1))
def test_weights_have_the_names_of_the_folder_or_of_transformers(kind: Kind, folder: Folder) -> None:
    """First the vision tower alone, then the language model alone, with both kinds of names."""
    driver, stored = Driver(folder(kind)), load_file(folder(kind, 1) / "model.safetensors")
    weights, wanted = WeightUpdater(driver.engine.model), Driver(folder(kind, 1)).engine.model.state_dict()
    seeing = {name: tensor for name, tensor in stored.items() if "visual." in name}
    weights.write(driver.engine, list(seeing.items()), "1")
    own = driver.engine.model.state_dict()
    assert all(own[name].equal(tensor) == ("visual." in name) for name, tensor in wanted.items() if tensor.dim() > 1)
    weights.write(driver.engine, [(name, each) for name, each in wanted.items() if "visual." not in name], "2")
    assert all(own[name].equal(tensor) for name, tensor in wanted.items())


def test_a_retracted_sequence_keeps_its_image(folder: Folder) -> None:
    undisturbed, disturbed = Driver(folder("qwen3_vl")), Driver(folder("qwen3_vl"))
    jobs = [driver.job([*words(5), RED, *words(7, 1)]) for driver in (undisturbed, disturbed)]
    run(undisturbed.engine, jobs[0])
    disturbed.engine.add(jobs[1])
    for _ in range(6):
        disturbed.engine.step()
    disturbed.engine.pause("retract")
    disturbed.engine.resume()
    run(disturbed.engine)
    assert jobs[1].retractions == 1
    assert jobs[1].output == jobs[0].output
    assert jobs[1].log_probs == pytest.approx(jobs[0].log_probs, abs=1e-5)


def test_prompt_log_probs_pass_over_an_image(folder: Folder, plain: Callable[..., Any]) -> None:
    driver = Driver(folder("qwen3_vl"), chunk=16)
    job = driver.job([*words(5), RED, *words(12, 1)], want=Wanted(return_logprob=True, logprob_start_len=3))
    run(driver.engine, job)
    whole = driver.job([*words(5), RED])
    whole.output = job.prompt[len(whole.prompt) :]
    wanted = reference(plain("qwen3_vl"), whole)
    assert job.input_log_probs[-12:] == pytest.approx(wanted, abs=1e-5)


def bodies() -> dict[str, tuple[dict[str, Any], str]]:
    """Return requests that are refused, and words of the reason."""
    marked = [1, VISION_START, IMAGE_PAD, VISION_END]
    damaged = "data:image/png;base64," + base64.b64encode(picture(90, 70)[:200]).decode()
    return {
        "more images than places": ({"input_ids": marked, "image_data": [RED.url, RED.url]}, "places for 1"),
        "fewer images than places": ({"input_ids": marked * 2, "image_data": [RED.url]}, "places for 2"),
        "a run of another length": (
            {"input_ids": [1, *[IMAGE_PAD] * 3, 2], "image_data": [RED.url]},
            "needs 6 placeholders",
        ),
        "a span of other ids": (
            {"input_ids": marked, "image_data": [RED.url], "image_spans": [[0, 1]]},
            "0 of them placeholders",
        ),
        "a span beyond the end": (
            {"input_ids": marked, "image_data": [RED.url], "image_spans": [[2, 5]]},
            "image_spans",
        ),
        "spans that touch": (
            {"input_ids": [1, IMAGE_PAD, IMAGE_PAD], "image_data": [RED.url] * 2, "image_spans": [[1, 2], [2, 3]]},
            "apart",
        ),
        "spans of no form": ({"input_ids": marked, "image_data": [RED.url], "image_spans": "2"}, "image_spans"),
        "too many images": ({"input_ids": [IMAGE_PAD, 1] * 65, "image_data": [RED.url] * 65}, "may have 64 images"),
        "a damaged file": ({"input_ids": marked, "image_data": [damaged]}, "image_data[0]: an image's file is damaged"),
        "text for a file": ({"input_ids": marked, "image_data": ["data:image/png;base64,aGVsbG8="]}, "none of PNG"),
        "an address": ({"input_ids": marked, "image_data": ["http://127.0.0.1/x.png"]}, "not fetched"),
        "a path": ({"input_ids": marked, "image_data": ["/etc/passwd"]}, "--image-root"),
        "no text": ({"input_ids": marked, "image_data": [3]}, "valid string"),
        "an image to a text": ({"text": "a", "image_data": [RED.url]}, "send input_ids"),
        "a batch without lists": ({"input_ids": [marked, marked], "image_data": [RED.url]}, "each of 2 prompts"),
        "an image that makes the prompt too long": (
            {"input_ids": [*words(250), *marked], "image_data": [RED.url]},
            "context length",
        ),
    }


@pytest.mark.parametrize("name", bodies())
def test_a_request_that_is_refused(name: str, folder: Folder, reader: ImageReader) -> None:
    body, reason = bodies()[name]
    path = str(folder("qwen2_5_vl"))
    vocab = Vocabulary(path, read_config(path))
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        parse_generate(body, vocab, 256, reader=reader)
    assert caught.value.status == 400


@pytest.fixture(scope="module")
def reader(folder: Folder) -> ImageReader:
    return Driver(folder("qwen2_5_vl")).reader


def test_a_batch_with_and_without_images(folder: Folder, reader: ImageReader) -> None:
    path = str(folder("qwen2_5_vl"))
    marked = [1, VISION_START, IMAGE_PAD, VISION_END]
    body = {"input_ids": [marked, [1, 2], [*marked, *marked]], "image_data": [RED.url, None, [RED.url, WIDE.url]]}
    jobs = parse_generate(body, Vocabulary(path, read_config(path)), 256, reader=reader).jobs
    seen = [[each.hash for each in job.images.images] if job.images else [] for job in jobs]
    assert seen == [[RED.hash], [], [RED.hash, WIDE.hash]]
    assert [job.prompt.count(IMAGE_PAD) for job in jobs] == [6, 0, 6 + 14]


def test_a_model_that_sees_nothing_says_so() -> None:
    vocab = Vocabulary("nowhere", {"vocab_size": 512})
    with pytest.raises(RequestError, match="this model sees no images"):
        parse_generate({"input_ids": [1], "image_data": [RED.url]}, vocab, 256)


def test_more_pixels_than_allowed_are_refused(reader: ImageReader) -> None:
    """A bomb: a small file whose header promises a hundred million pixels."""
    held = io.BytesIO()
    PIL.Image.new("1", (10_000, 10_000)).save(held, "PNG")
    url = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    with pytest.warns(PIL.Image.DecompressionBombWarning), pytest.raises(RequestError, match="10000 x 10000 pixels"):
        reader.read([VISION_START, IMAGE_PAD, VISION_END], [url], None)
