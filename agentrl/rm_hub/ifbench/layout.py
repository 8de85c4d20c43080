"""Checks of `format:*` (the form of the answer) and `custom:*` (prompts of IFBench with one right content)."""

import csv
import datetime
import io
import re
import string
import unicodedata
from collections.abc import Mapping
from itertools import pairwise

from agentrl.rm_hub.ifbench.check import Faults, Run, compare, unless
from agentrl.rm_hub.ifbench.passage import AROUND, LISTS, MARKS, ResponseText, split_sentences
from agentrl.rm_hub.ifbench.words import neighbours

_BRACKETS = {")": "(", "]": "[", "}": "{"}
_QUOTES = {'"': '"', "'": "'"}
_LETTERED = re.compile(r"\W*[aA]\W*[bB]\W*[cC]\W*")
_DIGITS_AND_MARKS = "0123456789" + MARKS.replace('"', "")
_NUMBER = re.compile(r"\d+")
_QUESTION = re.compile(r"Question \d+[.|):;]?\s*")
_OPTION = re.compile(r"[A-Ea-e][.|)]\s*\w")
_DATE = re.compile(r"\d{4}-\d{2}-\d{2}")
_QUOTED = re.compile(r'"([^\n]*)"')
_SPECIAL = re.compile(r"[^\w\s]")
_AFRICAN_LINES = 52


def _nests(raw: str, closers: Mapping[str, str], deep: int, shut: int) -> bool:
    """Return true if brackets or quotes nest `deep` levels, and `shut` of these are closed. `closers`: closing to opening
    character. A closing bracket without a match resets the count; a quote that closes no quote opens one."""
    open_: list[str] = []
    deepest = 0
    for char in raw:
        if open_ and closers.get(char) == open_[-1]:
            open_.pop()
            if deepest >= deep and deepest - len(open_) >= shut:
                return True
        elif char in closers.values():
            open_.append(char)
            deepest = max(deepest, len(open_))
        elif char in closers:
            open_, deepest = [], 0
    return False


def options(passage: ResponseText, options: str) -> Faults:
    """The answer is one of the options. Letters (a, b, c) must match exactly; words in any case, with any punctuation."""
    separator = next((mark for mark in ("/", "or") if mark in options), ",")
    choices = [choice.strip() for choice in options.split(separator)]
    answer = passage.raw
    if not _LETTERED.match(options):
        choices, answer = [choice.strip(AROUND).lower() for choice in choices], answer.strip(AROUND).lower()
    return unless(answer in choices)


def newline(passage: ResponseText) -> Faults:
    """As many lines as words, without ASCII punctuation and blank lines."""
    stripped = passage.bare.strip()
    lines, words = sum(line != "" for line in stripped.split("\n")), len(stripped.split())
    return unless(lines == words, f"{words} words on {lines} lines")


def emoji_ends(passage: ResponseText) -> Faults:
    """Each sentence ends in an emoji, or the next sentence starts with it (after the full stop). Of an emoji of several
    characters, one of the last two must be an emoji."""
    import emoji

    bare = [ResponseText(sentence).bare.strip() for sentence in passage.sentences]
    for sentence, after in zip(bare, [*bare[1:], ""], strict=True):
        if not sentence or not any(map(emoji.is_emoji, sentence[-2:] + after[:1])):
            yield f"no emoji after {sentence[-40:]!r}"


def line_indent(passage: ResponseText) -> Faults:
    """Each line that is not blank starts with more spaces than the one before. The benchmark mostly
    rejects two blank lines in a row; here blank lines do not count."""
    lines = [line for line in passage.raw.split("\n") if line.strip()]
    return neighbours((len(line) - len(line.lstrip(" ")) for line in lines), lambda one, other: one < other)


def quote_unquote(passage: ResponseText) -> Faults:
    """No straight double quotes next to each other, and none at the end: text follows each quoted phrase."""
    joined = "".join(passage.raw.replace("'\"'", "").split())
    return unless('""' not in joined and not joined.strip(_DIGITS_AND_MARKS).endswith('"'))


def thesis(passage: ResponseText) -> Faults:
    """Some text in <i> or <em>, and text after it. Only the first pair counts."""
    section = passage.raw[_first_of(passage.raw, "<i>", "<em>") :]
    end = _first_of(section, "</i>", "</em>")
    return unless(section[3:end].strip() and section[end + 4 :].strip())


def _first_of(raw: str, tag: str, other: str) -> int:
    """Return the position of `tag`, else of `other`, else of the end of the text."""
    return next((raw.find(one) for one in (tag, other) if one in raw), len(raw))


def no_bullets_bullets(passage: ResponseText) -> Faults:
    """At least two sentences (any mark ends one), then two or more lines, each with *. A blank line ends these."""
    sentences = bullets = 0
    reading = True
    for line in passage.raw.split("\n"):
        if (stripped := line.strip()).startswith("*"):
            reading = False
            bullets += 1
            yield from compare(sentences, "at least", 2, "sentences before the bullets")
        elif reading:
            found = len(split_sentences(stripped))
            sentences += found
            reading = found > 0
        else:
            yield "other lines among or after the bullets"
    yield from compare(bullets, "at least", 2, "bullets")


def title_case(passage: ResponseText) -> Faults:
    """No token is all lower case, or a lower-case letter and then capitals (aBC). As in the benchmark, short words count
    too, and "n't" is a token: "Don't" is refused."""
    lower = (token for token in passage.tokens if token[0].islower())
    return (repr(token) for token in lower if len(token) == 1 or token[1:].islower() or token[1:].isupper())


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
    """At least 52 lines (any, as in the benchmark) from Zimbabwe on, in reverse alphabetical order without accents."""
    lines = [line for line in (line.strip(AROUND) for line in passage.raw.split("\n")) if line]
    start = next((number for number, line in enumerate(lines) if "Zimbabwe" in line), len(lines))
    listed = [_plain(line) for line in lines[start:]]
    yield from compare(len(listed), "at least", _AFRICAN_LINES, "lines from Zimbabwe on")
    yield from unless(all(one >= other for one, other in pairwise(listed)))


def sentence_alphabet(passage: ResponseText) -> Faults:
    """26 sentences that begin with a to z in turn; a quote or asterisk before the letter fails the check."""
    firsts = [sentence[:1].lower() for sentence in passage.sentences]
    return unless(firsts == list(string.ascii_lowercase), f"sentences that begin with {' '.join(firsts)}")


def european_capitals_sort(passage: ResponseText) -> Faults:
    """The benchmark's 27 capitals in its order, separated by commas, without a full stop. Accents do not count."""
    capitals = [name.strip() for name in _plain(passage.raw).split(",") if name.strip()]
    yield from compare(len(capitals), "exactly", len(LISTS["northern_capitals"]), "names")
    yield from (repr(got) for got, want in zip(capitals, LISTS["northern_capitals"], strict=True) if got != want)


def csv_city(passage: ResponseText) -> Faults:
    """A header and seven rows of five fields, and no other text."""
    rows = _rows(passage.raw, ",")
    yield from compare(len(rows), "exactly", 8, "lines")
    if rows[0] != ["ID", "Country", "City", "Year", "Count"]:
        yield "another header"
    yield from (f"{len(row)} fields" for row in rows if len(row) != 5)


def csv_special_character(passage: ResponseText) -> Faults:
    """A header and fourteen rows, of which one has a field in double quotes with a special character. As in the
    benchmark, the rows after that row are not checked."""
    yield from _header(passage.raw, ["ProductID", "Category", "Brand", "Price", "Stock"], ",")
    rows = _rows(passage.raw.replace('"', '"""'), ",")
    yield from compare(len(rows), "exactly", 15, "lines")
    for row in rows[1:]:
        yield from compare(len(row), "exactly", 5, "fields")
        if any(_SPECIAL.search(quoted[1]) for quoted in map(_QUOTED.match, row) if quoted):
            return
    yield "no quoted field with a special character"


def csv_quotes(passage: ResponseText) -> Faults:
    """A header and three tab-separated rows. Each field, also of the header, is in double quotes."""
    yield from _header(passage.raw, ["StudentID", "Subject", "Grade", "Semester", "Score"], "\t")
    rows = _rows(passage.raw.replace('"', '"""'), "\t")
    yield from compare(len(rows), "exactly", 4, "lines")
    yield from (f"{len(row)} fields" for row in rows if len(row) != 5)
    yield from (cell for row in rows for cell in row if not cell.strip()[:1] == '"' == cell.strip()[-1:])


def _header(raw: str, names: list[str], separator: str) -> Faults:
    """Report another header unless the first line has these names, quoted or not. White space may follow separators."""
    first, *others = raw.split("\n", 1)[0].strip().split(separator)
    cells = [first, *(cell.lstrip(" \t".replace(separator, "")) for cell in others)]
    bare = [cell[1:-1] if cell in (f'"{name}"' for name in names) else cell for cell in cells]
    return unless(bare == names, "another header")


def _rows(raw: str, separator: str) -> list[list[str]]:
    """Return the rows of CSV; none if the CSV is malformed."""
    try:
        return list(csv.reader(io.StringIO(raw), delimiter=separator))
    except csv.Error:
        return []


def _plain(raw: str) -> str:
    """Remove accents, then all characters that are not ASCII."""
    return unicodedata.normalize("NFKD", raw).encode("ascii", "ignore").decode("ascii")


def _in_napoleons_life(text: str) -> bool:
    """Return true if this is a date YYYY-MM-DD from Napoleon's lifetime, 1769 to 1821."""
    try:
        return bool(_DATE.fullmatch(text)) and 1769 <= datetime.date.fromisoformat(text).year <= 1821
    except ValueError:
        return False


CHECKS: dict[str, Run] = {
    # Round, square and curly brackets, of which the innermost is closed.
    "format:parentheses": lambda p: unless(_nests(p.raw, _BRACKETS, 5, 1)),
    # Straight quotes, closed. As in the benchmark, an apostrophe counts as a quote.
    "format:quotes": lambda p: unless(_nests(p.raw, _QUOTES, 3, 3)),
    "format:options": options,
    "format:newline": newline,
    "format:emoji": emoji_ends,
    "format:line_indent": line_indent,
    "format:quote_unquote": quote_unquote,
    # The separator comes at least twice, anywhere.
    "format:list": lambda p, sep: compare(p.raw.count(sep), "at least", 2, f"times {sep!r}"),
    "format:thesis": thesis,
    # A hyphen follows each asterisk before the next. As in the benchmark, bold text counts, and no bullets pass.
    "format:sub-bullets": lambda p: unless(all("-" in part for part in p.raw.split("*")[1:])),
    "format:no_bullets_bullets": no_bullets_bullets,
    "format:title_case": title_case,
    # The three headings, anywhere.
    "format:output_template": lambda p: (
        f"no {h!r}" for h in ("My Answer:", "My Conclusion:", "Future Outlook:") if h not in p.raw),
    # No space, tab or line break, also not at the ends.
    "format:no_whitespace": lambda p: unless(p.raw.split() == [p.raw]),
    # The numbers of the answer, in this order; words do not matter.
    "custom:multiples": lambda p: unless(_NUMBER.findall(p.raw) == [str(n) for n in range(14, 50, 7)]),
    "custom:mcq_count_length": mcq_count_length,
    "custom:reverse_newline": reverse_newline,
    "custom:word_reverse": lambda p: unless("bald eagle" in " ".join(reversed(p.bare_words))),
    "custom:character_reverse": lambda p: unless("elgae dlab" in p.lower),
    "custom:sentence_alphabet": sentence_alphabet,
    "custom:european_capitals_sort": european_capitals_sort,
    "custom:csv_city": csv_city,
    "custom:csv_special_character": csv_special_character,
    "custom:csv_quotes": csv_quotes,
    "custom:date_format_list": lambda p: (
        repr(date) for date in map(str.strip, p.raw.split(",")) if not _in_napoleons_life(date)),
}  # fmt: skip
