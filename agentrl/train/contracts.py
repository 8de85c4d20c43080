"""Values that a run and its train backends hand to each other."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

ModelRole = Literal["actor", "ref", "teacher"]
Learners = Literal["all", "actor", "critic"]
"""The learning models of a process: those of the run, or one of two that have processes of their own."""
Device = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a trainer process stands: its rank, the number of processes, and where they meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0


class WeightSpec(NamedTuple):
    """One exported tensor: its Hugging Face name, the name of its dtype (`bfloat16`, ...) and its full shape."""

    name: str
    dtype: str
    shape: list[int]


@dataclass(frozen=True, slots=True)
class Prepared:
    """What is fixed of a rollout before its first optimizer step.

    Attributes:
        arrays: float32 [R] each, in the batch's flat response layout: `advantages`, with a critic `values` and `returns`
            (what it is to predict), and the log-probs that the loss reads, by their names in `TokenView`.
        metrics: of the advantages, and of the critic before it learns.
    """

    arrays: Mapping[str, NDArray[np.float32]]
    metrics: Mapping[str, float]
