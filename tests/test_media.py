"""Images of messages: forms, limits and damage."""

import base64
import io
from pathlib import Path
from typing import Any

import PIL.Image
import pytest

from agentrl.errors import MediaError
from agentrl.media import Image, ImageLimits, reference_hash, references, take_images
from tests.support.vision import picture

FILE = picture(30, 20)
URL = f"data:image/png;base64,{base64.b64encode(FILE).decode()}"


def _user(*parts: Any) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": URL, "detail": "low"}},
        {"type": "image_url", "image_url": URL},
        {"type": "input_image", "image_url": URL},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": URL.partition(",")[2]}},
        {"type": "image", "image": URL},
        {"type": "image", "image": FILE},
        {"type": "image", "image": {"bytes": FILE, "path": None}},
        {"type": "image", "image": PIL.Image.open(io.BytesIO(FILE))},
        {"type": "image", "image": Image.from_bytes(FILE)},
    ],
)
def test_every_form_becomes_the_same_reference(part: dict[str, Any]) -> None:
    messages, images = take_images([_user(part, {"type": "text", "text": "What is it?"})], {})
    [image] = images.values()
    assert messages[0]["content"][0] == image.reference
    assert messages[0]["content"][1] == {"type": "text", "text": "What is it?"}
    assert (image.width, image.height, image.form) == (30, 20, "PNG")
    with PIL.Image.open(io.BytesIO(image.data)) as kept, PIL.Image.open(io.BytesIO(FILE)) as given:
        assert kept.tobytes() == given.tobytes()
    assert [reference_hash(found) for found in references(messages)] == [image.hash]


def test_a_picture_in_a_mode_that_png_lacks_is_converted() -> None:
    for mode in ("CMYK", "I", "F", "I;16"):
        _, images = take_images([_user({"type": "image", "image": PIL.Image.new(mode, (3, 2))})], {})
        [image] = images.values()
        assert (image.width, image.height, image.form) == (3, 2, "PNG")


def test_paths_lie_below_the_root(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a.png").write_bytes(FILE)
    (tmp_path / "secret.png").write_bytes(FILE)
    (tmp_path / "images" / "link.png").symlink_to(tmp_path / "secret.png")
    limits = ImageLimits(root=str(tmp_path / "images"))
    _, images = take_images([_user({"type": "image", "image": "a.png"})], {}, limits)
    assert [image.data for image in images.values()] == [FILE]
    for path, says in (("../secret.png", "leads out"), ("link.png", "leads out"), ("b.png", "No such file")):
        with pytest.raises(MediaError, match=says):
            take_images([_user({"type": "image", "image": path})], {}, limits)
    with pytest.raises(MediaError, match="--image-root"):
        take_images([_user({"type": "image", "image": "a.png"})], {})


def test_equal_images_are_one(tmp_path: Path) -> None:
    part = {"type": "image", "image": FILE}
    messages, images = take_images([_user(part, part), _user(part)], {})
    assert len(images) == 1
    again, new = take_images([*messages, _user(part)], images)
    assert not new
    assert again[:2] == messages


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"type": "image", "image": FILE[:90]}, "damaged"),
        ({"type": "image", "image": b"not an image"}, "none of PNG"),
        ({"type": "image", "image": FILE + b"\0" * 3000}, "at most 2,000 are allowed"),
        ({"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}, "not fetched"),
        ({"type": "image_url", "image_url": {"url": "data:image/png,abc"}}, "must have the form"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,###"}}, "base64 text is damaged"),
        ({"type": "image", "image": "sha256:" + "0" * 64}, "no image of the trajectory"),
        ({"type": "image", "image": 3}, "holds int"),
        ({"type": "image", "source": {"type": "url", "url": "https://example.org"}}, "only base64"),
    ],
)
def test_a_refused_image_names_its_place(part: dict[str, Any], says: str) -> None:
    _refused(part, says, 2000)


def test_a_small_file_of_very_many_pixels_is_refused() -> None:
    stream = io.BytesIO()
    PIL.Image.new("1", (20_000, 20_000)).save(stream, "PNG")
    part = {"type": "image", "image": stream.getvalue()}
    _refused(part, "too many pixels, at most 16,777,216", len(stream.getvalue()))


def _refused(part: dict[str, Any], says: str, file_bytes: int) -> None:
    limits = ImageLimits(file_bytes=file_bytes)
    with pytest.raises(MediaError, match=says) as caught:
        take_images([_user({"type": "text", "text": "a"}), _user({"type": "text", "text": "b"}, part)], {}, limits)
    assert "message 1, part 1" in str(caught.value)


def test_the_number_of_images_has_a_limit() -> None:
    parts = [{"type": "image", "image": picture(8, 8, seed)} for seed in range(3)]
    with pytest.raises(MediaError, match="has 3 images, at most 2"):
        take_images([_user(*parts)], {}, ImageLimits(count=2))
