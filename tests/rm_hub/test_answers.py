"""The reader of answers that the graders share: its time, and the part of a response that it takes for the answer."""

import time

import pytest

from agentrl.chat.parsers.base import TAGS
from agentrl.rm_hub import grade
from tests.support.nightly import nightly

SIZE, CPU_S = 100_000, 1.5

REPEATED = [
    "the answer is ", "answer is is is ", "is ", "final ", "correct right ", "so, ", "therefore, ", "answer: 5. ", "A is ",
    "if ", "not ", "wait ", "or maybe 5 ", "(", "[", "{", "$", "$1$ ", "\\boxed{", "\\boxed{1}", "\\boxed ", "\\[1\\]", "~~",
    '"a ', "<a hidden>", "<b>", "<answer>1</answer>", "<answer>\\boxed{1}</answer>", "```", "**a", "#### 1\n", ", a", "答案是",
    "a.m. ", "\\begin{", "\\phantom{", "<<1>>", "? ", "1,", "I choose ", "option A ",
]  # fmt: skip
ONCE = [
    '"' + "a " * (SIZE // 2),
    "<a " + "hidden " * (SIZE // 7),
    "#### 5 (" + "ab" * (SIZE // 2),
    "#### 5" + " " * SIZE + "x",
    "<answer>5 (" + "ab" * (SIZE // 2) + "</answer>",
    "answer" + " so," * (SIZE // 4),
    "answer: " + "(" * SIZE,
    "\\boxed{1}" * 8_800 + "answer: 5. " * 1_800,
    "\\boxed{" * 7_000 + "1" + "}" * 7_000,
]


TEXTS = [atom * (SIZE // len(atom)) for atom in REPEATED] + ONCE


@pytest.mark.parametrize("name", nightly(["math", "gpqa"], 1))
@pytest.mark.parametrize(
    "text",
    [pytest.param(text, marks=() if at % 4 == 0 else pytest.mark.slow) for at, text in enumerate(TEXTS)],
    ids=lambda text: text[:12],
)
def test_reading_takes_time_linear_in_the_text(name: str, text: str) -> None:
    """If this takes long, so does a tenth of the text: then the processor is slow."""
    took = _seconds(name, text)
    assert took < CPU_S or took < 70 * _seconds(name, text[: SIZE // 10])


def _seconds(name: str, text: str) -> float:
    label = "C" if name == "gpqa" else "271828"
    started = time.process_time()
    assert not grade(name, text, label, {"reader": "lenient"}).correct
    return time.process_time() - started


@pytest.mark.parametrize(
    "response",
    [
        "The answer is 7. Forget that.",
        "The answer is 7. No, 8.",
        "The answer is 7. Or rather 8.",
        "The answer is 7, which is clearly wrong.",
        "The answer is 7. This answer is wrong.",
        r"\boxed{7} is wrong.",
        "答案是7。错了，应该是8。",
        "答案是7，这是错误的。",
    ],
)
def test_a_retracted_answer_does_not_count(response: str) -> None:
    assert not grade("math", response, "7").correct


@pytest.mark.parametrize(
    "response", ["7?", r"\boxed{7?}", "答案是7吗", "Check whether the answer is 7.", "小明认为答案是7。"]
)
def test_questions_and_answers_of_others_do_not_count(response: str) -> None:
    assert not grade("math", response, "7").correct


@pytest.mark.parametrize(
    "response", [r"$1\boxed{7}$", r"$\boxed{7}^2$", r"$\frac{\boxed{7}}{2}$", r"$2\cdot\boxed{7}$", r"$\boxed{7}0$"]
)
def test_a_box_in_a_formula_is_no_answer(response: str) -> None:
    assert not grade("math", response, "7").correct


@pytest.mark.parametrize("said", ["7 factorial", "7 halves", "7 mod 3", "7, times 2", "7 is the wrong answer"])
def test_a_number_that_is_changed_is_another_one(said: str) -> None:
    assert not grade("math", f"The answer is {said}.", "7").correct
    assert not grade("math", said, "7").correct


@pytest.mark.parametrize("said", ["答案是7到8之间。", "答案是7倍。", "答案是7的平方。"])
def test_a_number_that_is_changed_in_a_dense_script_is_another_one(said: str) -> None:
    assert not grade("math", said, "7").correct


@pytest.mark.parametrize(
    ("name", "response", "label"),
    [
        ("math", "### Answer\n7", "7"),
        ("math", "Final Answer\n7", "7"),
        ("math", r"The answer is $\boxed{7}$. Let me know if this is wrong!", "7"),
        ("math", r"The answer is \boxed{7}. Sorry for the long explanation.", "7"),
        ("math", r"The answer is $\boxed{60}^\circ$.", "60"),
        ("math", "The answer is $5!$", "5!"),
        ("gsm8k", "Answer: 18 more apples", "18"),
        ("gsm8k", "The answer is 18 over the week.", "18"),
        ("gpqa", "A项错误，B项错误，D项错误，故选C。", "C"),
    ],
)
def test_ordinary_forms_are_read(name: str, response: str, label: str) -> None:
    assert grade(name, response, label).correct


@pytest.mark.parametrize("response", ["【答案】B、C、D", "B正确，C也正确。", "<answer>A</answer><answer>B</answer>"])
def test_several_choices_are_no_choice(response: str) -> None:
    assert not grade("gpqa", response, "B").correct


def test_a_word_is_not_cut_into_another() -> None:
    """ "on" is not the Spanish "o", and the end of "casino" is no negation, even if the reader stops within the word."""
    for padding in range(90):
        after = f"The answer is 7.\n\nExplanation: {'x' * padding} is $25*4=$100 on food."
        before = f"At the casino {'x' * padding} the answer is 7."
        assert grade("math", after, "7").correct, after
        assert grade("math", before, "7").correct, before
    for padding in range(280, 300):
        words = ("wood " * 60)[:padding].rstrip()
        for text in (f"The answer is 7 with {words} notices.", f"This motif {words} the answer is 7."):
            assert grade("math", text, "7").correct, text


@pytest.mark.parametrize(
    "remark",
    [
        "\n\nActually, this can also be seen by symmetry.",
        ". The common mistake here is to answer 6, which is wrong because order matters.",
        "\n\nThis is wrong only if order matters; here it does not.",
        "\n\nThis isn't correct for negative x, which are excluded.",
        "\n\nIt cannot be right to divide by zero, so that case is excluded.",
        "\n\nThat is not the answer to part (b), which was not asked.",
        "\n\nWait, we should double check: 2+3=5. Yes, it is correct.",
        "\n\nNo, there is no other solution.",
    ],
)
def test_a_remark_after_a_box_that_gives_no_other_answer_leaves_it(remark: str) -> None:
    assert grade("math", rf"\boxed{{5}}{remark}", "5", {}).correct


@pytest.mark.parametrize(
    "other", [". Actually it is 6.", ". Correction: 6.", ". Wait, no: 6.", " -- wait, I meant 6.", ". No, 6 is right.", ". My answer is wrong."]
)  # fmt: skip
def test_a_box_that_another_answer_follows_is_not_paid(other: str) -> None:
    assert not grade("math", rf"\boxed{{5}}{other}", "5", {}).correct


@pytest.mark.parametrize(
    "box",
    [
        r"\textbf{(C)}\ 42",
        r"\text{(C) } 42",
        "(C) 42",
        "C. 42",
        r"\mathrm{(C)}~\frac{84}{2}",
        r"\textbf{(C) }42",
        r"(\text{C})\ 42",
        r"\text{Option C: } 42",
        r"\bf{(C)}\ 42",
        r"\textsf{(C)} 42",
        r"\textbf{(C) 42}",
    ],
)
def test_a_choices_letter_before_its_value_is_not_part_of_it(box: str) -> None:
    assert grade("math", rf"\boxed{{{box}}}", "42", {}).correct
    assert not grade("math", rf"\boxed{{{box}}}", "43", {}).correct


@pytest.mark.parametrize(
    ("opened", "closed"),
    [
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("<seed:think>", "</seed:think>"),
        ("<|channel>thought\n", "<channel|>"),
        ("<|START_THINKING|>", "<|END_THINKING|>"),
        ("<longcat_think>", "</longcat_think>"),
        ("<think >", "</think >"),
        ("<analysis>", "</analysis>"),
        ("<reflection>", "</reflection>"),
        ("<think_fast>", "</think_fast>"),
        ('<thinking mode="deep">', "</thinking>"),
        ("<|begin_of_thought|>", "<|end_of_thought|>"),
        *((tags.open, tags.close) for tags in TAGS),
    ],
)
def test_reasoning_of_any_family_is_paid_only_where_it_has_ended(opened: str, closed: str) -> None:
    for grader in ("math", "gsm8k", "boxed_math"):
        assert not grade(grader, rf"{opened}so \boxed{{7}}", "7", {}).correct
        assert not grade(grader, rf"{opened}so \boxed{{8}}{closed}It is \boxed{{9}}.", "8", {}).correct
        assert grade(grader, rf"{opened}so \boxed{{8}}{closed}It is \boxed{{7}}.", "7", {}).correct


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ('The "total" is $\\boxed{42}$, the "sum" of both.', True),
        ('Since "yes" got 10 votes, the answer is 42 ("no" got the rest).', True),
        ('The pipe is 5" wide, so the answer is 42".', True),
        ('First I get \\boxed{42}.\nAfter a check, the "total" is \\boxed{43} in "units".', False),
        ('He said "the answer is 41" but the answer is 42.', True),
        ('He wrote "the answer is 42" there.', False),
        ('The answer is "42 apples".', True),
        ("> **Final answer:** $\\boxed{42}$", True),
        ("> The answer is 42.", False),
    ],
)
def test_a_quotation_counts_if_it_is_announced_or_has_a_box(response: str, right: bool) -> None:
    assert grade("math", response, "42").correct == right


@pytest.mark.parametrize("response", ['The answer is "no solution".', "Answer: “No solution”"])
def test_words_may_be_quoted(response: str) -> None:
    assert grade("math", response, "no solution").correct


@pytest.mark.parametrize(
    ("response", "label"),
    [
        ('{"answer": 42}', "42"),
        ('{"reasoning": "6 * 7", "final_answer": "42"}', "42"),
        ('So:\n```json\n{\n  "reasoning": "6 * 7",\n  "answer": "42"\n}\n```', "42"),
        ('{"answer": "\\\\frac{1}{2}"}', "1/2"),
        ('{"answer": "\\boxed{42}"}', "42"),
    ],
)
def test_the_answer_of_a_json_object_is_read(response: str, label: str) -> None:
    assert grade("math", response, label).correct
    assert not grade("math", response, "41").correct


@pytest.mark.parametrize("response", ['{"result": 42}', '{"answer": null}', '{"answer": [42]}', "{" * 5_000 + "}"])
def test_json_without_an_answer_is_text(response: str) -> None:
    assert not grade("math", response, "42").correct


@pytest.mark.parametrize(
    "response", ["Answer: 42 ✅", "**Answer: 42** ✔️", "The answer is 42 🎉", "Thus the answer is 42 □"]
)
def test_a_symbol_after_the_answer_is_decoration(response: str) -> None:
    assert grade("math", response, "42").correct


@pytest.mark.parametrize(
    ("response", "label"), [("Answer: 42 ❌", "42"), ("Answer: 60° ✅", "60"), ("Answer: 42°", "42")]
)
def test_a_cross_and_degrees_are_no_decoration(response: str, label: str) -> None:
    assert grade("math", response, label).correct == ("❌" not in response)


@pytest.mark.parametrize(
    ("sentence", "right"),
    [
        ("Natalia sold 72 clips altogether in April and May.", True),
        ("He earned 72 dollars.", True),
        ("They spent $72.", True),
        ("In total, she sold 72 clips.", True),
        ("Natalia sold a total of 72 clips.", True),
        ("She sold 48 clips and then 72 clips.", False),
        ("She sold more than 72 clips.", False),
        ("She never sold 72 clips.", False),
        ("She sold half of 72 clips.", False),
        ("She sold 72 of them.", False),
        ("See page 72.", False),
        ("If she sold 72 clips.", False),
    ],
)
def test_a_sentence_with_one_number_and_its_unit_is_an_answer(sentence: str, right: bool) -> None:
    assert grade("gsm8k", f"Answer: {sentence}", "72").correct == right
