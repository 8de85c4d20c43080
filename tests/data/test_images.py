"""Images of prompt rows: columns, marks, paths and refusals."""

import base64
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from agentrl.data.prompts import PromptData
from agentrl.data.settings import DataSettings
from agentrl.data.source import pending_group
from agentrl.errors import DataError
from agentrl.media import references
from tests.support.vision import picture

FILES = [picture(30, 20, seed) for seed in range(3)]


def _data(tmp_path: Path, row: dict[str, Any], **settings: Any) -> PromptData:
    for at, file in enumerate(FILES):
        (tmp_path / f"{at}.png").write_bytes(file)
    (tmp_path / "rows.jsonl").write_bytes(orjson.dumps(row) + b"\n")
    given = {"image_key": "images", "image_root": str(tmp_path), **settings}
    return PromptData(str(tmp_path / "rows.jsonl"), DataSettings(**given))


def _shape(prompt: Any) -> list[list[str]]:
    return [
        [part.get("text", "image") for part in message["content"]]
        if isinstance(message["content"], list)
        else [message["content"]]
        for message in prompt
    ]


@pytest.mark.parametrize(
    ("prompt", "shape"),
    [
        ("What are they?", [["image", "image", "What are they?"]]),
        ("Is <image> like <image>?", [["Is ", "image", " like ", "image", "?"]]),
        ("<image><image>", [["image", "image"]]),
        (
            [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What are they?"}],
            [["Be brief."], ["image", "image", "What are they?"]],
        ),
        (
            [{"role": "user", "content": "First <image>"}, {"role": "assistant", "content": "Yes?"},
             {"role": "user", "content": "then <image>."}],
            [["First ", "image"], ["Yes?"], ["then ", "image", "."]],
        ),
    ],
)  # fmt: skip
def test_images_stand_at_their_marks(prompt: Any, shape: list[list[str]], tmp_path: Path) -> None:
    url = f"data:image/png;base64,{base64.b64encode(FILES[1]).decode()}"
    row = _data(tmp_path, {"input": prompt, "images": ["0.png", url]})[0]
    assert _shape(row.prompt) == shape
    assert not isinstance(row.prompt, str)
    shown = [row.images[part["image"].removeprefix("sha256:")].data for part in references(row.prompt)]
    assert shown == FILES[:2]


def test_a_group_shares_its_images(tmp_path: Path) -> None:
    row = _data(tmp_path, {"input": "What?", "images": "0.png"})[0]
    group = pending_group(row, 3, 4)
    assert len({id(image) for sample in group for image in sample.images.values()}) == 1


def test_images_of_parquet_are_bytes(tmp_path: Path) -> None:
    table = pa.table({"input": ["What?"], "images": [[{"bytes": FILES[0], "path": None}]]})
    pq.write_table(table, tmp_path / "rows.parquet")
    row = PromptData(str(tmp_path / "rows.parquet"), DataSettings(image_key="images"))[0]
    assert [image.data for image in row.images.values()] == [FILES[0]]


def test_images_in_messages_of_parquet_are_bytes_too(tmp_path: Path) -> None:
    part = {"type": "image", "image": {"bytes": FILES[0], "path": None}, "text": None}
    message = {"role": "user", "content": [part, {"type": "text", "text": "What?", "image": None}]}
    pq.write_table(pa.table({"input": [[message]]}), tmp_path / "rows.parquet")
    row = PromptData(str(tmp_path / "rows.parquet"))[0]
    assert [image.data for image in row.images.values()] == [FILES[0]]
    assert _shape(row.prompt) == [["image", "What?"]]


@pytest.mark.parametrize(
    ("row", "settings", "says"),
    [
        ({"images": ["0.png"]}, {"image_key": None}, "set --image-key images"),
        ({"videos": ["a.mp4"]}, {}, "videos and sound are not read"),
        ({"images": ["0.png"]}, {"image_root": None}, "--image-root"),
        ({"images": ["../0.png"]}, {}, "leads out of --image-root"),
        ({"images": ["missing.png"]}, {}, "missing.png"),
        ({"images": ["0.png"]}, {"image_max_pixels": 100}, "30 x 20 pixels, at most 100"),
        ({"images": ["0.png"]}, {"image_max_bytes": 10}, "at most 10 are allowed"),
        ({"images": ["0.png", "1.png"]}, {"image_max_count": 1}, "has 2 images, at most 1"),
        ({"input": "<image> and <image>", "images": ["0.png"]}, {}, "2 marks <image> for 1 images"),
        ({"input": [{"role": "user", "content": [{"type": "video", "video": "a"}]}]}, {}, "parts of text and images"),
    ],
)
def test_a_refused_image_names_file_and_line(
    row: dict[str, Any], settings: dict[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError, match=says) as caught:
        _data(tmp_path, {"input": "What?", **row}, **settings).check()
    assert "rows.jsonl" in str(caught.value)
    assert "line 1" in str(caught.value)
