"""Closed lists of English words and names that the constraints speak of: the entries of `words.toml`."""

import tomllib
from importlib import resources

LISTS: dict[str, tuple[str, ...]] = {
    name: tuple(words.split())
    for name, words in tomllib.loads((resources.files(__package__) / "words.toml").read_text(encoding="utf-8")).items()
}
