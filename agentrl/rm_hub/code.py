"""`code`: unit tests of submitted Python, in the sandbox.

1. The last code block of the answer is tested (the last block that defines the tested name, if the name is known).
2. The submission sees no tests or verdicts. Printed outputs are compared in this process. Other tests run in a second
   sandbox, on proxies.
3. Each test has a deadline. After an overrun or a crash the submission is loaded again.
4. A test that cannot run, or that passes without using the submission, is a `grader_bad_label`.
5. Limits: if tests use a class by name, its operators are the submission's code. Arguments are passed by value, but the
   test sees in-place changes of a list, dict or set. Coroutines run before they are awaited."""

import math
import re
import time
from collections.abc import Callable
from contextlib import aclosing
from decimal import Decimal, InvalidOperation
from functools import partial
from typing import Any, TypeVar

import anyio

from agentrl.errors import GraderFailure
from agentrl.rm_hub.grade import Grade, GraderService, Metadata
from agentrl.rm_hub.reading.common import one_of
from agentrl.rm_hub.settings import RmHubSettings
from agentrl.rm_hub.submissions.sessions import MAX_OVERRUNS, NOT_RUN, Submission, run_tests
from agentrl.rm_hub.submissions.tests import Checks, Programs, extract_code, read_tests, usual_imports, with_preamble
from agentrl.sandbox import Sandbox, SandboxBusy, SandboxFailure, SandboxInput, SandboxLimits
from agentrl.tools.threads import run_in_daemon_thread

T = TypeVar("T")

_PRELOAD = ("numpy", "pytest", "unittest", "asyncio", "doctest")
_OUTPUT_BYTES = 8 << 20  # the sandbox's maximum: expected outputs may have megabytes
_SHORT = 20_000


class CodeGrader(GraderService):
    """A grader of code, an async context manager: one sandbox for many submissions. Reads the settings `code_*`."""

    def __init__(self, settings: RmHubSettings) -> None:
        self._settings = settings
        seconds, width = settings.code_timeout, settings.code_concurrency
        self._places = anyio.CapacityLimiter(width)
        limits = SandboxLimits(wall_seconds=seconds, cpu_seconds=seconds, output_bytes=_OUTPUT_BYTES)
        self._sandbox = Sandbox(limits=limits, preload=_PRELOAD, max_concurrency=2 * width)
        super().__init__(self._sandbox)

    async def grade(self, response: str, label: Any, metadata: Metadata) -> Grade:
        """Test the answer's program. Raises GraderFailure: `grader_no_label` or `grader_bad_label` if the tests are
        missing or broken; `grader_sandbox` if the sandbox broke. SandboxUnavailable: this machine has no sandbox."""
        cases = read_tests(label, metadata)
        # A block that defines a name which the tests mention is preferred.
        mentioned = () if isinstance(cases, Programs) else (*cases.tests, cases.entry, "Solution")
        needed = set(re.findall(r"[A-Za-z_]\w*", "\n".join(map(str, mentioned))))
        program, where = await _aside(len(response), partial(extract_code, response, needed))
        if program is None:
            return Grade(0.0, False, None, where)
        program = with_preamble(program, cases.preamble)
        try:
            async with self._places:
                results = await self._run(program, cases, time.monotonic() + self._settings.code_timeout)
        except (SandboxBusy, SandboxFailure) as error:
            raise GraderFailure(f"the sandbox failed: {error}", kind="grader_sandbox") from error
        except SandboxInput as error:
            raise GraderFailure(f"--rm-type code: an input of the tests: {error}", kind="grader_bad_label") from error
        rules = dict.fromkeys((self._settings.code_score, "all", "fraction"))  # the first is the default
        rule = one_of(metadata, "code_score", tuple(rules), "code")
        failed = [(number, why) for number, why in enumerate(results, 1) if why]
        passed, total = len(results) - len(failed), len(results)
        reason = f"{passed} of {total} tests passed" + (f"; test {failed[0][0]}: {failed[0][1]}" if failed else "")
        parts = {"passed": float(passed), "tests": float(total), "fraction": passed / total}
        return Grade(parts["fraction"] if rule == "fraction" else float(not failed), not failed, program, reason, parts)

    async def _run(self, program: str, cases: Programs | Checks, ends: float) -> list[str]:
        """Return a text for each test: empty if it passed, else the reason of the failure."""
        if isinstance(cases, Checks):
            imports, seconds = usual_imports(program, cases), self._settings.code_test_timeout
            submission = Submission(self._sandbox, program, imports, seconds, ends)
            async with aclosing(submission):
                return await run_tests(self._sandbox, submission, cases.tests, cases.entry)
        results: list[str] = []
        overruns = 0
        for given, want in cases.tests:
            seconds = min(self._settings.code_test_timeout, ends - time.monotonic())
            if seconds <= 0 or overruns >= MAX_OVERRUNS:
                results.append(NOT_RUN)
                continue
            run = await self._sandbox.run(program, stdin=given, timeout=seconds)
            overruns += run.outcome == "timeout"
            if not run.ok:
                results.append(f"{run.outcome}: {run.last_line:.200}")
                continue
            same = await _aside(len(run.stdout) + len(want), partial(same_output, run.stdout, want))
            results.append("" if same else f"printed {run.stdout.strip()!r:.80}, expected {want.strip()!r:.80}")
        return results


async def _aside(size: int, work: Callable[[], T]) -> T:
    """Return the result of `work` on `size` characters. Long texts get a thread and do not block the event loop."""
    return work() if size <= _SHORT else await run_in_daemon_thread(work)


def same_output(got: str, want: str) -> bool:
    """Return true if the lines of both outputs are equal. Ignores white space around words and empty lines at the ends.
    Numbers are compared by value: within 1e-6 if the expected number has a point or an exponent, else exactly."""
    got_lines, want_lines = (
        "\n".join(line.rstrip() for line in text.split("\n")).strip("\n").split("\n") for text in (got, want)
    )
    return len(got_lines) == len(want_lines) and all(map(_same_line, got_lines, want_lines))


def _same_line(got: str, want: str) -> bool:
    if got == want:
        return True
    a, b = got.split(), want.split()
    return len(a) == len(b) and all(x == y or _same_number(x, y) for x, y in zip(a, b, strict=True))


def _same_number(got: str, want: str) -> bool:
    if len(got) > 60 or len(want) > 60 or "_" in got:
        return False
    try:
        a, b = Decimal(got), Decimal(want)
    except InvalidOperation:
        return False
    if not (a.is_finite() and b.is_finite()):
        return False
    whole = "." not in want and "e" not in want.lower()
    return a == b if whole else math.isclose(float(a), float(b), rel_tol=1e-6, abs_tol=1e-6)
