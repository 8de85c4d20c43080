"""Ids word by word are the ids of the tokenizer itself, and other tokenizers are refused."""

import json
import random
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer

from agentrl.chat import words
from agentrl.chat.encoding import Codec
from agentrl.chat.words import WordEncoder
from agentrl.tiny import shipped
from tests.support.chats import make_chat
from tests.support.nightly import examples

ROOT = Path(__file__).resolve().parents[2]
EXPRESSIONS = {
    "qwen": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "llama3": [
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
        r"|\s+(?!\S)|\s+"
    ],
    "gptoss": [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "deepseek": [
        r"\p{N}{1,3}",
        r"[一-龥぀-ゟ゠-ヿ]+",
        r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
        r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
}
"""The expressions of published tokenizers, which cut text into words one after another."""


@cache
def qwen3() -> Tokenizer:
    backend: Tokenizer = make_chat("qwen3").tokenizer.backend_tokenizer
    return backend


@cache
def copy_of_qwen3() -> Tokenizer:
    return Tokenizer.from_str(qwen3().to_str())


def changed(**parts: Any) -> Tokenizer:
    """Return the tokenizer of a small model with other parts."""
    whole = json.loads((shipped("tools") / "tokenizer.json").read_text(encoding="utf-8"))
    return Tokenizer.from_str(json.dumps({**whole, **parts}))


def cut_by(*expressions: str, use_regex: bool = False, **split: Any) -> dict[str, Any]:
    splits = [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False, **split}
        for each in expressions
    ]
    last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}
    return {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [*splits, last]}}


def ids(backend: Tokenizer, text: str) -> list[int]:
    return list(backend.encode(text, add_special_tokens=False).ids)


@cache
def encoder() -> WordEncoder:
    found = WordEncoder.of(qwen3())
    assert found is not None
    return found


PIECES = st.lists(
    st.sampled_from(["<|im_end|>", "<think>", "'s", "'LL", "  ", "\r\n", " \n", "ſ", "é", "e\u0301", "漢字", "🙂", "–"])
    | st.text(words._CHARACTERS, max_size=8)
    | st.text(max_size=4),
    max_size=8,
).map("".join)


@settings(max_examples=examples(1), derandomize=True, deadline=None)
@given(text=PIECES)
def test_ids_are_those_of_the_tokenizer(text: str) -> None:
    assert encoder().encode(text) == ids(qwen3(), text)
    assert encoder().encode("") == []


@pytest.mark.parametrize("family", [*EXPRESSIONS, "gpt2"])
def test_families_of_tokenizers(family: str) -> None:
    backend = copy_of_qwen3()
    backend.pre_tokenizer = changed(**cut_by(*EXPRESSIONS.get(family, []), use_regex=family == "gpt2")).pre_tokenizer
    found = WordEncoder.of(backend)
    assert found is not None
    for path in (ROOT / "README.md", ROOT / "docs/gateway.md", ROOT / "agentrl/chat/parsers/base.py"):
        text = path.read_text(encoding="utf-8")
        assert found.encode(text) == ids(backend, text)
    rng = random.Random(0)
    for _ in range(200):
        text = "".join(rng.choices(words._CHARACTERS + " \n'1aB" * 100, k=200))
        assert found.encode(text) == ids(backend, text), text


METASPACE = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
OTHER = {
    "another normalizer": {"normalizer": {"type": "Lowercase"}},
    "another cut": {"pre_tokenizer": METASPACE},
    "no cut": {"pre_tokenizer": None},
    "a single word": cut_by(),
    "words that are joined": cut_by(r"\p{L}+", behavior="MergedWithNext"),
    "the other words": cut_by(r"\p{L}+", invert=True),
    "a string": cut_by(r"\p{L}+", pattern={"String": " "}),
    "a group": cut_by(r"(\p{L})+"),
    "a class that Python lacks": cut_by(r"\h+|\p{L}+"),
    "a set in a set": cut_by(r"[a[bc]]+"),
    "no category": cut_by(r"\P{L}+"),
    "the other spaces in a set": cut_by(r"[a\S]+"),
    "an anchor": cut_by(r"^\p{L}+"),
    "a number that Ruby repeats": cut_by(r"\p{N}{1,3}+"),
    "an empty set": cut_by(r"[\p{M}]+"),
}


@pytest.mark.parametrize("parts", OTHER.values(), ids=OTHER.keys())
def test_other_tokenizers_are_refused(parts: dict[str, Any]) -> None:
    assert WordEncoder.of(changed(**parts)) is None


def test_an_expression_that_means_something_else_for_python_is_refused() -> None:
    backend = copy_of_qwen3()
    # Without regard to case, the dotted capital I is an i for Python only.
    backend.pre_tokenizer = changed(**cut_by(r"\s(?=\s(?i:i))|\s+|[^\s]+")).pre_tokenizer
    assert WordEncoder.of(backend) is None


@pytest.mark.parametrize("option", ["lstrip", "rstrip", "single_word", "normalized"])
def test_added_tokens_that_see_their_surroundings_are_refused(option: str) -> None:
    backend = changed()
    backend.add_tokens([AddedToken("<odd>", **{"normalized": False, option: True})])
    assert WordEncoder.of(backend) is None


def test_a_codec_of_another_tokenizer_uses_the_tokenizer() -> None:
    tokenizer = make_chat("llama3_1").tokenizer
    normal = tokenizer.backend_tokenizer.normalizer
    try:
        from tokenizers.normalizers import Lowercase

        tokenizer.backend_tokenizer.normalizer = Lowercase()
        codec = Codec(tokenizer)
        assert codec.encode("A Word") == codec.encode("a word")
    finally:
        tokenizer.backend_tokenizer.normalizer = normal


def test_common_characters_mean_the_same_for_every_version_of_unicode() -> None:
    old = unicodedata.ucd_3_2_0
    assigned = [c for c in words._CHARACTERS if old.category(c) != "Cn"]
    assert len(assigned) > 1300
    # The soft hyphen changed in 2003, the others in 2012.
    assert [c for c in assigned if old.category(c) != unicodedata.category(c)] == ["§", "ª", "\xad", "¶", "º"]
    pairs = "".join(a + b for a in words._CHARACTERS for b in words._CHARACTERS)
    assert unicodedata.is_normalized("NFC", pairs)


def test_a_long_text_goes_to_the_tokenizer_which_lets_other_threads_run() -> None:
    found = WordEncoder.of(qwen3())
    assert found is not None
    known = set(found._known)
    text = "a longword " * 8192
    assert found.encode(text) == ids(qwen3(), text)
    assert set(found._known) == known
    assert found.encode(text[:-1000]) == ids(qwen3(), text[:-1000])


def test_words_are_kept_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_KEPT", 3)
    found = WordEncoder.of(qwen3())
    assert found is not None
    text = "one two three four five " + "x" * 100
    assert found.encode(text) == ids(qwen3(), text)
    assert 0 < len(found._known) <= 3
    assert "x" * 100 not in found._known
