"""Pixels of images for models that see images, computed by the model's own image processor.

The processor is always transformers' version for Pillow and numpy, even if torchvision is installed. So trainer and
built-in engine compute the same pixels on every machine."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from agentrl.errors import CheckpointError, MediaError, raised_as
from agentrl.media import FORMATS, Image
from agentrl.modelfolder import ImageTokens

_SETTINGS = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class Vision:
    """The placeholders and the image processor of a model folder."""

    tokens: ImageTokens
    _processor: Any

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read the settings; None if the model sees no images. Raises CheckpointError: they cannot be read."""
        if (tokens := ImageTokens.of(folder)) is None:
            return None
        from transformers import AutoImageProcessor

        file = next((folder / name for name in _SETTINGS if (folder / name).is_file()), None)
        if file is None:
            raise CheckpointError(
                f"{folder}: expected {_SETTINGS[0]} beside the weights of a model that sees; fetch it too"
            )
        what = f"{file}: transformers cannot read it"
        with raised_as(CheckpointError, what, OSError, ValueError, TypeError, ImportError):
            processor = AutoImageProcessor.from_pretrained(folder, backend="pil", trust_remote_code=False)
        return cls(tokens, processor)

    def pixels(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """Return arguments of the model's `get_image_features`, on the CPU: `pixel_values` float32 [patches of all
        images, numbers], `image_grid_thw` int64 [images, 3]. Raises MediaError: the processor refuses an image."""
        import PIL.Image

        sizes = ", ".join(f"{image.width} x {image.height}" for image in images)
        what = f"the image processor refuses one of {len(images)} images ({sizes})"
        with raised_as(MediaError, what, OSError, ValueError):
            opened = [PIL.Image.open(io.BytesIO(image.data), formats=FORMATS) for image in images]
            found = self._processor(images=opened, return_tensors="pt")
        return {"pixel_values": found["pixel_values"].to(torch.float32), "image_grid_thw": found["image_grid_thw"]}
