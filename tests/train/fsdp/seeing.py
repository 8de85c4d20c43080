"""Batches with images, and plain transformers and torch as the reference: one sample at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForImageTextToText

from agentrl.algorithms import AlgorithmSettings
from agentrl.media import Image, ImageSpan
from agentrl.numerics.vision import Vision
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from agentrl.train.settings import TrainSettings
from tests.support.vision import IMAGE_PAD, ROWS, VISION_END, VISION_START, Kind, picture, unit
from tests.train.megatron.helpers import TEMPERATURE, Reference

DOUBLE = ROWS - 1
"""An id that no sample has. In the reference it replaces a sampled placeholder, and has the placeholder's embedding."""


def image(kind: Kind, seed: int, wide: int = 3, high: int = 2) -> Image:
    """Return an image of `wide` x `high` tokens."""
    return Image.from_bytes(picture(wide * unit(kind), high * unit(kind), seed))


def shown(kind: Kind, images: list[Image]) -> tuple[list[int], list[ImageSpan]]:
    """Return the ids of images between their marks, and their spans."""
    ids: list[int] = []
    spans = []
    for each in images:
        tokens = each.width * each.height // unit(kind) ** 2
        spans.append(ImageSpan(each.hash, len(ids) + 1, len(ids) + 1 + tokens))
        ids += [VISION_START, *[IMAGE_PAD] * tokens, VISION_END]
    return ids, spans


def make_samples(kind: Kind, seed: int = 0) -> list[list[Sample]]:
    """Make four groups. 1: an image in the prompt, in some samples another in a later turn, and a placeholder's id that
    the model sampled. 2: two images in the prompt. 3: text alone. 4: equal ids with different images."""
    rng = np.random.default_rng(seed)

    def ids(count: int) -> list[int]:
        found: list[int] = rng.integers(4, 512, count).tolist()
        return found

    out: list[list[Sample]] = []
    for group in range(4):
        out.append([])
        prompts = [[image(kind, seed + 10)], [image(kind, seed + 20, 4, 3), image(kind, seed + 21, 2, 2)], [], []]
        before, after, turn = ids(20), ids(4), ids(9)
        for i in range(3):
            images = prompts[group] if group < 3 else [image(kind, seed + 30 + i)]
            sample = Sample(group_index=group, index=3 * group + i, reward=float(rng.random()))
            middle, spans = shown(kind, images)
            sample.set_prompt_tokens([*before, *middle, *after], [span.moved(len(before)) for span in spans])
            sample.images = {each.hash: each for each in images}
            wrote = turn if group == 3 else ids(9)
            if group == 0 and i == 2:
                wrote[3] = IMAGE_PAD
            sample.append_model(wrote, (-5 * rng.random(9)).tolist(), "1", turn=1)
            later = [image(kind, seed + 40 + i, 2, 2)] if group == 0 and i else []
            middle, spans = shown(kind, later)
            sample.append_observation([*ids(3), *middle], turn=1, spans=[span.moved(3) for span in spans])
            sample.images |= {each.hash: each for each in later}
            if not (group == 0 and i == 1):  # that one ends with an image
                sample.append_model(ids(5), (-5 * rng.random(5)).tolist(), "1", turn=2)
            out[-1].append(sample)
    return out


def make_batch(kind: Kind, seed: int = 0) -> TrainBatch:
    """Return `make_samples` as a batch."""
    return TrainBatch.from_samples(make_samples(kind, seed))


class SeeingReference(Reference):
    """transformers' own forward pass of each sample, with eager attention."""

    def __init__(self, folder: Path, train: TrainSettings, dtype: torch.dtype = torch.float32) -> None:
        plain: dict[str, Any] = dict.fromkeys(("attn_implementation", "experts_implementation"), "eager")
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, **plain)
        self.vision, self.train_settings, self.algorithm = Vision.load(folder), train, AlgorithmSettings()
        with torch.no_grad():
            embedding = self.model.get_input_embeddings().weight
            embedding[DOUBLE] = embedding[IMAGE_PAD]
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(train.train_vision or ".visual." not in name)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=train.lr, eps=train.adam_eps, weight_decay=0.0)

    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        assert self.vision is not None
        parts = []
        for i in range(len(batch)):
            ids, spans = torch.from_numpy(batch.sample_tokens(i).astype(np.int64)), batch.sample_images(i).tolist()
            given, kinds = ids.clone(), torch.zeros_like(ids)
            given[ids == IMAGE_PAD] = DOUBLE
            held = []
            for number, start, end in spans:
                given[start:end], kinds[start:end] = IMAGE_PAD, 1
                held.append(batch.pictures[number].held)
            inputs: dict[str, Any] = {"mm_token_type_ids": kinds[None], **self.vision.pixels(held)} if held else {}
            logits = self.model(input_ids=given[None], **inputs).logits[0, :-1]
            log_p = (logits / TEMPERATURE).log_softmax(-1)
            parts.append(log_p.gather(-1, ids[1:, None])[-int(batch.response_lengths[i]) :, 0])
        return torch.cat(parts)
