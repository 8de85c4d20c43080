"""Who is told what a run is starting."""

from typing import Protocol

from agentrl.observability.progress import Progress, counted

__all__ = ["Announcer", "counted"]


class Announcer(Protocol):
    """Told of phases; `agentrl.observability.progress.Progress` is one."""

    def phase(self, text: str) -> None:
        """What is being done now."""

    def begin(self, text: str) -> None:
        """A phase before the first step."""

    def ready(self, text: str, since: float) -> None:
        """Something that was begun at `since` (of `time.monotonic`) is there."""


_checked: type[Announcer] = Progress
