"""Mutated schemas of MCP servers are refused by name, or they check arguments and give a scripted call."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from agentrl.chat.messages import normalise_tools
from agentrl.check.script import arguments
from agentrl.errors import PluginError
from agentrl.tools import arguments as tool_arguments
from agentrl.tools.schema_check import SchemaCheck
from tests.fuzz.mutate import ODD, counts, fuzz, of_tree

NODE = {"type": "object", "required": ["next"], "properties": {"next": {"$ref": "#/$defs/node"}, "n": {"minItems": 3}}}
SCHEMAS: tuple[dict[str, Any], ...] = (
    {
        "type": "object",
        "properties": {
            "a": {"type": "string", "pattern": "^[a-z]+$", "maxLength": 9, "description": "A text."},
            "b": {"type": "array", "items": {"type": "integer", "minimum": 1}, "minItems": 1, "uniqueItems": True},
            "c": {"anyOf": [{"type": "null"}, {"enum": ["x", 1]}], "default": None},
        },
        "required": ["a", "b"],
        "additionalProperties": False,
    },
    {"type": "object", "$defs": {"node": NODE}, "properties": {"tree": {"$ref": "#/$defs/node"}}, "required": ["tree"]},
    {
        "type": "object",
        "patternProperties": {"^x": {"type": "number"}},
        "if": {"required": ["x"]},
        "then": {"maxProperties": 1},
    },
)
KEYWORDS = (
    "$ref",
    "pattern",
    "minItems",
    "allOf",
    "not",
    "$dynamicRef",
    "unevaluatedProperties",
    "$id",
    "$schema",
    "type",
)
HARD: tuple[Any, ...] = (
    *ODD,
    "#",
    "#/$defs/node",
    "^(a+)+$",
    "(",
    "http://127.0.0.1:9/x",
    "file:///etc/passwd",
    [{"$ref": "#"}],
)
GIVEN = {"a": "a" * 40 + "!", "b": [1, 2, {"x": [1]}], "c": "x", "tree": {"next": {"next": {}}}, "x1": 2}


def mutant(rng: random.Random) -> Any:
    schema = of_tree(rng, rng.choice(SCHEMAS), HARD)
    if isinstance(schema, dict) and rng.random() < 0.5:
        holders = (
            [schema, *(value for value in (schema.get("properties") or {}).values() if isinstance(value, dict))]
            if isinstance(schema.get("properties"), dict)
            else [schema]
        )
        rng.choice(holders)[rng.choice(KEYWORDS)] = rng.choice(HARD)
    return schema


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@counts
def test_mutated_schemas(count: int, loop: asyncio.AbstractEventLoop) -> None:
    check = SchemaCheck()

    def read(schema: Any) -> list[Any]:
        if not isinstance(schema, dict):
            raise PluginError("the SDK takes objects alone")
        tool = {
            "type": "function",
            "function": {"name": "t", "parameters": tool_arguments.of_schema("t", schema).schema},
        }
        try:
            text = json.dumps(schema)
        except RecursionError:
            raise PluginError("no message of a server is nested so deeply") from None
        loop.run_until_complete(check.problems(text, {}))
        made = arguments((normalise_tools([tool]) or [])[0], "guess")
        return [loop.run_until_complete(check.problems(text, given)) for given in (GIVEN, made)]

    def sound(found: list[Any]) -> None:
        for problems in found:
            assert all(isinstance(part, str) for problem in problems for part in problem)
            assert len(str(tool_arguments.mistakes(problems))) < 20_000

    try:
        found = fuzz(count, mutant, read, sound)
    finally:
        loop.run_until_complete(check.close())
    assert found["accepted"] > count // 50
    assert found["PluginError"] > count // 50
