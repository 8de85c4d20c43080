"""Facts about the turns of a sample: their numbers, their rewards, their observations, and the user's weights.
Turns count through a trajectory from 1, also where it was split into several samples, which share a rollout id."""

import difflib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import SampleError
from agentrl.sample import Origin, Sample


def turns_of(sample: Sample) -> list[int]:
    """The turn of each response token; 0 where it is unknown."""
    if not sample.segments:
        return [0] * sample.response_length
    return [segment.turn for segment in sample.segments for _ in range(segment.start, segment.end)]


def credit_of(sample: Sample, reward: float) -> list[float]:
    """The reward that each turn of a sample earned, at the turn's last model token; else 0; all 0 if `reward` is NaN.

    Exactly `metadata["step_credit"]` where a combined reward wrote it; else the steps' rewards, and what `reward` has
    beyond their sum on the last turn. Both have an entry for each turn of the trajectory so far. Of samples that one
    trajectory was split into each has its own turns': what was earned before its first turn is an earlier sibling's,
    and its last turn has all that was earned from then on, so that returns are as without the split. Without turns all
    of `reward` stands at the end."""
    out = [0.0] * sample.response_length
    last = {s.turn: s.end - 1 for s in sample.segments if s.origin is Origin.MODEL and s.turn > 0}
    if not out or math.isnan(reward):
        return out
    if not last:
        out[-1] = reward
        return out
    credit = _step_numbers(sample, "step_credit")
    if not credit:
        credit = _step_numbers(sample, "step_rewards")
        credit += [0.0] * (max(last) - len(credit))
        credit[-1] += reward - math.fsum(credit)
    at = None
    for turn, earned in enumerate(credit, 1):  # a turn without tokens is a consequence of the one before
        at = last.get(turn, at)
        if at is not None:
            out[at] += earned
    return out


def gives_credit(sample: Sample) -> bool:
    """Return true if a step gave a reward, or a combined reward said what each turn earned."""
    given = sample.metadata.get("step_rewards") or ()
    return bool(sample.metadata.get("step_credit")) or any(reward is not None for reward in given)


def _step_numbers(sample: Sample, key: str) -> list[float]:
    numbers = [0.0 if number is None else number for number in sample.metadata.get(key) or ()]
    for turn, number in enumerate(numbers, 1):
        if not _finite(number):
            where = f"sample index={sample.index}: {key} of turn {turn}"
            raise SampleError(f"{where} must be a finite number or None, got {number!r:.80}")
    return numbers


def observation_ids_of(
    groups: Sequence[Sequence[Sample]], tokens: NDArray[np.int32], offsets: NDArray[np.int64]
) -> NDArray[np.int32]:
    """A number for what was shown right before each response token's turn; -1 where the turn is unknown. Equal numbers
    are equal tokens within a group: since the model's last turn, or the prompt before a sample's first."""
    numbers: dict[tuple[int, bytes], int] = {}
    out, samples = [], ((g, sample) for g, group in enumerate(groups) for sample in group)
    for (g, sample), shown, end in zip(samples, offsets[:-1], offsets[1:], strict=True):
        first, states, turn, state = end - sample.response_length, np.full(sample.response_length, -1, np.int32), 0, -1
        for segment in sample.segments:
            if segment.origin is Origin.MODEL:
                if segment.turn != turn:
                    key = (g, tokens[shown : first + segment.start].tobytes())
                    turn, state = segment.turn, numbers.setdefault(key, len(numbers))
                shown = first + segment.end
            states[segment.start : segment.end] = state if turn else -1
        out.append(states)
    return np.concatenate(out)


_READ = ("weight", "turn_weights")  # the keys of `train_metadata` that are read; the rest of it is the user's own


def weights_of(sample: Sample) -> list[float]:
    """The user's factor of each response token: the sample's "weight" times its turn's of the "turn_weights"; 1 if it
    is removed. Raises SampleError: one is missing, negative or not finite, or a name is misspelt."""
    given, where = sample.train_metadata or {}, f"sample index={sample.index}: train_metadata"
    for name in set(given) - set(_READ):
        if close := difflib.get_close_matches(str(name), _READ, n=1, cutoff=0.85):
            raise SampleError(f"{where}: {name!r} is not read; write {close[0]!r}")
    if sample.remove_sample or set(_READ).isdisjoint(given):
        return [1.0] * sample.response_length
    turns = turns_of(sample)
    last = max(turns, default=0)
    weights = given.get("turn_weights", [1.0] * last)
    if not isinstance(weights, (list, tuple)) or len(weights) != last:
        raise SampleError(f"{where}: turn_weights must have one number for each of {last} turns, got {weights!r:.80}")
    for name, weight in [("weight", given.get("weight", 1.0)), *(("turn_weights", weight) for weight in weights)]:
        if not _finite(weight) or weight < 0:
            raise SampleError(f"{where}: {name} must be finite and not negative, got {weight!r:.80}")
    return [given.get("weight", 1.0) * (weights[turn - 1] if turn else 1.0) for turn in turns]


def _finite(number: object) -> bool:
    return isinstance(number, (int, float)) and not isinstance(number, bool) and math.isfinite(number)
