"""A tool's arguments: a JSON schema, and a check whose messages a model can act on. They come from a function's type
hints and docstring (`of_function`), or from a given schema (`of_schema`)."""

import inspect
import json
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Annotated, Any, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic.errors import PydanticSchemaGenerationError, PydanticUserError
from pydantic.fields import FieldInfo
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from agentrl.errors import AgentRLError, PluginError, raised_as
from agentrl.sample import content_text

Content = str | list[dict[str, Any]]  # content of a message: text, or text parts and image parts


class OutcomeKind(StrEnum):
    """Kind of end of a tool call; the values are stable names for metrics."""

    OK = "ok"  # the tool returned a usable result
    BAD_ARGUMENTS = "bad_arguments"  # the arguments are not a JSON object, or do not fit the tool's schema
    UNKNOWN_TOOL = "unknown_tool"  # there is no tool of that name
    REFUSED = "refused"  # the tool raised a `ToolError`, whose message is for the model
    RAISED = "raised"  # the tool raised any other exception
    TIMEOUT = "timeout"  # the tool did not finish before its deadline
    HUNG = "hung"  # the tool was not run: too many calls of sync tools are past their deadline and never returned
    BAD_RESULT = "bad_result"  # the tool returned something that cannot be shown to a model


class ToolError(AgentRLError):
    """A failed call. The message is written for the model; a tool may raise it to word its own errors."""

    def __init__(self, message: str, *, kind: OutcomeKind = OutcomeKind.REFUSED) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """The outcome of a call."""

    content: Content  # text to show the model, or a list of parts if there are images
    kind: OutcomeKind  # the way in which the call ended
    seconds: float

    @property
    def text(self) -> str:
        """The text to show the model, without images."""
        return content_text(self.content)

    @property
    def ok(self) -> bool:
        return self.kind is OutcomeKind.OK


_SHOWN_VALUE_CHARS, _SHOWN_PROBLEM_CHARS = 60, 200
_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


class Injected:
    """Mark of a parameter that the environment fills, hidden from the model: `state: Annotated[Any, Injected]`."""


class _WithoutTitles(GenerateJsonSchema):
    """Schemas without field titles, which repeat the names and only cost prompt tokens."""

    def field_title_should_be_set(self, schema: Any) -> bool:
        return False


@dataclass(frozen=True, slots=True)
class Arguments:
    """A tool's parameters. `check` turns a call's arguments into keyword arguments. Arguments that the model left out
    keep the function's default. Raises ToolError of kind `bad_arguments`, with one sentence for each mistake."""

    schema: dict[str, Any]  # JSON Schema of an object
    check: Callable[[Mapping[str, Any]], dict[str, Any]]
    injected: tuple[str, ...] = ()  # parameters that the environment fills


def of_function(function: Callable[..., Any], name: str, descriptions: Mapping[str, str]) -> Arguments:
    """Return the arguments of a function. Raises PluginError: a parameter has no type hint, a hint cannot be resolved
    or has no JSON schema, or the signature takes `*args`, `**kwargs` or positional-only parameters."""
    hints, fields, injected = _hints(function, name), dict[str, Any](), list[str]()
    parameters = list(inspect.signature(function).parameters.values())
    for position, parameter in enumerate(parameters[needs_self(function) :]):
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            shown = parameter.replace(annotation=parameter.empty)
            expected = "a tool's parameters must be ordinary or keyword-only ones"
            raise PluginError(f"tool {name!r}: parameter '{shown}' cannot be given by name; {expected}")
        if parameter.name not in hints:
            why = "the model's schema comes from the hints, for example `query: str`"
            raise PluginError(f"tool {name!r}: parameter {parameter.name!r} has no type hint; {why}")
        hint = hints[parameter.name]
        if get_origin(hint) is Annotated and Injected in get_args(hint):
            injected.append(parameter.name)
            continue
        default = ... if parameter.default is parameter.empty else parameter.default
        if isinstance(default, FieldInfo):  # pydantic's way to describe a parameter
            hint, default = Annotated[hint, default], ...
        said: dict[str, Any] = {"description": text} if (text := descriptions.get(parameter.name)) else {}
        described = Field(default, alias=parameter.name, **said)  # without `said`, the hint's own description stays
        # Neutral field names with aliases: a parameter may be called `json`, `_x` or `model_config`.
        fields[f"field_{position}"] = (hint, described)
    try:
        model = create_model("Arguments", __config__=ConfigDict(extra="forbid"), **fields)
        made = model.model_json_schema(schema_generator=_WithoutTitles)
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError) as error:
        reason = str(error).splitlines()[0]
        raise PluginError(f"tool {name!r}: its type hints cannot be turned into a JSON schema: {reason}") from error
    kept = {key: value for key, value in made.items() if key not in ("title", "additionalProperties", "description")}
    schema = {"type": "object", "properties": {}, **kept}

    def check(arguments: Mapping[str, Any]) -> dict[str, Any]:
        try:
            checked: BaseModel = model.model_validate(dict(arguments))
        except ValidationError as error:
            text = "; ".join(_explain(detail, name, schema["properties"]) for detail in error.errors(include_url=False))
            raise ToolError(text, kind=OutcomeKind.BAD_ARGUMENTS) from error
        given = [field for field in fields if field in checked.model_fields_set or fields[field][1].is_required()]
        return {str(model.model_fields[field].alias): getattr(checked, field) for field in given}

    return Arguments(schema, check, tuple(injected))


def of_schema(tool: str, schema: dict[str, Any]) -> Arguments:
    """Return the arguments of a tool with a given JSON schema. They are passed on unchanged; `SchemaCheck` checks them.
    Raises PluginError: the schema is not that of an object."""
    if schema.get("type", "object") != "object":
        got = f"{schema['type']!r:.100}; a model gives a tool's arguments by name"
        raise PluginError(f"tool {tool!r}: expected parameters of type 'object', got {got}")
    return Arguments({"type": "object", "properties": {}, **schema}, dict)


def mistakes(problems: Sequence[tuple[str, str]]) -> ToolError:
    """Return the error for arguments that do not fit a given schema; `problems` are JSON paths and messages."""
    return ToolError("; ".join(_where(*problem) for problem in problems), kind=OutcomeKind.BAD_ARGUMENTS)


def needs_self(function: Callable[..., Any]) -> bool:
    """Return true if the function is an unbound method: its first parameter is an unannotated `self`."""
    if not isinstance(function, types.FunctionType):
        return False
    first = next(iter(inspect.signature(function).parameters.values()), None)
    return first is not None and first.name == "self" and first.annotation is first.empty


def as_object(arguments: object) -> dict[str, Any]:
    """Return a call's arguments (JSON text, or parsed) as a dict. Raises ToolError: they are not a JSON object."""
    try:
        value = json.loads(arguments) if isinstance(arguments, str) else arguments
    except json.JSONDecodeError as error:
        said = f"the arguments are not valid JSON: {error.msg} at character {error.pos}"
        raise ToolError(said, kind=OutcomeKind.BAD_ARGUMENTS) from error
    except (RecursionError, ValueError) as error:
        said = "the arguments are nested too deeply, or contain a number of too many digits"
        raise ToolError(said, kind=OutcomeKind.BAD_ARGUMENTS) from error
    if not isinstance(value, dict):
        raise ToolError(f"the arguments must be a JSON object, got {_shown(value)}", kind=OutcomeKind.BAD_ARGUMENTS)
    return value


def parse_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """Return a Google-style docstring's description (everything before the first section), and those of its arguments.
    Line breaks inside a paragraph become spaces; paragraphs stay apart."""
    lines = inspect.cleandoc(text or "").splitlines()
    starts = [i for i, line in enumerate(lines) if _SECTION.match(line)]
    arguments: dict[str, str] = {}
    for start, end in zip(starts, [*starts, len(lines)][1:], strict=True):
        if lines[start].rstrip().rstrip(":") in ("Args", "Arguments", "Parameters"):
            arguments |= _entries([line for line in lines[start + 1 : end] if line.strip()])
    paragraphs = "\n".join(lines[: starts[0]] if starts else lines).strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs), arguments


def _entries(lines: list[str]) -> dict[str, str]:
    """Return `name: description` entries. A line that is indented more than the first continues the entry above."""
    entries, current = dict[str, list[str]](), list[str]()
    for line in lines:
        match = _ENTRY.match(line.strip())
        if match and len(line) - len(line.lstrip()) == len(lines[0]) - len(lines[0].lstrip()):
            current = entries.setdefault(match[1], [match[2]])
        else:
            current.append(line.strip())
    return {name: " ".join(filter(None, parts)) for name, parts in entries.items()}


def _hints(function: Callable[..., Any], name: str) -> dict[str, Any]:
    plain = isinstance(function, (types.FunctionType, types.MethodType))
    target = function if plain else getattr(function, "__wrapped__", type(function).__call__)
    what = f"tool {name!r}: a type hint cannot be resolved (`Annotated[Any, Injected]` fits every injected parameter)"
    with raised_as(PluginError, what, NameError, TypeError, AttributeError):
        return get_type_hints(target, include_extras=True)


def _explain(detail: ErrorDetails, tool: str, properties: Mapping[str, Any]) -> str:
    loc, kind = detail["loc"], detail["type"]
    where = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).lstrip(".")
    value, expected = _shown(detail.get("input")), _type_name(properties.get(str(loc[0]), {}) if loc else {})
    if kind == "missing" and len(loc) == 1:
        return f"argument `{where}` is missing (expected {expected})"
    if kind == "extra_forbidden" and len(loc) == 1:
        names = ", ".join(f"`{name}`" for name in properties) or "none"
        return f"unknown argument `{where}`; the arguments of `{tool}` are {names}"
    if kind in ("literal_error", "enum"):
        return f"argument `{where}`: expected {detail['ctx']['expected']}, got {value}"
    if kind.endswith(("_type", "_parsing")) and len(loc) == 1:
        return f"argument `{where}`: expected {expected}, got {value}"
    message = detail["msg"]
    return f"argument `{where}`: {message[:1].lower()}{message[1:]}, got {value}"


def _where(path: str, message: str) -> str:
    shown = message if len(message) <= _SHOWN_PROBLEM_CHARS else f"{message[:_SHOWN_PROBLEM_CHARS]}..."
    where = path.removeprefix("$").lstrip(".")
    return f"argument `{where}`: {shown}" if where else shown


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
