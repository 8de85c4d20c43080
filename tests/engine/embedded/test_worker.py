"""The engine's thread after a crash: no earlier or later request waits for ever."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import anyio
import pytest

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.worker import Worker
from tests.engine.embedded.driver import make_engine, make_job


class Broken:
    """An engine whose forward pass raises once it has a job."""

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

    def exclusive(self, action: Any, _: object) -> None:
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


async def test_an_exclusive_call_whose_caller_was_cancelled_blocks_no_request(folder: Callable[..., Path]) -> None:
    engine = make_engine(folder())
    worker, done = Worker(engine, on_crash=lambda: None), list[str]()
    running, later = make_job([1, 2], max_new_tokens=50), make_job([3, 4])
    engine.add(running)
    engine.step()
    with anyio.move_on_after(0):
        await worker.exclusive(lambda _: done.append("flush"))
    await anyio.wait_all_tasks_blocked()
    worker._inbox.get()(engine)
    engine.add(later)
    for _ in range(3):
        engine.step()
    assert later.output
    assert running.finish is None
    assert not done
