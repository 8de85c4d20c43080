"""Builders that the buffer's tests share."""

import io
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import orjson
import PIL.Image

from agentrl.buffer.ledger import Ledger
from agentrl.data.order import DataPosition
from agentrl.data.settings import DataSettings
from agentrl.data.source import DataSource
from agentrl.data.user_source import load_source
from agentrl.media import Image, ImageSpan
from agentrl.sample import Sample, Status


def make_args(prompt_data: Path | str | None = None, **changes: Any) -> SimpleNamespace:
    """Make the flat settings that user code and sources get."""
    flat = DataSettings(prompt_data=None if prompt_data is None else str(prompt_data)).model_dump()
    return SimpleNamespace(
        **{**flat, "n_samples_per_prompt": 2, "rollout_seed": 7, "env_timeout": 60.0, "start_timeout": 60.0, **changes}
    )


def source_of(args: SimpleNamespace) -> DataSource:
    return load_source(DataSettings.of_args(args), args)


def lease(ledger: Ledger, n: int, step: int) -> list[int]:
    """Lease groups: released ones, then new ones of an endless file in its order. Returns their ids."""
    waiting = ledger.lease_waiting(n, step)
    new = ledger.lease_new(n - len(waiting), step, lambda position: DataPosition(0, position))
    return [leased.group_id for leased in waiting + new]


def complete(ledger: Ledger, n: int, step: int) -> list[int]:
    """Lease and finish groups. Returns their ids."""
    ids = lease(ledger, n, step)
    for group_id in ids:
        ledger.complete(group_id, finished(group_id))
    return ids


def recovered(ledger: Ledger, checkpoint_step: int | None) -> dict[str, list[int]]:
    """Recover. Returns the groups whose state changed, by the reason of their events."""
    ledger.recover(checkpoint_step)
    moved: dict[str, list[int]] = {}
    with ledger.transaction() as db:
        its = "seq > (SELECT max(seq) FROM events WHERE to_state='recover')"
        for group_id, reason in db.execute(f"SELECT group_id, reason FROM events WHERE {its} ORDER BY seq"):
            moved.setdefault(reason, []).append(group_id)
    return moved


def write_jsonl(path: Path, rows: list[Any]) -> Path:
    path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
    return path


def prompts(path: Path, n: int) -> Path:
    return write_jsonl(path, [{"input": f"question {i}", "metadata": {"number": i}} for i in range(n)])


def with_images(group: list[Sample]) -> list[Sample]:
    """Give samples of `finished` a shared image of the group in the prompt, and a separate one in the observation."""
    for sample in group:
        images = [_image(sample.group_index or 0, 0), _image(sample.group_index or 0, 1 + (sample.index or 0))]
        sample.images = {image.hash: image for image in images}
        places = (1, len(sample.tokens) - 1)
        sample.image_spans = [ImageSpan(image.hash, at, at + 1) for image, at in zip(images, places, strict=True)]
        sample.validate()
    return group


def _image(red: int, green: int) -> Image:
    stream = io.BytesIO()
    PIL.Image.new("RGB", (8, 8), (red % 256, green % 256, 0)).save(stream, "PNG")
    return Image.from_bytes(stream.getvalue())


def finished(group_id: int, n: int = 2, tag: str = "answer") -> list[Sample]:
    """Make a finished group as the rollout loop does."""
    group = []
    for j in range(n):
        sample = Sample(
            group_index=group_id, index=group_id * n + j, prompt=f"question {group_id}", label=str(group_id)
        )
        sample.set_prompt_tokens([1, 2, 3])
        sample.append_model([4 + group_id, 5, 6 + j], [-0.125, -0.5, -2.0], "3", text=f"{tag} {group_id}.{j}", turn=1)
        sample.append_observation([7], text="seen", turn=1)
        sample.reward, sample.status = float(j), Status.COMPLETED
        group.append(sample)
    return group


def until(condition: Callable[[], bool]) -> None:
    """Wait until another thread has made the condition true."""
    deadline = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
