"""The 25 kinds of IFEval (Zhou et al. 2023, arXiv:2311.07911), whose data has the same form as IFBench's.

Keywords are looked for as they are written; the original takes them for regular expressions.
"""

import json
import re

from agentrl.rm_hub.ifbench.check import (
    Counted,
    Finding,
    Letter,
    Relation,
    Text,
    Texts,
    Trimmed,
    Whole,
    at_least,
    compare,
    constraint,
)
from agentrl.rm_hub.ifbench.passage import Passage

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_BOLD = re.compile(r"\*\*[^\n*]*\*\*")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_POSTSCRIPTS = {"P.P.S": re.compile(r"p\.\s?p\.\s?s"), "P.S.": re.compile(r"p\.\s?s\.")}
_FENCES = ("```json", "```Json", "```JSON", "```")
_ENDS_OF_WORD = frozenset(".,?!'\"")


@constraint("keywords:existence", "the keywords {keywords}")
def existence(passage: Passage, keywords: Texts) -> Finding:
    """Each keyword comes, in any case, also inside a longer word."""
    missing = [keyword for keyword in keywords if keyword.lower() not in passage.lower]
    return f"no {missing[0]!r}" if missing else None


@constraint("keywords:frequency", "{relation} {frequency} times {keyword}")
def frequency(passage: Passage, keyword: Trimmed, frequency: Whole, relation: Relation) -> Finding:
    """How often the keyword comes, in any case, also inside longer words."""
    return compare(passage.lower.count(keyword.lower()), relation, frequency, f"times {keyword!r}")


@constraint("keywords:forbidden_words", "none of the words {forbidden_words}")
def forbidden_words(passage: Passage, forbidden_words: Texts) -> Finding:
    """None of the words comes as a whole word, in any case."""
    for word in forbidden_words:
        if re.search(rf"\b{re.escape(word)}\b", passage.raw, re.IGNORECASE):
            return f"{word!r}"
    return None


@constraint("keywords:letter_frequency", "{let_relation} {let_frequency} times the letter {letter}")
def letter_frequency(passage: Passage, letter: Letter, let_frequency: Whole, let_relation: Relation) -> Finding:
    """How often the letter comes, in any case."""
    return compare(passage.lower.count(letter), let_relation, let_frequency, f"times {letter!r}")


@constraint("language:response_language", "the language {language} only")
def response_language(passage: Passage, language: Trimmed) -> Finding:
    """The language as langdetect guesses it, with a fixed seed; a text without features passes, as in the original."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        guess = langdetect.detect(passage.raw)
    except langdetect.LangDetectException:
        return None
    return None if guess == language else f"language {guess!r}"


@constraint("length_constraints:number_sentences", "{relation} {num_sentences} sentences")
def number_sentences(passage: Passage, num_sentences: Whole, relation: Relation) -> Finding:
    """How many sentences there are."""
    return compare(len(passage.sentences), relation, num_sentences, "sentences")


@constraint("length_constraints:number_paragraphs", "{num_paragraphs} paragraphs divided by ***")
def number_paragraphs(passage: Passage, num_paragraphs: Whole) -> Finding:
    """Paragraphs between dividers ***; only the first and the last part may be blank."""
    parts = [bool(part.strip()) for part in _DIVIDER.split(passage.raw)]
    if not all(parts[1:-1]):
        return "a blank paragraph"
    return None if sum(parts) == num_paragraphs else f"{sum(parts)} paragraphs"


@constraint("length_constraints:number_words", "{relation} {num_words} words")
def number_words(passage: Passage, num_words: Whole, relation: Relation) -> Finding:
    """Words are runs of letters, digits and underscores."""
    return compare(len(passage.runs), relation, num_words, "words")


@constraint(
    "length_constraints:nth_paragraph_first_word",
    "{num_paragraphs} paragraphs, of which number {nth_paragraph} begins with {first_word}",
)
def nth_paragraph(passage: Passage, num_paragraphs: Counted, nth_paragraph: Counted, first_word: Trimmed) -> Finding:
    """Paragraphs between blank lines, of which one begins with a word; further blank ones do not count, but shift."""
    parts = passage.raw.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count:
        return f"{count} paragraphs"
    words = parts[nth_paragraph - 1].split(maxsplit=1)
    first = words[0].lstrip("'").lstrip('"') if words else ""
    end = next((at for at, char in enumerate(first) if char in _ENDS_OF_WORD), len(first))
    return None if first[:end].lower() == first_word.lower() else f"{first[:40]!r} there"


@constraint("detectable_content:number_placeholders", "at least {num_placeholders} placeholders in brackets")
def number_placeholders(passage: Passage, num_placeholders: Whole) -> Finding:
    """Square brackets with their content on one line."""
    got = sum(_bracketed(line) for line in passage.raw.split("\n"))
    return at_least(got, num_placeholders, "placeholders")


def _bracketed(line: str) -> int:
    count = position = 0
    while (start := line.find("[", position)) >= 0 and (end := line.find("]", start)) >= 0:
        count, position = count + 1, end + 1
    return count


@constraint("detectable_content:postscript", "a postscript that starts with {postscript_marker}")
def postscript(passage: Passage, postscript_marker: Trimmed) -> Finding:
    """The marker comes somewhere, in any case; P.S. and P.P.S also with a space between their letters."""
    pattern = _POSTSCRIPTS.get(postscript_marker)
    found = pattern.search(passage.lower) if pattern else postscript_marker.lower() in passage.lower
    return None if found else f"no {postscript_marker!r}"


@constraint("detectable_format:number_bullet_lists", "exactly {num_bullets} bullet points")
def number_bullets(passage: Passage, num_bullets: Whole) -> Finding:
    """Lines that begin with a hyphen, or with an asterisk that no other follows."""
    lines = [line.lstrip() for line in passage.raw.split("\n")]
    got = sum(line[:1] == "-" or (line[:1] == "*" and line[1:2] != "*") for line in lines)
    return None if got == num_bullets else f"{got} bullet points"


@constraint("detectable_format:constrained_response", f"one of: {' '.join(_ANSWERS)}")
def constrained_response(passage: Passage) -> Finding:
    """One of the three fixed answers comes, also among other text."""
    return None if any(answer in passage.raw for answer in _ANSWERS) else "none of them"


@constraint("detectable_format:number_highlighted_sections", "at least {num_highlights} highlighted sections")
def highlighted(passage: Passage, num_highlights: Whole) -> Finding:
    """Text between asterisks on one line; bold text counts once."""
    spans = [*_HIGHLIGHT.findall(passage.raw), *_BOLD.findall(passage.raw)]
    return at_least(sum(bool(span.strip("*").strip()) for span in spans), num_highlights, "highlighted sections")


@constraint(
    "detectable_format:multiple_sections", "{num_sections} sections that begin with {section_spliter} and a number"
)
def multiple_sections(passage: Passage, section_spliter: Trimmed, num_sections: Whole) -> Finding:
    """The word that begins a section, with a number after it, at least that often."""
    found = re.findall(rf"{re.escape(section_spliter)}\s?\d", passage.raw)
    return at_least(len(found), num_sections, f"times {section_spliter!r} with a number")


@constraint("detectable_format:json_format", "JSON and nothing else")
def json_format(passage: Passage) -> Finding:
    """JSON and nothing else, in a code fence or not."""
    body = passage.raw.strip()
    for fence in _FENCES:
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError) as error:
        return f"no JSON ({str(error)[:60]})"
    return None


@constraint("detectable_format:title", "a title in <<double angular brackets>>")
def title(passage: Passage) -> Finding:
    """Text in double angular brackets on one line."""
    for line in passage.raw.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return None
    return "no title"


@constraint("combination:two_responses", "two different responses divided by ******")
def two_responses(passage: Passage) -> Finding:
    """Two different texts with ****** between them; only the first and the last part may be blank."""
    parts = [part.strip() for part in passage.raw.split("******")]
    if not all(parts[1:-1]):
        return "a blank response"
    filled = [part for part in parts if part]
    if len(filled) != 2:
        return f"{len(filled)} responses"
    return None if filled[0] != filled[1] else "the same response twice"


@constraint("combination:repeat_prompt", "the request first, word for word")
def repeat_prompt(passage: Passage, prompt_to_repeat: Text) -> Finding:
    """The answer begins with the request, in any case."""
    same = passage.raw.strip().lower().startswith(prompt_to_repeat.strip().lower())
    return None if same else "another beginning"


@constraint("startend:end_checker", "{end_phrase} at the end")
def end_phrase(passage: Passage, end_phrase: Trimmed) -> Finding:
    """The answer ends with the phrase, in any case; a double quote may follow."""
    return None if passage.raw.strip().strip('"').lower().endswith(end_phrase.lower()) else "another end"


@constraint("startend:quotation", "double quotation marks around the whole answer")
def quotation(passage: Passage) -> Finding:
    """A double quote at both ends."""
    body = passage.raw.strip()
    return None if len(body) > 1 and body[0] == body[-1] == '"' else "no quotes around it"


@constraint("change_case:capital_word_frequency", "{capital_relation} {capital_frequency} words in capitals")
def capital_words(passage: Passage, capital_frequency: Whole, capital_relation: Relation) -> Finding:
    """How many tokens are in capitals throughout; "I" and "A" are."""
    return compare(
        sum(token.isupper() for token in passage.tokens), capital_relation, capital_frequency, "words in capitals"
    )


@constraint("change_case:english_capital", "English in capitals only")
def english_capital(passage: Passage) -> Finding:
    """Capitals throughout, and English as langdetect guesses."""
    return response_language(passage, "en") if passage.raw.isupper() else "letters that are not capital"


@constraint("change_case:english_lowercase", "English in lower case only")
def english_lowercase(passage: Passage) -> Finding:
    """Lower case throughout, and English as langdetect guesses."""
    return response_language(passage, "en") if passage.raw.islower() else "letters that are not in lower case"


@constraint("punctuation:no_comma", "no commas")
def no_comma(passage: Passage) -> Finding:
    """No comma (of ASCII) at all."""
    return "a comma" if "," in passage.raw else None
