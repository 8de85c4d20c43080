"""A reader of answers that takes an afternoon to write, for the table of `benchmarks.grader_errors`.

Of box, `<answer>` tag, `####`, announced answer and last line, it reads the first that occurs, at its last place. It
compares by math_verify, number or letter. Graders: `math`, `gsm8k`, `gpqa` (`--rm-type benchmarks/small_reader.py:math`)
"""

import re
from collections.abc import Mapping
from typing import Any

from math_verify import parse, verify

from agentrl.rm_hub import Grade

ANNOUNCED = re.compile(
    r"(?:answer|result)(?:\s+to\s+[^.\n]{1,60}?)?\s*(?:is|are|equals|:|=)\s*:?|^A:|答案(?:是|为|】)?\s*[::]?",
    re.IGNORECASE | re.MULTILINE,
)
NUMBER = re.compile(r"-?\$?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|-?\.\d+")


def box(text: str) -> str | None:
    """Return the content of the last `\\boxed{}`, braces matched."""
    start = text.rfind("\\boxed{")
    depth = 0
    for at in range(start + len("\\boxed"), len(text)) if start >= 0 else ():
        depth += (text[at] == "{") - (text[at] == "}")
        if depth == 0:
            return text[start + len("\\boxed{") : at]
    return None


def claim(response: str) -> str:
    """Return the claim of the response, or "". Unfinished reasoning claims nothing."""
    text = response.rsplit("</think>", 1)[-1].strip()
    if not text or "<think>" in text:
        return ""
    if (boxed := box(text)) is not None:
        return boxed
    if tags := re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL):
        return str(tags[-1]).strip()
    if "####" in text:
        return text.rsplit("####", 1)[1].strip().split("\n")[0]
    if said := list(ANNOUNCED.finditer(text)):
        rest = text[said[-1].end() :].strip(" *:\n").split("\n")[0]
        return re.split(r"\.\s|\.$|。", rest)[0].strip(" *")
    return text.splitlines()[-1].strip()


def graded(right: bool, got: str) -> Grade:
    return Grade(float(right), right, extracted=got or None, reason=f"the claim is {got!r}")


def math(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    got = claim(response)
    return graded(bool(got) and bool(verify(parse(f"${label}$"), parse(f"${got}$") or parse(got))), got)


def gsm8k(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    numbers = [found.replace(",", "").replace("$", "") for found in NUMBER.findall(claim(response))]
    right = bool(numbers) and float(numbers[-1]) == float(str(label).replace(",", ""))
    return graded(right, numbers[-1] if numbers else "")


def gpqa(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    got = claim(response)
    choices = [str(choice).strip().lower() for choice in metadata.get("choices", ())]
    if got.strip(" .").lower() in choices:
        letter = chr(ord("A") + choices.index(got.strip(" .").lower()))
    else:
        letter = next(iter(re.findall(r"(?<![A-Za-z])\(?([A-Z])(?![A-Za-z'])", got)), "")
    return graded(letter == label, letter)
