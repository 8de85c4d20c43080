"""Schemas of foreign MCP servers: what a malicious schema can do to a run."""

import json
import sys
from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import anyio
import pytest

from agentrl.errors import PluginError
from agentrl.tools import OutcomeKind
from agentrl.tools.mcp import MCPTools
from agentrl.tools.schema_check import SchemaCheck
from tests.support.nightly import nightly

SERVER = """
import json, sys
from mcp.server.lowlevel import Server
import anyio, mcp.types as types
from mcp.server.stdio import stdio_server

tools = [types.Tool(**tool) for tool in json.loads(open(sys.argv[1]).read())]

async def list_tools(*_):
    return types.ListToolsResult(tools=tools)

async def call_tool(*_):
    return types.CallToolResult(content=[types.TextContent(type="text", text="called")])

async def main():
    server = Server("liar", on_list_tools=list_tools, on_call_tool=call_tool)
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())

anyio.run(main)
"""


def text(**keywords: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {"a": {"type": "string", **keywords}}}


def node(width: int) -> dict[str, Any]:
    """Make a chain of 60 definitions, each of which refers to the next one `width` times."""
    names = [f"n{i}" for i in range(60)]
    chain = {name: {"allOf": [{"$ref": f"#/$defs/{after}"}] * width} for name, after in pairwise(names)}
    return {"type": "object", "$defs": {**chain, names[-1]: {}}, "properties": {"a": {"$ref": "#/$defs/n0"}}}


NUMBERS = json.dumps({"type": "object", "additionalProperties": {"type": "integer"}})
WIDE = "\U0001f600" * 1200  # JSON writes twelve characters for each
LONG = {f"{WIDE}{number}": WIDE for number in range(6)}


async def test_the_longest_mistakes_are_the_models_and_not_the_tools(check: SchemaCheck) -> None:
    problems = await check.problems(NUMBERS, LONG)
    assert [(len(path), len(message)) for path, message in problems] == [(1000, 1000)] * 5


async def test_an_answer_without_end_ends_the_process(check: SchemaCheck, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.tools.schema_check._MAX_BYTES", 1 << 10)
    monkeypatch.setattr("agentrl.tools.schema_check._GRACE", 0.0)
    with pytest.raises(PluginError, match="a check by it takes longer"):
        await check.problems(NUMBERS, LONG)
    assert await check.problems(json.dumps(text()), {"a": 1}) == [("$.a", "1 is not of type 'string'")]


@pytest.fixture
async def check() -> AsyncIterator[SchemaCheck]:
    check = SchemaCheck()
    yield check
    await check.close()


def liar(folder: Path, *schemas: dict[str, Any], description: str = "A tool.") -> MCPTools:
    tools = [{"name": f"t{i}", "description": description, "inputSchema": s} for i, s in enumerate(schemas)]
    (folder / "tools.json").write_text(json.dumps(tools))
    return MCPTools.stdio(sys.executable, "-c", SERVER, str(folder / "tools.json"), start_timeout=120)


@pytest.mark.slow
async def test_an_endless_pattern_does_not_block_the_loop(tmp_path: Path) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            await anyio.sleep(0.01)
            ticks += 1

    async with liar(tmp_path, text(pattern="^(a+)+$"), node(1)) as source, anyio.create_task_group() as group:
        group.start_soon(tick)
        for _ in range(2):  # a new process checks after the first has ended
            hung = await source.tools[0].run({"a": "a" * 40 + "!"})
            assert hung.kind is OutcomeKind.RAISED
            assert "schema of `t0`: a check by it takes longer than 0.5 s of computing" in hung.text
        assert ticks > 10
        wrong = await source.tools[0].run({"a": "b"})
        assert (wrong.kind, wrong.text) == (
            OutcomeKind.BAD_ARGUMENTS,
            "Error: argument `a`: 'b' does not match '^(a+)+$'",
        )
        assert (await source.tools[1].run({"a": 1})).text == "called"
        group.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("schema", "message"),
    nightly(
        [
            ({"$ref": "#"}, "it refers to itself without end"),
            ({"$ref": "#/$defs/x"}, "PointerToNowhere"),
            ({"$ref": "file:///etc/passwd"}, "Unresolvable: file:///etc/passwd"),
            ({"$ref": "http://127.0.0.1:9/x"}, "Unresolvable: http"),
            ({"properties": {"a": {"type": "nothing"}}}, "'nothing' is not valid"),
            ({"properties": {"a": {"pattern": "("}}}, "is not a 'regex'"),
            ({"required": "a"}, "'a' is not of type 'array'"),
        ],
        1,
    ),
)
async def test_what_no_schema_is(tmp_path: Path, schema: dict[str, Any], message: str) -> None:
    with pytest.raises(PluginError, match="tool 't0': its parameters are no usable JSON schema") as caught:
        await liar(tmp_path, {"type": "object", **schema}).open()
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "argument", "message"),
    nightly(
        [
            ({"properties": {"a": {"$ref": "#/properties/a"}}}, 1, "refers to itself without end"),
            (node(2), 1, "takes longer than 0.5 s of computing"),
            ({"patternProperties": {"^(a+)+$": {}}}, {"a" * 40 + "!": 1}, "takes longer than 0.5 s of computing"),
            ({"$schema": ["x"]}, 1, "unhashable"),
        ],
        2,
    ),
)
@pytest.mark.timeout(45)  # a process that continues is given up after 60 s
async def test_schemas_that_lie_in_wait(check: SchemaCheck, schema: Any, argument: Any, message: str) -> None:
    given = argument if isinstance(argument, dict) else {"a": argument}
    with pytest.raises(PluginError, match=message):
        await check.problems(json.dumps(schema), given)
    assert await check.problems('{"required": ["b"]}', {}) == [("$", "'b' is a required property")]


async def test_a_check_that_is_cancelled_answers_no_later_one(check: SchemaCheck) -> None:
    with anyio.move_on_after(0):
        await check.problems('{"required": ["late"]}', {})
    assert await check.problems("{}", {}) == []


async def test_descriptions_have_a_length(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"have 300,\d+ characters, t0 alone 300,\d+; at most 262,144") as caught:
        await liar(tmp_path, text(), description="long " * 60_000).open()
    assert len(str(caught.value)) < 1_000_000


async def test_nothing_is_fetched(check: SchemaCheck, tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text('{"required": ["b"]}')
    with pytest.raises(PluginError, match="Unresolvable"):
        await check.problems(json.dumps({"$ref": (tmp_path / "other.json").as_uri()}), {})
