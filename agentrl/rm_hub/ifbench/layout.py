"""Constraints `format:*`: the form of the answer."""

import re

from agentrl.rm_hub.ifbench.check import Finding, Text, at_least, constraint
from agentrl.rm_hub.ifbench.passage import AROUND, MARKS, Passage, split_sentences

_DEEP = 5
_QUOTES_DEEP = 3
_PAIRS = {")": "(", "]": "[", "}": "{"}
_LETTERED = re.compile(r"\W*[aA]\W*[bB]\W*[cC]\W*")
_DIGITS_AND_MARKS = "0123456789" + MARKS.replace('"', "")


@constraint("format:parentheses", "brackets nested at least 5 deep")
def parentheses(passage: Passage) -> Finding:
    """Round, square and curly brackets, five deep, of which the innermost is closed; a wrong closer starts again."""
    open_: list[str] = []
    deepest = 0
    for char in passage.raw:
        if char in "([{":
            open_.append(char)
            deepest = max(deepest, len(open_))
        elif char in ")]}":
            if open_ and open_[-1] == _PAIRS[char]:
                open_.pop()
                if deepest >= _DEEP:
                    return None
            else:
                open_, deepest = [], 0
    return f"less than {_DEEP} levels"


@constraint("format:quotes", "quotes within quotes at least 3 deep")
def quotes(passage: Passage) -> Finding:
    """Straight double and single quotes nested three deep and closed; as in the benchmark an apostrophe is a quote."""
    open_: list[str] = []
    deepest = 0
    for char in passage.raw:
        if open_ and char == open_[-1]:
            open_.pop()
            if deepest - len(open_) >= _QUOTES_DEEP:
                return None
        elif char in "\"'":
            open_.append(char)
            deepest = max(deepest, len(open_))
    return f"less than {_QUOTES_DEEP} levels"


@constraint("format:options", "one of {options} and nothing else")
def options(passage: Passage, options: Text) -> Finding:
    """Exactly one of the options; letters as they are given, words in any case and with marks around them."""
    separator = "/" if "/" in options else "or" if "or" in options else ","
    choices = [choice.strip() for choice in options.split(separator)]
    if _LETTERED.match(options):
        return None if passage.raw in choices else "another answer"
    answer = passage.raw.strip(AROUND).lower()
    return None if any(choice.strip(AROUND).lower() == answer for choice in choices) else "another answer"


@constraint("format:newline", "each word on a new line")
def newline(passage: Passage) -> Finding:
    """As many lines as words once ASCII marks are taken out; blank lines do not count."""
    stripped = passage.bare.strip()
    lines = sum(line != "" for line in stripped.split("\n"))
    words = len(stripped.split())
    return None if lines == words else f"{words} words on {lines} lines"


@constraint("format:emoji", "an emoji at the end of every sentence")
def emoji_ends(passage: Passage) -> Finding:
    """Each sentence ends in an emoji, or the next one starts with it (the mark may stand before it); of a joined
    emoji one of the last two characters is looked at."""
    import emoji

    bare = [Passage(sentence).bare.strip() for sentence in passage.sentences]
    for position, sentence in enumerate(bare):
        if not sentence:
            return "a sentence of marks alone"
        after = bare[position + 1 : position + 2]
        nearby = [*sentence[-2:], *(char for text_ in after for char in text_[:1])]
        if not any(emoji.is_emoji(char) for char in nearby):
            return f"no emoji after {sentence[-40:]!r}"
    return None


@constraint("format:line_indent", "each line indented more than the one before")
def line_indent(passage: Passage) -> Finding:
    """Each line that is not blank starts with more spaces than the one before.

    The benchmark stumbles over two blank lines in a row (it refuses them, mostly); here blank lines do not matter.
    """
    before = -1
    for line in passage.raw.split("\n"):
        if not line.strip():
            continue
        indent = len(line) - len(line.lstrip(" "))
        if indent <= before:
            return f"{indent} spaces after {before}"
        before = indent
    return None


@constraint("format:quote_unquote", "an explanation after every quoted phrase")
def quote_unquote(passage: Passage) -> Finding:
    """No straight double quotes next to each other, and none at the end: something stands after each quoted phrase."""
    joined = "".join(passage.raw.replace("'\"'", "").split())
    if '""' in joined:
        return "a quote right after a quote"
    return "a quote at the end" if joined.strip(_DIGITS_AND_MARKS).endswith('"') else None


@constraint("format:list", "a list of items marked with {sep}")
def item_list(passage: Passage, sep: Text) -> Finding:
    """The separator comes at least twice, anywhere."""
    return at_least(passage.raw.count(sep), 2, f"times {sep!r}")


@constraint("format:thesis", "sections that begin with a thesis in HTML italics")
def thesis(passage: Passage) -> Finding:
    """Some text in <i> or <em>, and text after it; only the first pair is looked at."""
    start = _first_of(passage.raw, "<i>", "<em>")
    if start < 0:
        return "no <i> or <em>"
    section = passage.raw[start:]
    end = _first_of(section, "</i>", "</em>")
    if end < 0:
        return "italics that do not end"
    if not section[3:end].strip():
        return "empty italics"
    return None if section[end + 4 :].strip() else "nothing after the italics"


def _first_of(raw: str, tag: str, other: str) -> int:
    return raw.find(tag) if tag in raw else raw.find(other)


@constraint("format:sub-bullets", "bullet points (*) with sub-bullet points (-)")
def sub_bullets(passage: Passage) -> Finding:
    """After each asterisk, before the next one, comes a hyphen.

    As in the benchmark that is all: bold text counts as bullets, and an answer without bullets passes.
    """
    if any("-" not in part for part in passage.raw.split("*")[1:]):
        return "a * without a - after it"
    return None


@constraint("format:no_bullets_bullets", "two sentences, then two bullet points (*)")
def no_bullets_bullets(passage: Passage) -> Finding:
    """At least two sentences, then at least two lines with *, and nothing else after the first of them.

    As in the benchmark a blank line ends the sentences, so only bullets may follow it, and it does not matter which
    mark ends a sentence.
    """
    sentences = bullets = 0
    reading = True
    for line in passage.raw.split("\n"):
        stripped = line.strip()
        if stripped.startswith("*"):
            reading = False
            bullets += 1
            if sentences < 2:
                return f"bullets after {sentences} sentences"
        elif not reading:
            return "other lines among or after the bullets"
        else:
            found = len(split_sentences(stripped))
            sentences += found
            reading = found > 0
    return at_least(bullets, 2, "bullets")


@constraint("format:title_case", "title case throughout")
def title_case(passage: Passage) -> Finding:
    """No token is in lower case throughout, or in small capitals (aBC); other mixtures and full capitals pass.

    As in the benchmark short words are not let off, and "n't" is a token: "Don't" is refused.
    """
    for token in passage.tokens:
        if token[0].islower() and (len(token) == 1 or token[1:].islower() or token[1:].isupper()):
            return f"{token[:40]!r}"
    return None


@constraint("format:output_template", "the template My Answer, My Conclusion, Future Outlook")
def output_template(passage: Passage) -> Finding:
    """The three headings of the template, anywhere."""
    headings = ("My Answer:", "My Conclusion:", "Future Outlook:")
    missing = [heading for heading in headings if heading not in passage.raw]
    return f"no {missing[0]!r}" if missing else None


@constraint("format:no_whitespace", "no white space")
def no_whitespace(passage: Passage) -> Finding:
    """No space, tab or line break at all, at the ends neither."""
    return "white space" if passage.raw.split() != [passage.raw] else None
