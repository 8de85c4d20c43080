"""The 25 kinds of IFEval (Zhou et al. 2023, arXiv:2311.07911), whose data has the same form as IFBench's. Keywords are
searched literally; the original reads keywords as regular expressions."""

import json
import re
from collections.abc import Sequence

from agentrl.rm_hub.ifbench.check import Faults, Run, compare, unless
from agentrl.rm_hub.ifbench.passage import ResponseText

_ANSWERS = ("My answer is yes.", "My answer is no.", "My answer is maybe.")
_BULLET = re.compile(r"(?m)^[^\S\n]*(?:-|\*(?!\*))")
_PLACEHOLDER = re.compile(r"\[[^\[\]\n]*\]")
_HIGHLIGHT = re.compile(r"\*[^\n*]*\*")
_BOLD = re.compile(r"\*\*[^\n*]*\*\*")
_DIVIDER = re.compile(r"\s?\*\*\*\s?")
_POSTSCRIPTS = {"P.P.S": r"p\.\s?p\.\s?s", "P.S.": r"p\.\s?s\."}
_FIRST_WORD = re.compile(r"'*\"*([^.,?!'\"\s]*)")


def response_language(passage: ResponseText, language: str) -> Faults:
    """Check the language with langdetect and a fixed seed. A text without features passes, as in the original."""
    import langdetect

    langdetect.DetectorFactory.seed = 0
    try:
        guess = langdetect.detect(passage.raw)
    except langdetect.LangDetectException:
        return ()
    return unless(guess == language, f"language {guess!r}")


def _parts(parts: Sequence[str], want: int, what: str) -> Faults:
    """Check the number of parts. Only the first and the last may be blank; blank parts do not count."""
    filled = [bool(part.strip()) for part in parts]
    return compare(sum(filled), "exactly", want, what) if all(filled[1:-1]) else [f"blank {what}"]


def two_responses(passage: ResponseText) -> Faults:
    """Check for two different texts with ****** between them; only the first and the last part may be blank."""
    parts = passage.raw.split("******")
    yield from _parts(parts, 2, "responses")
    if len({part.strip() for part in parts if part.strip()}) == 1:
        yield "the same response twice"


def nth_paragraph(passage: ResponseText, num_paragraphs: int, nth_paragraph: int, first_word: str) -> Faults:
    """Check the number of paragraphs and the first word of one. Blank parts do not count, but shift the index."""
    parts = passage.raw.split("\n\n")
    count = sum(bool(part.strip()) for part in parts)
    if count != num_paragraphs or nth_paragraph > count:
        return [f"{count} paragraphs"]
    first = _FIRST_WORD.match(parts[nth_paragraph - 1].strip())
    return unless(first and first[1].lower() == first_word.lower())


def json_format(passage: ResponseText) -> Faults:
    """Check that the text is JSON and nothing else, in a code fence or not."""
    body = passage.raw.strip()
    for fence in ("```json", "```Json", "```JSON", "```"):
        body = body.removeprefix(fence)
    try:
        json.loads(body.removesuffix("```").strip())
    except (ValueError, RecursionError) as error:
        yield f"no JSON ({error})"


def title(passage: ResponseText) -> Faults:
    """Check for text in double angular brackets on one line."""
    for line in passage.raw.split("\n"):
        start, end = line.find("<<"), line.rfind(">>")
        if 0 <= start < end - 2 and line[start : end + 2].lstrip("<").rstrip(">").strip():
            return ()
    return ["no title"]


CHECKS: dict[str, Run] = {
    # Case-insensitive. Keywords may be inside longer words; forbidden words are whole words.
    "keywords:existence": lambda p, keywords: (
        f"no {keyword!r}" for keyword in keywords if keyword.lower() not in p.lower),
    "keywords:frequency": lambda p, keyword, frequency, relation: compare(
        p.lower.count(keyword.lower()), relation, frequency, "times"),
    "keywords:forbidden_words": lambda p, forbidden_words: re.findall(
        rf"\b(?:{'|'.join(map(re.escape, forbidden_words))})\b", p.raw, re.I),
    # Case-insensitive; in two prompts of IFEval the letter is a mark.
    "keywords:letter_frequency": lambda p, letter, let_frequency, let_relation: compare(
        p.lower.count(letter), let_relation, let_frequency, "times"),
    "language:response_language": response_language,
    "length_constraints:number_sentences": lambda p, relation, num_sentences: compare(
        len(p.sentences), relation, num_sentences, "sentences"),
    "length_constraints:number_paragraphs": lambda p, num_paragraphs: _parts(
        _DIVIDER.split(p.raw), num_paragraphs, "paragraphs"),
    # Words are runs of letters, digits and underscores.
    "length_constraints:number_words": lambda p, relation, num_words: compare(
        len(p.runs), relation, num_words, "words"),
    "length_constraints:nth_paragraph_first_word": nth_paragraph,
    # Square brackets with their content on one line.
    "detectable_content:number_placeholders": lambda p, num_placeholders: compare(
        len(_PLACEHOLDER.findall(p.raw)), "at least", num_placeholders, "placeholders in brackets"),
    # Anywhere, case-insensitive; P.S. and P.P.S may have a space between their letters.
    "detectable_content:postscript": lambda p, postscript_marker: unless(
        re.search(_POSTSCRIPTS.get(postscript_marker, re.escape(postscript_marker.lower())), p.lower)),
    # Lines that begin with a hyphen or with a single asterisk.
    "detectable_format:number_bullet_lists": lambda p, num_bullets: compare(
        len(_BULLET.findall(p.raw)), "exactly", num_bullets, "bullet points"),
    # One of the three fixed answers; other text is allowed.
    "detectable_format:constrained_response": lambda p: unless(any(answer in p.raw for answer in _ANSWERS)),
    # Text between asterisks on one line; bold text counts once.
    "detectable_format:number_highlighted_sections": lambda p, num_highlights: compare(
        sum(bool(span.strip("*").strip()) for span in (*_HIGHLIGHT.findall(p.raw), *_BOLD.findall(p.raw))),
        "at least", num_highlights, "highlighted sections"),
    # The word `section_spliter` with a digit after it, at least `num_sections` times.
    "detectable_format:multiple_sections": lambda p, section_spliter, num_sections: compare(
        len(re.findall(rf"{re.escape(section_spliter)}\s?\d", p.raw)), "at least", num_sections, "sections"),
    "detectable_format:json_format": json_format,
    "detectable_format:title": title,
    "combination:two_responses": two_responses,
    # The beginning and the end are case-insensitive; a double quote may follow the end.
    "combination:repeat_prompt": lambda p, prompt_to_repeat: unless(
        p.lower.strip().startswith(prompt_to_repeat.strip().lower())),
    "startend:end_checker": lambda p, end_phrase: unless(p.lower.strip().strip('"').endswith(end_phrase.lower())),
    "startend:quotation": lambda p: unless(len(p.raw.strip()) > 1 and p.raw.strip()[0] == p.raw.strip()[-1] == '"'),
    # Tokens in capitals only; "I" and "A" count.
    "change_case:capital_word_frequency": lambda p, capital_relation, capital_frequency: compare(
        sum(t.isupper() for t in p.tokens), capital_relation, capital_frequency, "words in capitals"),
    # langdetect must guess English.
    "change_case:english_capital": lambda p: response_language(p, "en") if p.raw.isupper() else ["other letters"],
    "change_case:english_lowercase": lambda p: response_language(p, "en") if p.raw.islower() else ["other letters"],
    # No ASCII comma.
    "punctuation:no_comma": lambda p: unless("," not in p.raw),
}  # fmt: skip
