"""Limits and result of a run."""

from dataclasses import dataclass, fields
from typing import Literal

from agentrl.errors import SettingsError

Outcome = Literal["ok", "error", "timeout", "memory", "output", "killed"]


@dataclass(frozen=True, slots=True)
class _Limits:
    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kinds, kind = ((int,), "whole number") if field.type is int else ((int, float), "number")
            most = 8 << 20 if field.name == "output_bytes" else 1 << 30  # the output must fit into one message
            if isinstance(value, bool) or not isinstance(value, kinds) or not 0 < value <= most:
                expected = f"a positive {kind}, at most {most}"
                raise SettingsError(f"limit {field.name}: expected {expected}, got {value!r}")


@dataclass(frozen=True, slots=True)
class SandboxLimits(_Limits):
    """Limits of one run (in a session, `processes` and `disk_mb` apply to all its runs together).

    Attributes:
        wall_seconds: seconds from the start of the code to its end; then the whole process tree is killed.
        cpu_seconds: processor seconds of the code's process, all its threads together, and of the processes that it
            started, if they still run or it waited for them.
        memory_mb: address space of one process beyond that of the preloaded libraries. There is no limit on the sum
            of all processes but `processes` times this.
        processes: processes and threads at once. With backend `landlock` code cannot fork, so these are threads.
        file_mb: size of one file.
        disk_mb: all files together. They are in memory, and are deleted after the run. With backend `landlock` no file
            can be written.
        output_bytes: standard output and standard error together; one byte more ends the run. At most 8 MiB."""

    wall_seconds: float = 10.0
    cpu_seconds: float = 10.0
    memory_mb: int = 512
    processes: int = 16
    file_mb: int = 16
    disk_mb: int = 64
    output_bytes: int = 65536


@dataclass(frozen=True, slots=True)
class MachineLimits(_Limits):
    """Limits of a machine.

    Attributes:
        seconds: time of one command; then all its processes are killed.
        memory_mb: under bubblewrap, the address space of one process; in a container, the memory of all processes.
        processes: processes and threads at once.
        file_mb: size of one file. The sum of all files has no limit.
        output_bytes: number of bytes kept of a command's standard output, and of its standard error. At most 8 MiB."""

    seconds: float = 600.0
    memory_mb: int = 4096
    processes: int = 256
    file_mb: int = 1024
    output_bytes: int = 1 << 20


@dataclass(frozen=True, slots=True)
class RunResult:
    """The result of one run.

    Attributes:
        stdout: standard output, decoded as UTF-8 with replacement; in a session also the last expression's value.
        stderr: standard error; a traceback starts at the code's own frames.
        outcome: `ok`; `error` (an exception, or an exit status other than 0); `timeout` (wall or processor time);
            `memory` (an uncaught MemoryError); `output` (too long; its beginning is kept);
            `killed` (ended by a signal, by the machine's lack of memory, or because it broke the sandbox's protocol).
        returncode: the exit status, -N for signal N, None if the session continues.
        seconds: from the start of the code to its end, without the wait for a free slot.
        note: that the session was restarted, or that it has ended; otherwise ""."""

    stdout: str
    stderr: str
    outcome: Outcome
    returncode: int | None
    seconds: float
    note: str = ""

    @property
    def ok(self) -> bool:
        return self.outcome == "ok"

    @property
    def last_line(self) -> str:
        """The last line on standard error, which names the exception of a traceback; "" if there is none."""
        return next(reversed(self.stderr.strip().splitlines()), "")
