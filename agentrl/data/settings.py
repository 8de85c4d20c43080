"""Settings of the prompt data and of data sources."""

from typing import Any, Literal

from pydantic import Field, JsonValue

from agentrl.media import ImageLimits
from agentrl.settings import Settings


class DataSettings(Settings):
    """Sources of prompts."""

    prompt_data: str | None = None
    """JSONL or Parquet file of prompts, or path@[start:end]; optional if the environment makes them."""
    prompt_data_limit: int | None = Field(None, ge=1, description="Use only the first N rows of the prompt data.")
    prompt_data_check: Literal["full", "lazy"] = "full"
    """Check every row before the run starts (full), or when it is drawn (lazy, for huge files)."""
    input_key: str = Field("input", min_length=1, description="Field of a row that holds the prompt.")
    label_key: str | None = Field(None, description="Field of a row that holds the label, if there are labels.")
    metadata_key: str = Field("metadata", min_length=1, description="Field of a row that holds an object of metadata.")
    tool_key: str = Field("tools", min_length=1, description="Field of a row that holds its own list of tool schemas.")
    image_key: str | None = Field(None, min_length=1)
    """Field of a row that holds its images: paths, data URLs, bytes, or a list of these. `<image>` in the prompt marks
    their places; without marks they come before the text of the last user message."""
    image_root: str | None = Field(None, description="Folder of images; paths of images in the data lie below it.")
    image_max_pixels: int = Field(4096 * 4096, ge=1, description="Most pixels of an image, width times height.")
    image_max_bytes: int = Field(20 << 20, ge=1, description="Most bytes of an image's file.")
    image_max_count: int = Field(64, ge=1, description="Most images of a trajectory.")
    sft_turns: Literal["all", "last"] | None = None
    """The rows are whole conversations to learn from (`agentrl sft`): all turns of the assistant, or the last. A
    message's own `loss` overrides it. By default the rows are prompts."""
    env_key: str | None = Field(None, min_length=1)
    """Field of a row that names its environment, if the run has several; default: env. A row without it may name one in
    its metadata's env."""
    apply_chat_template: bool = Field(False, description="Turn text prompts into user messages for the chat template.")
    apply_chat_template_kwargs: dict[str, JsonValue] = Field({}, description="Extra variables for the chat template.")
    rollout_shuffle: bool = Field(False, description="Shuffle the prompts anew in every epoch.")
    prompt_order: Literal["passes", "difficulty"] = "passes"
    """Draw prompts in passes over the data, or by difficulty: prompts that succeed about half the time come more
    often."""
    num_epoch: int | None = Field(None, ge=1, description="Stop after this many passes over the prompts.")
    data_source_path: str | None = Field(None, description="Data source 'pkg.mod:Class': get_samples and add_samples.")
    buffer_filter_path: str | None = None
    """Function 'pkg.mod:function' that chooses from the buffer: fn(args, buffer, num_samples)."""

    @property
    def image_limits(self) -> ImageLimits:
        return ImageLimits(self.image_max_pixels, self.image_max_bytes, self.image_max_count, self.image_root)

    @classmethod
    def of_args(cls, args: Any) -> "DataSettings":
        """The same settings out of the flat `args` that a user's data source is built from; they were checked before."""
        return cls.model_construct(**{name: getattr(args, name) for name in cls.model_fields if hasattr(args, name)})
