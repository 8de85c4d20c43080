"""Rows of slime's train data (`--custom-convert-samples-to-train-data-path`) as samples."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from agentrl.errors import PluginError
from agentrl.sample import Sample
from agentrl.train.hooks import Groups

_FIELDS = {
    "tokens": "tokens",
    "response_lengths": "response_length",
    "loss_masks": "loss_mask",
    "metadata": "train_metadata",
    "rollout_log_probs": "rollout_log_probs",
    "teacher_log_probs": "teacher_log_probs",
    "rollout_ids": "rollout_id",
}
_NEEDED = {"tokens", "response_lengths", "rewards", "sample_indices", "loss_masks"}
_FOLLOWS = {"raw_reward", "truncated", "round_number", "total_lengths", "rollout_mask_sums", "source_names"}
"""Statistics, and what follows from the others."""


def converted(data: Any, groups: Groups) -> tuple[list[list[Sample]], list[float]]:
    """The rows in the groups of the samples that they name, and their rewards in that order.

    A row whose tokens are the sample's keeps what else there is known of it: turns, weight versions, log-probs.

    Raises:
        PluginError: a key is missing, of another length or none of slime's, or a row names no sample.
    """
    what = "--custom-convert-samples-to-train-data-path"
    if not isinstance(data, Mapping) or (
        wrong := sorted(_NEEDED - data.keys() or data.keys() - _FIELDS.keys() - _NEEDED - _FOLLOWS)
    ):
        told = f"something is wrong with {', '.join(wrong)}" if isinstance(data, Mapping) else f"got {data!r:.80}"
        raise PluginError(f"{what}: expected a dict with the lists {', '.join(sorted(_NEEDED))}; {told}")
    if len(sizes := {key: len(column) for key, column in data.items()}) and len(set(sizes.values())) > 1:
        raise PluginError(f"{what}: the lists have different lengths: {sizes}")
    origins = {sample.index: (g, sample) for g, group in enumerate(groups) for sample in group}
    out: list[list[Sample]] = [[] for _ in groups]
    for row, index in enumerate(data["sample_indices"]):
        if index not in origins:
            raise PluginError(f"{what}: sample_indices[{row}] is {index!r}, which no sample of the rollout has")
        group, origin = origins[index]
        fields = {ours: _plain(data[key][row]) for key, ours in _FIELDS.items() if key in data}
        if fields["tokens"] != list(origin.tokens):
            origin = Sample(index=index, group_index=origin.group_index, rollout_id=origin.rollout_id)
        out[group].append(replace(origin, **fields, reward=float(data["rewards"][row])))
    kept = [group for group in out if group]
    return kept, [sample.get_reward_value() for group in kept for sample in group]


def _plain(value: Any) -> Any:
    """A row's tensor or array as a list."""
    return value.tolist() if hasattr(value, "tolist") else value
