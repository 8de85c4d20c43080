"""The tool `python`: a model's code, run in the sandbox. `python_tool(box)` is a `Tool` with one argument, `code`. If
stateful (the default), each trajectory has a session of its own. `WithPython` gives an environment this tool: `class
Solver(WithPython, Environment)`. The model sees the printed text and, of a traceback, its own lines."""

import weakref
from typing import Annotated, Any, ClassVar

import anyio

from agentrl.sandbox import RunResult, Sandbox, SandboxBusy, SandboxFailure, SandboxSession, SandboxUnavailable
from agentrl.tools.arguments import Injected, OutcomeKind, ToolError
from agentrl.tools.base import Tool, shortened

_STATEFUL = (
    "Run Python code and see what it prints, and the value of its last expression. "
    "Variables and imports stay for the next call."
)
_STATELESS = "Run a Python program and see what it prints. Nothing is kept for the next call."
_QUEUE_SECONDS = 90.0
_HEADLINES = {
    "error": "the code failed",
    "timeout": "the code ran out of time and was stopped",
    "memory": "the code ran out of memory",
    "output": "the code printed too much and was stopped",
    "killed": "the code's process was killed",
}


class PythonTool(Tool):
    """The tool `python` for a model."""

    def __init__(
        self, box: Sandbox | None = None, *, stateful: bool = True, timeout: float = 10.0, max_output_chars: int = 4096
    ) -> None:
        """Use the open sandbox `box`, or the environment's attribute `sandbox` (`WithPython`). If `stateful`, variables
        stay within a trajectory. `timeout`: seconds for the code of one call, at most the sandbox's `wall_seconds`. Of
        outputs longer than `max_output_chars` the middle is left out."""

        async def python(code: str, state: Annotated[Any, Injected]) -> str:
            return await self._run(code, state)

        outer = timeout + _QUEUE_SECONDS  # a call may wait for its turn
        description = _STATEFUL if stateful else _STATELESS
        super().__init__(python, description=description, timeout=outer, max_output_chars=max_output_chars)
        self.stateful, self._box, self._code_timeout = stateful, box, timeout
        self._sessions: dict[int, SandboxSession] = {}  # by `id`: environments may be equal, or have no hash

    async def end(self, state: object) -> None:
        """End the session of a trajectory; without one, nothing happens."""
        if state is not None and (session := self._sessions.pop(id(state), None)) is not None:
            await session.close()

    async def _run(self, code: str, state: object) -> str:
        try:
            box = self._box if self._box is not None else getattr(state, "sandbox", None)
            if not isinstance(box, Sandbox):
                remedy = "let the environment inherit from WithPython and call its `setup`"
                raise SandboxUnavailable(f"the tool `python` has no sandbox: give one to python_tool(...), or {remedy}")
            result = await (self._session(box, state) if self.stateful else box).run(code, timeout=self._code_timeout)
        except SandboxBusy as error:
            raise ToolError("the interpreter is busy; try again", kind=OutcomeKind.TIMEOUT) from error
        except SandboxFailure as error:
            raise ToolError(f"the interpreter failed: {error}") from error
        return _observation(result, self.max_output_chars)

    def _session(self, box: Sandbox, state: object) -> SandboxSession:
        if state is None:
            remedy = "pass `state` to the toolbox (environments do), or make the tool with stateful=False"
            raise SandboxUnavailable(f"a stateful `python` tool needs to know whose call it is: {remedy}")
        if id(state) not in self._sessions:
            self._sessions[id(state)] = box.session()
            weakref.finalize(state, self._sessions.pop, id(state), None)
        return self._sessions[id(state)]


python_tool = PythonTool


class WithPython:
    """For environments whose model may run Python; put it before `Environment` among the bases."""

    python: ClassVar[PythonTool] = python_tool()
    """The tool; a subclass may make another one, `python = python_tool(stateful=False)`."""
    sandbox: ClassVar[Sandbox | None] = None
    """The sandbox that all instances share, open between `setup` and `teardown`."""

    @classmethod
    def make_sandbox(cls, args: Any) -> Sandbox:
        """The sandbox to open; a subclass may choose limits, libraries and a backend."""
        return Sandbox()

    @classmethod
    async def setup(cls, args: Any) -> None:
        """Open the sandbox. Raises SandboxUnavailable: no safe backend works on this machine."""
        await super().setup(args)  # type: ignore[misc]
        cls.sandbox = await cls.make_sandbox(args).__aenter__()

    @classmethod
    async def teardown(cls) -> None:
        box, cls.sandbox = cls.sandbox, None
        if box is not None:
            await box.__aexit__(None, None, None)
        await super().teardown()  # type: ignore[misc]

    async def close(self) -> None:
        with anyio.CancelScope(shield=True):
            await self.python.end(self)
        await super().close()  # type: ignore[misc]


def _observation(result: RunResult, room: int) -> str:
    """Return the text that the model reads. Raises ToolError: the code did not run to its end without an error."""
    output = "\n".join(part.rstrip("\n") for part in (result.note, result.stdout, result.stderr) if part.strip())
    if result.ok:
        return shortened(output, room) or "[no output]"
    headline = _HEADLINES[result.outcome]
    text = f"{headline}\n{shortened(output, max(room - len(headline) - 1, 1))}" if output else headline
    raise ToolError(text, kind=OutcomeKind.TIMEOUT if result.outcome == "timeout" else OutcomeKind.RAISED)
