"""Runs with images, killed during trajectories: no group is lost or trained twice, and ids, images and
log-probs are exact."""

import json
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import Chat
from agentrl.media import Image
from agentrl.sample import Sample, Status
from tests.support.kills import CHECKED, kill_and_resume, kill_workers
from tests.support.nightly import weekly
from tests.support.runs import ENV, RunKit
from tests.support.versions import log_prob_errors, trained_groups
from tests.support.vision import picture, tiny_vlm

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

VISION_MODEL_TYPES = f"""{ENV}
from tests.support.vision import picture


class SeeingEnv(WaitEnv):
    tools = []

    async def step(self, turn):
        step = await super().step(turn)
        shown = {{"type": "image", "image": picture(64, 64, 100 * turn.sample.index + turn.index)}}
        step.messages[0]["content"] = [{{"type": "text", "text": "And this?"}}, shown]
        return step
"""
"""Three turns, each answered with an image that depends on the trajectory and the turn."""
PROMPTS = 60
FORM: dict[str, Any] = {
    **CHECKED,
    "env": "seeing.py:SeeingEnv",
    "image_key": "images",
    "image_root": ".",
    "train_backend": "fsdp",
    "max_staleness": 2,
    "partial_rollout": True,
}


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    folder = Path(tmp_path_factory.mktemp("kit"))
    tiny_vlm(folder / "model", "qwen3_vl", tie_word_embeddings=False)
    (folder / "seeing.py").write_text(VISION_MODEL_TYPES)
    rows = [{"input": "What is <image>?", "label": str(i), "images": [f"{i}.png"]} for i in range(PROMPTS)]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for i in range(PROMPTS):
        (folder / f"{i}.png").write_bytes(first(i))
    return RunKit(folder)


def first(row: int) -> bytes:
    return picture(64 + 32 * (row % 3), 64, 10_000 + row)


def check_images(kit: RunKit, folder: Path, steps: int) -> None:
    """Check that every trained trajectory has its own images in place, and the ids that the chat makes of them. The
    log-prob of each token must be that of the weights that it names, given the images before it."""
    chat = Chat.load(str(kit.folder / "model"))
    samples = [sample for _, group in trained_groups(folder / "ledger.sqlite") for sample in group]
    assert len(samples) == 8 * steps
    for sample in samples:
        check_sample(chat, sample)
    errors = log_prob_errors(folder, kit.folder / "model")
    assert (errors.wrong, errors.versions > 1) == (0, True), errors
    assert errors.tokens > 8 * steps


def check_sample(chat: Chat, sample: Sample) -> None:
    assert chat.placeholders is not None
    assert isinstance(sample.prompt, list)
    assert list(sample.tokens[: sample.prompt_length]) == list(chat.render_ids(sample.prompt))
    later = [picture(64, 64, 100 * (sample.index or 0) + turn) for turn in (1, 2, 3)]
    images = [Image.from_bytes(file) for file in (first(int(sample.label)), *later)]
    shown = images[:-1]  # the last answer ends the trajectory
    if sample.status is Status.TRUNCATED:  # too long an answer ends it earlier
        shown = images = images[: sum(message["role"] == "assistant" for message in sample.metadata["messages"])]
    assert [span.hash for span in sample.image_spans] == [image.hash for image in shown]
    assert sample.images == {image.hash: image for image in images}
    for span, image in zip(sample.image_spans, shown, strict=True):
        ids = list(sample.tokens[span.start : span.end])
        assert ids == [chat.placeholders.token_id] * (image.width * image.height // 32**2)


@pytest.mark.parametrize("role", weekly(["trainer", "driver", "rollout_worker"], 1))
def test_a_kill_among_images_loses_no_group_and_no_image(kit: RunKit, role: str) -> None:
    outcome = kill_and_resume(kit, role, 0, steps=6, **FORM)
    assert outcome.ok, str(outcome)
    check_images(kit, kit.folder / f"{role}-0", steps=6)


def test_workers_that_die_among_images_lose_none(kit: RunKit) -> None:
    outcome = kill_workers(kit, 0, steps=24, kills=3, **FORM)
    assert "3 kills" in str(outcome)
    assert outcome.ok, str(outcome)
    check_images(kit, kit.folder / "workers-2-0", steps=24)
