"""Pixels of images: equal to the model's own processor, in every format, and refusals that name the file."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import cast

import PIL.Image
import pytest
import torch
from transformers import AutoImageProcessor

from agentrl.errors import CheckpointError, MediaError
from agentrl.media import Image
from agentrl.numerics.vision import Vision
from tests.support.tiny_models import make_tiny_model
from tests.support.vision import IMAGE_PAD, Kind, picture, tiny_vlm, unit


@pytest.fixture(scope="module", params=["qwen2_5_vl", "qwen3_vl"])
def kind(request: pytest.FixtureRequest) -> Kind:
    return cast(Kind, request.param)


@pytest.fixture(scope="module")
def folder(kind: Kind, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vlm(tmp_path_factory.mktemp("models") / kind, kind)


def loaded(folder: Path) -> Vision:
    vision = Vision.load(folder)
    assert vision is not None
    return vision


def test_pixels_are_the_processors(kind: Kind, folder: Path) -> None:
    """Each image's pixels do not depend on others in the batch; the size determines the number of placeholders."""
    vision, theirs = loaded(folder), AutoImageProcessor.from_pretrained(folder, backend="pil")
    images = [
        Image.from_bytes(picture(*size, seed)) for seed, size in enumerate([(64, 64), (300, 40), (64, 64), (9, 70)])
    ]
    found = vision.pixels(images)
    want = theirs(images=[PIL.Image.open(io.BytesIO(each.data)) for each in images], return_tensors="pt")
    assert found["pixel_values"].dtype == torch.float32
    for name in ("pixel_values", "image_grid_thw"):
        assert found[name].equal(want[name])
        assert found[name].equal(torch.cat([vision.pixels([each])[name] for each in images]))
    patches = [theirs.get_number_of_image_patches(each.height, each.width) for each in images]
    assert found["image_grid_thw"].prod(-1).tolist() == patches
    assert (vision.tokens.id, vision.tokens.patches) == (IMAGE_PAD, 4)


def test_settings_may_lie_in_the_file_of_the_whole_processor(kind: Kind, folder: Path, tmp_path: Path) -> None:
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    (tmp_path / "config.json").symlink_to(folder / "config.json")
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": settings}))
    image = Image.from_bytes(picture(200, 100))
    assert loaded(tmp_path).pixels([image])["pixel_values"].equal(loaded(folder).pixels([image])["pixel_values"])


def test_every_format_and_colour_is_read(kind: Kind, folder: Path) -> None:
    vision, side = loaded(folder), 2 * unit(kind)
    plain = PIL.Image.open(io.BytesIO(picture(side, side)))
    for form, mode in (("PNG", "RGBA"), ("PNG", "L"), ("PNG", "P"), ("JPEG", "RGB"), ("WEBP", "RGB"), ("GIF", "P")):
        file = io.BytesIO()
        plain.convert(mode).save(file, form)
        assert vision.pixels([Image.from_bytes(file.getvalue())])["image_grid_thw"].tolist() == [[1, 4, 4]]


def test_a_model_of_text_has_no_vision_and_damage_is_named(folder: Path, tmp_path: Path) -> None:
    assert Vision.load(make_tiny_model(tmp_path / "text")) is None
    thin = Image.from_bytes(picture(1000, 2))
    with pytest.raises(MediaError, match=r"refuses one of 1 images \(1000 x 2\)"):
        loaded(folder).pixels([thin])
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match="expected preprocessor_config.json"):
        Vision.load(tmp_path)
    (tmp_path / "preprocessor_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="preprocessor_config.json: transformers cannot read it"):
        Vision.load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_token_id": "x"}))
    with pytest.raises(CheckpointError, match="config.json: image_token_id and .* expected whole numbers, got 'x'"):
        Vision.load(tmp_path)
