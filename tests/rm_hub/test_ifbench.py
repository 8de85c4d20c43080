"""The instruction-following grader: every kind, its parameters, the two modes, hostile answers."""

import functools
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import GraderFailure
from agentrl.rm_hub import Grade, grade
from agentrl.rm_hub.ifbench import CHECKS, grade_ifbench
from tests.support.nightly import examples

HERE = Path(__file__).parent
CORPUS = HERE.parent / "conformance" / "rm_hub" / "ifbench.jsonl"
CONSTRAINTS = HERE / "data" / "ifbench_constraints.jsonl"
IFEVAL = (
    "keywords:",
    "language:",
    "length_constraints:",
    "detectable_",
    "combination:",
    "startend:",
    "change_case:",
    "punctuation:",
)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def check(response: str, kind: str, *, mode: str = "strict", **kwargs: object) -> Grade:
    metadata = {"instruction_id_list": [kind], "kwargs": [kwargs], "ifbench_mode": mode}
    return grade_ifbench(response, None, metadata)


@functools.cache
def parameters() -> dict[str, dict[str, Any]]:
    """Return one set of parameters for each kind, from the corpus."""
    found: dict[str, dict[str, Any]] = {}
    for item in lines(CORPUS):
        metadata = item["metadata"]
        for kind, kwargs in zip(metadata.get("instruction_id_list", ()), metadata.get("kwargs", ()), strict=True):
            found.setdefault(kind, kwargs or {})
    return found


class TestKinds:
    def test_58_of_ifbench_and_25_of_ifeval(self) -> None:
        assert sum(kind.startswith(IFEVAL) for kind in CHECKS) == 25
        assert len(CHECKS) == 58 + 25

    def test_the_whole_test_set_can_be_graded(self) -> None:
        items = lines(CONSTRAINTS)
        assert len(items) == 300
        used = set()
        for item in items:
            answer = grade("ifbench", "An answer that meets few of them.", metadata=item)
            assert set(item["instruction_id_list"]) <= set(answer.parts)
            used |= set(item["instruction_id_list"])
        assert used == {kind for kind in CHECKS if not kind.startswith(IFEVAL)}

    def test_corpus_has_two_accepts_and_two_refusals_of_each(self) -> None:
        found = Counter(
            (item["metadata"]["instruction_id_list"][0], item["correct"])
            for item in lines(CORPUS)
            if len(item["metadata"].get("instruction_id_list", ())) == 1
        )
        assert {kind for kind in CHECKS if found[kind, True] < 2 or found[kind, False] < 2} == set()

    @pytest.mark.parametrize("kind", sorted(CHECKS))
    def test_nothing_meets_no_constraint(self, kind: str) -> None:
        assert not check(" \n", kind, **parameters()[kind]).correct


class TestModes:
    TWO = {"instruction_id_list": ["punctuation:no_comma", "format:no_whitespace"], "kwargs": [{}, {}]}

    def test_parts_have_both_modes_and_each_verdict(self) -> None:
        got = grade_ifbench("Sure, yes!\na,b", None, {**self.TWO, "aggregate": "mean"})
        assert got.parts == {"strict": 0.0, "loose": 0.5, "punctuation:no_comma": 0.0, "format:no_whitespace": 0.0}

    def test_the_same_kind_twice(self) -> None:
        metadata = {"instruction_id_list": ["format:list"] * 2, "kwargs": [{"sep": "-"}, {"sep": "+"}]}
        got = grade_ifbench("- a\n- b", None, metadata)
        assert (got.parts["format:list"], got.parts["format:list#2"], got.score) == (1.0, 0.0, 0.0)

    def test_reason_names_the_first_unmet_constraint_and_what_was_found(self) -> None:
        metadata = {
            "instruction_id_list": ["punctuation:no_comma", "count:word_count_range", "words:start_verb"],
            "kwargs": [{}, {"min_words": 5.0, "max_words": 6.0}, {}],
        }
        reason = grade_ifbench("One two three", None, metadata).reason
        assert reason == ("not met: between 5 and 6 words (count:word_count_range): 3 words; 1 more")

    @given(st.text(alphabet=st.sampled_from("ab *,\n\"'.!?-<i>"), max_size=60), st.sampled_from(sorted(parameters())))
    @settings(max_examples=examples(3))
    def test_what_is_met_strictly_is_met_loosely(self, answer: str, kind: str) -> None:
        strict = check(answer, kind, **parameters()[kind])
        loose = check(answer, kind, mode="loose", **parameters()[kind])
        assert strict.score <= loose.score
        assert strict.parts["loose"] == loose.score


class TestProperties:
    @given(st.lists(st.sampled_from(["ox", "cat's", "1,000", "déjà"]), min_size=1), st.integers(0, 40))
    def test_number_of_words_and_its_converse(self, words: list[str], limit: int) -> None:
        text = " ".join(words)
        least, less = (
            check(text, "length_constraints:number_words", num_words=limit, relation=relation)
            for relation in ("at least", "less than")
        )
        assert least.correct != less.correct

    @given(st.integers(1, 12))
    def test_nesting(self, depth: int) -> None:
        assert check("(" * depth + "x" + ")" * depth, "format:parentheses").correct == (depth >= 5)

    @given(st.integers(0, 25), st.integers(0, 60))
    def test_alphabet_goes_round(self, start: int, length: int) -> None:
        words = [chr(97 + (start + n) % 26) + "x" for n in range(length + 1)]
        assert check(" ".join(words), "words:alphabet").correct
        assert not check(" ".join([*words, words[-1]]), "words:alphabet").correct

    @given(st.lists(st.integers(0, 8), min_size=2, max_size=8, unique=True))
    def test_stairs_go_up(self, indents: list[int]) -> None:
        stairs = [" " * indent + "step" for indent in sorted(indents)]
        assert check("\n".join(stairs), "format:line_indent").correct
        assert not check("\n".join(reversed(stairs)), "format:line_indent").correct

    @given(st.integers(1, 4), st.integers(2, 6), st.integers(1, 3))
    def test_sentences_grow(self, first: int, sentences: int, step: int) -> None:
        text = " ".join("Word" + " word" * (first + n * step - 1) + "." for n in range(sentences))
        assert check(text, "sentence:increment", small_n=step).correct
        assert not check(text, "sentence:increment", small_n=step + 1).correct

    @pytest.mark.parametrize("text", ["Dr. Smith paid $3.50 to U.S. firms.", "It is 5 p.m. in Bonn, Jan. 3 at home."])
    def test_abbreviations_end_no_sentence(self, text: str) -> None:
        assert not check(text, "length_constraints:number_sentences", num_sentences=2, relation="at least").correct

    @pytest.mark.parametrize(("text", "count"), [("What?! No.", 2), ("What!! No!!", 3), ("No?!", 2), ("No!", 1)])
    def test_two_marks_at_the_very_end_are_two_sentences(self, text: str, count: int) -> None:
        kind = "length_constraints:number_sentences"
        assert check(text, kind, num_sentences=count, relation="at least").correct
        assert check(text, kind, num_sentences=count + 1, relation="less than").correct

    @pytest.mark.parametrize("closer", ["", '"', "”", ")", "']"])
    def test_a_sentence_ends_in_its_last_mark_before_quotes_and_brackets(self, closer: str) -> None:
        text = f"They say so.{closer} They do.{closer} Do they?{closer}"
        assert check(text, "ratio:sentence_type").correct
        assert not check(text, "ratio:sentence_balance").correct
        assert check(f"Do they?{closer} They do!{closer} It is so.{closer}", "ratio:sentence_balance").correct

    @pytest.mark.parametrize(("letter", "count"), [("#", 2), ("!", 1), ("A", 3)])
    def test_a_letter_may_be_any_sign(self, letter: str, count: int) -> None:
        kind, text = "keywords:letter_frequency", "# A\n# banal!"
        for relation, right in (("at least", True), ("less than", False)):
            got = check(text, kind, let_relation=relation, let_frequency=count, letter=letter)
            assert got.correct == right

    @pytest.mark.parametrize("text", ["1800-00-10", "1800-10-00", "1800-02-30", "1768-01-01", "1800-1-1", "18000101"])
    def test_no_date_of_his_life(self, text: str) -> None:
        assert check("1800-10-10, 1769-08-15", "custom:date_format_list").correct
        assert not check(f"1800-10-10, {text}", "custom:date_format_list").correct

    @pytest.mark.parametrize(
        "text",
        ["Imagine it.", "Running helps.", "Was it so?", "Use the lamp.", "Wrote letters.", "Whirring, it wakes."],
    )
    def test_verbs(self, text: str) -> None:
        assert check(text, "words:start_verb").correct

    @pytest.mark.parametrize(
        "text",
        [
            "Use of lamps is wise.",
            "Water is wet.",
            "Certainly!",
            "42 is it.",
            "**Run**",
            "Bed is best.",
            "King of men.",
            "Nothing helps.",
        ],
    )
    def test_other_words(self, text: str) -> None:
        assert not check(text, "words:start_verb").correct


LETTERS = {"letter": "ab", "let_frequency": 1, "let_relation": "at least"}


class TestBadData:
    @pytest.mark.parametrize(
        ("metadata", "words"),
        [
            ({}, "instruction_id_list"),
            ({"instruction_id_list": [], "kwargs": []}, "at least one"),
            ({"instruction_id_list": "count:numbers", "kwargs": [{}]}, "a list"),
            ({"instruction_id_list": ["count:numbers"], "kwargs": []}, "1 mappings"),
            ({"instruction_id_list": ["count:numbers"], "kwargs": ["N"]}, "a mapping"),
            ({"instruction_id_list": ["count:number"], "kwargs": [{}]}, "'count:numbers'"),
            ({"instruction_id_list": [7], "kwargs": [{}]}, "no known constraint"),
            ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": None}]}, "N missing"),
            ({"instruction_id_list": ["count:numbers"], "kwargs": [None]}, "N missing"),
            ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": "two"}]}, "a whole number"),
            ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": 1.5}]}, "a whole number"),
            ({"instruction_id_list": ["count:numbers"], "kwargs": [{"N": float("nan")}]}, "a whole number"),
            ({"instruction_id_list": ["ratio:stop_words"], "kwargs": [{"percentage": 120}]}, "a percentage"),
            ({"instruction_id_list": ["format:list"], "kwargs": [{"sep": " "}]}, "not blank"),
            ({"instruction_id_list": ["keywords:letter_frequency"], "kwargs": [LETTERS]}, "one character"),
            ({"instruction_id_list": ["count:words_japanese"], "kwargs": [{"N": 0}]}, "from 1 on"),
            ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "ifbench_mode": "lax"}, "strict, loose"),
            ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{}], "aggregate": "max"}, "all, mean"),
        ],
    )
    def test_is_a_failure_and_no_zero(self, metadata: dict[str, Any], words: str) -> None:
        with pytest.raises(GraderFailure, match=words) as caught:
            grade("ifbench", "An answer.", metadata=metadata)
        assert caught.value.kind == "grader_bad_metadata"

    @pytest.mark.parametrize("label", ["no JSON", "[" * 100_000, 3, ["a"]])
    def test_a_label_that_holds_no_constraints(self, label: object) -> None:
        with pytest.raises(GraderFailure, match="metadata"):
            grade("ifbench", "An answer.", label)


HOSTILE = {
    "letters": "a",
    "stops": ".",
    "interrobangs": "?!",
    "braces": "({[",
    "quotes": "\"'",
    "asterisks": "*",
    "lines": "\n",
    "spaces": " x\t",
    "nulls": "\0",
    "surrogates": "\ud800",
    "titles": "<<",
    "brackets": "[a",
    "abbreviations": "Mr. ",
    "emoji": "😀 a. ",
    "italics": "<i>",
    "questions": "Question 1",
    "thinking": "<think>",
}


class TestHostile:
    @pytest.mark.parametrize("piece", HOSTILE.values(), ids=HOSTILE)
    def test_every_kind_is_total(self, piece: str) -> None:
        answer = "A" + piece * (6_000 // len(piece))
        for kind, kwargs in parameters().items():
            assert check(answer, kind, mode="loose", **kwargs).score in (0.0, 1.0)

    @given(st.text(max_size=40), st.sampled_from(sorted(parameters())))
    @settings(max_examples=examples(4))
    def test_any_text(self, answer: str, kind: str) -> None:
        assert check(answer, kind, mode="loose", **parameters()[kind]).score in (0.0, 1.0)

    def test_a_megabyte_is_refused_with_the_reason(self) -> None:
        got = check("x" * 1_000_000, "punctuation:no_comma")
        assert not got.correct
        assert "1000000 characters; more than 100000 are not graded" in got.reason
        assert check("x" * 100_000, "punctuation:no_comma").correct
