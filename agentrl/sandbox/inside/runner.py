"""Runs the model's code, in the confined child.

1. One program: like `python main.py`, with the given standard input; then the process ends.
2. A session: cells that share one `__main__`; the value of a cell's last expression is shown, as in a notebook.
3. Tracebacks start at the model's own frames and show its own lines."""

import ast
import atexit
import builtins
import contextlib
import itertools
import linecache
import os
import site
import socket
import sys
import threading
import traceback
import types
from typing import Any

from agentrl.sandbox.inside import frames


def serve(control: socket.socket, *, session: bool) -> None:
    """Take requests from the jailer; never returns."""
    decoder, main, own = frames.FrameDecoder(), _fresh_main(session), os.getpid()
    for cell in itertools.count(1):
        code = _receive(control, decoder)["code"]
        status, answer = _execute(code, f"<cell {cell}>" if session else "main.py", main, show_last=session)
        if not session:
            _end_program()
        _flush()
        if os.getpid() != own:
            os._exit(status)  # a process that the code forked; only the original process answers
        try:
            control.sendall(answer)
        except OSError:
            os._exit(status)  # the code closed the channel: the exit status suffices, and a session is over
        if not session:
            os._exit(status)


def reseed() -> None:
    """Make the random numbers of forked children differ; the standard library's `random` does so by itself."""
    if (random := sys.modules.get("numpy.random")) is not None:
        random.seed()


def _end_program() -> None:
    """Do what Python does at its end: wait for threads, then call the code's exit handlers."""
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
    except BaseException as error:  # noqa: BLE001 - the model's own functions: reported as Python does at exit
        _show(error)


def _execute(code: str, name: str, main: types.ModuleType, *, show_last: bool) -> tuple[int, bytes]:
    """Run `code`; return its exit status and its answer, a key of `frames.ANSWERS`."""
    linecache.cache[name] = (len(code), None, code.splitlines(keepends=True), name)
    try:
        for part in _compiled(code, name, show_last):
            exec(part, main.__dict__)
    except SystemExit as error:
        status = _exit_status(error.code)
        return status, b"e" if status else b"o"
    except BaseException as error:  # noqa: BLE001 - the model's code: whatever it raises is its result
        _show(error)
        return 1, b"m" if isinstance(error, MemoryError) else b"e"
    return 0, b"o"


def _compiled(code: str, name: str, show_last: bool) -> list[types.CodeType]:
    tree = ast.parse(code, name)
    parts: list[tuple[Any, str]] = [(tree, "exec")]
    if show_last and tree.body and isinstance(tree.body[-1], ast.Expr):
        parts.append((ast.Interactive([tree.body.pop()]), "single"))
    return [compile(part, name, mode, dont_inherit=True) for part, mode in parts]


def _exit_status(code: object) -> int:
    if code is None or isinstance(code, int):
        return (code or 0) & 0xFF
    sys.stderr.write(f"{code}\n")
    return 1


def _show(error: BaseException) -> None:
    """Print a traceback without this module's frames."""
    step = error.__traceback__
    while step is not None and step.tb_frame.f_code.co_filename == __file__:
        step = step.tb_next
    if isinstance(error, SyntaxError) and step is not None and step.tb_frame.f_code.co_filename == ast.__file__:
        step = None
    try:
        if sys.excepthook is not sys.__excepthook__:
            sys.excepthook(type(error), error, step)
        else:
            traceback.print_exception(type(error), error.with_traceback(step), step)
    except BaseException:  # noqa: BLE001 - the model's hook or its exception's __str__ is broken, or no memory is left
        with contextlib.suppress(OSError):  # the code closed its standard error
            os.write(2, f"{type(error).__name__}\n".encode())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        # The model's program may have set any object, closed or broken. Its errors are no result of the run.
        with contextlib.suppress(BaseException):
            stream.flush()


def _fresh_main(session: bool) -> types.ModuleType:
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    if not session:
        main.__dict__["__file__"] = "main.py"
    sys.modules["__main__"] = main
    site.setquit()  # defines `exit` and `quit`, which many programs call; `-S` skipped this
    sys.argv = ["main.py"]
    return main


def _receive(control: socket.socket, decoder: frames.FrameDecoder) -> dict[str, Any]:
    while (message := decoder.next()) is None:
        if not (data := control.recv(65536)):
            os._exit(0)
        decoder.feed(data)
    return message
