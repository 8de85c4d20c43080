"""The arguments of an environment (`--env-args`): keyword parameters of its class, read as its type hints say."""

import difflib
import inspect
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from agentrl.envs.base import Environment
from agentrl.errors import PluginError

_KEYWORDS = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_ANY_CLASS = ConfigDict(arbitrary_types_allowed=True)


def read_arguments(cls: type[Environment], given: Mapping[str, Any]) -> dict[str, Any]:
    """`given` as `cls(**arguments)` takes it: checked, and converted to the types of the parameters' hints.

    Raises:
        PluginError: names the class, the argument, and what it takes.
    """
    parameters = inspect.signature(cls).parameters
    named = {name: p for name, p in parameters.items() if p.kind in _KEYWORDS}
    others = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    hints = _hints(cls) if given else {}
    read: dict[str, Any] = {}
    for name, value in given.items():
        if name not in named and not others:
            close = difflib.get_close_matches(name, named, n=1)
            hint = f"did you mean {close[0]}?" if close else f"it takes {_listed(named)}"
            raise PluginError(f"{cls.__name__} has no argument {name!r}; {hint}")
        read[name] = _read(cls, name, hints.get(name, Any), value)
    optional = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    required = [n for n, p in parameters.items() if p.default is p.empty and p.kind not in optional]
    if missing := [name for name in required if name not in read]:
        values = " ".join(f"{name}=..." for name in missing)
        raise PluginError(f"{cls.__name__}.__init__ needs {', '.join(missing)}; give --env-args {values}")
    return read


def _hints(cls: type[Environment]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(inspect.unwrap(cls.__init__), include_extras=True)
    except Exception as error:
        raise PluginError(f"{cls.__name__}.__init__: its type hints cannot be read: {error}") from error


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


def _listed(names: Mapping[str, object]) -> str:
    return ", ".join(names) or "none: its class has no __init__ with parameters"
