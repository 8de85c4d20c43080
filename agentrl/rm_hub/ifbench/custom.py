"""Constraints `custom:*`: single prompts of IFBench whose answer itself is checked."""

import csv
import io
import re
import unicodedata
from collections.abc import Sequence
from itertools import pairwise

from agentrl.rm_hub.ifbench.check import Finding, constraint
from agentrl.rm_hub.ifbench.lists import NORTHERN_CAPITALS, words_of
from agentrl.rm_hub.ifbench.passage import AROUND, Passage

_NUMBER = re.compile(r"\d+")
_MULTIPLES = [str(number) for number in range(14, 50, 7)]
_QUESTION = re.compile(r"Question \d+[.|):;]?\s*")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"(\d{4})-(\d{2})-(\d{2})")
_SPECIAL = re.compile(r"[^\w\s]")
_LONG_MONTHS = frozenset({1, 3, 5, 7, 8, 10, 12})
_AFRICAN_LINES = 52


@constraint("custom:multiples", "the multiples of 7 from 10 to 50")
def multiples(passage: Passage) -> Finding:
    """The numbers of the answer are 14, 21, 28, 35, 42, 49, in this order; words do not matter."""
    return None if _NUMBER.findall(passage.raw) == _MULTIPLES else "other numbers"


@constraint("custom:mcq_count_length", "4 questions with 5 options, each longer than the one before")
def mcq_count_length(passage: Passage) -> Finding:
    """Four times "Question N", each with five options A to E, each question's text longer than the one before."""
    if not passage.raw.startswith("Question"):
        return "it does not start with 'Question'"
    questions = [part.strip() for part in _QUESTION.split(passage.raw) if part.strip()]
    if len(questions) != 4:
        return f"{len(questions)} questions"
    lengths = []
    for question in questions:
        lines = [line.strip() for line in question.split("\n")]
        marked = [bool(_OPTION.match(line)) for line in lines]
        if sum(marked) != 5:
            return f"a question with {sum(marked)} options"
        lengths.append(len(" ".join(lines[: marked.index(True)]).strip()))
    longer = all(one < other for one, other in pairwise(lengths))
    return None if longer else f"questions of {', '.join(map(str, lengths))} characters"


@constraint("custom:reverse_newline", "the countries of Africa in reverse order, one a line")
def reverse_newline(passage: Passage) -> Finding:
    """From the line with Zimbabwe on at least 52 lines, in reverse alphabetical order (accents do not count).

    As in the benchmark it is not checked that the lines are countries.
    """
    lines = [line for line in (line.strip(AROUND) for line in passage.raw.split("\n")) if line]
    start = next((number for number, line in enumerate(lines) if "Zimbabwe" in line), None)
    if start is None:
        return "no line with Zimbabwe"
    listed = [_plain(line) for line in lines[start:]]
    if len(listed) < _AFRICAN_LINES:
        return f"{len(listed)} lines from Zimbabwe on"
    return None if all(one >= other for one, other in pairwise(listed)) else "another order"


@constraint("custom:word_reverse", "the bald eagle in a sentence reversed by words")
def word_reverse(passage: Passage) -> Finding:
    """Read from its last word to its first the answer has "bald eagle"."""
    return None if "bald eagle" in " ".join(reversed(passage.bare_words)) else "no 'bald eagle' read backwards"


@constraint("custom:character_reverse", "the bald eagle in a sentence reversed by letters")
def character_reverse(passage: Passage) -> Finding:
    """The answer has "elgae dlab"."""
    return None if "elgae dlab" in passage.lower else "no 'elgae dlab'"


@constraint("custom:sentence_alphabet", "26 sentences that begin with a to z")
def sentence_alphabet(passage: Passage) -> Finding:
    """26 sentences that begin with a to z in turn; a quote or asterisk before the letter breaks the row."""
    firsts = [sentence[:1].lower() for sentence in passage.sentences]
    if len(firsts) != 26:
        return f"{len(firsts)} sentences"
    wrong = next((number for number, first in enumerate(firsts) if first != chr(97 + number)), None)
    return None if wrong is None else f"sentence {wrong + 1} begins with {firsts[wrong]!r}"


@constraint("custom:european_capitals_sort", "the northern capitals from north to south")
def european_capitals_sort(passage: Passage) -> Finding:
    """The 27 capitals of the benchmark, in its order, between commas; without a full stop, accents do not count."""
    capitals = [name.strip() for name in _plain(passage.raw).split(",") if name.strip()]
    if len(capitals) != len(NORTHERN_CAPITALS):
        return f"{len(capitals)} names"
    wrong = next((got for got, want in zip(capitals, NORTHERN_CAPITALS, strict=True) if got != want), None)
    return None if wrong is None else f"{wrong[:40]!r} out of place"


@constraint("custom:csv_city", "CSV with 7 rows of ID, Country, City, Year, Count")
def csv_city(passage: Passage) -> Finding:
    """A header and seven rows of five fields; nothing around them."""
    rows = _rows(passage.raw, ",")
    if rows is None or len(rows) != 8:
        return "not CSV" if rows is None else f"{len(rows)} lines instead of 8"
    if rows[0] != ["ID", "Country", "City", "Year", "Count"]:
        return "another header"
    return None if all(len(row) == 5 for row in rows) else "a row that has not five fields"


@constraint("custom:csv_special_character", "CSV with 14 rows of products and a special character in quotes")
def csv_special_character(passage: Passage) -> Finding:
    """A header and fourteen rows, of which one has a field in double quotes with a special character.

    As in the benchmark the rows after that one are not looked at.
    """
    if not _header(passage.raw, words_of("ProductID Category Brand Price Stock"), ","):
        return "another header"
    rows = _rows(passage.raw.replace('"', '"""'), ",")
    if rows is None or len(rows) != 15:
        return "not CSV" if rows is None else f"{len(rows)} lines instead of 15"
    for row in rows[1:]:
        if len(row) != 5:
            return "a row that has not five fields"
        if any(_quoted_special(cell) for cell in row):
            return None
    return "no quoted field with a special character"


@constraint("custom:csv_quotes", "3 tab-separated rows with every field in quotes")
def csv_quotes(passage: Passage) -> Finding:
    """A header and three rows between tabs, each field in double quotes, those of the header too."""
    if not _header(passage.raw, words_of("StudentID Subject Grade Semester Score"), "\t"):
        return "another header"
    rows = _rows(passage.raw.replace('"', '"""'), "\t")
    if rows is None or len(rows) != 4:
        return "not tab-separated" if rows is None else f"{len(rows)} lines instead of 4"
    if any(len(row) != 5 for row in rows):
        return "a row that has not five fields"
    quoted = all(cell.strip()[:1] == '"' == cell.strip()[-1:] for row in rows for cell in row)
    return None if quoted else "a field without quotes"


@constraint("custom:date_format_list", "dates as YYYY-MM-DD between commas")
def date_format_list(passage: Passage) -> Finding:
    """Dates YYYY-MM-DD between commas, from Napoleon's lifetime, 1769 to 1821; nothing else."""
    for part in passage.raw.split(","):
        date = _DATE.fullmatch(part.strip())
        if date is None:
            return f"{part.strip()[:40]!r} is no date"
        year, month, day = map(int, date.groups())
        most = 31 if month in _LONG_MONTHS else 29 if month == 2 else 30
        if not 1769 <= year <= 1821 or month > 12 or (month and day > most):
            return f"{date.group()} is no date of his life"
    return None


def _plain(raw: str) -> str:
    """Without accents, and without what is not ASCII then."""
    return unicodedata.normalize("NFKD", raw).encode("ascii", "ignore").decode("ascii")


def _header(raw: str, names: Sequence[str], separator: str) -> bool:
    """Whether the first line has these names, quoted or not, with white space after the separators at most."""
    cells = raw.split("\n", 1)[0].strip().split(separator)
    space = " " if separator == "\t" else " \t"
    cells = [cells[0], *(cell.lstrip(space) for cell in cells[1:])]
    return len(cells) == len(names) and all(
        cell in (name, f'"{name}"') for cell, name in zip(cells, names, strict=True)
    )


def _rows(raw: str, separator: str) -> list[list[str]] | None:
    try:
        return list(csv.reader(io.StringIO(raw), delimiter=separator))
    except csv.Error:
        return None


def _quoted_special(cell: str) -> bool:
    line = cell.split("\n", 1)[0]
    return line.startswith('"') and bool(_SPECIAL.search(line[1 : max(1, line.rfind('"'))]))
