"""The process from which calls are forked: it imports the preloaded libraries once and never sees the model's code.

1. It takes `{"jail": {...}}` messages, each with one socket, and forks a jailer that serves that socket.
2. It ends, and its children with it, if the parent closes the control socket or ends (by a process descriptor).
3. At its end it removes the folder of its children, if they have one, because a killed parent cannot."""

import gc
import importlib
import json
import os
import random
import select
import signal
import socket
import sys
import traceback
from typing import Any

from agentrl.sandbox.inside import jailer
from agentrl.sandbox.inside.jail import Jail

_LARGEST = 1 << 16
# Ids that no ordinary account has (systemd gives them to services that want a user of their own).
_FIRST_USER, _LAST_USER = 61184, 65519


def main(control: socket.socket, lifeline: int, settings: dict[str, Any]) -> None:
    """Serve until the parent is gone. `settings`: `site` (folders for sys.path), `preload` (module names), `own_users`
    (true: each child gets its own user id), `to_remove` (a folder to remove at the end, if any)."""
    zygote = os.getpid()
    try:
        _serve(control, lifeline, settings)
    finally:
        if "to_remove" in settings and os.getpid() == zygote:
            import shutil  # here, because other zygotes need not load its many parts

            shutil.rmtree(settings["to_remove"], ignore_errors=True)


def _serve(control: socket.socket, lifeline: int, settings: dict[str, Any]) -> None:
    sys.path += settings["site"]
    broken = _preload(settings["preload"])
    if "numpy" in sys.modules:
        importlib.import_module("numpy.random")  # numpy loads it lazily; load it here, once for all children
    control.send(json.dumps({"broken": broken}).encode())
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the jailers
    gc.collect()
    gc.freeze()
    user = random.randrange(_FIRST_USER, _LAST_USER)
    poll = select.poll()
    for descriptor in (control.fileno(), lifeline):
        poll.register(descriptor, select.POLLIN)
    while True:
        if lifeline in dict(poll.poll()):
            return
        data, descriptors, _, _ = socket.recv_fds(control, _LARGEST, 1)
        if not data:
            return
        user = user + 1 if user < _LAST_USER else _FIRST_USER
        _spawn(json.loads(data)["jail"], descriptors[0], user if settings["own_users"] else None, (control, lifeline))


def _spawn(jail: dict[str, Any], descriptor: int, user: int | None, ours: tuple[socket.socket, int]) -> None:
    with socket.socket(fileno=descriptor) as parent:
        try:
            pid = os.fork()
        except OSError as error:
            jailer.fail(parent, str(error))
            return
        if pid == 0:
            try:
                ours[0].close()
                os.close(ours[1])
                jailer.main(parent, Jail(**jail, user=user))
            except BaseException:  # noqa: BLE001 - for the parent's error file; the process ends in any case
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)


def _preload(names: list[str]) -> list[str]:
    """Import the libraries that are installed; return those whose import fails, with the error."""
    broken: list[str] = []
    for name in names:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                broken.append(f"{name} ({error})")
        except Exception as error:  # noqa: BLE001 - a library's import may raise anything; it is reported
            broken.append(f"{name} ({type(error).__name__}: {error})")
    sys.stdout.flush()  # else every child would print the buffered output of an import
    sys.stderr.flush()
    return broken
