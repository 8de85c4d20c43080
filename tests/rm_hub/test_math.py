"""The `math` grader: answers in many forms, hostile input, GSM8K and math-verify's own pairs."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.errors import GraderFailure
from agentrl.rm_hub import grade
from tests.rm_hub import latex_variants
from tests.rm_hub.math_variants import concluded, mistakes, stated, without_marks
from tests.support.corpus import gsm8k_solutions
from tests.support.nightly import examples, nightly, weekly

AGREEMENT = Path(__file__).parent.parent / "conformance" / "rm_hub" / "agreement"


def right(response: str, label: Any) -> bool:
    return grade("math", response, label).correct


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("12", "12 apples"),
        ("12", "twelve"),
        ("1/2", r"\frac12"),
        ("1/2", "½"),
        ("1234", "1 234"),
        ("50", "50%"),
        ("0.5", "50%"),
        ("50%", "50"),
        ("12 cm", r"12\,\text{cm}"),
        ("120 cm", "1.2 m"),
        ("0.333", r"\frac{1}{3}"),
        ("3.1416", r"\pi"),
        ("5", "x = 5"),
        ("x = 5", "5"),
        ("y=2x+1", "2x+1"),
        (r"2\sqrt{3}", "2*sqrt(3)"),
        (r"1\pm\sqrt2", r"1+\sqrt{2}, 1-\sqrt{2}"),
        (r"(5,\infty)", "x>5"),
        ("3,4", "4 and 3"),
        ("(3,4)", "x = 3, y = 4"),
        ("2x+y=3", "y=3-2x"),
        ("no solution", r"\emptyset"),
        ("B", r"\textbf{(B)}\ 17"),
        ("[1,2]", r"1 \le x \le 2"),
        ("p=5,q=2;p=7,q=2", "(5,2),(7,2)"),
        ("1,22", "1.22"),
        ("0.0001", "10^{-4}"),
        ("3/4", r"\frac{3}{4} = 75\%"),
        ("1024", "2^{10} = 1,024"),
        ("90", r"1.5\text{ hours} = 90\text{ minutes}"),
    ],
)
def test_the_same_answer_in_another_form(label: str, answer: str) -> None:
    assert right(rf"\boxed{{{answer}}}", label)


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        ("12", "12x"),
        ("0.5", "50"),
        ("0.5", "0.5%"),
        ("1/3", "0.333"),
        ("3.75", "3.749"),
        ("12 cm", "12 m"),
        ("(1,2]", "[1,2)"),
        ("(1,2)", "(2,1)"),
        ("x=5", "y=5"),
        ("3", "3 or 4"),
        ("101_2", "5"),
        ("2+3i", "2-3i"),
        (r"2\pi", "6.28"),
        (r"\sqrt{2}", "1.41"),
        ("2x+y=3", "y=3+2x"),
        (r"\{1,2\}", "1"),
        (r"\infty", r"-\infty"),
        ("B", "C"),
        ("x^2+1", "x^2"),
        ("3:4", "4:3"),
    ],
)
def test_another_answer(label: str, answer: str) -> None:
    assert not right(rf"\boxed{{{answer}}}", label)


@pytest.mark.parametrize(
    "response",
    [
        r"The % increase is \boxed{3}.",
        r"Since n % 7 = 3, the answer is \boxed{3}.",
        "% the answer is 9\nThe answer is 3.",
        "Let me restate it.\n\n**Question:** What is 1+2?\n\n**Answer:** 3",
        "P: (1,2)\nQ: (4,2)\nSo the distance is \\boxed{3}.",
        "The answer is 3.\n\nQuestion: What is 4+5?\nAnswer: 9",
        "A: 3\n\nQ: What is 4+5?\nA: 9",
        "3\n\nQ: What is 4+5?\nA: 9",
        "Let me answer this.\n\n**Question:** What is 1+2?\n\n**Answer:** 3",
    ],
)
def test_percent_signs_and_questions_in_prose(response: str) -> None:
    assert right(response, "3")
    assert not right(response, "9")


def test_a_grade_says_what_was_read_and_why() -> None:
    verdict = grade("math", "So we get \\boxed{\\frac{2}{4}}.", "1/2")
    assert (verdict.score, verdict.correct, verdict.extracted) == (1.0, True, r"\frac{2}{4}")
    assert "box" in verdict.reason
    assert grade("math", "", "1/2").reason == "no final answer found"


@pytest.mark.parametrize(
    "label", ["", "  ", [], {}, object(), float("nan"), float("inf"), "\\boxed{}", ["1", ""], "$$"]
)
def test_labels_that_are_no_answers(label: Any) -> None:
    with pytest.raises(GraderFailure, match="math") as caught:
        grade("math", "The answer is 5.", label)
    assert caught.value.kind == "grader_bad_label"


@pytest.mark.parametrize("label", [5, 5.0, Fraction(5), "5", "$5$", r"\boxed{5}", "2+3=5\n#### 5", ["7", "5"], ("5",)])
def test_labels_of_every_form(label: Any) -> None:
    assert right("The answer is 5.", label)
    assert not right("The answer is 6.", label)


HOSTILE = {
    "power of a long sum": r"\boxed{(a+b+c+d+e+f)^{40}}",
    "tower": r"\boxed{9^{9^{9^{9}}}}",
    "tower of stars": r"\boxed{9**9**9**9}",
    "factorial": r"\boxed{100000!}",
    "factorial twice": r"\boxed{((9!)!)!}",
    "binomial": r"\boxed{\binom{1000000}{500000}}",
    "exponent": r"\boxed{10^{1000000}}",
    "power of a sum": r"\boxed{(1+x)^{10000}}",
    "sum": r"\boxed{\sum_{n=1}^{100000000} n}",
    "open boxes": "\\boxed{" * 100_000,
    "braces": "\\boxed{" + "{" * 100_000 + "}" * 100_000 + "}",
    "brackets": "\\boxed{" + "(" * 500 + "1" + ")" * 500 + "}",
    "fractions": "\\boxed{" + "\\frac{" * 300 + "1" + "}{2}" * 300 + "}",
    "long": "a" * 1_000_000,
    "long number": "\\boxed{" + "1" * 1_000_000 + "}",
    "blanks": "The answer is" + " " * 200_000 + "x",
    "lines": "\n" * 500_000,
    "hashes": "#" * 200_000,
    "dollars": "$1 " * 60_000,
    "answers": "answer is " * 30_000,
    "tags": "<answer>" * 50_000,
    "surrogates": "\\boxed{\ud800}",
    "nulls": "\0" * 1000,
    "code": "\\boxed{__import__('os').system('exit 1')}",
    "attribute": "\\boxed{x.__class__.__base__}",
}


@pytest.mark.parametrize("name", nightly(HOSTILE, 8))
@pytest.mark.timeout(120)
def test_hostile_answers_are_refused_in_bounded_time(name: str) -> None:
    for label in ("5", r"\sqrt{3}+x"):
        assert not right(HOSTILE[name], label)


def test_nothing_is_loaded_for_numbers() -> None:
    code = (
        "import sys\n"
        "from agentrl.rm_hub import grade\n"
        "assert grade('math', 'So she pays \\\\boxed{\\\\frac{3}{4}} of it.', '0.75').correct\n"
        "assert not grade('math', 'The answer is 18 dollars.', '19').correct\n"
        "assert 'sympy' not in sys.modules and 'math_verify' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


@given(st.text(max_size=300), st.sampled_from(["5", r"\frac{1}{2}", "no solution", "(1,2)", r"\{1,2\}"]))
@settings(max_examples=examples(1.5), deadline=None)
def test_any_text_gets_a_grade(response: str, label: str) -> None:
    assert grade("math", response, label).score in (0.0, 1.0)


@given(st.fractions(max_denominator=999), st.sampled_from(["\\boxed{%s}", "The answer is %s.", "#### %s", "$x = %s$"]))
@settings(max_examples=examples(2), deadline=None)
def test_a_fraction_equals_itself_and_no_other(value: Fraction, form: str) -> None:
    written = rf"\frac{{{value.numerator}}}{{{value.denominator}}}"
    assert right(form % written, str(value))
    assert not right(form % written, str(value + Fraction(1, 7)))


def gsm8k() -> Iterator[tuple[int, str, str, str]]:
    for index, solution in enumerate(gsm8k_solutions()):
        yield index, solution, solution.rpartition("####")[2].strip().replace(",", ""), without_marks(solution)


def wrong_verdicts(step: int, start: int = 0) -> tuple[list[str], int]:
    """Return (errors, graded) over every `step`-th item of GSM8K: its own solution, every form, every mistake."""
    told: list[str] = []
    graded = 0
    for index, solution, gold, working in gsm8k():
        if index % step != start:
            continue
        rng = random.Random(index)
        cases = [("solution", solution, True)]
        cases += [(form, text, True) for form, text in stated(gold, working, rng)]
        for mistake in mistakes(solution, gold, rng):
            cases += [(f"{form}: {mistake}", text, False) for form, text in stated(mistake, working, rng)]
        for name, text, expected in cases:
            graded += 1
            if right(text, gold) != expected:
                told.append(f"item {index}, {name}: {gold} should be {'right' if expected else 'wrong'}")
    return told, graded


def test_gsm8k_in_every_form_a_slice() -> None:
    told, graded = wrong_verdicts(step=240)
    assert graded > 1500
    assert not told, told[:20]


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", weekly(range(10), 3))
def test_gsm8k_in_every_form(part: int, record_property: Any) -> None:
    """Ten parts cover every item: half a minute of CPU time each."""
    told, graded = wrong_verdicts(step=10, start=part)
    record_property("graded", graded)
    assert not told, told[:20]


def test_a_last_line_is_read_leniently_only() -> None:
    for index, _, gold, working in gsm8k():
        if index % 40 == 0:
            for response in concluded(gold, working):
                assert not right(response, gold), response
                assert grade("math", response, gold, {"reader": "lenient"}).correct, response


def latex_errors(seed: int, rounds: int) -> list[str]:
    return [
        f"{family}: {answer!r} for {label!r} should be {'right' if equal else 'wrong'}"
        for family, label, answer, equal in latex_variants.pairs(seed, rounds)
        if right(f"We work it out step by step and find \\boxed{{{answer}}}.", label) != equal
        or right(f"We work it out step by step. So the answer is ${answer}$.", label) != equal
    ]


def test_rewritten_latex_a_slice() -> None:
    assert not latex_errors(seed=0, rounds=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", weekly(range(1, 11), 3))
def test_rewritten_latex(seed: int) -> None:
    assert not latex_errors(seed, rounds=20)


ON_PURPOSE = {
    "test_all::test_complex_math_expressions[4]": "a control character inside a LaTeX command",
    "test_all::test_complex_math_expressions[7]": "0.33 for 1/3, asked with two decimals",
    "test_all::test_complex_math_expressions[13]": "2.6667 for 8/3, asked with two decimals",
    "test_all::test_latex_notation_math[4]": "a box that is broken by a dollar sign",
    "test_all::test_number_extraction[7]": "a decimal comma in a price",
    "test_all::test_relations_math[2]": "an inequality before 'is our answer'",
    "test_all::test_relations_math[10]": "a chain of equations that is false",
    "test_all::test_relations_math[12]": "a chain of equations that is false",
    "test_all::test_latex_notation_math[2]": "a label that is a long solution without one answer",
    "test_all::test_math_extraction_additional_cases[7]": "a set for a tuple",
    "test_all::test_set_rel_assymetry[3]": "inequalities for the interval that they describe are right",
    "test_boxed::test_boxed[0]": "a label of two boxes joined by plus signs",
    "test_numina_cases::test_numina_cases[24]": "a label whose box is not closed",
    "test_open_thoughts::test_open_thoughts[27]": "a label of two boxes in prose",
    "test_strict::test_strict_variable_comparison[1]": "renamed variables are not the same",
}
"""Pairs of math-verify's tests with another verdict here, and the reason."""


def test_agreement_with_math_verifys_own_pairs(record_property: Any) -> None:
    with (AGREEMENT / "math_verify.jsonl").open(encoding="utf-8") as lines:
        pairs = [json.loads(line) for line in lines]
    lenient = {"reader": "lenient"}
    grades = {pair["id"]: (pair, grade("math", pair["pred"], pair["gold"], lenient)) for pair in pairs}
    # A text that announces no answer has none here. If an answer is read, the verdicts are compared.
    read = {name: (pair, got) for name, (pair, got) in grades.items() if got.extracted is not None}
    assert len(read) > 0.9 * len(pairs)
    differ = {name for name, (pair, got) in read.items() if got.correct != pair["expected"]}
    record_property("agreement", f"{len(read) - len(differ)} of {len(read)}")
    assert differ == set(ON_PURPOSE)


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (r"\mathbb{R}", r"\mathbb R"),
        (r"\mathbb{R}", r"\R"),
        (r"\mathbb{R}", r"\Bbb{R}"),
        (r"[0,\infty)", r"\{x \mid x \ge 0\}"),
        (r"(-1,3)", r"\{x \in \mathbb{R} : -1 < x < 3\}"),
        (r"\{x : x \le 2\}", r"\{x \mid x \leq 2\}"),
        ("(2,3)", r"\begin{cases} x=2 \\ y=3 \end{cases}"),
        ("2,3", r"\begin{aligned} x &= 2 \\ y &= 3 \end{aligned}"),
        (r"\begin{pmatrix}1&2\\3&4\end{pmatrix}", r"\begin{pmatrix} 1 & 2 \\[3pt] 3 & 4 \end{pmatrix}"),
        ("17", r"\large 17"),
        ("17", r"\textcolor{red}{17}"),
        ("17", r"\color{blue}{17}"),
    ],
)
def test_spellings_of_latex_that_change_nothing(label: str, answer: str) -> None:
    assert grade("math", rf"\boxed{{{answer}}}", label).correct


@pytest.mark.parametrize(
    ("label", "answer"),
    [
        (r"\mathbb{R}", r"\mathbb{Z}"),
        (r"[0,\infty)", r"\{x \mid x > 0\}"),
        ("(2,3)", r"\begin{cases} x=3 \\ y=2 \end{cases}"),
        (r"\begin{cases} x & x>0 \\ 0 & x<0 \end{cases}", r"\begin{cases} x & x>0 \\ 1 & x<0 \end{cases}"),
        ("17", r"\textcolor{17}{71}"),
    ],
)
def test_other_values_stay_different(label: str, answer: str) -> None:
    assert not grade("math", rf"\boxed{{{answer}}}", label).correct
