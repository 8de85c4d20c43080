"""Environments of problems with a picture.

1. `CropEnv` has a tool that shows one field of the picture larger; the answer is the model's first turn without a call.
2. `Geo3kEnv` is for geometry problems (GEO3K); its tool says if an answer is right, and the model may reason again.
3. The grader is `--rm-type`'s: `exact_match` for drawn scenes, `math` for GEO3K.
"""

import io

from PIL import Image

from agentrl import Environment, Message, Sample, tool
from agentrl.errors import DataError
from agentrl.media import reference_hash, references
from agentrl.rm_hub import grade
from agentrl.tools import ToolError
from examples.geo3k_vlm.scenes import GRID, cropped


class CropEnv(Environment):
    """Answer a question about a picture, with a tool that shows a part of it."""

    max_turns = 3

    async def reset(self, sample: Sample) -> list[Message]:
        """Keep the picture for the tool."""
        self.picture = first_picture(sample)
        return await super().reset(sample)

    @tool
    def crop(self, field: int) -> Image.Image:
        """Show one of the 3 x 3 fields of the picture.

        Args:
            field: 1 to 9, row by row
        """
        if not 1 <= field <= GRID**2:
            raise ToolError(f"field is 1 to {GRID**2}, got {field}")
        return cropped(self.picture, field)


class Geo3kEnv(Environment):
    """A geometry problem, with a tool that says if an answer is right."""

    max_turns = 3

    async def reset(self, sample: Sample) -> list[Message]:
        """Add the form of the answer in front of the problem."""
        self.label = sample.label
        rules = "Reason step by step, check the answer with the tool `check`, and put the final answer in \\boxed{}."
        return [{"role": "system", "content": rules}, *await super().reset(sample)]

    @tool
    def check(self, answer: str) -> str:
        """Compare an answer with the solution.

        Args:
            answer: the answer alone, as a number or in LaTeX
        """
        right = grade("math", f"\\boxed{{{answer}}}", self.label).correct
        return "The answer is right." if right else "The answer is wrong. Reason again."


def first_picture(sample: Sample) -> Image.Image:
    """Open the first image of a sample's prompt. Raises DataError: it has none."""
    messages = sample.prompt if isinstance(sample.prompt, list) else []
    part = next(references(messages), None)
    if part is None:
        raise DataError("the prompt has no image; CropEnv needs rows with an image part, or --image-key")
    return Image.open(io.BytesIO(sample.images[str(reference_hash(part))].data)).convert("RGB")
