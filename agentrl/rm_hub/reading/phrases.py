"""The phrases by which answers are announced, denied, doubted and taken back, with languages as data (`phrases.toml`).
Words are matched, not grammar. What is read of them is decided in `answers`."""

import re
import tomllib
from importlib import resources

LANGUAGES = tomllib.loads((resources.files(__package__) / "phrases.toml").read_text(encoding="utf-8"))
"""Every language that is read; nothing else in the package is about one."""


def any_of(*fields: str) -> str:
    """The alternatives of some fields in all languages, as a pattern without groups."""
    found = [(row.get("spaced", True), row[field]) for row in LANGUAGES.values() for field in fields if field in row]
    spaced, dense = ("|".join("|".join(said) for apart, said in found if apart is kind) for kind in (True, False))
    return rf"(?:(?<![\w'’-])(?:{spaced})(?![^\W_])" + (f"|{dense})" if dense else ")")


def words(*fields: str) -> re.Pattern[str]:
    """A pattern that finds the words of some fields in any language."""
    return re.compile(any_of(*fields), re.IGNORECASE)
