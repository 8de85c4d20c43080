"""Graders that wait for something else (a server, the sandbox), open for many answers.

`GraderSpec.path` of such a grader names a coroutine function for one answer; this is the form that keeps connections,
caches and sandboxes between answers.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Awaitable, Callable, Mapping
from types import TracebackType
from typing import Any, Protocol, Self

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.registry import GraderSpec, find
from agentrl.rm_hub.settings import RmHubSettings

SERVICES: Mapping[str, str] = {
    "remote_rm": "agentrl.rm_hub.remote_rm:RemoteRM",
    "llm_judge": "agentrl.rm_hub.llm_judge:LLMJudge",
    "code": "agentrl.rm_hub.code:CodeGrader",
}


class Service(Protocol):
    """An async context manager that grades; it has no tasks of its own and may be closed by another task."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
    async def grade(self, response: str, label: Any, metadata: Mapping[str, Any]) -> Grade: ...


def service(rm_type: str, settings: RmHubSettings) -> Service:
    """The grader of that name, one of `SERVICES`, not yet entered.

    Raises:
        SettingsError: its settings are missing.
    """
    found: Service = pkgutil.resolve_name(SERVICES[rm_type])(settings)
    return found


def check_rm_type(rm_type: str, settings: RmHubSettings | None = None) -> GraderSpec:
    """Refuse a name that `grade` does not know; returns what is known of the grader.

    Args:
        settings: where to look for what a grader that waits for something needs (`--rm-url`, ...).

    Raises:
        SettingsError: no such grader (with the nearest name), or a setting that it needs is missing.
    """
    spec = find(rm_type)
    if settings is not None and rm_type in SERVICES:
        service(rm_type, settings)
    return spec


def alone(opens: Callable[[RmHubSettings], Service]) -> Callable[..., Awaitable[Grade]]:
    """The coroutine function that grades one answer with a service of its own."""

    async def grade(
        response: str, label: Any, metadata: Mapping[str, Any], *, settings: RmHubSettings | None = None
    ) -> Grade:
        """One answer with a service of its own, opened for it and closed again."""
        async with opens(settings or RmHubSettings()) as opened:
            return await opened.grade(response, label, metadata)

    return grade
