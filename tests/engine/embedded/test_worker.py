"""The engine's thread after a crash: nobody who asked before or asks later waits for ever."""

import threading
from typing import Any, cast

import anyio
import pytest

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.worker import Worker


class Broken:
    """An engine whose forward pass raises once something is asked of it."""

    def __init__(self) -> None:
        self.asked, self.aborted = 0, threading.Event()
        self.waiting: list[Any] = []

    def step(self) -> bool:
        if self.asked:
            raise RuntimeError("a broken device")
        return False

    def ask(self) -> None:
        self.asked += 1

    def abort(self, match: object, reason: object) -> None:
        self.aborted.set()

    def exclusive(self, action: Any) -> None:
        self.waiting.append(action)  # a forward pass would run it


async def test_all_calls_end_with_an_error_after_a_crash() -> None:
    crashed, engine = threading.Event(), Broken()
    worker = Worker(cast(Engine, engine), on_crash=crashed.set)
    worker.start()
    with anyio.fail_after(60):
        worker.post(lambda _: engine.ask())
        for ask in (worker.exclusive, worker.call, worker.exclusive):  # in the inbox, in the engine, and after both
            with pytest.raises(RuntimeError, match="the engine crashed"):
                await ask(lambda _: None)
        assert crashed.is_set()
        assert not worker.alive
        engine.aborted.clear()
        worker.post(lambda _: None)  # a job that was accepted just before
        await anyio.to_thread.run_sync(engine.aborted.wait)
    worker.stop()
    assert not worker._thread.is_alive()
