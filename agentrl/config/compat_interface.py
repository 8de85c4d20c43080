"""Interface for settings of other trainers: the meaning of names that are not ours. `agentrl.compat` implements it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentrl.config.fields import Sections
from agentrl.plugins import compat

Part = tuple[Mapping[str, Any], Mapping[str, str]]  # values by setting, and the place where each was written


class CompatInterface(Protocol):
    """Settings of other trainers, by their names with underscores."""

    def called(self) -> Mapping[str, str]:
        """Return names that mean a setting of ours, with that setting, for suggestions."""

    def answer(self, name: str) -> str | None:
        """Return why a setting is not supported, and a remedy, with `{it}` for the setting; None if it is supported."""

    def kind(self, name: str) -> str:
        """Return the number of values of a setting: `flag` (none), `one`, `many`; "" if the setting is not accepted."""

    def ours(self, name: str, values: Sequence[str]) -> Mapping[str, Any]:
        """Return our settings for the setting `name`. Raises SettingsError: the value is not supported here."""

    def script(self, path: str, given: Collection[str]) -> tuple[list[str], Mapping[str, str], list[str]]:
        """Return a launch script's flags, the place of each, and notes on the script. `given` settings override it."""

    def resolve(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> Part:
        """Return the given settings, with the other trainer's defaults and settings files if they are requested."""

    def problems(self, settings: Sections) -> Iterator[str]:
        """Yield sentences about settings that contradict the model or the run."""

    def notes(self, settings: Sections) -> Iterator[str]:
        """Yield the settings that were given and that the other trainer ignores."""


def foreign() -> CompatInterface | None:
    """Return `agentrl.compat`'s implementation, if it is installed."""
    found = compat()
    return None if found is None else found.flags()
