"""Tasks that user code starts itself on the event loop of a rollout.

1. A task that raises `SystemExit` or `KeyboardInterrupt` would end the event loop. Here it ends the call that started it.
2. A task that outlives its trajectory is cancelled, counted, and logged once. Tasks that a `setup` starts belong to the
   run, and end with it. Tasks of libraries are not cancelled: a client that all trajectories share may need them."""

import asyncio
import logging
import sys
import sysconfig
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from agentrl.clock import Deadline, current_call
from agentrl.plugins import describe_error

Work = Coroutine[Any, Any, Any]
_PYTHON = ("<frozen", *(sysconfig.get_path(name) for name in ("stdlib", "platstdlib")))
_PACKAGES = (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"), str(Path(__file__).parents[1]))
_log = logging.getLogger(__name__)


class UserTasks:
    """Tasks that user code has started on an event loop; made by `followed`."""

    def __init__(self, plain: Callable[..., Any]) -> None:
        self._plain, self._left, self._named = plain, Counter[str](), dict[str, str]()
        self._running: dict[Deadline | None, dict[asyncio.Task[Any], tuple[str, str]]] = {}

    @classmethod
    @contextmanager
    def followed(cls) -> Iterator["UserTasks"]:
        """Follow the tasks of the running event loop; cancel all remaining tasks at the end."""
        loop = asyncio.get_running_loop()
        before = loop.get_task_factory()
        tasks = cls(before or (lambda loop, work, **options: asyncio.Task(work, loop=loop, **options)))
        make: Any = tasks._make
        loop.set_task_factory(make)
        try:
            yield tasks
        finally:
            loop.set_task_factory(before)
            for owner in list(tasks._running):
                tasks._end(owner)

    def left(self) -> list[tuple[str, str]]:
        """Return the code that left tasks running, and the line that started them; each line once."""
        return [(what, where) for where, what in self._named.items()]

    def take(self) -> dict[str, float]:
        """Return how many tasks were left since the last call, as metrics `left_tasks/<whose code>`."""
        left, self._left = self._left, Counter()
        return {f"left_tasks/{what}": float(count) for what, count in left.items()}

    def _make(self, loop: asyncio.AbstractEventLoop, work: Work, **options: Any) -> Any:
        if (call := current_call()) is None:
            return self._plain(loop, work, **options)
        task = self._plain(loop, _contained(work, call), **options)
        task.add_done_callback(lambda _: work.close())  # needed if the task is cancelled before it begins
        if where := _started_at():
            trajectory = call.outermost if call.outermost.place else None
            if trajectory and trajectory not in self._running:
                trajectory.at_end.append(partial(self._end, trajectory))
            running = self._running.setdefault(trajectory, {})
            running[task] = (call.what, where)
            task.add_done_callback(running.pop)
        return task

    def _end(self, trajectory: Deadline | None) -> None:
        for task, (what, where) in list(self._running.pop(trajectory).items()):
            if trajectory and not (task.done() or task.cancelling()):
                self._left[what] += 1
                if where not in self._named:
                    self._named[where] = what
                    _log.warning(
                        f"{what} leaves a task running that it started at {where}; it is cancelled with its trajectory: await or "
                        "cancel it there, or start a task for the whole run in `setup`"
                    )
            task.cancel()


async def _contained(work: Work, call: Deadline) -> Any:
    try:
        return await work
    except (Exception, asyncio.CancelledError):
        raise
    except BaseException as error:  # noqa: BLE001 - raised again, in a form that the event loop survives
        if not call.fail(error):
            _log.error(f"a task that {call.what} started raised {describe_error(error)}")
        raise BaseExceptionGroup(f"a task of {call.what}", [error]) from None


def _started_at() -> str:
    """Return `FILE:LINE` of the user's code that starts a task now; "" if a library does."""
    frame = sys._getframe(2)
    while (file := frame.f_code.co_filename).startswith(_PYTHON) and not file.startswith(_PACKAGES):
        if frame.f_back is None:
            return ""
        frame = frame.f_back
    return "" if file.startswith(_PACKAGES) else f"{file}:{frame.f_lineno}"
