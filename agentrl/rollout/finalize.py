"""What becomes of a group that was played and graded: kept for training, or dropped with a reason; what of it is trained."""

from typing import Any

from agentrl.groups import Group
from agentrl.rollout.filters import GroupFilter, judge
from agentrl.sample import Sample


def reason_to_drop(group: Group, group_filter: GroupFilter | None, args: Any, scarce: bool = False) -> str | None:
    """Why the group is not trained on; None if it is.

    Args:
        scarce: without it another group has to be played.

    Raises:
        PluginError: the group filter's own code failed.
    """
    if all(not sample.response_length or sample.remove_sample for sample in group):
        return "nothing_to_train"
    verdict = judge(group_filter, args, group)
    return None if verdict.keep or (scarce and verdict.keep_when_insufficient) else verdict.reason


def mask_older(sample: Sample, version: int) -> int:
    """Train no token of weights before `version`; returns how many tokens that takes out."""
    before = sample.trained_tokens
    for segment in sample.segments:
        known = segment.version is not None and segment.version.isdecimal()
        if sample.loss_mask is not None and known and int(segment.version or 0) < version:
            for at in range(segment.start, segment.end):  # a list, or an array, which takes no slice of a list
                sample.loss_mask[at] = 0
    return before - sample.trained_tokens
