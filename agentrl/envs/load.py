"""Finding an environment class by path, and checking its definition."""

import inspect
from typing import Any, get_args

from agentrl.envs.base import Environment, WhenInterrupted
from agentrl.errors import PluginError
from agentrl.plugins import load_object
from agentrl.tools import Toolbox

_ASYNC_METHODS = {"setup": 1, "teardown": 0, "reset": 1, "step": 1, "reward": 1, "close": 0}
"""And how many parameters each gets besides `cls` or `self`."""


def load_environment(path: str, *, what: str = "--env") -> type[Environment]:
    """The environment class that `path` names (`package.module:Name` or `path/file.py:Name`).

    Raises:
        PluginError: nothing is there, it is no environment class, or the class is badly defined.
    """
    if path.endswith(".py"):
        raise PluginError(f"{what} {path!r}: {_named_in(path, what)}")
    found = load_object(path, what=what)
    label = f"{what} {path!r}"
    if not inspect.isclass(found):
        raise PluginError(f"{label}: {_what_is_it(found)}")
    if not issubclass(found, Environment):
        raise PluginError(f"{label}: class {found.__name__} does not subclass agentrl.Environment")
    if found is Environment and not path.startswith("agentrl"):
        own = _named_in(path.rpartition(":")[0], what) if ".py:" in path else "name a subclass of it"
        raise PluginError(
            f"{label}: this is the base class itself; {own}, or agentrl:Environment for one answer a prompt"
        )
    try:
        check_environment(found)
    except PluginError as error:
        raise PluginError(f"{label}: {error}") from error
    return found


def _named_in(file: str, what: str) -> str:
    """What to write for a file without `:Name`."""
    inside = load_object(f"{file}:__dict__", what=what)
    defined = [value for value in inside.values() if inspect.isclass(value) and value.__module__ == inside["__name__"]]
    names = [kind.__name__ for kind in defined if issubclass(kind, Environment)]
    if not names:
        return "it defines no environment; write a subclass of agentrl.Environment in it"
    return "name the environment too: " + " or ".join(f"{file}:{name}" for name in names)


def check_environment(cls: type[Environment]) -> None:
    """Check a class definition: tools, max_turns, when_interrupted, and that what must be `async` is.

    Raises:
        PluginError: names the class and what is wrong with it.
    """
    name = cls.__name__
    if not isinstance(cls.max_turns, int) or isinstance(cls.max_turns, bool) or cls.max_turns < 1:
        raise PluginError(f"{name}.max_turns: expected a positive integer, got {cls.max_turns!r}")
    choices = get_args(WhenInterrupted)
    if cls.when_interrupted not in choices:
        raise PluginError(f"{name}.when_interrupted: expected one of {choices}, got {cls.when_interrupted!r}")
    declared: object = cls.tools
    if not isinstance(declared, (list, tuple)):
        raise PluginError(f"{name}.tools: expected a list of functions, got {declared!r}")
    try:
        Toolbox(cls.declared_tools(with_sources=False))
    except PluginError as error:
        raise PluginError(f"{name}.tools: {error}") from error
    for method in _ASYNC_METHODS:
        _check_method(cls, method)


def _check_method(cls: type[Environment], method: str) -> None:
    where = f"{cls.__name__}.{method}"
    function = getattr(cls, method)
    if not inspect.iscoroutinefunction(function):
        raise PluginError(f"{where} must be a coroutine: write `async def {method}(...)`")
    if method in ("setup", "teardown") and not inspect.ismethod(function):
        raise PluginError(f"{where} must be a class method: put @classmethod above it")
    given = [object()] * (_ASYNC_METHODS[method] + (0 if inspect.ismethod(function) else 1))
    try:
        inspect.signature(function).bind(*given)
    except TypeError as error:
        expected = ", ".join(inspect.signature(getattr(Environment, method)).parameters)
        raise PluginError(f"{where}{inspect.signature(function)}: expected the parameters ({expected})") from error


def _what_is_it(found: Any) -> str:
    if isinstance(found, Environment):
        return f"this is an instance of {type(found).__name__}; give the class"
    if inspect.isfunction(found):
        return (
            f"{found.__name__} is a function, expected a subclass of agentrl.Environment "
            "(an own agent loop goes to --custom-generate-function-path)"
        )
    if inspect.ismodule(found):
        return f"{found.__name__} is a module, expected a class in it: '{found.__name__}:Name'"
    return f"expected a subclass of agentrl.Environment, got {type(found).__name__} {found!r}"
