from collections.abc import Iterator

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore


@pytest.fixture
def one_rank() -> Iterator[dist.ProcessGroup]:
    """Start a process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()
