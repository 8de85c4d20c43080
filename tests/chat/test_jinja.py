"""Untrusted chat templates: limits of the time and memory that they can take."""

import resource
import threading
from typing import Any

import pytest

from agentrl.chat import jinja
from agentrl.chat.jinja import MAX_WORK
from agentrl.chat.template import Template
from agentrl.errors import TemplateError
from tests.support.nightly import nightly

USER = [{"role": "user", "content": "hi"}]
BIG = "{% set a = 'abcd' * 1000000 %}"
DOUBLED = "{% set ns = namespace(a='ab') %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}"
NESTED_AS_TEXT = (
    "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a ~ '' }}"
)
"""Like the form without `~`; each takes seconds."""
GROWING = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{% set x = 'a' * 10**9 %}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'a'|center(1000000000) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (10**9, 1) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{a:{w}}'.format(a=1, w=10**9) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ 'a'|indent(10**9, first=true) }}",
    "{{ [1]|batch(10**9, 'a')|list }}",
    "{{ [1]|slice(10**9)|list }}",
    "{{ 1|round(10**9, 'ceil') }}",
    DOUBLED,
    DOUBLED.replace("~", "+"),
    "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace(a=[1]) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}{{ ns.a|tojson }}",
    NESTED_AS_TEXT,
    BIG + "{{ a.replace('a', a) }}",
    BIG + "{{ a|replace('a', a) }}",
    BIG + "{{ [a] * 100000 }}",
    BIG + "{{ ([a] * 1000)|join }}",
    BIG + "{{ a|join(a) }}",
    BIG + "{{ a.join(range(1000)|map('string')) }}",
    BIG + "{{ ('{0}' * 1000).format(a) }}",
    BIG + "{{ ('%s' * 1000) % (([a] * 1000)|list) }}",
    BIG + "{{ 'ab'.translate({97: a, 98: a}) }}" * 99,
    "{% set ns = namespace(a=3) %}{% for i in range(60) %}{% set ns.a = ns.a * ns.a %}{% endfor %}",
    "{{ 9 ** (9 ** 9) }}",
    BIG + "{% for i in range(99) %}{{ a }}{% endfor %}",
    BIG + "{% macro m() %}{% for i in range(99) %}{{ a }}{% endfor %}{% endmacro %}{% set x = m() %}",
    "{% macro m() %}{% for i in range(99999) %}" + "x" * 9999 + "{% endfor %}{% endmacro %}{% set x = m() %}",
]
LOOPING = [
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) if i < 0 %}{% endfor %}" * 100,
    "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "{% for i in range(99999) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro m() %}{{ caller() }}{{ caller() }}{% endmacro %}" + "{% call m() %}" * 40 + "{% endcall %}" * 40,
]


def rendered(source: str, messages: list[dict[str, Any]] = USER) -> str:
    return Template(source, {}).render(messages)


@pytest.mark.parametrize(
    "source", nightly(GROWING, [each for each in GROWING if not each.startswith(BIG) and each != NESTED_AS_TEXT])
)
def test_text_that_grows_is_refused_before_it_is_made(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(TemplateError, match="makes more than|width of more than|numbers without end|OverflowError"):
        rendered(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # in kB


@pytest.mark.parametrize("source", nightly(LOOPING, 3))
def test_loops_end(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja, "SECONDS", 0.1)
    with pytest.raises(TemplateError, match="loops without end|computes for longer than|RecursionError"):
        rendered(source)


@pytest.mark.parametrize("source", ["{{ lipsum(n=10**9) }}", "{{ '<>'|striptags }}", "{{ 'a'|wordwrap(1) }}"])
def test_what_only_web_pages_need_is_missing(source: str) -> None:
    with pytest.raises(TemplateError, match="lipsum|striptags|wordwrap"):
        rendered(source)


def test_each_rendering_begins_anew_in_every_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja, "MAX_WORK", 1 << 22)
    template = Template("{% for i in range(999) %}{{ messages[0].content ~ i }}{% endfor %}", {})
    texts: list[str] = []

    def often() -> None:
        texts.extend(template.render(USER) for _ in range(15))

    threads = [threading.Thread(target=often) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(texts) == 30
    assert set(texts) == {"".join(f"hi{i}" for i in range(999))}


def test_long_conversations_are_no_attack() -> None:
    source = "{% for m in messages %}{{ '<' ~ m.role ~ '>' + m.content.replace('a', 'bbb')|trim }}{% endfor %}"
    messages = [{"role": "user", "content": "a" * 1000}] * 2000
    assert len(rendered(source, messages)) == 2000 * 3006
    assert MAX_WORK > 10 * 2000 * 3006


def test_templates_may_look_ahead_from_every_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jinja, "MAX_WORK", 1 << 22)
    source = "{% for m in messages %}{% for n in messages[loop.index :] %}{% endfor %}{{ m.content }}{% endfor %}"
    assert rendered(source, USER * 150) == "hi" * 150
    with pytest.raises(
        TemplateError, match=r"render 900 messages, the last with roles user user .*: .* more than 4,194,304"
    ):
        rendered(source, USER * 900)


def test_a_template_has_a_length() -> None:
    with pytest.raises(TemplateError, match="has 1,048,577 characters"):
        rendered("a" * (1 << 20) + "b")
