"""Check that a cluster has the devices that a run asks for, and propose a smaller run that fits.

1. A bundle reserves the resources of one trainer process, or of one engine on one machine. With `--colocate` engines
   have no bundles: they run beside trainer processes, and both take turns on the same devices.
2. The unit is GPUs if models run on GPUs, else CPU slots, one per process."""

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import product

from agentrl.config import RunSettings
from agentrl.errors import SettingsError
from agentrl.run.protocols import counted


def engines(settings: RunSettings) -> int:
    starts = settings.generates and settings.engine.engine != "external"
    return settings.cluster.num_engines if starts else 0


def more_engines(settings: RunSettings) -> int:
    """Return the number of engines that the run starts for `--engine-groups`."""
    return sum(settings.engine.started_groups.values()) if settings.generates else 0


def over_machines(settings: RunSettings, nodes: Sequence[Mapping[str, float]]) -> RunSettings:
    """Return the settings. If an engine needs more GPUs than any node has, `num_gpus_per_node` is set to the largest
    node's. Raises SettingsError: an engine cannot be divided evenly among such nodes."""
    each = settings.cluster.rollout_num_gpus_per_engine
    most = int(max((node.get("GPU", 0.0) for node in nodes), default=0.0))
    if settings.cluster.num_gpus_per_node or settings.cluster.device != "cuda" or not 0 < most < each:
        return settings
    if each % most:
        said = f"--rollout-num-gpus-per-engine {each}: machines of {most} GPUs do not share it evenly"
        raise SettingsError(f"{said}; use a multiple of {most}, or set --num-gpus-per-node")
    return settings.replace(num_gpus_per_node=most)


def bundles(settings: RunSettings) -> list[dict[str, float]]:
    """Return the bundles of the actor's ranks, of a separate critic's ranks, and of the engines."""
    cluster, cuda = settings.cluster, settings.cluster.device == "cuda"
    share = cluster.rollout_num_gpus_per_engine // cluster.nodes_per_engine
    gpu, several = ({"GPU": float(n)} if cuda else {} for n in (1, share))
    found = [{"CPU": 1.0 + cluster.colocate, **gpu} for _ in range(cluster.world_size)]
    found += [{"CPU": 1.0, **gpu} for _ in range(cluster.critic_world_size)]
    wanted = more_engines(settings) + (0 if cluster.colocate else engines(settings))
    return found + [{"CPU": 1.0, **several} for _ in range(wanted * cluster.nodes_per_engine)]


def fitting(settings: RunSettings, has: Mapping[str, float]) -> RunSettings:
    """Return the settings if the run fits into the resources that the cluster `has`, by Ray's names. Otherwise, with
    `--allow-fewer-devices`, return those of the largest run that fits: with fewer model replicas and engines, but as
    many as possible of both. Raises SettingsError: the cluster is too small."""
    cluster, kind = settings.cluster, "GPU" if settings.cluster.device == "cuda" else "CPU"
    there, trainers, devices = has.get(kind, 0.0), cluster.world_size, cluster.rollout_num_gpus
    if sum(bundle.get(kind, 0.0) for bundle in bundles(settings)) <= there:
        return settings
    part, each = settings.train.model_parallel_size, cluster.rollout_num_gpus_per_engine
    forms = product(range(part, trainers + 1, part), range(each, devices + 1, each))
    fits = [form for form in forms if cluster.allow_fewer_devices and _needs(settings, kind, *form) <= there]
    for fewer, less in sorted(fits, key=lambda form: (-min(form[0] / trainers, form[1] / devices), -sum(form))):
        per_node = math.gcd(fewer, cluster.actor_num_gpus_per_node)
        shape = {"actor_num_nodes": fewer // per_node, "actor_num_gpus_per_node": per_node, "rollout_num_gpus": less}
        if cluster.critic_world_size:
            shape["critic_num_gpus_per_node"] = cluster.critic_num_gpus_per_node or cluster.actor_num_gpus_per_node
        with suppress(SettingsError):  # the model's layout does not divide so many processes
            return settings.replace(**shape)
    processes = counted(trainers + cluster.critic_world_size, "trainer process", "trainer processes")
    together = " on the same devices" if cluster.colocate else ""
    raise SettingsError(
        f"{processes} and {counted(engines(settings), 'engine')}{together} need "
        f"{_needs(settings, kind, trainers, devices):g} {kind}s, and the cluster has {there:g}; lower "
        "--actor-num-gpus-per-node, --critic-num-gpus-per-node or --rollout-num-gpus, join a larger cluster (--ray-address), "
        "or have fewer replicas and engines with --allow-fewer-devices"
    )


def _needs(settings: RunSettings, kind: str, trainers: int, devices: int) -> float:
    """Return the GPUs or CPU slots for `trainers` processes of the actor and `devices` of the engines."""
    cluster, each = settings.cluster, settings.cluster.rollout_num_gpus_per_engine
    if cluster.colocate and devices > trainers:
        return math.inf
    own = 0 if cluster.colocate or not engines(settings) else devices
    own += more_engines(settings) * each
    own = own if kind == "GPU" else own // each * cluster.nodes_per_engine
    return trainers * (1 + (cluster.colocate and kind == "CPU")) + cluster.critic_world_size + own
