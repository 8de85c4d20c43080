"""An environment class by its path, checked, and the arguments of its instances (`--env-args`)."""

import difflib
import functools
import importlib
import inspect
from collections.abc import Mapping
from typing import Any, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from agentrl.envs.agent import AgentEnvironment
from agentrl.envs.base import Environment, WhenInterrupted
from agentrl.errors import PluginError, install, raised_as
from agentrl.plugins import describe_error, load_object
from agentrl.tools import Toolbox

# And how many parameters each gets besides `cls` or `self`.
_ASYNC_METHODS = {"setup": 1, "teardown": 0, "reset": 1, "step": 1, "reward": 1, "close": 0}
_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)
# Adapters of other libraries: `SCHEME:NAME` is the class that `agentrl.adapters.SCHEME.environment(NAME)` returns.
SCHEMES = ("gymnasium", "harbor", "openenv", "verifiers")


def load_environment(path: str, *, what: str = "--env") -> type[Environment]:
    """Return the environment class that `path` names: `package.module:Name`, `path/file.py:Name` or `SCHEME:NAME`. Raises
    PluginError: nothing is there, it is no environment class or a malformed one, or a scheme's library is missing."""
    label, (scheme, _, name) = f"{what} {path!r}", path.partition(":")
    found = _of_scheme(scheme, name, label) if scheme in SCHEMES else load_object(path, what=what)
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        kind, name = "class" if inspect.isclass(found) else type(found).__name__, getattr(found, "__name__", "")
        raise PluginError(f"{label}: expected a class that subclasses agentrl.Environment, got {kind} {name}".rstrip())
    if found is Environment and not path.startswith("agentrl"):
        remedy = "name a subclass of it, or agentrl:Environment for one answer a prompt"
        raise PluginError(f"{label}: this is the base class itself; {remedy}")
    with raised_as(PluginError, label, PluginError):
        check_environment(found)
    return found


def _of_scheme(scheme: str, name: str, label: str) -> Any:
    try:
        return _adapted(scheme, name)
    except ModuleNotFoundError as error:
        raise PluginError(f"{label}: the package {error.name} is not installed; {install(scheme)}") from error
    except Exception as error:
        said = str(error) if isinstance(error, PluginError) else describe_error(error)
        raise PluginError(f"{label}: {said}") from error


@functools.cache
def _adapted(scheme: str, name: str) -> Any:
    if not name:
        raise PluginError(f"expected {scheme}:NAME")
    return importlib.import_module(f"agentrl.adapters.{scheme}").environment(name)


def check_environment(cls: type[Environment]) -> None:
    """Check a class definition: bases, tools, max_turns, when_interrupted, and that what must be `async` is. Raises
    PluginError: names the class and what is wrong with it."""
    name = cls.__name__
    if not isinstance(cls.max_turns, int) or isinstance(cls.max_turns, bool) or cls.max_turns < 1:
        raise PluginError(f"{name}.max_turns: expected a positive integer, got {cls.max_turns!r}")
    choices = ("keep",) if issubclass(cls, AgentEnvironment) else get_args(WhenInterrupted)
    if cls.when_interrupted not in choices:
        raise PluginError(f"{name}.when_interrupted: expected one of {choices}, got {cls.when_interrupted!r}")
    behind = cls.__mro__[cls.__mro__.index(Environment) + 1 :]
    if late := next((base.__name__ for base in behind if isinstance(vars(base).get("setup"), classmethod)), None):
        raise PluginError(f"{name}: put its base {late} before Environment; behind it, {late}.setup is not called")
    if not isinstance(cls.tools, (list, tuple)):
        raise PluginError(f"{name}.tools: expected a list of functions, got {cls.tools!r}")
    with raised_as(PluginError, f"{name}.tools", PluginError):
        Toolbox(cls.declared_tools(with_sources=False))
    for method in _ASYNC_METHODS:
        _check_method(cls, method)


def read_arguments(cls: type[Environment], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` as `cls(**arguments)` takes it: checked, and converted to the types of the parameters' hints. Raises
    PluginError: names the class, the argument, and what it takes."""
    parameters = inspect.signature(cls).parameters
    named = {name: p for name, p in parameters.items() if p.kind in _KEYWORDS}
    others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    takes = ", ".join(named) or "none: its class has no __init__ with parameters"
    hints = _hints(cls) if given else {}
    read: dict[str, Any] = {}
    for name, value in given.items():
        if name not in named and not others:
            close = difflib.get_close_matches(name, named, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {takes}"
            raise PluginError(f"{cls.__name__} has no argument {name!r}; {hint}")
        read[name] = _read(cls, name, hints.get(name, Any), value)
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in optional]
    if missing := [name for name in required if name not in read]:
        values = " ".join(f"{name}=..." for name in missing)
        raise PluginError(f"{cls.__name__}.__init__ needs {', '.join(missing)}; give --env-args {values}")
    return read


def _check_method(cls: type[Environment], method: str) -> None:
    where, function = f"{cls.__name__}.{method}", getattr(cls, method)
    if not inspect.iscoroutinefunction(function):
        raise PluginError(f"{where} must be a coroutine: write `async def {method}(...)`")
    if method in ("setup", "teardown") and not inspect.ismethod(function):
        raise PluginError(f"{where} must be a class method: put @classmethod above it")
    given = [object()] * (_ASYNC_METHODS[method] + (0 if inspect.ismethod(function) else 1))
    expected, found = ", ".join(inspect.signature(getattr(Environment, method)).parameters), inspect.signature(function)
    with raised_as(PluginError, f"{where}{found}: expected the parameters ({expected})", TypeError, shown=""):
        found.bind(*given)


def _hints(cls: type[Environment]) -> dict[str, Any]:
    with raised_as(PluginError, f"{cls.__name__}.__init__: its type hints cannot be read", Exception):
        return get_type_hints(inspect.unwrap(cls.__init__), include_extras=True)


def _read(cls: type[Environment], name: str, hint: Any, value: Any) -> Any:
    where = f"{cls.__name__}'s argument {name}"
    try:
        adapter = TypeAdapter(hint, config=_ANY_CLASS)
    except PydanticUserError:  # a hint with settings of its own
        adapter = TypeAdapter(hint)
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        inside = "".join(f"[{part!r}]" for part in first["loc"])
        number = first["type"] == "string_type" and isinstance(first["input"], int | float)
        quote = f"; in quotes it is text: {name}='\"{value}\"'" if number else ""
        raise PluginError(f"{where}{inside}: {first['msg']}; got {first['input']!r:.200}{quote}") from error
