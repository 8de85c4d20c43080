"""slime's example geo3k_vlm_multi_turn, with unchanged files: a run plays, grades and trains with them.

The files are not in this repository. `scripts/test_slime.sh` fetches them, and puts their folder in AGENTRL_SLIME.
"""

import os
from pathlib import Path
from typing import Any

import pytest

from agentrl.buffer.reader import Filter, StoreReader
from agentrl.media import Image
from tests.compat.test_images import write_rows
from tests.support.audit import audit_ledger
from tests.support.checkout import import_path
from tests.support.runs import RunKit
from tests.support.vision import Kind, picture, tiny_vlm

SLIME = Path(os.environ.get("AGENTRL_SLIME", "nowhere"))
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not SLIME.is_dir(), reason="needs slime's files: scripts/test_slime.sh"),
]
CALL = '<tool_call>\n{"name": "calc_score", "arguments": {"answer": "3"}}\n</tool_call><|im_end|>'
ANSWER = "\\boxed{3}<|im_end|>"
SHOWING = """
from examples.geo3k_vlm_multi_turn.base_env import BaseInteractionEnv
from PIL import Image


class Showing(BaseInteractionEnv):
    def reset(self):
        self.turns = 0

    def step(self, response_text):
        self.turns += 1
        shown = Image.new("RGB", (84 + 28 * self.turns, 112), (40 * self.turns, 9, 99))
        return {"obs_str": "And this?", "multi_modal_data": {"images": [shown]}}, self.turns == 3, {}


def build_env(sample=None, args=None, **_):
    return Showing()
"""
UTILS = """
def process_vision_info(messages):
    parts = [part for message in messages for part in message["content"] if part["type"] == "image"]
    return [part["image"] for part in parts] or None, None
"""
"""The part of qwen_vl_utils that the example needs, for machines without a working torchvision: images of this size are
resized there."""


def teach(folder: Path, file: bytes, feedback: str) -> None:
    """Train the model until it calls the tool and then answers."""
    import torch
    from transformers import AutoModelForImageTextToText

    from agentrl.chat import Chat
    from agentrl.numerics.vision import Vision

    chat, vision = Chat.load(str(folder)), Vision.load(folder)
    assert chat.placeholders is not None
    assert vision is not None
    image = Image.from_bytes(file)
    user = [{"type": "text", "text": "What is "}, {"type": "image", "image": image}, {"type": "text", "text": "?"}]
    messages, _ = chat.take_images([{"role": "user", "content": user}], {})
    head = list(chat.render_ids(messages))
    call, answer = chat.encode(CALL), chat.encode(ANSWER)
    shown = chat.encode(f"<|im_start|>user\n{feedback}<|im_end|>\n<|im_start|>assistant\n")
    ids = torch.tensor([[*head, *call, *shown, *answer]])
    labels = torch.tensor([[*[-100] * len(head), *call, *[-100] * len(shown), *answer]])
    kinds = (ids == vision.tokens.id).int()
    pixels = vision.pixels([image])
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_pretrained(folder)
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(120):
        loss = model(input_ids=ids, mm_token_type_ids=kinds, labels=labels, **pixels).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss < 0.02
    model.save_pretrained(folder)


@pytest.mark.parametrize(("env", "kind"), [("geo3k", "qwen3_vl"), ("showing", "qwen3_5")])
def test_the_example_runs_as_it_is(env: str, kind: Kind, tmp_path: Path) -> None:
    folder = tiny_vlm(tmp_path / "model", kind)
    write_rows(tmp_path, 4, label="3")
    right = "calc_score result: 1.0. Parsed answer '3' matches the reference. "
    right += "You can now stop reasoning and provide the final solution in \\boxed{}."
    teach(folder, picture(90, 70, 0), right)
    own = "examples.geo3k_vlm_multi_turn.env_geo3k" if env == "geo3k" else str(tmp_path / "showing.py")
    (tmp_path / "showing.py").write_text(SHOWING)
    (tmp_path / "config.yaml").write_text(f"max_turns: 3\nrollout_interaction_env_path: {own}\n")
    changes: dict[str, Any] = {
        "env": None,
        "prompt_data": "rows.jsonl",
        "input_key": "problem",
        "label_key": "answer",
        "multimodal_keys": '{"image": "images"}',
        "rm_type": "math",
        "apply_chat_template": True,
        "custom_generate_function_path": "examples.geo3k_vlm_multi_turn.rollout.generate",
        "custom_config_path": "config.yaml",
        "rollout_max_response_len": 600,
        "train_backend": "fsdp",
        "num_rollout": 2,
        "rollout_batch_size": 2,
        "backend": "local",
    }
    path = [import_path(), str(SLIME)]
    try:
        import qwen_vl_utils  # type: ignore[import-not-found] # noqa: F401
    except (ImportError, RuntimeError):
        (tmp_path / "utils").mkdir()
        (tmp_path / "utils" / "qwen_vl_utils.py").write_text(UTILS)
        path.append(str(tmp_path / "utils"))
    run = RunKit(tmp_path).start(RunKit(tmp_path).arguments(**changes), PYTHONPATH=os.pathsep.join(path))
    assert run.wait() == 0, run.output
    rows = run.metrics()
    assert [row["step"] for row in rows] == [0, 1]
    assert [row["train/train_rollout_logprob_abs_diff"] for row in rows] == pytest.approx([0, 0], abs=1e-4)
    assert audit_ledger(run.folder / "ledger.sqlite", through_step=1, groups_per_step=2).ok
    with StoreReader(run.folder / "trajectories.sqlite") as reader:
        found = [reader.group(row.key) for row in reader.query(Filter(equal={"kind": "train"}))]
    samples = [sample for group in found for sample in group]
    if env == "geo3k":
        played = [sample for sample in samples if right in sample.response]
        assert len(played) >= 6
        assert all(sample.reward == sample.response.endswith(ANSWER) for sample in samples)
    else:
        assert {len(sample.multimodal_inputs["images"]) for sample in samples} >= {3}
        for sample in samples:
            shown = sample.multimodal_inputs["images"]
            assert len(sample.multimodal_train_inputs["image_grid_thw"]) == len(shown)
            assert set(shown) == set(sample.images)
