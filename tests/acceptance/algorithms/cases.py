"""Make random rollouts of unequal lengths from a seed, in numpy float64: equal input for references and agentrl.

`case(seed)` mixes empty, fully masked and one-token samples, tool tokens (mask 0) between model tokens, groups of 1 to
five trajectories, trajectories of several samples, samples without a reward (NaN, fully masked), equal rewards, and
log-ratios from 0 to +-100. Arrays that models compute hold 0 at masked tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support.nightly import examples

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

FLOATS = ("log_probs", "old", "rollout", "ref", "teacher", "values", "old_values", "returns", "advantages", "kl")


@dataclass(frozen=True)
class Case:
    """S samples with N response tokens in all, flat and in sample order.

    Attributes:
        rewards: [S], NaN if a sample has none. groups, rollouts, lengths: [S].
        mask, turns, tokens, staleness: [N]; a turn is its model tokens and the observation after them.
        written: [N], 1 where the model wrote the token, masked or not.
        log_probs, old, rollout, ref, teacher: [N] under the trained, proximal, engine's, reference and teacher model.
        values, old_values, returns, advantages: [N]. kl: [N], token KL for the reward.
        step_rewards: [N], a turn's reward on the turn's last model token; they sum to the sample's reward.
        parts: [S, 2], two rewards of very different scales, NaN if a sample has none.
        chosen: [N], 1 for a few trained tokens that a method singles out.
    """

    rewards: Floats
    groups: Ints
    rollouts: Ints
    lengths: Ints
    mask: Ints
    written: Ints
    turns: Ints
    tokens: Ints
    staleness: Ints
    log_probs: Floats
    old: Floats
    rollout: Floats
    ref: Floats
    teacher: Floats
    values: Floats
    old_values: Floats
    returns: Floats
    advantages: Floats
    kl: Floats
    step_rewards: Floats
    parts: Floats
    chosen: Ints

    @classmethod
    def of(cls, masks: Sequence[Sequence[int]], rewards: Sequence[float], **given: Any) -> Case:
        """Make a case by hand. Omitted arrays are 0: one group. Each sample has its own rollout."""
        samples, tokens = len(masks), sum(map(len, masks))
        arrays: dict[str, Any] = {f.name: [0] * (samples if f.name == "groups" else tokens) for f in fields(cls)}
        arrays |= {"rewards": rewards, "rollouts": range(samples), "lengths": list(map(len, masks))}
        arrays["parts"] = [[0.0, 0.0]] * samples
        flat = [bit for row in masks for bit in row]
        arrays |= {"mask": flat, "written": flat} | given
        real = {*FLOATS, "rewards", "step_rewards", "parts"}
        return cls(**{name: np.array(list(a), float if name in real else np.int64) for name, a in arrays.items()})

    def samples(self) -> Iterator[tuple[int, range]]:
        """Yield each sample with the positions of its tokens."""
        start = 0
        for sample, length in enumerate(self.lengths.tolist()):
            yield sample, range(start, start + length)
            start += length

    def steps(self) -> Iterator[tuple[int, list[int]]]:
        """Yield each sample with the positions of its trained tokens."""
        for sample, positions in self.samples():
            yield sample, [t for t in positions if self.mask[t]]


def case(seed: int) -> Case:
    """Make the rollout of a seed: up to 4 groups, and about 80 tokens."""
    rng = np.random.default_rng(seed)
    rewards: list[float] = []
    groups: list[int] = []
    rollouts: list[int] = []
    masks: list[list[int]] = []
    turns: list[int] = []
    written: list[int] = []
    for group in range(rng.integers(1, 5)):
        equal = rng.random() < 0.25
        level = float(rng.normal())
        for _ in range(rng.integers(1, 6)):
            rollout = len(set(rollouts)) + 7
            for _ in range(rng.choice([1, 1, 1, 2, 3])):
                mask, turn = _sample(rng)
                failed = rng.random() < 0.1
                masks.append([0] * len(mask) if failed or rng.random() < 0.08 else mask)
                turns += turn
                written += mask
                groups.append(group)
                rollouts.append(rollout)
                rewards.append(float("nan") if failed else level if equal else float(rng.normal(level)))
    n = sum(map(len, masks))
    old = -rng.exponential(1.0, n)
    kinds: dict[str, Any] = {name: rng.normal(size=n) for name in FLOATS}
    kinds["old"] = old
    for name in ("log_probs", "rollout", "ref", "teacher"):
        kinds[name] = old + rng.choice([0.0, 0.02, 0.3, 3.0]) * rng.normal(size=n)
        if rng.random() < 0.25:
            far = rng.random(n) < 0.3
            kinds[name] = np.where(far, old + rng.uniform(-100, 100, n), kinds[name])
    kinds["old_values"] = kinds["values"] + rng.choice([0.05, 1.0]) * rng.normal(size=n)
    kinds["kl"] = np.abs(kinds["kl"])
    flat = np.array([bit for row in masks for bit in row], np.int64)
    kinds = {name: np.where(flat == 1, array, 0.0) for name, array in kinds.items()}
    kinds |= {"groups": groups, "rollouts": rollouts, "turns": turns, "written": written}
    made = Case.of(masks, rewards, tokens=rng.integers(3, 5, n), **kinds)
    for sample, positions in made.samples():
        _credit(made, rng, sample, [t for t in positions if made.written[t]])
    made.staleness[:] = np.where(flat == 1, rng.integers(-1, 5, n), -1)
    coarse, fine = rng.integers(0, 2, len(rewards)).astype(float), 100.0 * rng.normal(size=len(rewards))
    made.parts[:] = np.where(np.isnan(made.rewards)[:, None], np.nan, np.stack([coarse, fine], 1))
    made.chosen[:] = flat * (rng.random(n) < 0.2)
    return made


@cache
def cases() -> tuple[Case, ...]:
    """Return 100 cases at night, 40 in `make test`."""
    return tuple(case(seed) for seed in range(examples(1)))


def _sample(rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Make a mask and turns: no turn, or a few turns of one to five model tokens, with tool tokens between them."""
    kind = rng.random()
    if kind < 0.2:
        return ([], []) if kind < 0.1 else ([1], [1])
    mask: list[int] = []
    turns: list[int] = []
    for turn in range(1, rng.integers(2, 5)):
        spoken, shown = rng.integers(1, 6), rng.integers(0 if turn == 3 else 1, 3)
        mask += [1] * spoken + [0] * shown
        turns += [turn] * (spoken + shown)
    return mask, turns


def _credit(made: Case, rng: np.random.Generator, sample: int, written: list[int]) -> None:
    """Put rewards on the turns' last model tokens. The last turn gets the rest of the sample's reward."""
    last = [t for i, t in enumerate(written) if made.turns[t] not in made.turns[written[i + 1 :]]]
    for t in last[:-1]:
        made.step_rewards[t] = rng.choice([0.0, 1.0, -0.5])
    if np.isnan(made.rewards[sample]):
        made.step_rewards[last] = 0.0
    elif last:
        made.step_rewards[last[-1]] = made.rewards[sample] - made.step_rewards[last[:-1]].sum()
