"""Facts about the turns of a sample: numbers, rewards, observations, and the user's loss weights. Turns are numbered
from 1 through a whole trajectory. If a trajectory was split, its samples share a rollout id and this numbering."""

import difflib
import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl.errors import SampleError
from agentrl.sample import Origin, Sample


def turns_of(sample: Sample) -> list[int]:
    """Return the turn of each response token; 0 if the turn is unknown."""
    if not sample.segments:
        return [0] * sample.response_length
    return [segment.turn for segment in sample.segments for _ in range(segment.start, segment.end)]


def credit_of(sample: Sample, reward: float) -> list[float]:
    """Return each turn's reward at its last model token, and 0 elsewhere. If `reward` is NaN, all are 0.

    The rewards of turns are `metadata["step_credit"]`, which a combined reward writes. Without it they are
    `metadata["step_rewards"]`, and the last turn also gets the rest of `reward`. Both have an entry per turn. A sample
    of a split trajectory leaves out the rewards of turns before its own first turn. Its last turn also gets the rewards
    of all later turns, so returns equal those without a split. Without turns, all of `reward` is at the last token."""
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
    for turn, earned in enumerate(credit, 1):  # the reward of a turn without tokens goes to the turn before
        at = last.get(turn, at)
        if at is not None:
            out[at] += earned
    return out


def gives_credit(sample: Sample) -> bool:
    """Return true if a turn has a step reward or an entry in `step_credit`."""
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
    """Return, per response token, the number of the observation before the token's turn; -1 if the turn is unknown.
    Within a group, equal numbers are equal observations: the tokens since the previous turn, or the prompt."""
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


_READ = ("weight", "turn_weights")  # the keys of `train_metadata` that are read; users may add others


def weights_of(sample: Sample) -> list[float]:
    """Return the loss weight of each response token: the sample's "weight" times its turn's entry in "turn_weights".
    Removed samples have 1. Raises SampleError: a weight is missing, negative or not finite, or a key is misspelt."""
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
