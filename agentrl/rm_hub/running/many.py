"""Grading a list of answers from a plain script: no event loop of one's own, all cores, a deadline for each."""

import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import anyio

from agentrl.errors import GraderFailure, first_error
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.running.runner import GraderRunner
from agentrl.rm_hub.settings import RmHubSettings

Item = tuple[str, Any] | tuple[str, Any, Mapping[str, Any]] | Mapping[str, Any]
"""`(response, label)`, `(response, label, metadata)`, or a mapping with those keys."""


def grade_many(
    rm_type: str,
    items: Sequence[Item],
    *,
    processes: int | None = None,
    timeout: float = 10.0,
    settings: RmHubSettings | None = None,
    progress: Callable[[int], None] | None = None,
) -> list[Grade | GraderFailure]:
    """Grade answers in worker processes and return when all are done; usable inside a running event loop, too.

    Args:
        rm_type: a name of `graders()`, a `boxed_` form, or `path/to/file.py:function`.
        items: see `Item`.
        processes: worker processes; default one a core, at most 8.
        timeout: seconds one answer may take.
        settings: for graders that need more (`rm_url`, `judge_url`, ...); `processes` and `timeout` win over it.
        progress: called with the number of answers done so far, after each.

    Returns:
        In the order of `items`, a grade, or the failure where one could not be graded (not raised).

    Raises:
        SettingsError: no such grader, or a setting that it needs is missing.
    """
    own = (settings or RmHubSettings()).model_copy(update={"grader_processes": processes, "grader_timeout": timeout})
    done: Future[list[Grade | GraderFailure]] = Future()

    def run() -> None:
        try:
            done.set_result(anyio.run(_all, rm_type, items, own, progress))
        except BaseException as error:  # noqa: BLE001 - raised again below, in the caller's thread
            done.set_exception(first_error(error))

    # A thread of its own, so that it works where an event loop is running already (a notebook).
    threading.Thread(target=run, name="agentrl-grade-many", daemon=True).start()
    return done.result()


async def _all(
    rm_type: str, items: Sequence[Item], settings: RmHubSettings, progress: Callable[[int], None] | None
) -> list[Grade | GraderFailure]:
    results: dict[int, Grade | GraderFailure] = {}
    left = iter(enumerate(items))
    async with GraderRunner(settings, preload=[rm_type]) as runner:

        async def work() -> None:
            for at, item in left:
                try:
                    results[at] = await runner.grade(rm_type, *_parts(item))
                except GraderFailure as failure:
                    results[at] = failure
                if progress is not None:
                    progress(len(results))

        async with anyio.create_task_group() as group:
            for _ in range(min(len(items), _AT_ONCE)):
                group.start_soon(work)
    return [results[at] for at in range(len(items))]


_AT_ONCE = 128
"""Answers under way at once: enough for servers that are asked, few enough to hold in memory."""


def _parts(item: Item) -> tuple[str, Any, Mapping[str, Any]]:
    if isinstance(item, Mapping):
        return item["response"], item.get("label"), item.get("metadata") or {}
    response, label, *rest = item
    return response, label, rest[0] if rest else {}
