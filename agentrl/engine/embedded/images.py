"""Images of prompts: a request's thread reads and checks them, the engine's thread computes their embedding rows.

1. `ImageReader.read` returns the images of one prompt. A single placeholder is repeated as often as its image needs.
2. `PromptImages` has the tokens' positions (M-RoPE). `mark` puts image hashes in placeholders for the prefix cache.
3. `ImageEncoder` runs the vision tower, one image at a time, and caches the features until the weights change."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import MediaError, raised_as
from agentrl.media import ImageLimits, image_from_url
from agentrl.numerics.vision import Vision
from agentrl.serving.http import refused

Ids = NDArray[np.int64]
Pixels = dict[str, Tensor]

PIXEL_BYTES, FEATURE_ROWS = 256 << 20, 1 << 15  # cache sizes: bytes of images' pixels, and rows of features


@dataclass(frozen=True)
class PlacedImage:
    """An image at `start` to `end` of a prompt."""

    hash: str
    key: int  # the hash as a negative id, for the prefix cache
    start: int
    end: int
    pixels: Pixels


@dataclass(frozen=True)
class PromptImages:
    """The images of one prompt in order, and the positions of its tokens."""

    images: Sequence[PlacedImage]
    positions: Ids  # [3, tokens]
    shift: int  # position minus index, for tokens after these positions

    def mark(self, ids: Ids, start: int) -> None:
        """Replace placeholders in `ids`, which begin at token `start`, by the keys of their images."""
        for image in self.images:
            ids[max(image.start - start, 0) : max(image.end - start, 0)] = image.key

    def rope(self, start: int, end: int) -> Ids:
        """Return the positions [3, end - start] of tokens."""
        known = self.positions[:, start:end]
        later = np.arange(max(start, self.positions.shape[1]), end) + self.shift
        return np.concatenate([known, np.broadcast_to(later, (3, len(later)))], 1)


Piece = tuple[PromptImages | None, int, int, int]
"""A sequence's part of a packed batch: its images, start and end of its tokens, and the first token's batch index."""


@dataclass(frozen=True)
class ImageRows:
    """Image features, with their indices in a packed batch."""

    places: Tensor
    features: Tensor  # [places, width]
    deepstack: list[Tensor]  # for each of the first layers, features to add after the layer


class ImageReader:
    """Reader of the images of requests for one model; several threads may use it."""

    def __init__(self, model: Any, vision: Vision) -> None:
        self._rope_index, self._vision = model.model.get_rope_index, vision
        self._pixels: OrderedDict[str, Pixels] = OrderedDict()
        self._lock = threading.Lock()

    def read(self, ids: list[int], urls: Sequence[str], spans: Any) -> tuple[list[int], PromptImages]:
        """Return a prompt with all its placeholders, and its images. `urls`: data URLs, in the order of the images.
        `spans`: start and end of each image in `ids`; None if all placeholders in `ids` are images. Raises
        RequestError: an image is refused, or the placeholders do not match the images."""
        if len(urls) > (most := ImageLimits().count):
            raise refused(f"image_data: a prompt may have {most} images, this one has {len(urls)}")
        places = self._vision.tokens.runs(ids) if spans is None else _checked(spans, len(ids))
        if len(places) != len(urls):
            raise refused(f"image_data has {len(urls)} images, and input_ids have places for {len(places)}")
        whole, images, read = list[int](), list[PlacedImage](), 0
        for number, (url, (start, end)) in enumerate(zip(urls, places, strict=True)):
            with raised_as(refused, f"image_data[{number}]", MediaError):
                pixels = self._pixels_of(image := image_from_url(url))
            needs = int(pixels["image_grid_thw"].prod()) // self._vision.tokens.patches
            placeholder, place = self._vision.tokens.id, ids[start:end]
            if set(place) != {placeholder} or len(place) not in (1, needs):
                said = f"needs {needs} placeholders (id {placeholder}), or one that stands for them"
                has = f"its place in input_ids has {len(place)} ids, {place.count(placeholder)} of them placeholders"
                raise refused(f"image_data[{number}] {said}; {has}")
            whole += ids[read:start]
            key = -1 - int(image.hash[:15], 16)
            images.append(PlacedImage(image.hash, key, len(whole), len(whole) + needs, pixels))
            whole += [ids[start]] * needs
            read = end
        whole += ids[read:]
        return whole, self._placed(whole, images)

    def _pixels_of(self, image: Any) -> Pixels:
        with self._lock:
            if (known := self._pixels.get(image.hash)) is not None:
                self._pixels.move_to_end(image.hash)
                return known
        pixels = self._vision.pixels([image])
        with self._lock:
            self._pixels[image.hash] = pixels
            while sum(each["pixel_values"].nbytes for each in self._pixels.values()) > PIXEL_BYTES:
                self._pixels.popitem(last=False)
        return pixels

    def _placed(self, ids: list[int], images: list[PlacedImage]) -> PromptImages:
        """Return the images with the tokens' positions, computed by the model's own rule."""
        kinds = torch.zeros(1, len(ids), dtype=torch.int)
        for image in images:
            kinds[0, image.start : image.end] = 1
        grids = torch.cat([image.pixels["image_grid_thw"] for image in images])
        positions, shift = self._rope_index(torch.tensor([ids]), kinds, image_grid_thw=grids)
        return PromptImages(images, positions[:, 0].numpy(), int(shift))


def _checked(spans: Any, length: int) -> list[tuple[int, int]]:
    """Return `image_spans` as tuples. Raises RequestError: they are no spans, are not in order, or touch each other."""
    before = -1
    for span in spans if isinstance(spans, list) else [spans]:
        fits = isinstance(span, list) and len(span) == 2 and all(type(edge) is int for edge in span)
        if not fits or not before < span[0] < span[1] <= length:
            expected = f"expected [start, end] of each image in {length} ids, in order and apart"
            raise refused(f"image_spans: {expected}, got {span!r:.80}")
        before = span[1]
    return [(start, end) for start, end in spans]


class ImageEncoder:
    """The vision tower of a model; used by the engine's thread."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._known: OrderedDict[str, list[Tensor]] = OrderedDict()

    def clear(self) -> None:
        """Forget all features: the weights have changed."""
        self._known.clear()

    def rows(self, pieces: Sequence[Piece]) -> ImageRows | None:
        """Return the features in a packed batch; None if the batch has no placeholder."""
        places, found = list[int](), list[list[Tensor]]()
        for prompt, start, end, offset in pieces:
            for image in prompt.images if prompt is not None else ():
                first, last = max(start, image.start), min(end, image.end)
                if first < last:
                    places += range(offset + first - start, offset + last - start)
                    wanted = slice(first - image.start, last - image.start)
                    found.append([each[wanted] for each in self._features(image)])
        if not places:
            return None
        features, *deepstack = (torch.cat(parts) for parts in zip(*found, strict=True))
        return ImageRows(torch.tensor(places, device=features.device), features, deepstack)

    def _features(self, image: PlacedImage) -> list[Tensor]:
        """Return an image's features, followed by its deepstack features."""
        if (known := self._known.get(image.hash)) is not None:
            self._known.move_to_end(image.hash)
            return known
        pixels = {name: each.to(self._model.device) for name, each in image.pixels.items()}
        out = self._model.model.get_image_features(**pixels, return_dict=True)
        deepstack = getattr(out, "deepstack_features", None) or ()
        found = [each.to(self._model.dtype) for each in (out.pooler_output[0], *(layer[0] for layer in deepstack))]
        self._known[image.hash] = found
        while len(self._known) > 1 and sum(len(each[0]) for each in self._known.values()) > FEATURE_ROWS:
            self._known.popitem(last=False)
        return found
