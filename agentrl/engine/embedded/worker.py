"""The thread that owns the engine, and the bridge from the event loop to this thread. `post`, `call` and `exclusive`
take functions, which run between forward passes. An exception in a forward pass is logged, and `on_crash` is called.
From then on, all jobs and calls end with an error, later ones too."""

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.stopping import aborted

T = TypeVar("T")
log = logging.getLogger(__name__)

CRASHED = aborted("the engine crashed", 500, "InternalServerError")


class Worker:
    """The thread that runs `engine`, from `start()` to `stop()`."""

    def __init__(self, engine: Engine, *, on_crash: Callable[[], None]) -> None:
        self._engine, self._on_crash = engine, on_crash
        self._inbox: queue.SimpleQueue[Callable[[Engine], object]] = queue.SimpleQueue()
        self._stopping = self._crashed = False
        self._futures: set[Future[Any]] = set()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and not self._crashed

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float = 1.0) -> None:
        self.post(lambda _: setattr(self, "_stopping", True))
        self._thread.join(timeout)

    def post(self, action: Callable[[Engine], object]) -> None:
        """Run `action` in the engine's thread without waiting. `action` must not raise: an exception is a crash."""
        self._inbox.put(action)

    async def call(self, action: Callable[[Engine], T]) -> T:
        """Run `action` in the engine's thread; return its result or raise its exception."""
        future = self._future()
        self.post(lambda engine: self._settle(future, action, engine))
        return await asyncio.wrap_future(future)

    async def exclusive(self, action: Callable[[Engine], T]) -> T:
        """Like `call`, but wait until no job runs or generation is paused."""
        future = self._future()
        self.post(lambda engine: engine.exclusive(lambda: self._settle(future, action, engine), future.done))
        return await asyncio.wrap_future(future)

    def _future(self) -> Future[Any]:
        future = Future[Any]()
        self._futures.add(future)
        future.add_done_callback(self._futures.discard)
        return future

    def _run(self) -> None:
        try:
            while not self._stopping:
                while not self._inbox.empty():
                    self._inbox.get()(self._engine)
                if not self._engine.step():
                    self._inbox.get()(self._engine)
        except BaseException:
            log.critical("the engine's thread crashed", exc_info=True)
            self._crashed = True
            self._on_crash()
            while not self._stopping:
                self._refuse()
                self._inbox.get()(self._engine)

    def _refuse(self) -> None:
        """End all jobs and calls with an error."""
        self._engine.abort(lambda _: True, CRASHED)
        for future in tuple(self._futures):
            if future.set_running_or_notify_cancel():
                future.set_exception(RuntimeError("the engine crashed"))

    def _settle(self, future: Future[T], action: Callable[[Engine], T], engine: Engine) -> None:
        """Run the action and set the future's result or exception. Skip the action if the future has ended already."""
        if self._crashed or future.done() or not future.set_running_or_notify_cancel():
            return
        try:
            result = action(engine)
        except BaseException as error:
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
        else:
            future.set_result(result)
