"""Ways in which models state a number, right and wrong, to stress the math graders.

`stated(number, unit)` gives responses that commit to `number`. `mistakes(solution, gold)` gives wrong numbers that a
model could compute. A grader must accept every response made of the gold number and refuse every one of a mistake.
"""

import random
import re
from collections.abc import Iterator
from fractions import Fraction

_PLACES = (1000, 100, 10)


def grouped(number: str) -> str:
    """Write 1234.5 as 1,234.5."""
    sign = "-" if number.startswith("-") else ""
    whole, point, places = number.lstrip("-").partition(".")
    return sign + f"{int(whole):,}" + point + places


def stated(number: str, working: str, rng: random.Random) -> Iterator[tuple[str, str]]:
    """Yield (form, response) of responses whose final answer is `number`; `working` is text before the answer."""
    unit = rng.choice(["dollars", "apples", "hours", "km", "people", "pages per day", "square feet", "cups of sugar"])
    comma = grouped(number)
    other = rng.randrange(2, 90)
    forms = {
        "hashes": f"{working}\n#### {number}",
        "box": f"{working}\nSo the final answer is $\\boxed{{{number}}}$.",
        "box unit": f"{working}\n\\[\\boxed{{{comma} \\text{{ {unit}}}}}\\]",
        "box grouped": f"{working}\n\n**Final Answer:** \\boxed{{{comma.replace(',', '{,}')}}}",
        "box dollar": f"{working}\nThe total is \\boxed{{\\${comma}}}. I hope this helps!",
        "box point": f"{working} $\\boxed{{{number if '.' in number else number + '.00'}}}$",
        "box twice": f"So we get \\boxed{{{number}}}.\n{working}\n**Final Answer**\n\\boxed{{{number}}}",
        "box equation": f"{working} \\( x = \\boxed{{{number}}} \\)",
        "box name": f"{working}\nThus \\boxed{{x = {number}}}.",
        "box after step": f"First, \\boxed{{{other}}} of them leave. {working}\nTherefore the answer is \\boxed{{{number}}}.",
        "answer is": f"{working}\nThe answer is {comma}.",
        "answer is unit": f"{working} Therefore, the answer is {number} {unit}.",
        "answer colon": f"{working}\n\nAnswer: {comma} {unit}",
        "answer bold": f"{working}\n\n**Answer:** **{number}**",
        "answer bold 2": f"{working}\n\n**Answer: {comma} {unit}**",
        "answer currency": f"{working}\nFinal answer: ${comma}",
        "answer heading": f"{working}\n\n### Final Answer\n\n{number}",
        "answer latex": f"{working}\nThe final answer is $x = {number}$.",
        "answer tag": f"<reasoning>{working}</reasoning><answer>{number} {unit}</answer>",
        "answer restated": f"The answer is {number}.\n\nExplanation: {working.splitlines()[0]}",
        "answer so": f"{working} So the correct answer is {number}, since that is what remains.",
        "think": f"<think>Maybe {other}? {working}</think>\nThe answer is **{number}**.",
        "think box": f"<think>It might be \\boxed{{{other}}}. Hmm.</think>\n{working}\n\\boxed{{{number}}}",
        "corrected": f"The answer is {other}{number.lstrip('-')[0]}. Wait, that is wrong. The answer is {number}.",
        "not but": f"{working}\nThe answer is not {other}{number.lstrip('-')[0]} but {number}.",
        "french": f"{working}\nLa réponse est {number}.",
        "spanish": f"{working}\nPor lo tanto, la respuesta final es {number} {unit}.",
        "german": f"{working}\nDie Antwort lautet: {number}.",
        "russian": f"{working}\nОтвет: {number}",
        "chinese": f"{working}\n所以答案是{number}。",
        "full width": f"{working}\n答案：{number.translate(str.maketrans('0123456789', '０１２３４５６７８９'))}",
        "quoted": f'{working}\nMy answer: "{number}"',
        "special token": f"{working}\nThe answer is {number}.<|im_end|>",
    }
    yield from forms.items()


def concluded(number: str, working: str) -> Iterator[str]:
    """Yield responses whose last line reaches `number` without announcing it: for the lenient reader only."""
    yield f"{working}\nSo in the end there are {grouped(number)} dollars."
    yield f"{working}\nThis gives x = {number}"
    yield f"{working}\nThe total is **{grouped(number)} dollars**."


def mistakes(solution: str, gold: str, rng: random.Random) -> list[str]:
    """Return numbers that differ from `gold`: near misses and the solution's own intermediate results."""
    value = Fraction(gold)
    wrong = {value + 1, value - 1, -value, value * 10, value / 10, value * 2, value / 2, value * 60, value * 100}
    digits = list(gold.lstrip("-"))
    if len(digits) > 1:
        at = rng.randrange(len(digits) - 1)
        digits[at], digits[at + 1] = digits[at + 1], digits[at]
        swapped = "".join(digits)
        if re.fullmatch(r"\d+(\.\d+)?", swapped):
            wrong.add(Fraction(swapped))
    for step in re.findall(r"<<[^<>]*=(-?[\d.]+)>>", solution):
        if step.rstrip(".").count(".") <= 1 and step.strip("-."):
            wrong.add(Fraction(step.rstrip(".")))
    wrong.discard(value)
    # A fraction and its percentage count as equal.
    wrong -= {value / 100, value * 100} if abs(value) <= 2 else set()
    plain = [decimal(number) for number in sorted(wrong)]
    return [number for number in plain if number is not None]


def decimal(value: Fraction) -> str | None:
    """Return a value as a short decimal; None if it has none."""
    if value.denominator == 1:
        return str(value.numerator)
    for places in range(1, 5):
        if (value * 10**places).denominator == 1:
            return f"{float(value):.{places}f}"
    return None


def without_marks(solution: str) -> str:
    """Return a GSM8K solution in a model's form: no calculator marks, no last line with the answer."""
    lines = re.sub(r"<<[^<>]*>>", "", solution).splitlines()
    return "\n".join(line for line in lines if not line.startswith("####"))
