"""`Tool`, the `@tool` decorator, and `ToolSource`: tools that come from somewhere else."""

import contextlib
import copy
import difflib
import inspect
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Literal, Self, TypedDict, Unpack, overload

import anyio
from pydantic_core import PydanticSerializationError, to_json

from agentrl.clock import Deadline, waiting
from agentrl.errors import Failure, PluginError, SandboxUnavailable, ToolFailure, first_error
from agentrl.media import is_picture
from agentrl.plugins import is_async, must_propagate
from agentrl.tools.arguments import (
    Arguments,
    Content,
    OutcomeKind,
    ToolError,
    ToolOutcome,
    as_object,
    needs_self,
    of_function,
    parse_docstring,
)
from agentrl.tools.threads import ToolThread

_TOOLS_FAULT = frozenset((OutcomeKind.RAISED, OutcomeKind.TIMEOUT, OutcomeKind.HUNG, OutcomeKind.BAD_RESULT))
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
DEFAULT_TIMEOUT, DEFAULT_MAX_OUTPUT_CHARS = 30.0, 16_384

OnFailure = Literal["observe", "fail"]
"""The consequence of a tool's own failure: a sentence for the model, or a `ToolFailure` that ends the trajectory."""


class CallOptions(TypedDict, total=False):
    """Options of a tool's calls; `Tool` documents each."""

    timeout: float
    max_output_chars: int
    max_concurrency: int | None
    on_failure: OnFailure


class ToolOptions(CallOptions, total=False):
    """The options of `@tool`; `Tool` says what they mean."""

    name: str | None
    description: str | None


class Tool:
    """A function that a model may call.

    1. `name` and `description` are what the model reads; `stray` are names that the docstring describes as arguments and
       that are no parameters.
    2. `timeout`: deadline of one call in seconds. A sync function that overruns it is left behind in its thread.
       `max_concurrency`: calls in flight at once in this process; the others wait, outside their deadline.
       `max_output_chars`: longer results are cut, with a note of how much is missing.
    3. `on_failure`: "observe" shows the model that the tool raised, hung or returned nonsense; "fail" raises a
       `ToolFailure` instead, and the run's failure policy decides. The model's own mistakes, and a `ToolError` that the
       tool raises to answer them, are always shown."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        max_output_chars: int = DEFAULT_MAX_OUTPUT_CHARS,
        max_concurrency: int | None = None,
        on_failure: OnFailure = "observe",
        arguments: Arguments | None = None,
    ) -> None:
        """Make a tool of `function`, sync (it runs in a thread of its own) or async. `arguments`: the parameters, where
        they do not come from type hints. Raises PluginError: it cannot become a tool; names tool and parameter."""
        self.name = name or getattr(function, "__name__", "") or type(function).__name__
        if not _NAME.fullmatch(self.name):
            raise PluginError(f"tool {self.name!r}: a name has 1-64 letters, digits, '_' or '-'; use @tool(name=...)")
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise PluginError(f"tool {self.name!r}: expected a function that returns its result, got one with `yield`")
        summary, argument_descriptions = parse_docstring(getattr(function, "__doc__", None))
        self.description = description or summary or self.name.replace("_", " ")
        at_once = 1 if max_concurrency is None else max_concurrency
        limits = {"timeout": timeout, "max_output_chars": max_output_chars, "max_concurrency": at_once}
        for option, value in limits.items():
            if not value > 0:
                raise PluginError(f"tool {self.name!r}: expected a positive `{option}`, got {value!r}")
        if on_failure not in ("observe", "fail"):
            raise PluginError(f"tool {self.name!r}: `on_failure` must be 'observe' or 'fail', got {on_failure!r}")
        self.timeout, self.max_output_chars = timeout, max_output_chars
        self.max_concurrency, self.on_failure = max_concurrency, on_failure
        self._limiter = anyio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
        self._function = function
        self._arguments = arguments or of_function(function, self.name, argument_descriptions)
        known = {*self._arguments.schema.get("properties", ()), *self._arguments.injected}
        self.stray = [] if arguments else [described for described in argument_descriptions if described not in known]
        self._is_async = is_async(function)
        self.unbound = needs_self(function)  # a method of a class, without its instance (`bind`)

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI form, `{"type": "function", "function": {"name", "description", "parameters"}}`."""
        function = {"name": self.name, "description": self.description, "parameters": self._arguments.schema}
        return copy.deepcopy({"type": "function", "function": function})

    def bind(self, instance: object) -> Self:
        """The same tool with `self` given; a tool that is no method is returned as it is."""
        if not self.unbound:
            return self
        bound = copy.copy(self)
        bound._function, bound.unbound = partial(self._function, instance), False
        return bound

    def __get__(self, instance: object | None, owner: type | None = None) -> Self:
        return self if instance is None else self.bind(instance)

    async def call(self, arguments: Mapping[str, Any], *, state: object = None) -> Content:
        """Run the tool and return the content to show the model. A result that is an image, or a list of texts and
        images, becomes a list of parts; images are Pillow's or `agentrl.media`'s. `arguments`: parsed from JSON. `state`:
        handed to parameters annotated `Annotated[..., Injected]`. Raises ToolError: anything that went wrong; the message
        is written for the model, `kind` says what it was."""
        keywords = self._arguments.check(arguments)
        keywords.update(dict.fromkeys(self._arguments.injected, state))
        # Waiting for a free place or thread is not the tool's fault: both deadlines leave it out.
        async with waiting(self._limiter) if self.max_concurrency else self._limiter:
            if self._is_async:
                return await self._finish(self._function(**keywords))
            thread = ToolThread(self.name, self.timeout)
            async with waiting(thread):
                return await self._finish(thread.run(partial(self._function, **keywords)))

    async def run(self, arguments: Mapping[str, Any], *, state: object = None) -> ToolOutcome:
        """Like `call`, but failures come back as a `ToolOutcome` whose text starts with `Error: `. Raises ToolFailure:
        with `on_failure="fail"`, what was the tool's own fault; its kind is `tool_<outcome kind>`."""
        start = time.perf_counter()
        try:
            content, kind = await self.call(arguments, state=state), OutcomeKind.OK
        except ToolError as error:
            if self.on_failure == "fail" and error.kind in _TOOLS_FAULT:
                raise ToolFailure(f"tool `{self.name}`: {error}", kind=f"tool_{error.kind}") from error
            content, kind = f"Error: {error}", error.kind
        return ToolOutcome(content, kind, time.perf_counter() - start)

    async def _finish(self, running: Awaitable[Any]) -> Content:
        result: Any = None
        try:
            with Deadline(self.timeout, f"tool {self.name}") as limit:
                if inspect.isawaitable(result := await running):
                    result = await result
        except ToolError as error:
            raise ToolError(self._cut(str(error)), kind=error.kind) from error
        except (Failure, SandboxUnavailable):  # the trajectory cannot go on, or the whole run
            raise
        except BaseException as error:  # a tool is user code: whatever it raises is an observation for the model
            if must_propagate(error):
                raise
            raise ToolError(self._cut(described(first_error(error))), kind=OutcomeKind.RAISED) from error
        if limit.overdue:
            raise ToolError(f"`{self.name}` did not finish within {self.timeout:g} s", kind=OutcomeKind.TIMEOUT)
        items = result if isinstance(result, (list, tuple)) else [result]
        if not any(map(is_picture, items)):
            return self._cut(self._text(result))
        return [
            {"type": "image", "image": item}
            if is_picture(item)
            else {"type": "text", "text": self._cut(self._text(item))}
            for item in items
        ]

    def _text(self, result: Any) -> str:
        if isinstance(result, str):
            return result
        problem = f"`{self.name}` returned {type(result).__name__}; expected text, a number or a JSON value"
        if result is None or isinstance(result, (bytes, bytearray, Iterator)):
            raise ToolError(problem, kind=OutcomeKind.BAD_RESULT)
        try:
            return to_json(result).decode()
        except (PydanticSerializationError, ValueError, RecursionError) as error:
            raise ToolError(problem, kind=OutcomeKind.BAD_RESULT) from error

    def _cut(self, text: str) -> str:
        if len(text) <= self.max_output_chars:
            return text
        return f"{text[: self.max_output_chars]}\n[{len(text) - self.max_output_chars} more characters cut]"

    def __repr__(self) -> str:
        return f"Tool({self.name!r})"


def shortened(text: str, room: int) -> str:
    """Return at most `room` characters of `text`: its beginning and its end, where programs print their errors."""
    if len(text) <= room:
        return text
    mark = f"\n[{len(text) - room} characters left out]\n"
    tail = (kept := max(room - len(mark), 0)) // 2
    return (text[: kept - tail] + mark + text[len(text) - tail :])[:room]


def described(error: BaseException) -> str:
    """`ValueError: the message`, or the name alone."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def as_tool(function: Callable[..., Any] | Tool) -> Tool:
    """A `Tool` from a function; a `Tool` is returned as it is. Raises PluginError: it cannot become a tool."""
    if isinstance(function, Tool):
        return function
    if not callable(function) or isinstance(function, type):
        raise PluginError(f"expected a function or a Tool, got {function!r}")
    return Tool(function)


@overload
def tool(function: Callable[..., Any], /) -> Tool: ...
@overload
def tool(**options: Unpack[ToolOptions]) -> Callable[[Callable[..., Any]], Tool]: ...
def tool(
    function: Callable[..., Any] | None = None, /, **options: Unpack[ToolOptions]
) -> Tool | Callable[[Callable[..., Any]], Tool]:
    """Make a function a `Tool`: `@tool`, or with options `@tool(timeout=5)`. Raises PluginError: the function cannot
    become a tool; names the tool and the parameter."""
    return partial(Tool, **options) if function is None else Tool(function, **options)


class ToolSource(ABC):
    """An entry of `Environment.tools` that brings tools once it is open; opened once a process, before `setup`."""

    @property
    @abstractmethod
    def tools(self) -> Sequence[Tool]:
        """The tools. Raises PluginError: it is not open."""

    @abstractmethod
    async def open(self) -> None:
        """Connect. Raises PluginError: with what is wrong and what to do."""

    @abstractmethod
    async def close(self) -> None:
        """Disconnect; what it started ends. Does nothing if it is not open."""


class Toolbox:
    """Tools by name, in the model's order. Raises PluginError: an entry is no tool, or two share a name."""

    def __init__(self, tools: Iterable[Callable[..., Any] | Tool] = ()) -> None:
        self._tools: dict[str, Tool] = {}
        for entry in tools:
            if (added := as_tool(entry)).name in self._tools:
                raise PluginError(f"two tools are called {added.name!r}; use @tool(name=...) or MCPTools(prefix=...)")
            self._tools[added.name] = added

    def __iter__(self) -> Iterator[Tool]:
        return iter(self._tools.values())

    def __len__(self) -> int:
        return len(self._tools)

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """The tools' schemas in OpenAI form, for a chat template."""
        return [entry.schema for entry in self]

    async def run(self, name: str, arguments: Mapping[str, Any] | str, *, state: object = None) -> ToolOutcome:
        """Run one call of the model, with arguments parsed or as JSON text. `state`: handed to parameters annotated
        `Annotated[..., Injected]`. Raises ToolFailure: the tool failed, and its `on_failure` is "fail"."""
        start = time.perf_counter()
        try:
            entry, parsed = self._find(name), as_object(arguments)
        except ToolError as error:
            return ToolOutcome(f"Error: {error}", error.kind, time.perf_counter() - start)
        return await entry.run(parsed, state=state)

    def _find(self, name: str) -> Tool:
        if name in self._tools:
            return self._tools[name]
        close = difflib.get_close_matches(str(name), self._tools, n=1)
        names = ", ".join(f"`{known}`" for known in self._tools) or "none"
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise ToolError(f"unknown tool `{name}`; {hint}the tools are {names}", kind=OutcomeKind.UNKNOWN_TOOL)
