"""Values that a run and its train backends hand to each other."""

from dataclasses import dataclass
from typing import Literal

ModelRole = Literal["actor", "ref", "teacher"]
Learners = Literal["all", "actor", "critic"]
"""The learning models of a process: those of the run, or one of two that have processes of their own."""
Device = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The place of a trainer process: its rank, the number of processes, and the address where they meet."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
