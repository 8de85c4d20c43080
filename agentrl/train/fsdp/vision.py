"""Models that see images: their forward pass over a microbatch, and the pixels and positions for it.

1. The samples' spans say which tokens are an image's. Ids do not: the model may have sampled the placeholder's id.
2. Each image goes through the vision tower once per microbatch. Several samples may use its features.
3. Positions are from the model's `get_rope_index`, for each sample separately."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.errors import TrainError
from agentrl.media import Image
from agentrl.numerics.vision import Vision
from agentrl.train.batch import TrainBatch
from agentrl.train.hf import HFFolder
from agentrl.train.microbatches import PackedLayout, SeenImages


@dataclass(slots=True)
class ImagePreprocessor:
    """Preprocessor of a rank's images. It caches an image's pixels as long as batches contain the image."""

    vision: Vision  # the model's image processor
    body: Any  # transformers' model without its LM head
    made: dict[str, Mapping[str, Tensor]] = field(default_factory=dict)  # pixels by the hash of their image

    @classmethod
    def of(cls, folder: HFFolder, model: Any) -> "ImagePreprocessor | None":
        """Make a model read `MicrobatchTensors.seen`, and return its preprocessor; None if the model sees no images."""
        if (vision := Vision.load(folder.path)) is None:
            return None
        body = model.model
        body.forward = partial(_forward, body)
        return cls(vision, body)

    def see(self, batch: TrainBatch, samples: Sequence[int], laid: PackedLayout, device: torch.device) -> SeenImages:
        """Return the images of a microbatch of these samples, or a dummy image if they have none. Raises TrainError: an
        image has more or fewer placeholders than features."""
        present = {picture.hash for picture in batch.pictures}
        self.made = {name: pixels for name, pixels in self.made.items() if name in present}
        own = dict.fromkeys(int(number) for i in samples for number in batch.sample_images(i)[:, 0])
        pixels = [self._pixels(batch, number) for number in own] or [self._dummy()]
        sizes = [self._tokens(each["image_grid_thw"]) for each in pixels]
        first = dict(zip(own, np.cumsum([0, *sizes]), strict=False))
        grids = dict(zip(own, (each["image_grid_thw"] for each in pixels), strict=False))
        rows, positions = [], []
        for i in samples:
            spans, row = batch.sample_images(i).tolist(), np.full(int(batch.lengths[i]), -1, np.int64)
            for number, start, end in spans:
                if (made := self._tokens(grids[number])) != end - start:
                    raise TrainError(
                        f"sample index={batch.sample_indices[i]}: an image has {end - start} placeholder ids, and its pixels make "
                        f"{made}; prompts and trainer need the same preprocessor_config.json"
                    )
                row[start:end] = first[number] + np.arange(end - start)
            rows.append(row)
            positions.append(self._positions(batch.sample_tokens(i), row >= 0, [grids[n] for n, *_ in spans]))
        places = torch.from_numpy(laid.laid_out(positions, 0)).view(-1, 1, laid.total).expand(3, -1, -1)
        return SeenImages(
            pixels={name: torch.cat([each[name] for each in pixels]).to(device) for name in pixels[0]},
            rows=torch.from_numpy(laid.laid_out(rows, -1)).to(device),
            positions=places.to(device),
        )

    def _pixels(self, batch: TrainBatch, number: int) -> Mapping[str, Tensor]:
        name, held = batch.pictures[number]
        if name not in self.made:
            found = held() if callable(held) else held
            if isinstance(found, Image):
                self.made[name] = self.vision.pixels([found])
            else:
                self.made[name] = {key: torch.from_numpy(np.array(array)) for key, array in found.items()}
        return self.made[name]

    def _dummy(self) -> Mapping[str, Tensor]:
        """Return the smallest image, for a rank without images if another rank has one."""
        vision, merge = self.body.config.vision_config, self.body.config.vision_config.spatial_merge_size
        numbers = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        return {"pixel_values": torch.zeros(merge**2, numbers), "image_grid_thw": torch.tensor([[1, merge, merge]])}

    def _tokens(self, grid: Tensor) -> int:
        return int(grid.prod()) // self.vision.tokens.patches

    def _positions(self, tokens: NDArray[np.int32], there: NDArray[np.bool_], grids: list[Tensor]) -> NDArray[np.int64]:
        """Return the positions [3, n] of one sample's tokens; `there` is true at image tokens."""
        ids, kinds = torch.from_numpy(tokens.astype(np.int64))[None], torch.from_numpy(there.astype(np.int64))[None]
        found, _ = self.body.get_rope_index(ids, kinds, torch.cat(grids) if grids else None)
        return np.asarray(found[:, 0].numpy(), np.int64)


def _forward(body: Any, *, input_ids: Tensor, position_ids: Tensor, pack: Any, **_: Any) -> Any:
    """Run the model without its LM head over a microbatch; its images replace their placeholders' embeddings."""
    embeds, seen, more = body.get_input_embeddings()(input_ids), pack.mb.seen, {}
    if seen is not None:
        found = body.get_image_features(**seen.pixels, return_dict=True)
        there = (seen.rows >= 0)[None]
        own = seen.rows[there[0]]
        deep = [torch.cat(parts)[own] for parts in getattr(found, "deepstack_features", None) or ()]
        embeds = embeds.masked_scatter(there[..., None], torch.cat(found.pooler_output)[own].to(embeds.dtype))
        position_ids = seen.positions
        more = {"visual_pos_masks": there, "deepstack_visual_embeds": deep} if deep else {}
    return body.language_model(inputs_embeds=embeds, position_ids=position_ids, pack=pack, use_cache=False, **more)
