"""Placeholders of images: ids equal the processor's, spans of images, and text that looks like a placeholder."""

import random
from pathlib import Path
from typing import Any

import pytest

from agentrl.chat import AppendResult, Chat, Conversation
from agentrl.chat.demonstration import to_sample
from agentrl.chat.vision import ImagePlaceholders
from agentrl.errors import MediaError, TemplateError
from agentrl.media import Image
from agentrl.sample import Sample
from tests.support.nightly import nightly
from tests.support.vision import CHAT_TEMPLATE, Kind, picture, tiny_vlm, tokenizer_with_images

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "glm4v")
"""The two Qwens from whole folders; the other processors from transformers' classes with small settings."""

MARKS = {"gemma3": "<start_of_image>", "glm4v": "<|image|>"}


def _chat(family: str, folder: Path) -> Chat:
    if family in ("qwen2_5_vl", "qwen3_vl"):
        kind: Kind = "qwen2_5_vl" if family == "qwen2_5_vl" else "qwen3_vl"
        return Chat.load(str(tiny_vlm(folder, kind)))
    import copy
    import json

    tokenizer = copy.deepcopy(tokenizer_with_images())
    settings: dict[str, Any]
    if family == "gemma3":
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil as Processor

        names = {"image_token": "<image_soft_token>", "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        settings = {"size": {"height": 56, "width": 56}}
    else:
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil as Processor

        names = {"image_token": "<|image|>", "video_token": "<|video|>"}
        settings = {"size": {"shortest_edge": 56 * 56, "longest_edge": 224 * 224}}
    tokenizer.add_special_tokens({"additional_special_tokens": list(names.values())})
    for name, word in names.items():
        setattr(tokenizer, name, word)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(word))
    folder.mkdir(exist_ok=True)
    Processor(**settings).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({"model_type": family, "vision_config": {}}))
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    template = CHAT_TEMPLATE.replace(mark, MARKS[family])
    return Chat(tokenizer, chat_template=template, placeholders=ImagePlaceholders.load(str(folder), tokenizer))


def _part(chance: random.Random) -> dict[str, Any]:
    if chance.random() < 0.5:
        words = ["What is it?", "\n\n", " <|image_pad|> <start_of_image>", "Zwölf äpfel", "<|im_end|>", "x"]
        return {"type": "text", "text": chance.choice(words)}
    return {"type": "image", "image": picture(chance.randint(20, 130), chance.randint(20, 130), chance.randint(0, 9))}


def _said(chance: random.Random, role: str) -> dict[str, Any]:
    return {"role": role, "content": [_part(chance) for _ in range(chance.randint(1, 4))]}


@pytest.mark.parametrize("count", [10, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", nightly(FAMILIES, 2))
def test_ids_equal_the_processors(family: str, count: int, tmp_path: Path) -> None:
    import io

    import PIL.Image

    chat, chance = _chat(family, tmp_path / "m"), random.Random(0)
    assert chat.placeholders is not None
    for _ in range(count):
        raw = [_said(chance, "user"), {"role": "assistant", "content": "It is red."}, _said(chance, "user")]
        messages, images = chat.take_images(raw, {})
        # The processor does not handle untrusted text, so it gets a conversation without such text.
        plain = [_without_marks(message) for message in messages]
        ids = chat.render_ids(plain)
        text = chat.template.render(_normal(plain), None)
        shown = [
            PIL.Image.open(io.BytesIO(images[part["image"].removeprefix("sha256:")].data)).convert("RGB")
            for message in plain
            for part in (message["content"] if isinstance(message["content"], list) else ())
            if part["type"] == "image"
        ]
        processor = chat.placeholders._processor
        wanted = processor(text=[text], images=shown, add_special_tokens=False) if shown else None
        assert ids == (chat.encode(text) if wanted is None else list(wanted["input_ids"][0]))
        spans = chat.image_spans(ids, plain)
        assert len(spans) == len(shown)
        for span in spans:
            assert ids[span.start] == ids[span.end - 1] == chat.placeholders.token_id
        covered = sum(ids[span.start : span.end].count(chat.placeholders.token_id) for span in spans)
        assert covered == ids.count(chat.placeholders.token_id)


def _normal(messages: Any) -> Any:
    from agentrl.chat.messages import normalise_messages

    return normalise_messages(messages)


def _without_marks(message: Any) -> dict[str, Any]:
    content = message["content"]
    if isinstance(content, list):
        content = [{**p, "text": p["text"].replace("<", "(")} if p["type"] == "text" else p for p in content]
    return {**message, "content": content}


@pytest.mark.parametrize("count", [10, pytest.param(500, marks=pytest.mark.slow)])
@pytest.mark.parametrize("family", nightly(FAMILIES, 2))
def test_a_conversation_with_faults_keeps_ids_masks_and_places(family: str, count: int, tmp_path: Path) -> None:
    """Turns may be truncated or contain placeholders that the model sampled, and tools may answer with images."""
    chat, chance = _chat(family, tmp_path / "m"), random.Random(1)
    assert chat.placeholders is not None
    pad, stop = chat.placeholders.token_id, chat.stop_token_ids[0]
    call = chat.encode('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    tools = [{"type": "function", "function": {"name": "look", "description": "d", "parameters": {}}}]
    for _ in range(count):
        talk = Conversation(chat, Sample(index=0), [_said(chance, "user")], tools)
        written: list[tuple[int, list[int]]] = []
        for _ in range(chance.randint(1, 4)):
            ids = [chance.choice([pad, *chat.encode("ab c")]) for _ in range(chance.randint(1, 5))]
            calls = chance.random() < 0.5
            ids += (call if calls else []) + ([stop] if chance.random() < 0.8 else [])
            written.append((len(talk.sample.tokens), ids))
            talk.append_model_turn(ids, [-1.0] * len(ids), "0", text=chat.decode(ids))
            assert talk.append_messages([_said(chance, "tool" if calls else "user")]) is AppendResult.FITS
        sample = talk.sample.validate()
        mask = [0] * sample.prompt_length + list(sample.loss_mask or ())
        for at, ids in written:
            assert list(sample.tokens[at : at + len(ids)]) == ids
            assert mask[at : at + len(ids)] == [1] * len(ids)
        assert sum(mask) == sum(len(ids) for _, ids in written)
        shown = [part for m in talk.messages if isinstance(m["content"], list) for part in m["content"]]
        wanted = [part["image"].removeprefix("sha256:") for part in shown if part["type"] == "image"]
        assert [span.hash for span in sample.image_spans] == wanted
        assert set(wanted) == set(sample.images)
        for span in sample.image_spans:
            own = sample.images[span.hash]
            assert not any(mask[span.start : span.end])
            count = sample.tokens[span.start : span.end].count(pad)
            assert count == chat.placeholders.expand(chat.placeholders._processor.image_token, [own.reference]).count(
                chat.placeholders._repeated
            )


def test_messages_of_the_user_cannot_write_placeholders(tmp_path: Path) -> None:
    chat = _chat("qwen2_5_vl", tmp_path / "m")
    assert chat.placeholders is not None
    messages, _ = chat.take_images(
        [
            {
                "role": "user",
                "content": [{"type": "text", "text": "<|image_pad|>"}, {"type": "image", "image": picture(56, 56)}],
            }
        ],
        {},
    )
    ids = chat.render_ids(messages)
    assert ids.count(chat.placeholders.token_id) == 4
    assert len(chat.image_spans(ids, messages)) == 1


def test_a_template_that_loses_an_image_is_named(tmp_path: Path) -> None:
    folder = tiny_vlm(tmp_path / "m")
    template = CHAT_TEMPLATE.replace("'<|vision_start|><|image_pad|><|vision_end|>'", "''")
    chat = Chat.load(str(folder), chat_template=template)
    messages, _ = chat.take_images([{"role": "user", "content": [{"type": "image", "image": picture(56, 56)}]}], {})
    with pytest.raises(TemplateError, match="shows 0 of 1 images"):
        chat.render_ids(messages)


def test_a_model_without_eyes_refuses_images() -> None:
    chat = Chat(tokenizer_with_images())
    part = {"type": "image", "image": Image.from_bytes(picture(8, 8))}
    with pytest.raises(MediaError, match="sees text only"):
        Conversation(chat, Sample(), [{"role": "user", "content": [part]}])


def test_a_demonstration_with_images_has_their_places(tmp_path: Path) -> None:
    chat = _chat("qwen3_vl", tmp_path / "m")
    image = {"type": "image", "image": picture(64, 64)}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": [image, {"type": "text", "text": "What is it?"}]},
        {"role": "assistant", "content": "Red."},
        {"role": "user", "content": [{"type": "text", "text": "And this?"}, image]},
        {"role": "assistant", "content": "Red too."},
    ]
    sample = to_sample(chat, messages).validate()
    assert [span.end - span.start for span in sample.image_spans] == [4, 4]
    assert len(sample.images) == 1
    assert sample.image_spans[1].start > sample.prompt_length
