"""Reading Google-style docstrings: the summary, and one description per argument."""

import inspect
import re

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns|Return|Yields|Raises|Examples?|Notes?):\s*$")
_ENTRY = re.compile(r"^\*{0,2}(\w+)\s*(?:\([^)]*\))?:\s*(.*)$")


def parse_docstring(text: str | None) -> tuple[str, dict[str, str]]:
    """Split a docstring into its description (everything before the first section) and its arguments' descriptions.

    Line breaks inside a paragraph become spaces; paragraphs stay apart.
    """
    lines = inspect.cleandoc(text or "").splitlines()
    starts = [i for i, line in enumerate(lines) if _SECTION.match(line)]
    summary = lines[: starts[0]] if starts else lines
    arguments: dict[str, str] = {}
    for start in starts:
        if lines[start].rstrip().rstrip(":") in ("Args", "Arguments", "Parameters"):
            end = next((i for i in starts if i > start), len(lines))
            arguments.update(_entries(lines[start + 1 : end]))
    paragraphs = "\n".join(summary).strip().split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs), arguments


def _entries(lines: list[str]) -> dict[str, str]:
    entries: dict[str, list[str]] = {}
    indent: int | None = None
    current: list[str] | None = None
    for line in lines:
        if not line.strip():
            continue
        depth = len(line) - len(line.lstrip())
        indent = depth if indent is None else indent
        match = _ENTRY.match(line.strip())
        if depth == indent and match:
            current = entries.setdefault(match[1], [match[2]])
        elif current is not None:
            current.append(line.strip())
    return {name: " ".join(part for part in parts if part) for name, parts in entries.items()}
