"""A Python that has already imported the heavy packages: tests start processes from it in a hundredth of the time.

1. The process that schedules the tests (`pytest -n`) starts one server, which imports torch, megatron, transformers,
   Ray and more, once. pytest workers, the processes of `run_ranks` and embedded engines are forked from the server.
2. `python()` is a program that takes the arguments of an interpreter: `-c CODE` or `-m MODULE`, and `-u`. Its standard
   streams, open files, folder and environment are those of the forked process. Signals and exit status are passed on.
   Without the server, `python()` is the interpreter itself.
3. A package that reads the environment at import gets the server's: OMP_NUM_THREADS is 1.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import selectors
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn, TextIO

import agentrl

_VARIABLE = "AGENTRL_TEST_PYTHON"
_CLIENT = Path(__file__).with_name("warm_client.py")
_IMPORTED = (
    "ray ray.cluster_utils transformers.models.qwen3.modeling_qwen3 sympy nicegui aiohttp pytest mcp.server.mcpserver"
    " latex2sympy2_extended math_verify playwright.sync_api prometheus_client pyarrow.parquet"
    " tensorboard.backend.event_processing.event_accumulator"
)
_FDS = 64
"""Maximum number of open files that one process is given."""


def python() -> str:
    """Return the program that starts a process with the heavy packages imported; without a server the interpreter."""
    return os.environ.get(_VARIABLE, sys.executable)


@contextlib.contextmanager
def serving() -> Iterator[None]:
    """Start the server, and end it with the block or with this process."""
    folder = Path(tempfile.mkdtemp(prefix="warm-"))
    program = folder / "python"
    # The kernel limits the length of a `#!` line, and the number of interpreter arguments in it.
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -I -S {_CLIENT} {sys.executable} {folder}/socket "$@"\n')
    program.chmod(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(folder / "socket"))
        listener.listen(128)
        command = [sys.executable, "-c", f"from {__name__} import main; main({listener.fileno()})"]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, pass_fds=[listener.fileno()])
    os.environ[_VARIABLE] = str(program)
    try:
        yield
    finally:
        del os.environ[_VARIABLE]
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:  # it is still importing
            process.kill()
            process.wait()
        shutil.rmtree(folder)


def main(listener: int) -> None:
    """Import the packages, and fork a process for each connection, until standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the forks, then the program that started this
    _import()
    with socket.socket(fileno=listener) as server:
        _Server(server).run()


def _import() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from agentrl.train.megatron.device import uncompiled

        with uncompiled():
            importlib.import_module("agentrl.train.megatron.network")
        ours = (module.name for module in pkgutil.walk_packages(agentrl.__path__, "agentrl."))
        for name in (*_IMPORTED.split(), *ours):
            if not name.endswith("__main__"):
                with contextlib.suppress(ImportError):
                    importlib.import_module(name)
    gc.collect()
    gc.freeze()


class _Server:
    """Forks, reaps, and tells each client how its process ended."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener, self._clients = listener, dict[int, socket.socket]()
        self._select = selectors.DefaultSelector()
        self._woken, waker = socket.socketpair()
        for end in (self._woken, waker):
            end.setblocking(False)
        self._inherited = [self._woken, waker, listener]
        signal.set_wakeup_fd(waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for file, does in ((0, self._end), (listener, self._fork), (self._woken, self._reap)):
            self._select.register(file, selectors.EVENT_READ, does)
        self._running = True

    def run(self) -> None:
        while self._running:
            for key, _ in self._select.select():
                key.data(key.fileobj)
        signal.set_wakeup_fd(-1)

    def _end(self, _: object) -> None:
        self._running = False
        for pid in self._clients:
            os.kill(pid, signal.SIGTERM)

    def _fork(self, _: object) -> None:
        client, _address = self._listener.accept()
        try:
            asked, fds = _receive(client)
        except (OSError, ValueError):  # it has ended
            client.close()
            return
        if pid := os.fork():
            for fd in fds:
                os.close(fd)
            self._clients[pid] = client
            with contextlib.suppress(OSError):  # it has ended, which is handled below
                client.sendall(pid.to_bytes(4, "little"))
            self._select.register(client, selectors.EVENT_READ, lambda _: self._hung_up(pid))
            return
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for each in (*self._inherited, *self._clients.values(), client):
            each.close()
        self._select.close()
        _become(asked, fds)

    def _hung_up(self, pid: int) -> None:
        """End the process of a client that has disconnected."""
        if pid in self._clients:
            self._select.unregister(self._clients.pop(pid))
            os.kill(pid, signal.SIGKILL)

    def _reap(self, _: object) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._woken.recv(4096):
                pass
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                pid, status = ended
                if client := self._clients.pop(pid, None):
                    self._select.unregister(client)
                    with contextlib.suppress(OSError):
                        client.sendall(status.to_bytes(4, "little"))
                    client.close()


def _receive(client: socket.socket) -> tuple[dict[str, Any], list[int]]:
    size = int.from_bytes(client.recv(8, socket.MSG_WAITALL), "little")
    data, fds, _flags, _address = socket.recv_fds(client, size, _FDS)
    while len(data) < size and (more := client.recv(size - len(data))):
        data += more
    return json.loads(data), fds


def _become(asked: dict[str, Any], fds: list[int]) -> NoReturn:
    """Become the requested process, and run it to its end."""
    status = 1
    try:
        os.setsid()  # Ctrl-C comes through the client
        _take(fds, asked["fds"])
        os.chdir(os.fsencode(str(asked["cwd"])))
        os.umask(int(asked["umask"]))
        os.environ.clear()
        os.environ.update(asked["environ"])
        status = _run(list(asked["arguments"]))
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _take(fds: list[int], wanted: list[int]) -> None:
    """Give received files the numbers that they have in the client."""
    free = max([*fds, *wanted, 2]) + 1
    for place, fd in enumerate(fds):  # move all files away first, so that no number is taken
        os.dup2(fd, free + place)
        os.close(fd)
    for place, number in enumerate(wanted):
        os.dup2(free + place, number, inheritable=True)
        os.close(free + place)


def _run(arguments: list[str]) -> int:
    """Run the command in an interpreter's arguments. Returns the exit status."""
    import atexit
    import threading

    sys.stdin, sys.stdout, sys.stderr = open(0, closefd=False), _text(1), _text(2)  # noqa: SIM115
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    while arguments[0] not in ("-c", "-m"):
        del arguments[: 2 if arguments[0] in ("-W", "-X") else 1]
    how, what, *rest = arguments
    try:
        if how == "-c":
            sys.argv = ["-c", *rest]
            exec(what, vars(main))
        else:
            sys.argv = ["-m", *rest]
            runpy.run_module(what, run_name="__main__", alter_sys=True)
        code: object = 0
    except SystemExit as ended:
        code = ended.code
    except BaseException:  # noqa: BLE001 - an interpreter's last resort
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    if isinstance(code, str):
        sys.stderr.write(f"{code}\n")
    return code if isinstance(code, int) else int(code is not None)


def _text(fd: int) -> TextIO:
    return open(fd, "w", buffering=1, closefd=False)
