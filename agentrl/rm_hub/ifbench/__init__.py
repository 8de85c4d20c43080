"""The grader `ifbench`: tests if an answer meets the constraints that its prompt states.

1. `instruction_id_list` and `kwargs` come from the metadata, or from the label as a mapping or JSON.
2. Strict reads the unchanged answer. Loose also reads it without its first line, its last line or both, and each of
   these texts without asterisks (Zhou et al. 2023, arXiv:2311.07911).
3. `ifbench_mode` ("strict" or "loose") and `ifbench_aggregate` ("all" or "mean") in the metadata choose the score.
4. Text before a closing `</think>` is not part of the answer. Answers longer than `LONGEST` meet nothing."""

import difflib
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import Any

from agentrl.chat.parsers.base import json_or_text
from agentrl.files import read_table
from agentrl.rm_hub.grade import Grade, Metadata
from agentrl.rm_hub.ifbench import counts, ifeval, layout, words
from agentrl.rm_hub.ifbench.check import Constraint, check, constrain, is_list
from agentrl.rm_hub.ifbench.passage import ResponseText
from agentrl.rm_hub.reading.common import bad_metadata, one_of

_RUNS = {**counts.CHECKS, **ifeval.CHECKS, **layout.CHECKS, **words.CHECKS}
CHECKS = {kind: check(says, _RUNS[kind], counted) for kind, counted, says in read_table(__file__, "constraints.tsv")}
"""All kinds of constraints by their id in the data: IFBench's 58 and IFEval's 25."""
LONGEST = 100_000
"""Maximum characters of a graded answer, about 25,000 tokens. This limits the time of one item."""


def grade_ifbench(response: str, label: Any, metadata: Metadata) -> Grade:
    """Grade an answer by the constraints of its prompt. The score is 0 or 1; with "mean", it is the share of
    constraints that are met. Parts are "strict" and "loose" (scores of the two modes) and each constraint's verdict
    under its id (with #2 and so on if a kind repeats)."""
    constraints = _constraints(label, metadata)
    mode = one_of(metadata, "ifbench_mode", ("strict", "loose"), "ifbench")
    field = "aggregate" if metadata.get("ifbench_aggregate") is None else "ifbench_aggregate"
    aggregate = one_of(metadata, field, ("all", "mean"), "ifbench")
    _, mark, answer = response.rpartition("</think>")
    answer = answer.lstrip("\r\n") if mark else "" if answer.lstrip().startswith("<think>") else answer
    if len(answer) > LONGEST:
        strict: list[str | None] = [f"an answer of {len(answer)} characters; more than {LONGEST} are not graded"]
        strict *= len(constraints)
        loose, answer = strict, ""
    else:
        passage, variants = ResponseText(answer), [ResponseText(text) for text in _variants(answer)]
        strict = [constraint.fault(passage) for constraint in constraints]
        loose = [
            fault if fault is None or None not in map(constraint.fault, variants) else None
            for constraint, fault in zip(constraints, strict, strict=True)
        ]
    modes = {"strict": strict, "loose": loose}
    shares = {name: faults.count(None) / len(faults) for name, faults in modes.items()}
    parts = {name: share if aggregate == "mean" else float(share == 1) for name, share in shares.items()}
    faults = modes[mode]
    seen: Counter[str] = Counter()
    unmet = []
    for constraint, fault in zip(constraints, faults, strict=True):
        seen[constraint.kind] += 1
        again = f"#{seen[constraint.kind]}" if seen[constraint.kind] > 1 else ""
        parts[constraint.kind + again] = float(fault is None)
        if fault is not None:
            unmet.append(f"{constraint}: {fault}".removesuffix(": "))
    reason = f"{len(faults)} of {len(faults)} constraints met ({mode})"
    if unmet:
        reason = f"not met: {unmet[0]}" + (f"; {len(unmet) - 1} more" if len(unmet) > 1 else "")
    return Grade(parts[mode], not unmet, answer or None, reason, parts)


def _variants(answer: str) -> list[str]:
    """Return the distinct texts of the loose mode that differ from the answer."""
    lines = answer.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    texts = [text for whole in (answer, *cut) for text in (whole, whole.replace("*", ""))]
    return [text for text in dict.fromkeys(texts) if text != answer and text.strip()]


def _constraints(label: Any, metadata: Metadata) -> list[Constraint]:
    source: Any = metadata if metadata.get("instruction_id_list") is not None else label
    source = json_or_text(source) if isinstance(source, str) else source
    if not isinstance(source, Mapping):
        raise _bad("instruction_id_list", "given (--metadata-key), or in a label that holds it and kwargs", label)
    kinds, kwargs = source.get("instruction_id_list"), source.get("kwargs")
    if not is_list(kinds) or not len(kinds):
        raise _bad("instruction_id_list", "a list of at least one id", kinds)
    if not is_list(kwargs) or len(kwargs) != len(kinds):
        raise _bad("kwargs", f"a list of {len(kinds)} mappings, one for each of instruction_id_list", kwargs)
    constraints = []
    for kind, given in zip(kinds, kwargs, strict=True):
        if not isinstance(kind, str) or kind not in CHECKS:
            nearest = difflib.get_close_matches(str(kind)[:200], CHECKS, n=1, cutoff=0.0)[0]
            known = f"of known ids (this is no known constraint; the nearest: {nearest!r})"
            raise _bad("instruction_id_list", known, kind)
        if not isinstance(given, Mapping | None):
            raise _bad("kwargs", f"a mapping for {kind!r}", given)
        constraints.append(constrain(kind, CHECKS[kind], given or {}))
    return constraints


_bad = partial(bad_metadata, "ifbench")
