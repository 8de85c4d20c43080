"""The list of all settings: the package that owns a field, its name on the command line, the values that it accepts.

1. `Sections` is the one list of sections; `SECTIONS` maps a section's name to its settings model.
2. `all_fields()` is the one flat list. It raises if two sections use the same name, which is a programming error.
3. `FieldRef.expected()` describes a valid value, for error messages and help."""

import functools
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.buffer.settings import BufferSettings
from agentrl.config.placement import ClusterSettings
from agentrl.data.settings import DataSettings
from agentrl.engine.settings import EngineSettings
from agentrl.errors import SettingsError
from agentrl.observability.settings import ObservabilitySettings
from agentrl.rm_hub.settings import RmHubSettings
from agentrl.rollout.settings import RolloutSettings
from agentrl.settings import Settings, flag_of
from agentrl.train.settings import TrainSettings


class CompatSettings(Settings):
    """Settings for user functions' `args`: those of other trainers that agentrl lacks, and a user's own keys."""

    slime_defaults: bool = False
    """Use slime's defaults for missing settings; report settings without effect, instead of an error."""
    compat_options: dict[str, Any] = Field(default_factory=dict)
    """Settings of slime that agentrl lacks (hooks by path), and your own keys for your functions' args."""


class Sections(Settings):
    """One section per package, in the order of `--help`; a section's title is its headline there."""

    rollout: RolloutSettings = Field(RolloutSettings(), title="Rollout: trajectories, grading, evaluation")
    rm_hub: RmHubSettings = Field(RmHubSettings(), title="Graders")
    data: DataSettings = Field(DataSettings(), title="Data")
    buffer: BufferSettings = Field(BufferSettings(), title="Ledger")
    algorithm: AlgorithmSettings = Field(AlgorithmSettings(), title="Algorithm")
    train: TrainSettings = Field(TrainSettings(), title="Trainer")
    engine: EngineSettings = Field(EngineSettings(), title="Inference engine")
    cluster: ClusterSettings = Field(ClusterSettings(), title="Placement")
    observability: ObservabilitySettings = Field(ObservabilitySettings(), title="Metrics and output")
    compat: CompatSettings = Field(CompatSettings(), title="Compatibility with slime")

    def flat(self) -> dict[str, Any]:
        return {name: value for _, section in self for name, value in section}

    def given(self) -> frozenset[str]:
        """Return the names of settings that were given a value. Others are defaults, or derived."""
        return frozenset(name for _, section in self for name in section.model_fields_set)


SECTIONS: Mapping[str, type[Settings]] = {name: type(section) for name, section in Sections()}

RENAMED: Mapping[str, str] = {
    "history_policy": "template_rewrite_policy",
    "ledger_keep": "ledger_retention",
    "mask_staleness": "max_token_staleness",
    "reduce_to_fit": "allow_fewer_devices",
    "stall_warning": "event_loop_block_warning",
}
"""Former names of settings. Flags, files, `from_flat` and `args` accept them for one release; no help text shows them."""

_SAID = {
    int: ("INT", "a whole number"),
    float: ("NUMBER", "a number"),
    str: ("TEXT", "text"),
    bool: ("VALUE", "true or false"),
    dict: ("KEY=VALUE", "KEY=VALUE or a JSON object"),
    tuple: ("VALUE...", "a list (repeat the flag, or give a JSON list)"),
}
"""Type of a setting to the metavar of its value in help, and a description of its value."""
_BOUNDS = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than", "min_length": "length at least"}


@dataclass(frozen=True)
class FieldRef:
    """One setting: the section that owns it, its name and pydantic's description of it."""

    section: str
    name: str
    info: FieldInfo

    @property
    def flag(self) -> str:
        return flag_of(self.name)

    @functools.cached_property
    def members(self) -> tuple[Any, ...]:
        """The annotation's alternatives without None: `int | None` is `(int,)`. There are two if it `is_named`."""
        return tuple(m for m in _members(self.info.annotation) if m is not type(None))

    @functools.cached_property
    def kind(self) -> Any:
        """The field's type without None: a key of `_SAID`, or `Literal`."""
        return typing.get_origin(self.members[0]) or self.members[0]

    @functools.cached_property
    def optional(self) -> bool:
        return type(None) in _members(self.info.annotation)

    @property
    def is_bool(self) -> bool:
        return self.kind is bool

    @property
    def is_named(self) -> bool:
        """True if the value is one text, or several texts by name."""
        return self.members == (str, dict[str, str])

    @property
    def choices(self) -> tuple[str, ...]:
        """The allowed values of a `Literal` field, else an empty tuple."""
        return typing.get_args(self.members[0]) if self.kind is Literal else ()

    @property
    def default(self) -> Any:
        value = self.info.get_default(call_default_factory=True, validated_data={})
        return None if value is PydanticUndefined else value

    @property
    def metavar(self) -> str:
        return self._said()[0]

    def expected(self) -> str:
        """Describe a valid value in words: `a whole number, at least 1`."""
        found = list(self.info.metadata)
        for arg in typing.get_args(self.info.annotation):  # `PositiveInt | None` hides its bound in the member
            found += typing.get_args(arg)[1:] if typing.get_origin(arg) is typing.Annotated else ()
        bounds = [f", {w} {getattr(each, n)}" for each in found for n, w in _BOUNDS.items() if hasattr(each, n)]
        return f"{self._said()[1]}{''.join(bounds)}{', or none' if self.optional and not self.choices else ''}"

    def _said(self) -> tuple[str, str]:
        """Return a value's metavar in help, and its description."""
        if self.choices:
            return "|".join(self.choices), f"one of {', '.join(self.choices)}"
        return ("PATH|NAME=PATH", "a path, or NAME=PATH for each of several") if self.is_named else _SAID[self.kind]


def _members(annotation: Any) -> tuple[Any, ...]:
    """Return the alternatives of a union. A plain type is its only alternative. `Annotated` is unwrapped."""
    if typing.get_origin(annotation) is typing.Annotated:
        return _members(typing.get_args(annotation)[0])
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return tuple(m for arg in typing.get_args(annotation) for m in _members(arg))
    return (annotation,)


@functools.cache
def all_fields() -> Mapping[str, FieldRef]:
    """Return all settings by name, in the order of `SECTIONS`. Raises SettingsError: two sections share a name."""
    found: dict[str, FieldRef] = {}
    for section, model in SECTIONS.items():
        for name, info in model.model_fields.items():
            if name in found:
                raise SettingsError(f"field {name!r} is in both {found[name].section} and {section}; rename one")
            found[name] = FieldRef(section, name, info)
    return types.MappingProxyType(found)
