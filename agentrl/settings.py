"""The base of every settings model.

`agentrl/<package>/settings.py` holds one frozen `Settings` subclass. Field names are flag names, unique over all
packages, and slime's names if slime has them. Each field's description, or the text below it, is its flag's help.
`shown(value)` hides secrets. Numbers are finite and whole numbers fit into 64 bits; text holds no lone surrogates."""

import ast
import inspect
import itertools
import os
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Final

import orjson
from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationInfo, field_validator

from agentrl.errors import SECRET, SECRET_NAME, SECRET_WORDS, without_secrets

# Environment variables with keys, for users who do not want them on a command line.
API_KEY_VARIABLE: Final = "SGLANG_API_KEY"  # of the engines
ADMIN_KEY_VARIABLE: Final = "SGLANG_ADMIN_API_KEY"  # of the engines' control routes: pauses, weights, memory
HOSTED_KEY_VARIABLE: Final = "OPENAI_API_KEY"  # of a hosted model, if the settings name no other variable

HomePath = Annotated[str, AfterValidator(os.path.expanduser)]  # a settings file has no shell to expand `~`


def shown(value: Any, key: object = "") -> Any:
    """`value` as it may be shown; `key` is what it is called in the mapping that it is from."""
    if value is not None and SECRET_NAME.search(str(key)):
        return SECRET
    if isinstance(value, Mapping):
        return {name: shown(inner, name) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [shown(inner) for inner in value]
    return _SECRET_WORDS.sub(rf"\1{SECRET}", without_secrets(value)) if isinstance(value, str) else value


_SECRET_WORDS = re.compile(
    rf"(?<![\w-])((?:--[\w-]*(?:{SECRET_WORDS})\s+|[\w-]*(?:{SECRET_WORDS})=))(?!{SECRET})(\"[^\"]*\"|'[^']*'|\S+)",
    re.I,
)
"""Keys in a command: `--api-key KEY`, `API_KEY=KEY`."""


def flag_of(name: str) -> str:
    """Return a setting's name on the command line."""
    return "--" + name.replace("_", "-")


class Settings(BaseModel):
    """A frozen, closed settings model: unknown keys are errors, nothing changes after validation."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        """Describe each field by the text below it. Pydantic's `use_attribute_docstrings` takes 15 ms a class."""
        try:
            source = inspect.getsource(sys.modules[cls.__module__])
        except (OSError, TypeError):
            return  # code without a file has no descriptions
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
                for pair in itertools.pairwise(node.body):
                    match pair:
                        case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                            cls.model_fields[name].description = " ".join(text.split())

    @field_validator("*")
    @classmethod
    def _check(cls, value: Any, info: ValidationInfo) -> Any:
        if value == "" and cls.model_fields[str(info.field_name)].default is None:
            raise ValueError("it is empty; leave it out for none")
        try:
            orjson.dumps(value, default=str, option=orjson.OPT_NON_STR_KEYS)
        except TypeError as error:
            raise ValueError(f"{error}: a run could not write it down") from error
        return value

    def __repr_args__(self) -> Iterator[tuple[str | None, Any]]:
        return ((name, shown(value)) for name, value in super().__repr_args__())
