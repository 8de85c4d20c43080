"""Images of a prompt, in the form that SGLang's `/generate` takes beside `input_ids`.

1. SGLang (from May 2026 on) expects one placeholder for each image and inserts the others itself. A prompt with all
   placeholders fails. So one placeholder is sent, and the engine's full prompt is compared with ours.
2. SGLang reads each placeholder as an image. The built-in engine reads `image_spans`, so a model may sample one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from agentrl.errors import EngineRejected
from agentrl.media import Image, ImageSpan


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The images of a prompt, and the places of their placeholders in its ids, both in order."""

    images: Sequence[Image]
    spans: Sequence[ImageSpan]

    @classmethod
    def of(cls, images: Mapping[str, Image], spans: Sequence[ImageSpan]) -> Self | None:
        """Return the images of a sample's prompt; None if it has none."""
        return cls([images[span.hash] for span in spans], spans) if spans else None

    def fields(self, ids: Sequence[int], *, reads_spans: bool) -> tuple[list[int], dict[str, Any]]:
        """Return the ids to send, with one placeholder for each image, and the request's other fields. `reads_spans`:
        the engine reads `image_spans`. Raises EngineRejected, kind `sampled_placeholder`: an id would be misread."""
        sent, places, read = list[int](), list[list[int]](), 0
        for span in self.spans:
            sent += ids[read : span.start + 1]
            places.append([len(sent) - 1, len(sent)])
            read = span.end
        sent += ids[read:]
        placeholder = ids[self.spans[0].start]
        if not reads_spans and sent.count(placeholder) != len(places):
            said = f"the prompt has the placeholder of an image, id {placeholder}, where there is no image: the model sampled it"
            why = "and SGLang would look for an image there; --engine embedded can read such a prompt"
            raise EngineRejected(f"{said}, {why}", status=400, kind="sampled_placeholder")
        urls = [image.url for image in self.images]
        return sent, {"image_data": urls, "image_spans": places, "return_prompt_token_ids": True}
