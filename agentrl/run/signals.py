"""SIGTERM becomes `SystemExit(143)` in the main thread, so that it stops a run as Ctrl-C does."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM raises `SystemExit` while this is open. In other threads than the main one this does nothing."""
    before = signal.getsignal(signal.SIGTERM)
    heed_sigterm()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def heed_sigterm() -> None:
    """Install our handler where a library (Ray) has put its own; and no alarm of its aborts the process while it stops."""
    if threading.current_thread() is threading.main_thread():
        signal.alarm(0)
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the stopping
    raise SystemExit(EXIT_CODE)
