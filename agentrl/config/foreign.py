"""The door for other trainers' settings: what a name that is none of ours is here. `agentrl.compat` answers, where it is."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

from agentrl.config.fields import Sections
from agentrl.plugins import optional

Part = tuple[Mapping[str, Any], Mapping[str, str]]
"""Values by setting, and where each was written."""


class Foreign(Protocol):
    """Settings of other trainers, by their names with underscores."""

    def called(self) -> Mapping[str, str]:
        """Names that mean a setting of ours, to be proposed."""

    def answer(self, name: str) -> str | None:
        """Why a setting is none here, and what to do; `{it}` stands for it, or them. None where that is not so."""

    def kind(self, name: str) -> str:
        """How many values a setting takes, where it is taken: `flag` (none), `one`, `many`; else nothing."""

    def ours(self, name: str, values: Sequence[str]) -> Mapping[str, Any]:
        """The settings that it means.

        Raises:
            SettingsError: the value does not agree with what is done here.
        """

    def script(self, path: str, given: Collection[str]) -> tuple[list[str], Mapping[str, str], list[str]]:
        """A launch script's flags, where each stands, and what to tell about the script; `given` settings win over it."""

    def settle(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> Part:
        """Everything that was given, with the other trainer's defaults and its files of settings where they are asked for."""

    def problems(self, settings: Sections) -> Iterator[str]:
        """What was said about the model or the run that is otherwise."""

    def notes(self, settings: Sections) -> Iterator[str]:
        """What was given that the other trainer ignores."""


def foreign() -> Foreign | None:
    """Who knows them, if the installation has it."""
    found: Foreign | None = optional("agentrl.compat.flags:FLAGS")
    return found
