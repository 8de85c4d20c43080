"""Prompts with images through the pool: the built-in engine agrees with transformers, and bad prompts are rejected."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentrl.engine.images import ImageInputs
from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import SamplingParams
from agentrl.media import Image
from agentrl.numerics.vision import Vision
from agentrl.sample import Sample
from tests.engine.embedded.driver import seeing_log_probs, seeing_model
from tests.support.vision import IMAGE_PAD, ROWS, VISION_END, VISION_START, picture, tiny_vlm

RED, WIDE = (Image.from_bytes(picture(*size)) for size in ((90, 70, 1), (200, 60, 2)))
SETTINGS = EngineSettings(embedded_slots=4, engine_max_retries=3, engine_retry_backoff=0.0)
PARAMS = SamplingParams(temperature=1.0, max_new_tokens=8, ignore_eos=True, sampling_seed=3)


def shown(sample: Sample, image: Image, count: int) -> None:
    """Show the sample's model an image, which has `count` placeholders."""
    from agentrl.media import ImageSpan

    sample.images[image.hash] = image
    ids = [7, VISION_START, *[IMAGE_PAD] * count, VISION_END, 8]
    spans = [ImageSpan(image.hash, 2, 2 + count)]
    if sample.tokens:
        sample.append_observation(ids, spans=spans)
    else:
        sample.set_prompt_tokens(ids, spans)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("seeing"), "qwen2_5_vl", tie_word_embeddings=False)


@pytest.fixture
async def pool(folder: Path) -> AsyncIterator[EnginePool]:
    async with in_process(SETTINGS, folder) as url, EnginePool([url], SETTINGS, vocab_size=ROWS) as pool:
        yield pool


async def turn(pool: EnginePool, sample: Sample) -> int:
    """Let the model write a turn. Returns the number of tokens from the prefix cache."""
    images = ImageInputs.of(sample.images, sample.image_spans)
    got = await pool.generate(sample.tokens, PARAMS, images=images)
    sample.append_model(got.ids, got.log_probs, got.weight_versions)
    return got.cached_tokens


async def test_turns_with_images_and_a_weight_update_between(pool: EnginePool, folder: Path, tmp_path: Path) -> None:
    sample, vision = Sample(), Vision.load(folder)
    assert vision is not None
    other = tiny_vlm(tmp_path, "qwen2_5_vl", 1, tie_word_embeddings=False)
    shown(sample, RED, 6)
    await turn(pool, sample)
    sample.append_observation([IMAGE_PAD])  # as if the model had sampled it
    shown(sample, WIDE, 14)
    first = len(sample.tokens)
    assert await turn(pool, sample) > 10
    await pool.pause()
    await pool.load_weights(DiskUpdate(str(other)), "1") if hasattr(pool, "load_weights") else None
    await pool.resume()
    model, end = seeing_model(folder), first + 8
    ids, spans = list(sample.tokens), [(span.start, span.end) for span in sample.image_spans]
    pixels = [vision.pixels([image]) for image in (RED, WIDE)]
    assert sample.rollout_log_probs is not None
    expected = seeing_log_probs(model, ids[:first], ids[first:end], spans, pixels)
    assert list(sample.rollout_log_probs[-8:]) == pytest.approx(expected, abs=1e-5)
    assert seeing_log_probs(model, ids[:10], ids[10:18], spans[:1], pixels[:1]) == pytest.approx(
        list(sample.rollout_log_probs[:8]), abs=1e-5
    )
    scores = await pool.log_probs(ids, 8, images=ImageInputs.of(sample.images, sample.image_spans))
    assert scores == pytest.approx(expected, abs=1e-5)
