"""Bytes of images in the codec, the trajectory store and the train batch: each image once."""

import io
import pickle
from pathlib import Path

import numpy as np
import PIL.Image
import pytest

from agentrl.buffer.codec import decode_group, encode_group
from agentrl.buffer.reader import Filter, StoreReader
from agentrl.buffer.store import TrajectoryStore
from agentrl.errors import SampleError
from agentrl.media import Image, ImageSpan
from agentrl.modelfolder import ImageTokens
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch

PAD = 99


def _image(seed: int) -> Image:
    """Return an image that does not compress."""
    stream = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (112, 112, 3), np.uint8)
    PIL.Image.fromarray(pixels).save(stream, "PNG")
    return Image.from_bytes(stream.getvalue())


def _sample(group: int, number: int) -> Sample:
    """Return a sample with three images of its group in the prompt, and its own image after the first turn."""
    *prompt, own = images = [*(_image(10 * group + at) for at in range(3)), _image(1000 + 8 * group + number)]
    sample = Sample(group_index=group, index=8 * group + number, reward=float(number % 2))
    sample.images = {image.hash: image for image in images}
    spans = [ImageSpan(image.hash, 1 + 17 * at, 17 + 17 * at) for at, image in enumerate(prompt)]
    sample.set_prompt_tokens([2, *([PAD] * 16 + [3]) * 3], spans)
    sample.append_model([5, 6, PAD], [-1.0, -1.0, -1.0], "0", turn=1)
    sample.append_observation([4, *[PAD] * 16], spans=[ImageSpan(own.hash, 1, 17)], turn=1)
    sample.append_model([5], [-1.0], "0", turn=2)
    sample.stop("done")
    return sample.validate()


@pytest.fixture(scope="module")
def groups() -> list[list[Sample]]:
    return [[_sample(group, number) for number in range(8)] for group in range(8)]


def test_64_trajectories_of_four_images_hold_each_image_once(groups: list[list[Sample]], tmp_path: Path) -> None:
    files = {name: image.data for group in groups for sample in group for name, image in sample.images.items()}
    assert len(files) == 8 * 3 + 64
    total = sum(map(len, files.values()))
    assert sum(len(encode_group(group)) for group in groups) < 1.01 * total
    with TrajectoryStore(tmp_path / "t.sqlite", keep=1000) as store:
        store.add("train", "", 0, groups)
    assert sum(file.stat().st_size for file in tmp_path.glob("t.sqlite*")) < 1.1 * total
    batch = TrainBatch.from_samples(groups, image_tokens=ImageTokens(PAD, 4))
    assert len(batch.pictures) == len(files)
    assert len(pickle.dumps(batch)) < 1.1 * total
    with StoreReader(tmp_path / "t.sqlite") as reader:
        row = reader.query(Filter(), "id")[9]
        assert reader.group(row.key) == groups[1]


def test_a_group_without_its_last_image_is_damaged(groups: list[list[Sample]]) -> None:
    data = encode_group(groups[0])
    assert decode_group(data) == groups[0]
    with pytest.raises(SampleError, match="images"):
        decode_group(data[:-1])
