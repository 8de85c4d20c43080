"""SIGTERM stops a run as Ctrl-C does, with exit code 143. It is turned into SIGINT, at which an event loop cancels its
main task and lets it clean up; an exception from a handler would end the loop in the middle of whatever runs."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
_TERMINATED = threading.Event()


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """SIGTERM leaves this block as `SystemExit(143)`. In other threads than the main one this does nothing."""
    before = signal.getsignal(signal.SIGTERM)
    _TERMINATED.clear()
    heed_sigterm()
    try:
        yield
    except KeyboardInterrupt:
        if not _TERMINATED.is_set():
            raise
        raise SystemExit(EXIT_CODE) from None
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def heed_sigterm() -> None:
    """Install our handler where a library (Ray) has put its own; and no alarm of its aborts the process while it stops.
    Background jobs of a script begin with SIGINT ignored, and would ignore SIGTERM too."""
    if threading.current_thread() is threading.main_thread():
        signal.alarm(0)
        signal.signal(signal.SIGTERM, _leave)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the stopping
    _TERMINATED.set()
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Inside an event loop: Ctrl-C raises at once in blocking code, where the loop cannot cancel anything."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
