"""Runs a submission in one sandbox and its tests in another, and passes messages between them. A message from the
submission's sandbox is a value for the tests, never a verdict: the tests' sandbox decides, whatever the submission
prints. Messages are JSON lines after a random token."""

import functools
import json
import secrets
import time
from collections.abc import Sequence
from contextlib import aclosing, suppress
from importlib import resources
from typing import Any

from agentrl.errors import GraderFailure, raised_as
from agentrl.sandbox import Sandbox, SandboxSession

_START_SECONDS = 15.0
MAX_OVERRUNS = 3  # after this many overruns, the remaining tests fail without a run
_LATE = "took too long"
_ENDS = {"timeout": _LATE, "memory": "used too much memory", "output": "used too much output"}
NOT_RUN = "not run: earlier tests took all the time"
_PARTS = {"answer": ("values", "answer"), "tests": ("values", "standins", "forms", "tests")}


@functools.cache
def _harness(side: str) -> str:
    """Return the source of one side and of the modules that it uses, as one text."""
    folder = resources.files("agentrl.rm_hub.submissions.harness")
    texts = [(folder / f"{name}.py").read_text(encoding="utf-8") for name in _PARTS[side]]
    return "\n".join(line for text in texts for line in text.splitlines() if "agentrl.rm_hub" not in line)


class _Side:
    """A session of the sandbox with a harness. A call returns JSON, or None with the reason."""

    def __init__(self, sandbox: Sandbox, side: str) -> None:
        self._sandbox, self._side = sandbox, side
        self.token = secrets.token_hex(16)
        self.session: SandboxSession | None = None

    async def open(self, setup: str) -> None:
        await self.aclose()
        self.session = self._sandbox.session()
        result = await self.session.run(f"{_harness(self._side)}\n{setup}", timeout=_START_SECONDS)
        if not result.ok:
            said = f"the sandbox could not start the tests: {result.outcome} {result.last_line:.300}"
            raise GraderFailure(said, kind="grader_sandbox")

    async def aclose(self) -> None:
        session, self.session = self.session, None
        if session is not None:
            await session.close()

    async def say(self, method: str, message: Any, deadline: float) -> tuple[Any, str]:
        """Call the harness; return its answer and "". If there is none, end the process; return None and the reason."""
        if self.session is None:
            return None, "the process of the answer has ended"
        code = f"__agentrl__.{method}({json.dumps(message)!r})"
        result = await self.session.run(code, timeout=max(0.01, deadline - time.monotonic()))
        lines = [line for line in result.stdout.splitlines() if line.startswith(self.token)]
        with suppress(ValueError, RecursionError):
            if result.outcome == "ok" and lines and isinstance(said := json.loads(lines[-1][len(self.token) :]), dict):
                return said, ""
        await self.aclose()
        ended = f"the answer's code ended its process or broke it ({result.last_line:.200})"
        return None, _ENDS.get(result.outcome, ended)


class Submission(_Side):
    """The submission's side. It loads the submission on first use and after every crash. The caller closes it."""

    def __init__(self, sandbox: Sandbox, program: str, imports: str, test_timeout: float, ends: float) -> None:
        super().__init__(sandbox, "answer")
        self._load = {"do": "load", "source": program, "imports": imports}
        self.test_timeout, self.ends = test_timeout, ends
        self.overruns = 0
        self.names: dict[str, Any] = {}

    def deadline(self) -> float:
        """Return the deadline of a test that starts now, in `time.monotonic()` seconds."""
        return min(time.monotonic() + self.test_timeout, self.ends)

    async def load(self, deadline: float) -> str:
        """Load the submission if it is not loaded. Return why it cannot be loaded, or ""."""
        if self.session is not None:
            return ""
        await self.open(f"__agentrl__ = SubmissionServer({self.token!r})")
        answer, why = await self.request(self._load, deadline + 1.0)
        if why:
            return f"loading the answer's code: {why}"
        if "raised" in answer:
            await self.aclose()
            match answer["raised"]:
                case [_, str(kind), _, args]:
                    return f"loading the answer's code raised {kind}: {args!s:.200}"
            return "loading the answer's code: it broke its process"
        self.names = answer.get("names", {})
        return ""

    async def request(self, request: Any, deadline: float) -> tuple[Any, str]:
        """Send a request to the submission's side. Return its answer and "", or None and the reason."""
        answer, why = await self.say("serve", request, deadline)
        self.overruns += why == _LATE
        return answer, why


async def run_tests(sandbox: Sandbox, submission: Submission, tests: Sequence[Any], entry: str | None) -> list[str]:
    """Run tests: code (text) or calls (name, arguments, value). Return for each "", or why it failed. Raises
    GraderFailure (`grader_bad_label`): a test is not Python, or cannot be used with any submission."""
    results: list[str] = []
    async with aclosing(_Side(sandbox, "tests")) as side:
        while len(results) < len(tests):
            late = submission.overruns >= MAX_OVERRUNS or time.monotonic() >= submission.ends
            if why := NOT_RUN if late else await submission.load(submission.deadline()):
                return results + [why] * (len(tests) - len(results))
            if side.session is None:
                what = "a call's arguments or value are no JSON"
                with raised_as(_unusable, what, TypeError, ValueError, RecursionError):
                    todo = json.dumps([side.token, tests[len(results) :], entry])
                await side.open(f"import json\n__agentrl__ = Tests(*json.loads({todo!r}))")
            results.append(await _next(side, submission, submission.deadline()))
    return results


async def _next(side: _Side, submission: Submission, deadline: float) -> str:
    """Run the next test. Return "", or why it failed."""
    answer: Any = {"names": submission.names}
    while True:
        wanted, why = await side.say("step", answer, deadline + 0.5)
        if why:
            submission.overruns += why == _LATE
            return why
        if "result" in wanted:
            outcome, reason = wanted["result"]
            if outcome == "broken":
                raise _unusable(reason)
            return "" if outcome == "passed" else reason or "failed"
        reply, lost = await submission.request(wanted["ask"], deadline)
        answer = {"abandon": lost} if lost else reply


def _unusable(why: str) -> GraderFailure:
    return GraderFailure(f"--rm-type code cannot use the item's tests: {why}", kind="grader_bad_label")
