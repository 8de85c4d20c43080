"""Asks the server of `warm` for a process and acts in its place: `warm_client.py PYTHON SOCKET ARGUMENTS...`.

It passes on its open files, folder, environment and signals, and ends as the process ends. If it is killed, the
process is killed too. Standard library only, run by file path, without `site`.
"""

import contextlib
import json
import os
import signal
import socket
import sys


def main(python: str, path: str, arguments: list[str]) -> int:
    if "-I" in arguments or not {"-c", "-m"} & set(arguments):
        os.execv(python, [python, *arguments])
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # blocked until it can be passed on
    fds = [int(name) for name in os.listdir("/proc/self/fd")]
    fds = [fd for fd in fds if _open(fd)]
    server = socket.socket(socket.AF_UNIX)
    try:
        server.connect(path)
    except OSError:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        os.execv(python, [python, *arguments])
    umask = os.umask(0)
    os.umask(umask)
    asked = {
        "fds": fds,
        "cwd": os.getcwd(),
        "umask": umask,
        "environ": dict(os.environ),
        "arguments": arguments,
    }
    data = json.dumps(asked).encode()
    server.sendall(len(data).to_bytes(8, "little"))
    sent = socket.send_fds(server, [data], fds)
    server.sendall(data[sent:])
    said = server.recv(4, socket.MSG_WAITALL)
    if not said:
        return 1
    pid = int.from_bytes(said, "little")

    def pass_on(number: int, _: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGQUIT):
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for fd in fds:
        os.close(fd)
    told = server.recv(4, socket.MSG_WAITALL)
    status = os.waitstatus_to_exitcode(int.from_bytes(told, "little")) if told else 1
    if status < 0:
        with contextlib.suppress(OSError):  # SIGKILL has no handler
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


def _open(fd: int) -> bool:
    """Return true if the file is still open: the one used to list them is closed already."""
    try:
        os.fstat(fd)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3:]))
