"""Values that a run and its train backends exchange."""

from dataclasses import dataclass
from typing import Literal

ModelRole = Literal["actor", "ref", "teacher"]
Learners = Literal["all", "actor", "critic"]
"""The models that a process trains: all of the run, or one of the two if actor and critic have separate processes."""
Device = Literal["auto", "cuda", "cpu"]


@dataclass(frozen=True, slots=True)
class RankInfo:
    """The place of a trainer process: its rank, the number of processes, and the address of their rendezvous."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 0
