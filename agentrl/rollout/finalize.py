"""What becomes of a group that was played and graded: kept for training, or dropped with a reason."""

from typing import Any

from agentrl.groups import Group
from agentrl.rollout.filters import GroupFilter, judge


def reason_to_drop(group: Group, group_filter: GroupFilter | None, args: Any) -> str | None:
    """Why the group is not trained on; None if it is.

    Raises:
        PluginError: the group filter's own code failed.
    """
    if all(not sample.response_length or sample.remove_sample for sample in group):
        return "nothing_to_train"
    verdict = judge(group_filter, args, group)
    return None if verdict.keep else verdict.reason or "filtered"
