"""Mutated chat templates: refused by name, or a conversation is rendered within the limits."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from agentrl.chat.jinja import MAX_WORK
from agentrl.chat.template import Template
from tests.fuzz.mutate import few, fuzz, of_bytes
from tests.fuzz.test_data import CALL, TOOL

SHIPPED = [file.read_bytes() for file in sorted(Path(__file__).parents[2].glob("[ae]*/**/*.jinja"))]
SOURCES = [source for source in SHIPPED if b"messages" in source]
HARD = (
    b"{{ 'a' * 10**9 }}",
    b"{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    b"{{ messages }}",
    b"{{ messages|tojson(indent=10**9) }}",
    b"{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    b"{% set x = messages[0] %}",
    b"{{ x ~ x }}",
    b"|join(messages)",
    b"|replace('', 'x' * 9999)",
    b"{%",
    b"%}",
    b"{{",
    b"}}",
    b"{#",
    b"* 10**9",
    b"* 99999",
    b"{{ lipsum(n=10**9) }}",
    b"{{ ''.__class__ }}",
    b"'%9999999999d' % 1",
    b"[" * 999,
    b"(" * 99,
    b"-" * 999,
    b"{% if true %}" * 150,
    b"{% for m in messages %}",
    b"{% endfor %}",
    b"{{ 9 ** 9 }}",
    b"not " * 999,
    b"{{ a.b.c.d }}",
)
MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "text"},
    {"role": "user", "content": "text"},
    {key: value if key != "content" else "" for key, value in CALL.items()},
    {"role": "tool", "content": "3"},
]


def mutant(rng: random.Random) -> bytes:
    source = rng.choice(SOURCES)
    return of_bytes(rng, source, HARD) if rng.random() < 0.95 else source


def read(source: bytes) -> str:
    template = Template(source.decode("utf-8", "replace"), {"bos_token": "<s>", "eos_token": "</s>"})
    template.variables()
    return template.render(MESSAGES, [TOOL])


def sound(text: str) -> None:
    assert len(text) <= MAX_WORK


@few
def test_mutated_templates(count: int) -> None:
    found = fuzz(count, mutant, read, sound)
    assert found["accepted"] > count // 50
    assert found["TemplateError"] > count // 50
