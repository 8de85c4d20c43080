"""Trajectories with images through the built-in engine: in the prompt, from a tool, and in environment messages."""

import io
from pathlib import Path
from typing import Any, cast

import PIL.Image
import pytest

from agentrl import Environment, Step
from agentrl.chat import Chat
from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.media import Image
from agentrl.rollout.agent_loop import run_environment
from agentrl.sample import Sample
from tests.engine.embedded.driver import check_seen
from tests.rollout.scripted import make_context
from tests.support.nightly import nightly
from tests.support.vision import ROWS, picture, tiny_vlm

SETTINGS = EngineSettings(embedded_slots=4, engine_max_retries=0)
FIRST, SECOND = picture(90, 70, 1), picture(200, 60, 2)


class Gallery(Environment):
    """Shows another image after the first turn."""

    max_turns = 3

    async def step(self, turn: Any) -> Step:
        seen = {"type": "image", "image": PIL.Image.open(io.BytesIO(SECOND)) if turn.index == 1 else FIRST}
        return Step([{"role": "user", "content": [{"type": "text", "text": "And this?"}, seen]}], done=turn.index == 3)

    async def reward(self, sample: Sample) -> float:
        return 1.0


@pytest.mark.parametrize("kind", nightly(["qwen2_5_vl", "qwen3_vl", "qwen3_5"], 1))
async def test_a_trajectory_with_images(kind: Any, tmp_path: Path) -> None:
    folder = tiny_vlm(tmp_path, kind, tie_word_embeddings=False)
    image = Image.from_bytes(FIRST)
    prompt = [{"role": "user", "content": [image.reference, {"type": "text", "text": "What is it?"}]}]
    ends = tuple(range(300, 512))  # a random model soon samples such a token, and its turn ends
    async with in_process(SETTINGS, folder) as url, EnginePool([url], SETTINGS, vocab_size=ROWS) as pool:
        context = make_context(Chat.load(str(folder)), cast(Any, pool), Gallery, rollout_stop_token_ids=ends)
        sample = Sample(index=0, group_index=0, prompt=prompt, images={image.hash: image})
        (played,) = await run_environment(context, sample, context.params())
    played.validate()
    shown = [image.hash, Image.from_bytes(tool_file(played)).hash, image.hash]
    assert [span.hash for span in played.image_spans] == shown
    assert (played.stop_reason, played.reward) == ("done", 1.0)
    check_seen(played, folder)


def tool_file(sample: Sample) -> bytes:
    """Return the file of the one image that was a Pillow image."""
    (file,) = (each.data for each in sample.images.values() if each.data != FIRST)
    with PIL.Image.open(io.BytesIO(file)) as one, PIL.Image.open(io.BytesIO(SECOND)) as other:
        assert one.tobytes() == other.tobytes()
    return file
