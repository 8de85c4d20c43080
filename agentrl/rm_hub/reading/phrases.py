"""The phrases that announce, deny, doubt and withdraw answers, with languages as data (`phrases.toml`). The patterns
match words, not grammar. `answers` decides the effect of a phrase."""

import re
import tomllib
from importlib import resources

LANGUAGES = tomllib.loads((resources.files(__package__) / "phrases.toml").read_text(encoding="utf-8"))
"""The phrases of each language, by the name of the language."""


def any_of(*fields: str) -> str:
    """Return a pattern, without capture groups, of the alternatives of some fields in all languages."""
    found = [(row.get("spaced", True), row[field]) for row in LANGUAGES.values() for field in fields if field in row]
    spaced, dense = ("|".join("|".join(said) for apart, said in found if apart is kind) for kind in (True, False))
    return rf"(?:(?<![\w'’-])(?:{spaced})(?![^\W_])" + (f"|{dense})" if dense else ")")


def words(*fields: str) -> re.Pattern[str]:
    """Return a pattern that finds the words of some fields in any language."""
    return re.compile(any_of(*fields), re.IGNORECASE)
