"""SIGTERM stops a run as Ctrl-C does, with exit code 143. The handler raises SIGINT: the event loop then cancels its
main task, which can clean up. An exception from the handler would end the loop at an arbitrary point."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM
_TERMINATED = threading.Event()


@contextlib.contextmanager
def stopped_by_sigterm() -> Iterator[None]:
    """Turn SIGTERM during this block into `SystemExit(143)`. Does nothing outside the main thread."""
    before = signal.getsignal(signal.SIGTERM)
    _TERMINATED.clear()
    handle_sigterm()
    try:
        yield
    except KeyboardInterrupt:
        if not _TERMINATED.is_set():
            raise
        raise SystemExit(EXIT_CODE) from None
    finally:
        if threading.current_thread() is threading.main_thread() and before is not None:
            signal.signal(signal.SIGTERM, before)


def handle_sigterm() -> None:
    """Replace a library's handler (Ray's) with ours, and cancel its alarm, which would abort the cleanup. Restore
    SIGINT: a script's background jobs start with SIGINT ignored, and would ignore SIGTERM too."""
    if threading.current_thread() is threading.main_thread():
        signal.alarm(0)
        signal.signal(signal.SIGTERM, _leave)
        if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second SIGTERM would interrupt the cleanup
    _TERMINATED.set()
    signal.raise_signal(signal.SIGINT)


@contextlib.contextmanager
def interrupted_at_once() -> Iterator[None]:
    """Let Ctrl-C raise at once in blocking code inside an event loop, which the loop cannot cancel."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
