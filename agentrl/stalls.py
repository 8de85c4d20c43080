"""The cause of a stall of the event loop, from the kernel's statistics of its thread. On systems without
`/proc/self/task`, the cause is always the code that runs."""

from __future__ import annotations

import os
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

Cause = Literal["its own code", "a stopped process", "other programs on the processor", "another thread"]

_TASKS = Path("/proc/self/task")
_IDLE, _BUSY, _WAITED = 0.2, 0.5, 0.7
"""Shares of the time between two readings. A thread is idle if it was on a processor for less than `_IDLE`, as all threads
of a stopped process are. Another thread is busy above `_BUSY`. A thread with a wait above `_WAITED` lacked a core."""
_SWITCHES = 50.0
"""Sleeps per second above which a thread waits for the GIL: it then wakes every 5 ms. A blocked thread sleeps once."""
_SHORT = 0.05  # minimum seconds between two readings to tell a cause; also the maximum duration of a reading
_TRIES = 5
_LATE = 1.0  # seconds above which an idle loop means that the process was stopped, or a thread held the GIL


@dataclass(frozen=True, slots=True)
class ThreadTimes:
    """Times of the loop's thread, in seconds since the thread began."""

    now: float  # time of the reading, in `time.monotonic()` seconds
    cpu: float  # on a processor
    delay: float  # ready but without a processor
    switches: int  # number of times that it went to sleep
    process: float  # on a processor, all threads of the process together
    others: dict[str, float]  # by name, for each other running thread: on a processor or ready for one

    @classmethod
    def of(cls, thread: int) -> Self | None:
        """Read the times of the thread with this native id; None if the system does not have them."""
        now, process = time.monotonic(), time.process_time()  # first, since this thread may be halted at any file
        try:
            cpu, delay = _schedule(thread)
            switches = int(_read(thread, "status").partition(b"voluntary_ctxt_switches:")[2].split()[0])
        except (OSError, ValueError, IndexError):
            return None
        others = {}
        for other in threading.enumerate():
            if other.native_id not in (None, thread, threading.get_native_id()):
                with suppress(OSError, ValueError):  # the thread has just ended
                    others[other.name] = sum(_schedule(other.native_id or 0))
        return cls(now, cpu, delay, switches, process, others)

    @classmethod
    def at_once(cls, thread: int) -> Self | None:
        """Read the times, again if this thread was halted between two files: all times must be of the same moment."""
        for _ in range(_TRIES):
            times = cls.of(thread)
            if times is None or time.monotonic() - times.now < _SHORT:
                break
        return times


def _schedule(thread: int) -> tuple[float, float]:
    cpu, delay, _ = _read(thread, "schedstat").split()
    return int(cpu) / 1e9, int(delay) / 1e9


def _read(thread: int, name: str) -> bytes:
    file = os.open(f"{_TASKS}/{thread}/{name}", os.O_RDONLY)  # a fifth of the time of `Path.read_text`
    try:
        return os.read(file, 1 << 16)
    finally:
        os.close(file)


def cause(before: ThreadTimes | None, after: ThreadTimes | None) -> tuple[Cause, str]:
    """Return the cause why the loop did not run between two readings, and a text for causes outside its own code."""
    if before is None or after is None or (seconds := after.now - before.now) < _SHORT:
        return "its own code", ""
    cpu, delay = (after.cpu - before.cpu) / seconds, (after.delay - before.delay) / seconds
    times = {name: total - before.others.get(name, 0.0) for name, total in after.others.items()}
    busiest = max(times, key=times.__getitem__, default="")
    used = max((after.process - before.process) / seconds - cpu, times.get(busiest, 0.0) / seconds)
    asks = (after.switches - before.switches) / seconds > _SWITCHES
    if cpu < _IDLE and used > (_IDLE if seconds > _LATE else _BUSY) and (seconds > _LATE or asks):
        named = f"the thread {busiest}" if times.get(busiest, 0.0) > _IDLE * seconds else "another thread"
        return "another thread", f"{named} held the interpreter"
    if delay > _WAITED:
        return "other programs on the processor", "the processor was busy with other programs"
    if cpu < _IDLE and seconds > _LATE:
        return "a stopped process", "the process was stopped, or the machine asleep"
    return "its own code", ""
