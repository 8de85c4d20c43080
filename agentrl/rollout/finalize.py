"""What becomes of a group that was played and graded: kept for training, or dropped with a reason."""

from typing import Any

from agentrl.groups import Group
from agentrl.rollout.filters import GroupFilter, judge
from agentrl.rollout.group import DropGroup


def reason_to_drop(outcome: Group | DropGroup, group_filter: GroupFilter | None, args: Any) -> str | None:
    """Why the group is not trained on; None if it is.

    Raises:
        PluginError: the group filter's own code failed.
    """
    if isinstance(outcome, DropGroup):
        return outcome.reason
    if all(not sample.response_length or sample.remove_sample for sample in outcome):
        return "nothing_to_train"
    verdict = judge(group_filter, args, outcome)
    return None if verdict.keep else verdict.reason or "filtered"
