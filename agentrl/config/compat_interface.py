"""Interface for settings of other trainers: the meaning of names that are not ours. `agentrl.compat` implements it."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentrl.config.fields import Sections
from agentrl.plugins import compat

Part = tuple[Mapping[str, Any], Mapping[str, str]]  # values by setting, and where each was written


class CompatInterface(Protocol):
    """Settings of other trainers, by their names with underscores."""

    def called(self) -> Mapping[str, str]:
        """Names that mean a setting of ours, to be proposed."""

    def answer(self, name: str) -> str | None:
        """The reason why a setting is none here, and the remedy; `{it}` stands for it, or them. None if it is one."""

    def kind(self, name: str) -> str:
        """Return how many values a setting takes: `flag` (none), `one`, `many`; empty if it is not taken."""

    def ours(self, name: str, values: Sequence[str]) -> Mapping[str, Any]:
        """The settings that it means. Raises SettingsError: the value does not agree with what is done here."""

    def script(self, path: str, given: Collection[str]) -> tuple[list[str], Mapping[str, str], list[str]]:
        """A launch script's flags, where each stands, and what to tell about the script; `given` settings win over it."""

    def settle(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> Part:
        """Everything that was given, with the other trainer's defaults and its files of settings where they are asked for."""

    def problems(self, settings: Sections) -> Iterator[str]:
        """Yield what the given settings say about the model or the run that is not so."""

    def notes(self, settings: Sections) -> Iterator[str]:
        """Yield the settings that were given and that the other trainer ignores."""


def foreign() -> CompatInterface | None:
    """Return `agentrl.compat`'s implementation, if it is installed."""
    found = compat()
    return None if found is None else found.flags()
