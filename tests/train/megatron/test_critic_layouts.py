"""PPO with its critic in every layout of two and four processes, against one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from agentrl.train.contracts import RankInfo
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron import test_layouts, test_layouts_of_four
from tests.train.megatron.helpers import PPO, backend
from tests.train.megatron.test_layouts import actor_and_critic, check_critics, with_critic

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

TWO = {name: changes for name, changes in test_layouts.LAYOUTS.items() if "bf16" not in name}
FOUR = test_layouts_of_four.LAYOUTS
LAYOUTS = {2: TWO, 4: {name: changes for name, changes in FOUR.items() if name != "pp4"}}


def train(rank: int, world: int, root: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{root}/of{world}", rank=rank, world_size=world)
    out = {}
    for name, changes in LAYOUTS[world].items():
        with backend(with_critic(root, **changes), PPO, RankInfo(rank, world, rank)) as made:
            out[name] = actor_and_critic(made)
    return out


@pytest.fixture(scope="module", params=["tied", "untied"])
def results(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    root = tmp_path_factory.mktemp("critics")
    make_tiny_model(root / "tied", "qwen2", tie_word_embeddings=request.param == "tied")
    with backend(with_critic(root), PPO) as made:
        found = {"one": actor_and_critic(made)}
    for world in LAYOUTS:
        found |= run_ranks(train, world, world, str(root))[0]
    return found


@pytest.mark.parametrize("name", [name for layouts in LAYOUTS.values() for name in layouts])
def test_same_as_one_process(results: dict[str, Any], name: str) -> None:
    check_critics(results["one"], results[name])
