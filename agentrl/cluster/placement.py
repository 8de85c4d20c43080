"""A run's parts on Ray: engines, rollouts and trainer start in parallel and stop together."""

import os
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby, islice
from typing import Any

import ray
from anyio import to_thread
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.capacity import bundles, engines, fitting, more_engines, over_machines
from agentrl.cluster.engines import EngineActor, fetch, start_engine, stop_engines
from agentrl.cluster.rollouts import RayRollouts, rollout_actor
from agentrl.cluster.runtime import library_output, ray_runtime, value, values, worker_environment
from agentrl.cluster.trainers import RayTrainer, TrainActor, local_ranks, rank_order
from agentrl.config import RunSettings
from agentrl.errors import SettingsError
from agentrl.run.demonstrations import without_engines
from agentrl.run.protocols import Components, Found, Progress, WeightTransfer, counted, within
from agentrl.run.training import Learners, RankInfo
from agentrl.run.weights import BroadcastWeights, DiskWeights, SharedWeights, eval_weights
from agentrl.runfolder import RunFolder
from agentrl.tasks import together


@asynccontextmanager
async def start(
    settings: RunSettings, folder: RunFolder, resume: Found | None, progress: Progress
) -> AsyncIterator[Components]:
    """Start all parts, from the checkpoint `resume` if given; stop them at the end, also after an error."""
    async with AsyncExitStack() as stack:
        stack.enter_context(library_output(folder.logs / "ray.log"))
        joined, began = settings.cluster.ray_address, time.monotonic()
        progress.begin(f"joining Ray at {joined}" if joined else "starting Ray")
        cpus = settings.cluster.rollout_workers + sum(int(bundle["CPU"]) for bundle in bundles(settings))
        stack.enter_context(ray_runtime(settings.cluster, cpus=cpus))
        progress.ready("Ray is up", began)
        as_asked = joined and not settings.cluster.allow_fewer_devices
        settings = over_machines(settings, [node["Resources"] for node in ray.nodes() if node["Alive"]])
        fits = settings if as_asked else fitting(settings, ray.cluster_resources())
        if fits is not settings:
            less, asked = fits.cluster, settings.cluster
            trainers = counted(less.world_size, "trainer process", "trainer processes")
            gpus = f"--rollout-num-gpus {less.rollout_num_gpus} instead of {asked.rollout_num_gpus}"
            progress.note(f"--allow-fewer-devices: {trainers} instead of {asked.world_size}, {gpus}")
        yield await _Starting(fits, folder, resume, progress, engines(fits), more_engines(fits)).on(stack)


_Addresses = tuple[list[str], dict[str, int | str]]  # of the run's engines; of `--engine-groups`, by name


@dataclass(frozen=True)
class _Starting:
    """State during the start of the parts."""

    settings: RunSettings
    folder: RunFolder
    resume: Found | None
    progress: Progress
    engines: int
    more: int
    here: str = field(default_factory=os.getcwd)

    async def on(self, stack: AsyncExitStack) -> Components:
        """Start all parts; `stack` stops them."""
        s, timeout = self.settings, self.settings.cluster.start_timeout
        total = self.engines + self.more
        names = counted(total, "engine"), counted(_trainers(s), "trainer process", "trainer processes")
        loading = f"loading the model into {names[0]}, " if total else ""
        self.progress.begin(f"{loading}starting {names[1]}")
        worker = rollout_actor(s, self.here, self.folder) if s.generates else None
        if worker is not None:
            stack.callback(ray.kill, worker)  # a joined cluster would keep the actor after the run
        placement = await stack.enter_async_context(_placed(s))
        trainer, ranks = self._trainer(placement)
        machines = [self._engine(placement, i) for i in range(total)]
        actors = [actor for each in machines for actor in each]
        stack.push_async_callback(stop_engines, actors)
        urls, groups = list(s.engine.rollout_external_engine_addrs), dict(s.engine.engine_groups)
        pids, began = list[int](), time.monotonic()

        async def check(worker: Any) -> None:
            with within(timeout, "importing your code in the rollouts' process"):
                await value(worker.check.remote())

        async def start_trainer() -> None:
            with within(timeout, "starting the trainer"):
                await trainer.start(ranks)
            self.progress.ready(f"{names[1]} ready", began)

        async def start_engines() -> None:
            with within(timeout, "starting the inference engines"):
                gpus = [await self._gpus(trainer, i) for i in range(total)]
                starting = [partial(start_engine, machines[i], i, self.folder.logs, gpus[i]) for i in range(total)]
                found = await together(*starting)
            started = [url for url, _ in found]
            urls[:], pids[:] = started[: self.engines], [pid for _, each in found for pid in each]
            left = iter(started[self.engines :])
            for name, number in s.engine.started_groups.items():
                groups[name] = ",".join(islice(left, number))
            self.progress.ready(f"{names[0]} ready", began)

        checks = [] if worker is None else [partial(check, worker)]
        apart = [start_engines] if actors and not s.cluster.colocate else []
        await together(*checks, start_trainer, *apart)
        if self.resume is not None:
            since = time.monotonic()
            self.progress.begin(f"loading the checkpoint of rollout {self.resume.step + 1}")
            with within(s.cluster.train_timeout, "loading the checkpoint"):
                await trainer.load(self.resume.path)
            self.progress.ready("checkpoint loaded", since)
        if actors and s.cluster.colocate:
            if s.cluster.offload_train:
                with within(s.cluster.train_timeout, "taking the trainer off the devices"):
                    await trainer.offload()
            await start_engines()
        near = len(set(_nodes(placement))) == 1
        parts, generating = await self._rollouts(stack, trainer, actors, (urls, groups), worker, near)
        with within(timeout, "asking for process ids"):
            trainers = await values([process.pid.remote() for process in trainer.processes])
        self.folder.write_processes({"driver": [os.getpid()], "trainer": trainers, "engine": pids, **generating})
        return parts

    async def _rollouts(
        self, stack: AsyncExitStack, trainer: RayTrainer, actors: list[Any], urls: _Addresses, worker: Any, near: bool
    ) -> tuple[Components, dict[str, list[int]]]:
        """Return the parts, and the process that generates, if any. `near`: all bundles are on one machine."""
        self.progress.phase("opening the data")
        s, step = self.settings, None if self.resume is None else self.resume.step
        if worker is None:
            return Components(stack.enter_context(without_engines(s, self.folder, step)), trainer, None), {}
        with within(s.cluster.start_timeout, "starting the rollout worker"):
            rollouts = await stack.enter_async_context(RayRollouts.open(worker, *urls, step))
        copies, root = s.cluster.update_weight_local_checkpoint_dir, s.cluster.update_weight_disk_dir
        given_to = (self.folder, trainer, rollouts.engines, partial(fetch, actors), copies)
        weights: WeightTransfer = DiskWeights(*given_to, root=root)
        if s.cluster.update_weight_mode == "ipc":
            weights = SharedWeights(s.cluster, trainer, rollouts.engines)
        elif s.cluster.update_weight_mode == "broadcast":
            builtin, shared = s.engine.engine == "embedded", s.cluster.colocate
            backend = "shared_memory" if shared and near and builtin else "gloo"
            if s.cluster.device == "cuda" and not shared and not builtin:  # NCCL needs one GPU per process
                backend = "nccl"
            broadcast = BroadcastWeights.open(s.cluster, trainer, rollouts.engines, backend)
            weights = await stack.enter_async_context(broadcast)
        evaluates = eval_weights(s, self.folder, trainer, lambda: rollouts.eval_engines)
        return Components(rollouts, trainer, weights, evaluates), {"rollout_worker": [rollouts.pid]}

    def _trainer(self, placement: PlacementGroup) -> tuple[RayTrainer, list[RankInfo]]:
        actor, own = self.settings.cluster.world_size, self.settings.cluster.critic_world_size
        actors, ranks = self._learners(placement, range(actor), "actor" if own else "all")
        critics, places = self._learners(placement, range(actor, actor + own), "critic")
        return RayTrainer(actors, critics), [*ranks, *places]

    def _learners(
        self, placement: PlacementGroup, bundles: range, learners: Learners
    ) -> tuple[list[Any], list[RankInfo]]:
        """Start processes that train together; return them and their rank infos in rank order."""
        s, nodes = self.settings, [_nodes(placement)[bundle] for bundle in bundles]
        order = rank_order(nodes)
        environment = worker_environment(s)
        environment |= {"OMP_NUM_THREADS": str(s.train.train_threads)} if s.train.train_threads else {}
        environment |= s.cluster.train_env_vars
        kind: Any = TrainActor
        gpus, given = int(s.cluster.device == "cuda"), (s, self.here, self.folder.logs, learners)
        options = [_options(placement, bundles[at], gpus, environment) for at in order]
        actors = [kind.options(**chosen).remote(*given) for chosen in options]
        local = local_ranks([nodes[at] for at in order])
        return actors, [RankInfo(rank, len(order), own) for rank, own in enumerate(local)]

    def _engine(self, placement: PlacementGroup, index: int) -> list[Any]:
        """Start the actors of an engine, one on each of its machines."""
        cluster = self.settings.cluster
        each, gpus = cluster.rollout_num_gpus_per_engine, 0
        if cluster.colocate:
            nodes = _nodes(placement)
            ranks = rank_order(nodes[: cluster.world_size])[index * each : (index + 1) * each]
            shares = [list(share) for _, share in groupby(ranks, key=lambda rank: nodes[rank])]
            if len({len(share) for share in shares}) > 1:
                said = f"--colocate: engine {index} would lie unevenly on several machines, with trainer processes {shares}"
                remedy = f"choose --actor-num-gpus-per-node so that --rollout-num-gpus-per-engine {each} divides it"
                raise SettingsError(f"{said}; {remedy}")
            places = [share[0] for share in shares]  # the engine uses the GPUs of the trainer processes there
        else:
            first = _trainers(self.settings) + index * cluster.nodes_per_engine
            places = [*range(first, first + cluster.nodes_per_engine)]
            gpus = each // len(places) if cluster.device == "cuda" else 0
        kind: Any = EngineActor
        environment = worker_environment(self.settings)
        made = [kind.options(**_options(placement, place, gpus, environment)) for place in places]
        return [actor.remote(self.settings, self.here) for actor in made]

    async def _gpus(self, trainer: RayTrainer, index: int) -> list[str] | None:
        """Return the GPUs that an engine shares with trainer processes; None if it shares none."""
        cluster = self.settings.cluster
        if not cluster.colocate or cluster.device != "cuda":
            return None
        each = cluster.rollout_num_gpus_per_engine
        found = await values([actor.gpus.remote() for actor in trainer.actors[index * each : (index + 1) * each]])
        return [gpu for gpus in found for gpu in gpus]


def _trainers(settings: RunSettings) -> int:
    """Return the number of processes that train, including a separate critic's."""
    return settings.cluster.world_size + settings.cluster.critic_world_size


def _options(placement: PlacementGroup, bundle: int, gpus: int, environment: dict[str, str]) -> dict[str, Any]:
    strategy = PlacementGroupSchedulingStrategy(placement, placement_group_bundle_index=bundle)
    needs = {"num_cpus": 1, "num_gpus": gpus, "runtime_env": {"env_vars": environment}}
    return {**needs, "scheduling_strategy": strategy}


@asynccontextmanager
async def _placed(settings: RunSettings) -> AsyncIterator[PlacementGroup]:
    """Reserve the bundles of the trainer's ranks, of a separate critic's ranks, and of the engines."""
    cluster, wanted = settings.cluster, bundles(settings)
    placement = placement_group(wanted, strategy="PACK")
    try:
        seconds = cluster.start_timeout if cluster.ray_address else 60
        if not await to_thread.run_sync(placement.wait, seconds, abandon_on_cancel=True):
            said = f"the cluster has no room for {len(wanted)} processes ({wanted}); it has {ray.available_resources()}"
            lower = "--actor-num-gpus-per-node, --critic-num-gpus-per-node or --rollout-num-gpus"
            raise SettingsError(f"{said}; lower {lower}, or join a larger cluster")
        yield placement
    finally:
        remove_placement_group(placement)


def _nodes(placement: PlacementGroup) -> list[str]:
    nodes: dict[int, str] = placement_group_table(placement)["bundles_to_node_id"]
    return [nodes[bundle] for bundle in sorted(nodes)]
