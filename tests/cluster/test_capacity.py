"""Capacity of the cluster: a run's need is counted. Too much is refused with the numbers, or reduced to fit."""

import pytest

from agentrl.cluster.capacity import bundles, fitting, over_machines
from agentrl.config import RunSettings
from agentrl.errors import SettingsError


def build(line: str) -> RunSettings:
    return RunSettings.from_cli(f"--device cuda --hf-checkpoint none {line}".split())


def counts(settings: RunSettings) -> tuple[int, int, int]:
    c = settings.cluster
    return c.world_size, c.critic_world_size, c.rollout_num_gpus


def test_engines_have_bundles_of_their_own_unless_they_take_turns() -> None:
    apart = build("--actor-num-gpus-per-node 2 --rollout-num-gpus 4 --rollout-num-gpus-per-engine 2 --engine sglang")
    assert bundles(apart) == [{"CPU": 1, "GPU": 1}] * 2 + [{"CPU": 1, "GPU": 2}] * 2
    assert bundles(build("--colocate --actor-num-gpus-per-node 2")) == [{"CPU": 2, "GPU": 1}] * 2
    assert bundles(build("--rollout-external-engine-addrs x:1")) == [{"CPU": 1, "GPU": 1}]
    assert bundles(build("--device cpu")) == [{"CPU": 1}] * 2


def test_an_engine_that_is_larger_than_a_machine_has_a_bundle_on_each_of_several() -> None:
    asked = build("--rollout-num-gpus 32 --rollout-num-gpus-per-engine 16 --engine sglang")
    spread = over_machines(asked, [{"CPU": 4.0}, {"CPU": 64.0, "GPU": 8.0}])
    assert bundles(spread) == [{"CPU": 1, "GPU": 1}] + [{"CPU": 1, "GPU": 8}] * 4
    assert fitting(spread, {"GPU": 33.0}) is spread
    assert over_machines(asked, [{"GPU": 16.0}]) is asked
    with pytest.raises(SettingsError, match="machines of 6 GPUs do not share it evenly"):
        over_machines(asked, [{"GPU": 6.0}])
    with pytest.raises(SettingsError, match="3 machines of --num-gpus-per-node 6 do not share it evenly"):
        build("--rollout-num-gpus 16 --rollout-num-gpus-per-engine 16 --engine sglang --num-gpus-per-node 6")


def test_too_few_gpus_are_refused_with_the_numbers() -> None:
    asked = build("--actor-num-gpus-per-node 4 --rollout-num-gpus 4")
    assert fitting(asked, {"GPU": 8.0, "CPU": 1.0}) is asked
    with pytest.raises(
        SettingsError,
        match=r"4 trainer processes and 4 engines need 8 GPUs, and the cluster has 6; lower .*--allow-fewer",
    ):
        fitting(asked, {"GPU": 6.0})
    shared = build("--colocate --actor-num-gpus-per-node 4")
    with pytest.raises(SettingsError, match="4 engines on the same devices need 4 GPUs, and the cluster has 0"):
        fitting(shared, {"CPU": 64.0})
    with pytest.raises(SettingsError, match="1 trainer process and 1 engine need 2 CPUs, and the cluster has 1"):
        fitting(build("--device cpu"), {"CPU": 1.0, "GPU": 8.0})


@pytest.mark.parametrize(
    ("line", "gpus", "left"),
    [
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4", 6, (3, 0, 3)),
        ("--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --tensor-model-parallel-size 2", 6, (2, 0, 4)),
        ("--actor-num-nodes 2 --actor-num-gpus-per-node 8 --rollout-num-gpus 16", 24, (12, 0, 12)),
        ("--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 2 --engine sglang", 5, (5, 0, 4)),
        (
            "--actor-num-gpus-per-node 4 --rollout-num-gpus 4 --train-backend fsdp --data-parallel-replicate-degree 2",
            6,
            (2, 0, 4),
        ),
        (
            "--actor-num-gpus-per-node 4 --critic-num-nodes 1 --rollout-num-gpus 4 --advantage-estimator ppo",
            8,
            (2, 4, 2),
        ),
    ],
)
def test_a_run_is_reduced_to_what_is_there_if_it_is_asked_for(line: str, gpus: int, left: tuple[int, int, int]) -> None:
    assert counts(fitting(build(f"--allow-fewer-devices {line}"), {"GPU": float(gpus)})) == left


def test_what_cannot_be_reduced_is_refused() -> None:
    with pytest.raises(SettingsError, match="need 4 GPUs, and the cluster has 2"):
        fitting(
            build(
                "--allow-fewer-devices --actor-num-gpus-per-node 2 --tensor-model-parallel-size 2 --rollout-num-gpus 2"
            ),
            {"GPU": 2},
        )
