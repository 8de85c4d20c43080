"""Constraints `format:*`: the form of the answer."""

import re
from collections.abc import Mapping

from agentrl.rm_hub.ifbench.check import Check, Faults, check, compare, unless
from agentrl.rm_hub.ifbench.passage import AROUND, MARKS, ResponseText, split_sentences
from agentrl.rm_hub.ifbench.words import neighbours

_BRACKETS = {")": "(", "]": "[", "}": "{"}
_QUOTES = {'"': '"', "'": "'"}
_LETTERED = re.compile(r"\W*[aA]\W*[bB]\W*[cC]\W*")
_DIGITS_AND_MARKS = "0123456789" + MARKS.replace('"', "")


def _nests(raw: str, closers: Mapping[str, str], deep: int, shut: int) -> bool:
    """Return true if marks nest `deep` levels, of which `shut` are closed again; `closers` says what each mark closes.
    A bracket that closes nothing starts again; a quote opens where it does not close."""
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
    """Exactly one of the options; letters as they are given, words in any case and with marks around them."""
    separator = next((mark for mark in ("/", "or") if mark in options), ",")
    choices = [choice.strip() for choice in options.split(separator)]
    answer = passage.raw
    if not _LETTERED.match(options):
        choices, answer = [choice.strip(AROUND).lower() for choice in choices], answer.strip(AROUND).lower()
    return unless(answer in choices)


def newline(passage: ResponseText) -> Faults:
    """As many lines as words once ASCII marks are taken out; blank lines do not count."""
    stripped = passage.bare.strip()
    lines, words = sum(line != "" for line in stripped.split("\n")), len(stripped.split())
    return unless(lines == words, f"{words} words on {lines} lines")


def emoji_ends(passage: ResponseText) -> Faults:
    """Each sentence ends in an emoji, or the next one starts with it (the mark may stand before it); of a joined
    emoji one of the last two characters is looked at."""
    import emoji

    bare = [ResponseText(sentence).bare.strip() for sentence in passage.sentences]
    for sentence, after in zip(bare, [*bare[1:], ""], strict=True):
        if not sentence or not any(map(emoji.is_emoji, sentence[-2:] + after[:1])):
            yield f"no emoji after {sentence[-40:]!r}"


def line_indent(passage: ResponseText) -> Faults:
    """Each line that is not blank starts with more spaces than the one before. The benchmark stumbles over two blank
    lines in a row (it refuses them, mostly); here blank lines do not matter."""
    lines = [line for line in passage.raw.split("\n") if line.strip()]
    return neighbours((len(line) - len(line.lstrip(" ")) for line in lines), lambda one, other: one < other)


def quote_unquote(passage: ResponseText) -> Faults:
    """No straight double quotes next to each other, and none at the end: something stands after each quoted phrase."""
    joined = "".join(passage.raw.replace("'\"'", "").split())
    return unless('""' not in joined and not joined.strip(_DIGITS_AND_MARKS).endswith('"'))


def thesis(passage: ResponseText) -> Faults:
    """Some text in <i> or <em>, and text after it; only the first pair is looked at."""
    section = passage.raw[_first_of(passage.raw, "<i>", "<em>") :]
    end = _first_of(section, "</i>", "</em>")
    return unless(section[3:end].strip() and section[end + 4 :].strip())


def _first_of(raw: str, tag: str, other: str) -> int:
    """Where a tag stands, or else the other; the end of the text where neither does."""
    return next((raw.find(one) for one in (tag, other) if one in raw), len(raw))


def no_bullets_bullets(passage: ResponseText) -> Faults:
    """At least two sentences, then at least two lines with *, and nothing else after the first of them. As in the
    benchmark a blank line ends the sentences, so only bullets may follow it, and it does not matter which mark ends a
    sentence."""
    sentences = bullets = 0
    reading = True
    for line in passage.raw.split("\n"):
        stripped = line.strip()
        if stripped.startswith("*"):
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
    """No token is in lower case throughout, or in small capitals (aBC); other mixtures and full capitals pass. As in
    the benchmark short words are not let off, and "n't" is a token: "Don't" is refused."""
    lower = (token for token in passage.tokens if token[0].islower())
    return (repr(token) for token in lower if len(token) == 1 or token[1:].islower() or token[1:].isupper())


CHECKS: dict[str, Check] = {
    # Round, square and curly brackets, of which the innermost is closed.
    "format:parentheses": check("brackets nested at least 5 deep", lambda p: unless(_nests(p.raw, _BRACKETS, 5, 1))),
    # Straight quotes, closed; as in the benchmark an apostrophe is one.
    "format:quotes": check("quotes within quotes at least 3 deep", lambda p: unless(_nests(p.raw, _QUOTES, 3, 3))),
    "format:options": check("one of {options} and nothing else", options),
    "format:newline": check("each word on a new line", newline),
    "format:emoji": check("an emoji at the end of every sentence", emoji_ends),
    "format:line_indent": check("each line indented more than the one before", line_indent),
    "format:quote_unquote": check("an explanation after every quoted phrase", quote_unquote),
    # The separator comes at least twice, anywhere.
    "format:list": check(
        "a list of items marked with {sep}", lambda p, sep: compare(p.raw.count(sep), "at least", 2, f"times {sep!r}")
    ),
    "format:thesis": check("sections that begin with a thesis in HTML italics", thesis),
    # After each asterisk, before the next one, comes a hyphen. As in the benchmark that is all: bold text counts as
    # bullets, and an answer without bullets passes.
    "format:sub-bullets": check(
        "bullet points (*) with sub-bullet points (-)",
        lambda p: unless(all("-" in part for part in p.raw.split("*")[1:])),
    ),
    "format:no_bullets_bullets": check("two sentences, then two bullet points (*)", no_bullets_bullets),
    "format:title_case": check("title case throughout", title_case),
    # The three headings, anywhere.
    "format:output_template": check(
        "the template My Answer, My Conclusion, Future Outlook",
        lambda p: (f"no {h!r}" for h in ("My Answer:", "My Conclusion:", "Future Outlook:") if h not in p.raw),
    ),
    # No space, tab or line break at all, at the ends neither.
    "format:no_whitespace": check("no white space", lambda p: unless(p.raw.split() == [p.raw])),
}
