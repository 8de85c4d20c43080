"""Ray's own words, kept out of the terminal.

Its native library writes to file descriptor 2 of the driver: a stack trace at SIGTERM, and its log's errors while
processes end. `library_output(file)` sends to `file` what is written there; `sys.stderr`, where progress, messages
and tracebacks of ours go, stays where it was.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path


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
