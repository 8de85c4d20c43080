"""Joining a torch.distributed group beside the default one, the way trainers and SGLang servers share weights.

Both sides call `join_group` with the same address, world size and name; it returns when all ranks are there.
"""

from datetime import timedelta
from typing import Any, cast


def join_group(*, backend: str, address: str, world_size: int, rank: int, name: str, timeout: float) -> Any:
    """A new process group over `tcp://host:port`; `timeout` in seconds. Independent of the default group.

    torch has no public call for a second group with its own store: this follows the steps of `init_process_group`
    (as SGLang, vLLM and OpenRLHF do), which torch 2.9 to 2.13 share.
    """
    from torch.distributed import distributed_c10d as c10d
    from torch.distributed.rendezvous import rendezvous

    limit = timedelta(seconds=timeout)
    store, rank, world_size = next(rendezvous(address, rank, world_size, timeout=limit))
    store.set_timeout(limit)
    group, _ = c10d._new_process_group_helper(
        world_size,
        rank,
        [],
        c10d.Backend(backend),
        c10d.PrefixStore(name, store),
        group_name=cast(Any, name),
        timeout=limit,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(world_size)}
    return group
