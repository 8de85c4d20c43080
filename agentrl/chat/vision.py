"""Images in a prompt: the placeholder ids of an image, from the model's own processor.

1. A template writes a short mark for each image. The processor's text replaces the mark. The number of
   placeholder tokens in this text depends on the image's width and height.
2. The text comes from processing a blank image of the same size, once per size. No pixels of real images are read here.
3. `load` imports transformers, and torch with it, only for models with image input."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from agentrl.chat.encoding import OPEN
from agentrl.errors import SettingsError, TemplateError, raised_as
from agentrl.media import ImageSpan, reference_hash
from agentrl.modelfolder import read_json

_FILES = ("processor_config.json", "preprocessor_config.json", "tokenizer_config.json")
"""Files of a model folder that may name the processor's class."""


class ImagePlaceholders:
    """The placeholders of one model's images. `token_id`: the id that is repeated for an image."""

    def __init__(self, processor: Any) -> None:
        tokenizer = processor.tokenizer
        # Gemma 3's processor marks an image by a token that differs from the repeated token.
        self._repeated: str = getattr(tokenizer, "image_token", None) or processor.image_token
        self.token_id = int(tokenizer.convert_tokens_to_ids(self._repeated))
        self._processor, self._mark = processor, re.compile(f"(?<!{OPEN}){re.escape(processor.image_token)}")
        self._text = lru_cache(1024)(self._make_text)

    @classmethod
    def load(cls, folder: str, tokenizer: Any) -> Self | None:
        """Load the processor of a Hugging Face model folder; None if the model has no image input. Raises
        SettingsError: the processor cannot be loaded."""
        return None if (processor := load_processor(folder, tokenizer)) is None else cls(processor)

    def expand(self, text: str, images: Sequence[Mapping[str, Any]]) -> str:
        """Replace the marks in a rendered text by the images' placeholders. `images`: references, in order. Raises
        TemplateError: the number of marks is not the number of images."""
        sizes = iter([(int(image["width"]), int(image["height"])) for image in images])
        if (found := len(self._mark.findall(text))) != len(images):
            remedy = "give them in a user message, or set --chat-template-path"
            raise TemplateError(f"the chat template shows {found} of {len(images)} images; {remedy}")
        return self._mark.sub(lambda match: self._text(*next(sizes)), text) if images else text

    def spans(self, ids: Sequence[int], images: Iterable[Mapping[str, Any]]) -> list[ImageSpan]:
        """Find the images' placeholders among ids that `expand`'s text encodes to. The model sampled none of `ids`.
        Raises TemplateError: the ids have more or fewer placeholders than the images need."""
        places = [at for at, token in enumerate(ids) if token == self.token_id]
        spans, used = [], 0
        for image in images:
            count = self._text(int(image["width"]), int(image["height"])).count(self._repeated)
            own = places[used : (used := used + count)]
            if len(own) == count:
                spans.append(ImageSpan(str(reference_hash(image)), own[0], own[-1] + 1))
        if used != len(places):
            raise TemplateError(f"the prompt has {len(places)} image placeholders, and its images need {used}")
        return spans

    def _make_text(self, width: int, height: int) -> str:
        import PIL.Image

        mark = self._processor.image_token
        blank = PIL.Image.new("RGB", (width, height))
        with raised_as(TemplateError, f"the processor refuses an image of {width} x {height} pixels", ValueError):
            made = self._processor(images=[blank], text=[mark], return_text_replacement_offsets=True)
        return str(made["text_replacement_offsets"][0][0]["replacement"])


def load_processor(folder: str, tokenizer: Any) -> Any | None:
    """Return the processor for images and text of a Hugging Face model folder; None if the model has no image input.
    It has no part for videos, which would need torchvision. Raises SettingsError: the processor cannot be loaded."""
    path = Path(folder)
    if not (path / "config.json").is_file() or "vision_config" not in (config := read_json(path / "config.json")):
        return None
    damage = (OSError, ValueError, AttributeError, KeyError, TypeError, ImportError)
    with raised_as(SettingsError, f"{folder}: the processor of the model's images does not load", *damage):
        return _processor(path, str(config.get("model_type")), tokenizer)


def _processor(path: Path, kind: str, tokenizer: Any) -> Any:
    from transformers import AutoImageProcessor
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES, processor_class_from_name

    named = (read_json(path / name).get("processor_class") for name in _FILES if (path / name).is_file())
    name = next((name for name in named if name), None) or PROCESSOR_MAPPING_NAMES.get(kind)
    if name is None or (whole := processor_class_from_name(name)) is None:
        raise ValueError(f"transformers has no processor for model_type {kind!r}")

    class Images(whole):  # type: ignore[misc, valid-type]
        """The processor's class without the part for videos."""

        @classmethod
        def get_attributes(cls) -> list[str]:
            return [part for part in super().get_attributes() if part in ("image_processor", "tokenizer")]

    options, _ = whole.get_processor_dict(str(path)) if (path / _FILES[0]).is_file() else ({}, None)
    parts = {"image_processor": AutoImageProcessor.from_pretrained(str(path), backend="pil"), "tokenizer": tokenizer}
    made = Images.from_args_and_dict([parts.get(part) for part in whole.get_attributes()], options)
    if not hasattr(made, "image_token"):
        raise ValueError(f"{name} has no token for images")
    return made
