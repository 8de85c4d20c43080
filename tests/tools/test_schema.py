"""Schemas from type hints and docstrings, and functions that cannot become a tool."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from enum import Enum
from functools import lru_cache
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from agentrl.errors import PluginError
from agentrl.tools import Injected, Tool, Toolbox, as_tool, tool


class Unit(Enum):
    METRE = "m"
    FOOT = "ft"


class Point(BaseModel):
    x: int
    y: int = 0


def parameters(entry: Tool) -> dict[str, Any]:
    found: dict[str, Any] = entry.schema["function"]["parameters"]
    return found


def test_name_description_and_arguments_come_from_the_function() -> None:
    @tool
    def search(query: str, top_k: int = 3) -> str:
        """Search the index.

        Looks at every
        document.

        Args:
            query: what to look for,
                in plain words.
            top_k (int): how many results.

        Returns:
            The passages: one a line.
        """
        return query

    assert search.name == "search"
    assert search.description == "Search the index.\n\nLooks at every document."
    assert search.schema == {
        "type": "function",
        "function": {
            "name": "search",
            "description": "Search the index.\n\nLooks at every document.",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "description": "what to look for, in plain words."},
                    "top_k": {"type": "integer", "description": "how many results.", "default": 3},
                },
                "required": ["query"],
            },
        },
    }


@pytest.mark.parametrize(
    ("hint", "expected"),
    [
        (int, {"type": "integer"}),
        (float, {"type": "number"}),
        (bool, {"type": "boolean"}),
        (list[str], {"type": "array", "items": {"type": "string"}}),
        (dict[str, int], {"type": "object", "additionalProperties": {"type": "integer"}}),
        (Literal["a", "b"], {"type": "string", "enum": ["a", "b"]}),
        (str | None, {"anyOf": [{"type": "string"}, {"type": "null"}]}),
        (Annotated[int, Field(ge=1)], {"type": "integer", "minimum": 1}),
        (Annotated[int, Field(description="how many")], {"type": "integer", "description": "how many"}),
    ],
)
def test_hint_to_schema(hint: Any, expected: dict[str, Any]) -> None:
    def f(value):  # type: ignore[no-untyped-def]
        return value

    f.__annotations__ = {"value": hint}
    assert parameters(as_tool(f))["properties"]["value"] == expected


async def test_models_and_enums_arrive_as_python_objects() -> None:
    @tool
    def measure(point: Point, unit: Unit) -> str:
        """Measure."""
        return f"{type(point).__name__} {point.x} {unit}"

    assert await measure.call({"point": {"x": 4}, "unit": "ft"}) == "Point 4 Unit.FOOT"
    assert set(parameters(measure)["$defs"]) == {"Point", "Unit"}


async def test_awkward_parameter_names_and_keyword_only_ones() -> None:
    @tool
    def odd(json: str, _x: int, *, model_config: int = 1) -> str:
        """Odd."""
        return f"{json}{_x}{model_config}"

    assert list(parameters(odd)["properties"]) == ["json", "_x", "model_config"]
    assert await odd.call({"json": "j", "_x": 2, "model_config": 3}) == "j23"


async def test_defaults_and_descriptions_of_pydantic_fields() -> None:
    @tool
    def look(
        city: str = Field(description="its name"),
        year: int = Field(2024, ge=1900),
        *,
        unit: Annotated[str, Field(default="m")],
        far: Annotated[int, Field(default_factory=lambda: 7)],
    ) -> list[Any]:
        """Look."""
        return [city, year, unit, far]

    shown = parameters(look)
    assert shown["properties"]["city"] == {"type": "string", "description": "its name"}
    assert shown["properties"]["year"] == {"type": "integer", "default": 2024, "minimum": 1900}
    assert shown["required"] == ["city"]
    assert await look.call({"city": "Oslo"}) == '["Oslo",2024,"m",7]'
    assert (await look.run({})).kind == (await look.run({"city": "Oslo", "year": 1})).kind == "bad_arguments"


async def test_injected_parameters_are_hidden_from_the_model() -> None:
    @tool
    def secret(state: Annotated[dict[str, str], Injected], key: str) -> str:
        """Read."""
        return state[key]

    assert list(parameters(secret)["properties"]) == ["key"]
    assert await secret.call({"key": "a"}, state={"a": "b"}) == "b"
    assert (await secret.run({"key": "a", "state": {}})).kind == "bad_arguments"


def test_hints_are_those_of_the_wrapped_function() -> None:
    def look(city: str) -> str:
        """Look."""
        return city

    for function in (lru_cache(look), staticmethod(look)):
        assert parameters(Tool(function)) == parameters(Tool(look))


def test_schema_is_a_copy() -> None:
    @tool
    def f(x: int) -> int:
        """F."""
        return x

    f.schema["function"]["parameters"]["properties"].clear()
    assert list(parameters(f)["properties"]) == ["x"]


def test_options_override_the_docstring() -> None:
    @tool(name="other", description="Says.", timeout=1.5, max_output_chars=7)
    def f() -> str:
        """F."""
        return ""

    assert (f.name, f.description, f.timeout, f.max_output_chars) == ("other", "Says.", 1.5, 7)
    assert parameters(f) == {"type": "object", "properties": {}}


def test_function_without_docstring_is_described_by_its_name() -> None:
    def look_up(x: int) -> int:
        return x

    assert as_tool(look_up).description == "look up"


def test_what_cannot_be_a_tool() -> None:
    def no_hint(query, k: int) -> str:  # type: ignore[no-untyped-def]
        return ""

    def star(*names: str) -> str:
        return ""

    def keywords(**names: str) -> str:
        return ""

    def unknown(x: Missing) -> str:  # type: ignore[name-defined]  # noqa: F821
        return ""

    class Opaque:
        pass

    def opaque(x) -> str:  # type: ignore[no-untyped-def]
        return ""

    def rows(x: int) -> Iterator[int]:
        yield x

    async def pages(x: int) -> AsyncIterator[int]:
        yield x

    opaque.__annotations__ = {"x": Opaque}
    for function, message in [
        (no_hint, r"tool 'no_hint': parameter 'query' has no type hint"),
        (star, r"tool 'star': parameter '\*names.*' cannot be given by name"),
        (keywords, r"tool 'keywords': parameter '\*\*names.*' cannot be given by name"),
        (unknown, r"tool 'unknown': a type hint cannot be resolved \(`Annotated\[Any, Injected\]` .*Missing"),
        (rows, r"tool 'rows': expected a function that returns its result, got one with `yield`"),
        (pages, r"tool 'pages': expected a function that returns its result, got one with `yield`"),
        (opaque, r"tool 'opaque': its type hints cannot be turned into a JSON schema"),
        ("text", r"expected a function or a Tool, got 'text'"),
        (Opaque, r"expected a function or a Tool, got <class"),
    ]:
        with pytest.raises(PluginError, match=message):
            as_tool(function)  # type: ignore[arg-type]
    with pytest.raises(PluginError, match="positive `timeout`"):
        tool(timeout=0)(star)
    with pytest.raises(PluginError, match="positive `max_output_chars`"):
        tool(max_output_chars=0)(star)


def test_two_tools_of_one_name() -> None:
    def f(x: int) -> int:
        """F."""
        return x

    with pytest.raises(PluginError, match="two tools are called 'f'"):
        Toolbox([f, as_tool(f)])
