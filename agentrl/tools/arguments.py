"""From a function's type hints to a JSON schema and a validator whose messages a model can act on."""

import inspect
import json
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from agentrl.errors import PluginError
from agentrl.tools.outcome import OutcomeKind, ToolError

_SHOWN_VALUE_CHARS = 60


class Injected:
    """Marks a parameter that the environment fills, hidden from the model: `state: Annotated[MyState, Injected]`."""


class _WithoutTitles(GenerateJsonSchema):
    """Field titles repeat the names and only cost prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Arguments:
    """A tool's parameters: `schema` is a JSON Schema object, `validate` checks and converts a call's arguments."""

    tool: str
    schema: dict[str, Any]
    injected: tuple[str, ...]
    _model: type[BaseModel]
    _names: dict[str, str]

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The keyword arguments for the function; arguments that the model left out keep the function's defaults.

        Raises:
            ToolError: of kind `bad_arguments`, one sentence for each mistake.
        """
        try:
            checked = self._model.model_validate(dict(arguments))
        except ValidationError as error:
            text = "; ".join(self._explain(detail) for detail in error.errors(include_url=False))
            raise ToolError(text, kind=OutcomeKind.BAD_ARGUMENTS) from error
        return {self._names[name]: getattr(checked, name) for name in checked.model_fields_set}

    def _explain(self, detail: ErrorDetails) -> str:
        where, value = _path(detail["loc"]), _shown(detail.get("input"))
        kind, context = detail["type"], detail.get("ctx", {})
        properties = self.schema["properties"]
        known = properties.get(str(detail["loc"][0]), {}) if detail["loc"] else {}
        if kind == "missing" and len(detail["loc"]) == 1:
            return f"argument `{where}` is missing (expected {_type_name(known)})"
        if kind == "extra_forbidden" and len(detail["loc"]) == 1:
            names = ", ".join(f"`{name}`" for name in properties) or "none"
            return f"unknown argument `{where}`; the arguments of `{self.tool}` are {names}"
        if kind in ("literal_error", "enum"):
            return f"argument `{where}`: expected {context['expected']}, got {value}"
        if kind.endswith(("_type", "_parsing")) and len(detail["loc"]) == 1:
            return f"argument `{where}`: expected {_type_name(known)}, got {value}"
        message = detail["msg"]
        return f"argument `{where}`: {message[:1].lower()}{message[1:]}, got {value}"


def read_arguments(function: Callable[..., Any], name: str, descriptions: Mapping[str, str]) -> Arguments:
    """Build the `Arguments` of a function.

    Raises:
        PluginError: a parameter has no type hint, a hint cannot be resolved or has no JSON schema, or the signature
            takes `*args`, `**kwargs` or positional-only parameters.
    """
    hints = _hints(function, name)
    fields: dict[str, Any] = {}
    names: dict[str, str] = {}
    injected: list[str] = []
    for position, parameter in enumerate(visible_parameters(function)):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            shown = parameter.replace(annotation=parameter.empty)
            raise PluginError(
                f"tool {name!r}: parameter '{shown}' cannot be given by name; "
                "a tool's parameters must be ordinary or keyword-only ones"
            )
        if parameter.name not in hints:
            raise PluginError(
                f"tool {name!r}: parameter {parameter.name!r} has no type hint; "
                "the model's schema comes from the hints, for example `query: str`"
            )
        hint = hints[parameter.name]
        if get_origin(hint) is Annotated and Injected in get_args(hint):
            injected.append(parameter.name)
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        description = descriptions.get(parameter.name)
        # Neutral field names with aliases: a parameter may be called `json`, `_x` or `model_config`.
        fields[f"field_{position}"] = (hint, Field(default, alias=parameter.name, description=description))
        names[f"field_{position}"] = parameter.name
    try:
        model = create_model(
            "Arguments", __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False), **fields
        )
        schema = model.model_json_schema(schema_generator=_WithoutTitles)
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise PluginError(f"tool {name!r}: its type hints cannot be turned into a JSON schema: {reason}") from error
    schema = {
        key: value for key, value in schema.items() if key not in ("title", "additionalProperties", "description")
    }
    return Arguments(name, {"type": "object", "properties": {}, **schema}, tuple(injected), model, names)


def visible_parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters without the leading `self` of a function that was written in a class body."""
    parameters = list(inspect.signature(function).parameters.values())
    return parameters[1:] if needs_self(function) else parameters


def needs_self(function: Callable[..., Any]) -> bool:
    """Whether the function is an unbound method: its first parameter is an unannotated `self`."""
    if not isinstance(function, types.FunctionType):
        return False
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return first is not None and first.name == "self" and first.annotation is first.empty


def parse_json_arguments(text: str) -> dict[str, Any]:
    """The JSON object in `text`.

    Raises:
        ToolError: of kind `bad_arguments`, saying what is wrong and where.
    """
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ToolError(
            f"the arguments are not valid JSON: {error.msg} at character {error.pos}", kind=OutcomeKind.BAD_ARGUMENTS
        ) from error
    except RecursionError as error:
        raise ToolError("the arguments are nested too deeply", kind=OutcomeKind.BAD_ARGUMENTS) from error
    return require_object(value)


def require_object(value: Any) -> dict[str, Any]:
    """`value` itself if it is a JSON object, else a `ToolError` of kind `bad_arguments`."""
    if not isinstance(value, dict):
        raise ToolError(f"the arguments must be a JSON object, got {_shown(value)}", kind=OutcomeKind.BAD_ARGUMENTS)
    return value


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    target = function if isinstance(function, (types.FunctionType, types.MethodType)) else type(function).__call__
    try:
        return get_type_hints(target, include_extras=True)
    except (NameError, TypeError, AttributeError) as error:
        raise PluginError(f"tool {name!r}: a type hint cannot be resolved: {error}") from error


def _path(loc: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_VALUE_CHARS else f"{text[: _SHOWN_VALUE_CHARS - 3]}..."


def _type_name(schema: Mapping[str, Any]) -> str:
    if "enum" in schema:
        return "one of " + ", ".join(map(repr, schema["enum"]))
    if "anyOf" in schema:
        return " or ".join(dict.fromkeys(_type_name(option) for option in schema["anyOf"]))
    if schema.get("type") == "array" and "type" in schema.get("items", {}):
        return f"array of {schema['items']['type']}"
    return str(schema.get("type", "object" if "$ref" in schema else "a value"))
