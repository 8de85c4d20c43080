"""Arguments of a tool whose JSON schema was given, not made from type hints."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.errors import PluginError
from agentrl.tools.outcome import OutcomeKind, ToolError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

_MOST_PROBLEMS = 5
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True)
class SchemaArguments:
    """Checks a call's arguments against a JSON schema; the same interface as `Arguments`."""

    tool: str
    schema: dict[str, Any]
    _validator: "Validator"
    injected: tuple[str, ...] = ()

    @classmethod
    def of(cls, tool: str, schema: dict[str, Any]) -> "SchemaArguments":
        """Check the schema itself and make the validator.

        Raises:
            PluginError: it is no valid JSON schema of an object.
        """
        from jsonschema import SchemaError
        from jsonschema.validators import Draft202012Validator, validator_for

        family = validator_for(schema, default=Draft202012Validator)
        try:
            family.check_schema(schema)
        except SchemaError as error:
            raise PluginError(f"tool {tool!r}: its parameters are no valid JSON schema: {error.message}") from error
        if schema.get("type", "object") != "object":
            raise PluginError(
                f"tool {tool!r}: expected parameters of type 'object', got {schema['type']!r}; "
                "a model gives a tool's arguments by name"
            )
        return cls(tool, {"type": "object", "properties": {}, **schema}, family(schema))

    def validate(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments as they are.

        Raises:
            ToolError: of kind `bad_arguments`, one sentence for each mistake.
        """
        checked = dict(arguments)
        errors = sorted(self._validator.iter_errors(checked), key=lambda error: error.json_path)
        if errors:
            text = "; ".join(_explain(error.json_path, error.message) for error in errors[:_MOST_PROBLEMS])
            raise ToolError(text, kind=OutcomeKind.BAD_ARGUMENTS)
        return checked


def _explain(path: str, message: str) -> str:
    shown = message if len(message) <= _SHOWN_CHARS else f"{message[:_SHOWN_CHARS]}..."
    where = path.removeprefix("$").lstrip(".")
    return f"argument `{where}`: {shown}" if where else shown
