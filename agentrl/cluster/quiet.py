"""Ray's own words and Ray's own way with signals, kept out of the terminal and out of the way.

Ray's native library writes to file descriptor 2 of the driver: a stack trace at SIGTERM, and its log's errors while
processes end. Its handler of SIGTERM also aborts the process three seconds later, in the middle of stopping.

1. `library_output(file)`: what is written to file descriptor 2 goes to `file`. `sys.stderr`, where progress, messages
   and tracebacks of ours go, stays where it was.
2. `stopped_by_sigterm()`: SIGTERM becomes `SystemExit(143)` in the main thread, so that it stops the run as Ctrl-C
   does. Ray installs its own handlers when it starts; `heed_sigterm` puts ours back.
"""

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


@contextlib.contextmanager
def library_output(file: Path) -> Iterator[None]:
    """Send what native libraries write to standard error to `file` instead, while this is open."""
    ours = sys.stderr
    ours.flush()
    with contextlib.ExitStack() as stack:
        apart = stack.enter_context(file.open("ab"))
        terminal = os.dup(2)
        sys.stderr = stack.enter_context(open(terminal, "w", buffering=1, errors="backslashreplace"))
        os.dup2(apart.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            sys.stderr = ours


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
    """Install our handler; and no alarm of Ray's aborts the process while it stops."""
    if threading.current_thread() is threading.main_thread():
        signal.alarm(0)
        signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the stopping
    raise SystemExit(EXIT_CODE)
