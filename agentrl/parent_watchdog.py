"""Runs a command that must not outlive another process: `python parent_watchdog.py WATCHED_PID COMMAND...`.

1. Uses the standard library only, and is run by file path.
2. If the watched process ends, the command gets SIGTERM. After its end, or `GRACE` seconds, the process group gets
   SIGKILL. Otherwise the watchdog exits with the command's status. It passes SIGTERM only to the command.
3. The kernel's parent-death signal does not suffice: it fires when the parent's thread ends. The command also has this
   signal, in case the watchdog is killed."""

import ctypes
import os
import select
import signal
import subprocess
import sys

GRACE = 5.0
PR_SET_PDEATHSIG = 1


def main(watched: int, command: list[str]) -> int:
    """Run `command` until it or the process `watched` ends. Return the exit status."""
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
