"""slime's functions with images, in real rollouts: `multimodal_inputs`, `multimodal_train_inputs`, the processor."""

import base64
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from agentrl.config import RunSettings
from agentrl.media import ImageSpan
from agentrl.numerics.vision import Vision
from agentrl.run.driver import open_folder
from agentrl.train.batch import TrainBatch
from tests.compat.test_rollout_hooks import opened
from tests.engine.embedded.driver import check_seen
from tests.support.vision import Kind, picture, tiny_vlm

VISION_MODEL_TYPES = Path(__file__).with_name("seeing.py")


def write_rows(folder: Path, count: int, label: str = "1") -> None:
    """Write prompts with an image each."""
    urls = [f"data:image/png;base64,{base64.b64encode(picture(90 + at, 70, at)).decode()}" for at in range(count)]
    rows = [{"problem": "What is <image>?", "answer": label, "images": [url]} for url in urls]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("kind", ["qwen3_vl"])
async def test_a_function_shows_images_and_brings_their_pixels(kind: Kind, tmp_path: Path) -> None:
    folder = tiny_vlm(tmp_path / "model", kind, tie_word_embeddings=False)
    write_rows(tmp_path, 2)
    line = f"--hf-checkpoint {folder} --prompt-data {tmp_path}/rows.jsonl --input-key problem --label-key answer"
    line += f" --apply-chat-template --custom-generate-function-path {VISION_MODEL_TYPES}:generate --custom-rm-path {VISION_MODEL_TYPES}:reward"
    line += " --rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 6 --train-backend fsdp"
    keys = ["--multimodal-keys", '{"image": "images"}', "--output-dir", str(tmp_path / "run")]
    settings = RunSettings.from_cli([*line.split(), *keys])
    with open_folder(settings) as run:
        async with opened(settings, run) as rollouts:
            groups, *_ = await rollouts.play(0)
        async with opened(settings, run) as rollouts:
            again, *_ = await rollouts.play(0)
    assert [[s.to_dict() for s in group] for group in again] == [[s.to_dict() for s in group] for group in groups]
    vision = Vision.load(folder)
    assert vision is not None
    batch = TrainBatch.from_samples(again, image_tokens=vision.tokens)
    assert batch.image_offsets is not None
    for number, sample in enumerate(sample for group in again for sample in group):
        assert sample.reward == 90 + (sample.group_index or 0)
        first, second = (sample.images[name] for name in sample.multimodal_inputs["images"])
        assert first.data == picture(90 + (sample.group_index or 0), 70, sample.group_index or 0)
        assert (second.width, second.height) == (64, 128)
        for name, value in vision.pixels([first, second]).items():
            np.testing.assert_array_equal(sample.multimodal_train_inputs[name], value)
        own = slice(batch.image_offsets[number], batch.image_offsets[number + 1])
        spans = [
            ImageSpan(image.hash, *map(int, row[1:]))
            for image, row in zip((first, second), batch.image_spans[own], strict=True)
        ]
        check_seen(replace(sample, image_spans=spans), folder)
