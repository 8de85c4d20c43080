"""The decision on a finished group: keep it, or drop it with a reason. Also masks tokens that are too stale. A group
filter is `fn(args, samples) -> bool` (or an object with `keep` and `reason`), called once per group."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.errors import PluginError
from agentrl.groups import Group
from agentrl.plugins import defined_at, is_async, load_object, user_code
from agentrl.sample import Sample, version_number


@dataclass(frozen=True, slots=True)
class FilterOutput:
    """A filter's verdict; `reason` goes into the ledger and the metrics if the group is dropped.
    `keep_when_insufficient`: keep the group nevertheless if another group would have to be generated in its place."""

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

    def kept(self, *, scarce: bool) -> bool:
        """Return true if the group is trained. `scarce`: without this group, another one must be generated."""
        return self.keep or (scarce and self.keep_when_insufficient)


GroupFilter = Callable[[Any, list[Sample]], "FilterOutput | bool"]


def nonzero_std(args: Any, samples: list[Sample]) -> FilterOutput:
    """Keep a group only if its rewards differ: equal rewards give no GRPO gradient (DAPO, arXiv:2503.14476)."""
    rewards = [sample.get_reward_value(args.reward_key) for sample in samples]
    keep = max(rewards) - min(rewards) > 1e-9
    return FilterOutput(keep, None if keep else f"zero_std_{rewards[0]:g}")


def load_filter(path: str) -> GroupFilter:
    """Load `--dynamic-sampling-filter-path`. Raises PluginError: it is missing, or no function of `(args, samples)`."""
    flag = "--dynamic-sampling-filter-path"
    found: GroupFilter = load_object(path, what=flag, default_names=("filter", "keep"))
    if not callable(found) or is_async(found):
        raise PluginError(f"{flag} {path}: expected a plain function (args, samples) -> bool, got {found!r:.80}")
    return found


def named_filter(group_filter: GroupFilter) -> str:
    """Return the filter's name and place, for messages."""
    name = getattr(group_filter, "__name__", type(group_filter).__name__)
    return f"the group filter {name} ({defined_at(group_filter)})"


def judged(group: Group, group_filter: GroupFilter | None, args: Any) -> FilterOutput:
    """Return a group's verdict, with a reason if dropped. Raises PluginError: the filter raised, or gave no verdict."""
    if all(not (sample.response_length or sample.hosted) or sample.remove_sample for sample in group):
        return FilterOutput(False, "nothing_to_train")
    if group_filter is None:
        return FilterOutput(True)
    what = named_filter(group_filter)
    with user_code(what):
        verdict = group_filter(args, list(group))
    keep = getattr(verdict, "keep", verdict)
    keep = keep.item() if hasattr(keep, "item") else keep  # a scalar of torch or numpy
    if not isinstance(keep, bool):
        raise PluginError(f"{what} must return a bool or an object with a bool `keep`, got {verdict!r:.80}")
    reason = None if keep else getattr(verdict, "reason", None) or "filtered"
    return FilterOutput(keep, reason, bool(getattr(verdict, "keep_when_insufficient", False)))


def mask_older(sample: Sample, version: int) -> int:
    """Mask tokens of versions before `version` and of unknown versions; return the number of newly masked tokens."""
    before = sample.trained_tokens
    for label, start, end in sample.version_spans if version > 0 else ():
        known = version_number(label)
        if sample.loss_mask is not None and (known is None or known < version):
            for at in range(start, end):  # the mask is a list or an array; slices of the two differ
                sample.loss_mask[at] = 0
    return before - sample.trained_tokens
