"""What the settings of other trainers say that have no counterpart among our own."""

from typing import Any

from pydantic import Field

from agentrl.settings import Settings


class CompatSettings(Settings):
    """Read by `agentrl.compat`; also the keys of a user's own, which user functions find in `args`."""

    slime_defaults: bool = Field(
        False,
        description="Take slime's defaults where nothing was given, and name what has no effect in place of refusing it.",
    )
    compat_options: dict[str, Any] = Field(
        default_factory=dict,
        description="slime's settings that are none of ours (hooks by path), and keys of your own for your functions' args.",
    )
