"""Pipeline stages of unequal size: the numbers of one process, and a checkpoint for the same stages only."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.errors import CheckpointError, TrainError
from agentrl.run.training import free_port
from agentrl.train.contracts import RankInfo
from agentrl.train.settings import TrainSettings
from tests.support.distributed import run_ranks
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import backend, make_batch, settings, timeless

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last", "sizes"),
    [
        (6, 3, None, None, [2, 2, 2]),
        (5, 2, None, 2, [3, 2]),
        (5, 2, 1, None, [1, 4]),
        (7, 3, 1, 2, [1, 4, 2]),
        (94, 4, None, 22, [24, 24, 24, 22]),
        (61, 16, None, 1, [4] * 15 + [1]),
        (5, 2, 2, 3, [2, 3]),
    ],
)
def test_stages_share_what_the_first_and_the_last_leave(
    layers: int, stages: int, first: int | None, last: int | None, sizes: list[int]
) -> None:
    train = TrainSettings(
        pipeline_model_parallel_size=stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    assert train.stage_sizes(layers) == sizes


@pytest.mark.parametrize(
    ("layers", "stages", "first", "last"),
    [(5, 2, None, None), (5, 2, 2, 2), (5, 3, None, 2), (4, 3, 1, 3), (4, 2, 5, None)],
)
def test_stages_that_do_not_add_up_are_refused(layers: int, stages: int, first: int | None, last: int | None) -> None:
    train = TrainSettings(
        pipeline_model_parallel_size=stages,
        decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last,
    )
    with pytest.raises(
        TrainError, match=f"--pipeline-model-parallel-size {stages} does not divide the model's {layers}"
    ):
        train.stage_sizes(layers)


def numbers(made: Any) -> dict[str, Any]:
    metrics = [timeless(made.train(make_batch(), step)) for step in range(2)]
    weights = {name: tensor.float().cpu().numpy().copy() for name, tensor in made.export_weights()}
    return {"metrics": metrics, "log_probs": made.log_probs(make_batch()), "weights": weights}


def on_stages(rank: int, folder: str, port: int, second: int, world: int, changes: dict[str, Any]) -> dict[str, Any]:
    torch.set_num_threads(1)
    train = settings(Path(folder) / "m", pipeline_model_parallel_size=world, use_distributed_optimizer=True, **changes)
    where = RankInfo(rank, world, rank, "127.0.0.1", port)
    with backend(train, where=where) as made:
        found = numbers(made)
        made.save(f"{folder}/saved", 2)
        assert made.load(f"{folder}/saved") == 2
        found["next"] = timeless(made.train(make_batch(seed=1), 2))
    even = train.model_copy(
        update={"decoder_first_pipeline_num_layers": 2, "decoder_last_pipeline_num_layers": None if world > 2 else 3}
    )
    if world == 2:
        where = dataclasses.replace(where, master_port=second)
        with (
            backend(even, where=where) as made,
            pytest.raises(CheckpointError, match="'decoder_last_pipeline_num_layers': 2"),
        ):
            made.load(f"{folder}/saved")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layers", "world", "changes"),
    [
        (5, 2, {"decoder_last_pipeline_num_layers": 2}),
        pytest.param(
            7,
            3,
            {"decoder_first_pipeline_num_layers": 1, "decoder_last_pipeline_num_layers": 2},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_unequal_stages_are_one_process(tmp_path: Path, layers: int, world: int, changes: dict[str, Any]) -> None:
    make_tiny_model(tmp_path / "m", "qwen3", layers=layers)
    with backend(settings(tmp_path / "m", use_distributed_optimizer=True)) as made:
        want = numbers(made) | {"next": timeless(made.train(make_batch(seed=1), 2))}
    found = run_ranks(on_stages, world, str(tmp_path), free_port(), free_port(), world, changes)
    got = found[0]
    np.testing.assert_allclose(got["log_probs"], want["log_probs"], rtol=0, atol=1e-5)
    for ours, theirs in zip([*got["metrics"], got["next"]], [*want["metrics"], want["next"]], strict=True):
        for name in ("loss", "grad_norm"):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name
    assert got["weights"].keys() == want["weights"].keys()
    for name, tensor in want["weights"].items():
        np.testing.assert_allclose(got["weights"][name], tensor, rtol=0, atol=2e-5, err_msg=name)
