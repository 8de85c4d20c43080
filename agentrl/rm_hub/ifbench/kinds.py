"""The table of all kinds, by the ids that the data uses."""

import difflib
from collections.abc import Mapping

from agentrl.errors import GraderFailure
from agentrl.rm_hub.ifbench import counts, custom, ifeval, layout, repeat, words
from agentrl.rm_hub.ifbench.check import Check

KINDS: Mapping[str, Check] = {
    **counts.KINDS,
    **words.KINDS,
    **layout.KINDS,
    **custom.KINDS,
    **repeat.KINDS,
    **ifeval.KINDS,
}
"""IFBench's 58 kinds and IFEval's 25."""


def constraint_kinds() -> dict[str, str]:
    """Each known id with the constraint in words (parameters in braces), sorted by id."""
    return {kind: KINDS[kind].says for kind in sorted(KINDS)}


def find_check(kind: object) -> Check:
    """The check of that id.

    Raises:
        GraderFailure: `grader_bad_metadata`, with the nearest known id.
    """
    check = KINDS.get(kind) if isinstance(kind, str) else None
    if check is not None:
        return check
    close = difflib.get_close_matches(str(kind)[:200], KINDS, n=1, cutoff=0.0)
    raise GraderFailure(
        f"instruction_id_list: {str(kind)[:200]!r} is no known constraint; the nearest is {close[0]!r}",
        kind="grader_bad_metadata",
    )
