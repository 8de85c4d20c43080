"""Check text against the language guide of docs/contributing: openings, words, class names, sentence length.

Run by `make lint`. `--count` prints the number of findings by kind and exits with 0.
"""

import argparse
import ast
import itertools
import re
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "agentrl"
MAX_WORDS = 25
OPENINGS = re.compile(r"(?:What|Whether|Who|How|Where|That)\b")
WORDS = re.compile(
    r"(?i)\b(?:nobody|somebody|whoever|those (?:that|which|who)|in vain|outset|roster|upkeep|strayed|stands? in (?:its|the) way"
    r"|(?:this|that|another|other|earlier|a) room|rooms|the door|doors|away from home|knows nothing of|in play)\b"
)
ALLOWED = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)|\$[^$\n]+\$")
BREAK = re.compile(r"(?<=[.!?:])(?:\*\*)?\s+(?=[A-Z`\[\"'x(*])|(?<=[.!?])\s+(?=\d|agentrl|slime)")
HELP = {"description", "help", "short_help"}
LIST = re.compile(r"\bx(?:, x)+(?:,? (?:and|or) x)?\b")
"""A list of code names, which counts as one word."""
ABBREVIATIONS = re.compile(r"\b(?:e\.g|i\.e|cf|vs|etc|et al|no|fig|eq)\.", re.IGNORECASE)


class Finding(NamedTuple):
    """One sentence or name that breaks the guide."""

    kind: str
    place: str
    text: str


def documentation() -> Iterator[tuple[Path, int, str]]:
    """Yield the paragraphs of README, docs and examples, without code, tables and headings."""
    pages = [
        ROOT / "README.md",
        *sorted((ROOT / "docs").glob("*.md")),
        *sorted((ROOT / "examples").glob("*/README.md")),
    ]
    for page in pages:
        text = re.sub(r"```.*?```|<!--.*?-->", lambda found: "\n" * found[0].count("\n"), page.read_text(), flags=re.S)
        for number, block in blocks(text):
            if not block.startswith(("|", "#", "::: ", "!", "<", "    ", ":::")):
                yield page, number, block


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Yield paragraphs and list items with the number of their first line."""
    lines: list[str] = []
    first = 1
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        item = re.match(r"\s*(?:[-*]|\d+\.)\s", line)
        if (not line.strip() or item or line.startswith(("|", "#"))) and lines:
            yield first, " ".join(lines)
            lines = []
        if line.strip():
            first = number if not lines else first
            text = re.sub(r"^\s*(?:[-*]|\d+\.)\s+", "", line).strip()
            lines.append(f"    {text}" if not lines and not item and line.startswith("    ") else text)


def sentences(paragraph: str) -> list[str]:
    """Return the sentences of a paragraph; a semicolon does not end one."""
    plain = ABBREVIATIONS.sub(lambda found: found[0].replace(".", ""), LIST.sub("x", ALLOWED.sub("x", paragraph)))
    return [sentence for sentence in BREAK.split(plain) if sentence.strip()]


def check_documentation() -> Iterator[Finding]:
    """Yield long sentences and forbidden words of the pages."""
    for page, number, paragraph in documentation():
        place = f"{page.relative_to(ROOT)}:{number}"
        for sentence in sentences(paragraph):
            if len(sentence.split()) > MAX_WORDS:
                yield Finding("long sentence", place, f"{len(sentence.split())} words: {sentence}")
        for word in WORDS.findall(ALLOWED.sub("", paragraph)):
            yield Finding("word", place, word)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each docstring, attribute docstrings included."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def check_docstrings() -> Iterator[Finding]:
    """Yield docstrings that open with a question word or use a forbidden word."""
    for file in sorted(PACKAGE.rglob("*.py")):
        place = str(file.relative_to(ROOT))
        for line, text in docstrings(ast.parse(file.read_text())):
            where = f"{place}:{line}"
            if OPENINGS.match(text):
                yield Finding("opening", where, text.splitlines()[0])
            for word in WORDS.findall(ALLOWED.sub("", text)):
                yield Finding("word", where, word)


def check_help() -> Iterator[Finding]:
    """Yield texts of `--help` (settings' descriptions, options, summaries) that break the guide."""
    for file in [
        *sorted(PACKAGE.rglob("settings.py")),
        PACKAGE / "algorithms/fields.py",
        *sorted((PACKAGE / "cli").glob("*.py")),
        PACKAGE / "config/placement.py",
    ]:
        for line, text in help_texts(ast.parse(file.read_text())):
            place = f"{file.relative_to(ROOT)}:{line}"
            if OPENINGS.match(text):
                yield Finding("opening", place, text)
            for word in WORDS.findall(text):
                yield Finding("word", place, word)
            for sentence in sentences(" ".join(text.split())):
                if len(sentence.split()) > MAX_WORDS:
                    yield Finding("long sentence", place, f"{len(sentence.split())} words: {sentence}")


def help_texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of each `description`, `help` and `short_help`, and of the texts below fields."""
    for node in ast.walk(tree):
        found = [node.value] if isinstance(node, ast.keyword) and node.arg in HELP else []
        if isinstance(node, ast.ClassDef):
            pairs = itertools.pairwise(node.body)
            found = [
                text.value for field, text in pairs if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr)
            ]
        for value in found:
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield value.lineno, value.value


def check_classes() -> Iterator[Finding]:
    """Yield class names that the package uses twice."""
    places: dict[str, list[str]] = defaultdict(list)
    for file in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(ROOT)}:{node.lineno}")
    for name, found in places.items():
        if len(found) > 1:
            yield Finding("class name", found[1], f"{name} is also in {found[0]}")


def main() -> int:
    """Print the findings and return 1 if there are any."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", action="store_true", help="print the number of findings by kind")
    given = parser.parse_args()
    found = [*check_classes(), *check_docstrings(), *check_help(), *check_documentation()]
    if given.count:
        for (kind, top), number in sorted(Counter((f.kind, f.place.split("/")[0]) for f in found).items()):
            print(f"{number:6} {kind:14} {top}")
        return 0
    for finding in found:
        print(f"{finding.place}: {finding.kind}: {finding.text}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
