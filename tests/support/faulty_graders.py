"""Graders that misbehave, for fault injection; given by path, like a user's own."""

import ctypes
import os
import re
import subprocess
import time
from collections.abc import Mapping
from typing import Any, cast

from agentrl.rm_hub import Grade

GOOD = Grade(1.0, True, "ok", "fine", {"half": 0.5})
LEAK: list[bytes] = []


def echo(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    return Grade(1.0, response == label, response, repr(dict(metadata)))


def sleeps(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    time.sleep(float(response))
    return GOOD


def spins_in_c(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    re.match(r"(a+)+$", "a" * 60 + "b")
    return GOOD


def segfaults(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    ctypes.string_at(0)
    return GOOD


def exits(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    os._exit(3)


def hogs(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    return Grade(float(len(bytearray(4 << 30))), True)


def leaks(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    LEAK.append(bytes(1 << 20))
    return Grade(float(len(LEAK)), True)


def raises(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    raise LookupError("no such thing")


def extracts_number(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    return Grade(1.0, True, cast(str, 42))


def judges_by_numpy(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    import numpy as np

    right = np.isclose(1.0, 1.0 + 1e-12)
    return Grade(float(right), cast(bool, right))


def gives_nan(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    return Grade(float("nan"), True)


def gives_number(response: str, label: Any, metadata: Mapping[str, Any]) -> Any:
    return 1.0


def says_pid(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    return Grade(float(os.getpid()), True)


def starts_a_process(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """Start a child process, write its id into the file that `response` names, then hang."""
    child = subprocess.Popen(["sleep", "300"])
    with open(response, "w") as file:
        file.write(str(child.pid))
    time.sleep(300)
    return GOOD


async def waits(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    import anyio

    await anyio.sleep(float(response))
    return GOOD
