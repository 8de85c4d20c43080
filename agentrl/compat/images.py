"""slime's `slime.utils.processing_utils` for images: the model's processor, and images as engines get them."""

import base64
import io
from collections.abc import Mapping
from typing import Any

from agentrl.chat import vision
from agentrl.compat.helpers import load_tokenizer


class Processor:
    """A model's processor. Its pixels are tensors even without `return_tensors`, as with torchvision's processors."""

    def __init__(self, processor: Any) -> None:
        self._processor = processor

    def __getattr__(self, name: str) -> Any:
        return getattr(self._processor, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if "return_tensors" not in kwargs:
            kwargs["images_kwargs"] = {"return_tensors": "pt", **kwargs.get("images_kwargs", {})}
        return self._processor(*args, **kwargs)


def load_processor(name_or_path: str, **kwargs: Any) -> Processor | None:
    """Return the processor of a model folder; None if the model takes no images. Code in the folder is not run."""
    found = vision.load_processor(name_or_path, load_tokenizer(name_or_path, **kwargs))
    return None if found is None else Processor(found)


def build_processor_kwargs(multimodal_inputs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return `multimodal_inputs`, with arguments for ids as lists and pixels as tensors."""
    made = {"return_mm_token_type_ids": False, **(multimodal_inputs or {})}
    return made | {"images_kwargs": {**made.get("images_kwargs", {}), "return_tensors": "pt"}}


def encode_image_for_rollout_engine(image: Any) -> str:
    """Return a Pillow image as the data URL of a PNG, in RGB."""
    held = io.BytesIO()
    image.convert("RGB").save(held, "PNG")
    return f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"
