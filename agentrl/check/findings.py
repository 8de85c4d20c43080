"""What a check found."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

_VARYING = re.compile(r": .*(?= at \S+:\d+)|(?<=index=)\d+|, got .*")
"""What differs from episode to episode: the words of an exception, the sample's number, a value."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A problem (a run fails, trains on something else than it seems, or learns nothing), or a note.

    Attributes:
        what: what is wrong, where, and what to do.
        detail: more, of one episode.
        episode: what was played.
    """

    what: str
    detail: str = ""
    episode: str = ""
    note: bool = False


def summed(findings: Iterable[Finding]) -> list[tuple[Finding, int]]:
    """The first of those that say the same, and how many said it; problems first."""
    seen: dict[tuple[bool, str], list[Finding]] = {}
    for found in findings:
        seen.setdefault((found.note, _VARYING.sub("", found.what)), []).append(found)
    return [(same[0], len(same)) for _, same in sorted(seen.items(), key=lambda entry: entry[0][0])]
