"""Runs a command that must not outlive another process: `python guard.py WATCHED_PID COMMAND...`.

1. Standard library only and run by file path, so that any interpreter starts it in a few milliseconds.
2. When the watched process is gone, however it died, the command gets SIGTERM, `GRACE` seconds to end, and then the
   guard's whole process group SIGKILL. The launcher puts every guard into a session of its own.
3. Otherwise the guard exits when the command does, with its exit status. It hands SIGTERM on to the command alone:
   a server that finds its own helpers terminated beside it takes that for a crash.

The kernel's parent-death signal alone will not do: it fires when the parent's *thread* ends, and servers are often
started from worker threads. It is set on the command as well, for the case that the guard itself is killed.
"""

import ctypes
import os
import select
import signal
import subprocess
import sys

GRACE = 5.0
PR_SET_PDEATHSIG = 1


def main(watched: int, command: list[str]) -> int:
    """Run `command` until it ends or process `watched` does."""
    try:
        parent = os.pidfd_open(watched)
    except ProcessLookupError:
        return 1
    libc = ctypes.CDLL(None)
    child = subprocess.Popen(command, preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))
    signal.signal(signal.SIGTERM, lambda signum, frame: child.terminate())
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.register(os.pidfd_open(child.pid), select.POLLIN)
    gone = [fd for fd, _ in poll.poll()]
    if parent in gone and child.poll() is None:
        child.terminate()
        try:
            child.wait(GRACE)
        except subprocess.TimeoutExpired:
            child.kill()
        os.killpg(0, signal.SIGKILL)
    status = child.wait()
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
