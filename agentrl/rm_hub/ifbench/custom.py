"""Constraints `custom:*`: single prompts of IFBench whose answer itself is checked."""

import csv
import datetime
import io
import re
import string
import unicodedata
from itertools import pairwise

from agentrl.rm_hub.ifbench.check import Check, Faults, check, compare, unless
from agentrl.rm_hub.ifbench.passage import AROUND, ResponseText
from agentrl.rm_hub.ifbench.verbs import LISTS

_NUMBER = re.compile(r"\d+")
_QUESTION = re.compile(r"Question \d+[.|):;]?\s*")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_QUOTED = re.compile(r'"([^\n]*)"')
_SPECIAL = re.compile(r"[^\w\s]")
_AFRICAN_LINES = 52


def mcq_count_length(passage: ResponseText) -> Faults:
    """Four times "Question N", each with five options A to E, each question's text longer than the one before."""
    if not passage.raw.startswith("Question"):
        yield "it does not start with 'Question'"
    questions = [part.strip() for part in _QUESTION.split(passage.raw) if part.strip()]
    yield from compare(len(questions), "exactly", 4, "questions")
    lengths = []
    for question in questions:
        lines = [line.strip() for line in question.split("\n")]
        marked = [bool(_OPTION.match(line)) for line in lines]
        yield from compare(sum(marked), "exactly", 5, "options")
        lengths.append(len(" ".join(lines[: marked.index(True)]).strip()))
    yield from unless(all(one < other for one, other in pairwise(lengths)), f"questions of {lengths} characters")


def reverse_newline(passage: ResponseText) -> Faults:
    """From the line with Zimbabwe on at least 52 lines, in reverse alphabetical order (accents do not count). As in the
    benchmark it is not checked that the lines are countries."""
    lines = [line for line in (line.strip(AROUND) for line in passage.raw.split("\n")) if line]
    start = next((number for number, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    listed = [_plain(line) for line in lines[start:]]
    yield from compare(len(listed), "at least", _AFRICAN_LINES, "lines from Zimbabwe on")
    yield from unless(all(one >= other for one, other in pairwise(listed)))


def sentence_alphabet(passage: ResponseText) -> Faults:
    """26 sentences that begin with a to z in turn; a quote or asterisk before the letter breaks the row."""
    firsts = [sentence[:1].lower() for sentence in passage.sentences]
    return unless(firsts == list(string.ascii_lowercase), f"sentences that begin with {' '.join(firsts)}")


def european_capitals_sort(passage: ResponseText) -> Faults:
    """The 27 capitals of the benchmark, in its order, between commas; without a full stop, accents do not count."""
    capitals = [name.strip() for name in _plain(passage.raw).split(",") if name.strip()]
    yield from compare(len(capitals), "exactly", len(LISTS["northern_capitals"]), "names")
    yield from (repr(got) for got, want in zip(capitals, LISTS["northern_capitals"], strict=True) if got != want)


def csv_city(passage: ResponseText) -> Faults:
    """A header and seven rows of five fields; nothing around them."""
    rows = _rows(passage.raw, ",")
    yield from compare(len(rows), "exactly", 8, "lines")
    if rows[0] != ["ID", "Country", "City", "Year", "Count"]:
        yield "another header"
    yield from (f"{len(row)} fields" for row in rows if len(row) != 5)


def csv_special_character(passage: ResponseText) -> Faults:
    """A header and fourteen rows, of which one has a field in double quotes with a special character. As in the
    benchmark the rows after that one are not looked at."""
    yield from _header(passage.raw, ["ProductID", "Category", "Brand", "Price", "Stock"], ",")
    rows = _rows(passage.raw.replace('"', '"""'), ",")
    yield from compare(len(rows), "exactly", 15, "lines")
    for row in rows[1:]:
        yield from compare(len(row), "exactly", 5, "fields")
        if any(_SPECIAL.search(quoted[1]) for quoted in map(_QUOTED.match, row) if quoted):
            return
    yield "no quoted field with a special character"


def csv_quotes(passage: ResponseText) -> Faults:
    """A header and three rows between tabs, each field in double quotes, those of the header too."""
    yield from _header(passage.raw, ["StudentID", "Subject", "Grade", "Semester", "Score"], "\t")
    rows = _rows(passage.raw.replace('"', '"""'), "\t")
    yield from compare(len(rows), "exactly", 4, "lines")
    yield from (f"{len(row)} fields" for row in rows if len(row) != 5)
    yield from (cell for row in rows for cell in row if not cell.strip()[:1] == '"' == cell.strip()[-1:])


def _header(raw: str, names: list[str], separator: str) -> Faults:
    """Unless the first line has these names, quoted or not, with white space after the separators at most."""
    first, *others = raw.split("\n", 1)[0].strip().split(separator)
    cells = [first, *(cell.lstrip(" \t".replace(separator, "")) for cell in others)]
    bare = [cell[1:-1] if cell in (f'"{name}"' for name in names) else cell for cell in cells]
    return unless(bare == names, "another header")


def _rows(raw: str, separator: str) -> list[list[str]]:
    """The rows of CSV; none if it is not well formed."""
    try:
        return list(csv.reader(io.StringIO(raw), delimiter=separator))
    except csv.Error:
        return []


def _plain(raw: str) -> str:
    """Without accents, and without what is not ASCII then."""
    return unicodedata.normalize("NFKD", raw).encode("ascii", "ignore").decode("ascii")


def _of_his_life(text: str) -> bool:
    """Return true if this is a date YYYY-MM-DD from Napoleon's lifetime, 1769 to 1821."""
    try:
        return bool(_DATE.fullmatch(text)) and 1769 <= datetime.date.fromisoformat(text).year <= 1821
    except ValueError:
        return False


CHECKS: dict[str, Check] = {
    # The numbers of the answer, in this order; words do not matter.
    "custom:multiples": check(
        "the multiples of 7 from 10 to 50",
        lambda p: unless(_NUMBER.findall(p.raw) == [str(n) for n in range(14, 50, 7)]),
    ),
    "custom:mcq_count_length": check("4 questions with 5 options, each longer than the one before", mcq_count_length),
    "custom:reverse_newline": check("the countries of Africa in reverse order, one a line", reverse_newline),
    "custom:word_reverse": check(
        "the bald eagle in a sentence reversed by words",
        lambda p: unless("bald eagle" in " ".join(reversed(p.bare_words))),
    ),
    "custom:character_reverse": check(
        "the bald eagle in a sentence reversed by letters", lambda p: unless("elgae dlab" in p.lower)
    ),
    "custom:sentence_alphabet": check("26 sentences that begin with a to z", sentence_alphabet),
    "custom:european_capitals_sort": check("the northern capitals from north to south", european_capitals_sort),
    "custom:csv_city": check("CSV with 7 rows of ID, Country, City, Year, Count", csv_city),
    "custom:csv_special_character": check(
        "CSV with 14 rows of products and a special character in quotes", csv_special_character
    ),
    "custom:csv_quotes": check("3 tab-separated rows with every field in quotes", csv_quotes),
    "custom:date_format_list": check(
        "dates as YYYY-MM-DD between commas",
        lambda p: (repr(date) for date in map(str.strip, p.raw.split(",")) if not _of_his_life(date)),
    ),
}
