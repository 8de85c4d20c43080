"""Generation in one process: engines, chat, graders and environments, plus data source, ledger and coordinator.

1. `Loaded` opens a rollout worker. `RolloutResources` has a worker here, or several in other processes, and evaluates.
   `agentrl eval` needs no more.
2. `LedgerRollouts` adds coordinator, data source and ledger, and makes the train batch. `agentrl.cluster` runs both in
   one actor, `agentrl.run.local` beside the trainer. Weight updates go to the engine pool; `updated` reports them."""

import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from anyio import to_thread

from agentrl.buffer.ledger import Ledger
from agentrl.buffer.local import place_ledger
from agentrl.buffer.queue import GroupQueue
from agentrl.buffer.store import Kind, TrajectoryStore
from agentrl.clock import Watchdog
from agentrl.config import RunSettings
from agentrl.config.checks import UNTRAINABLE
from agentrl.config.model_info import read_model_info
from agentrl.data.user_source import load_source
from agentrl.dumps import save_rollout
from agentrl.engine.hosted import HostedModel
from agentrl.engine.pool import EnginePool
from agentrl.engine.transport import HttpTransport
from agentrl.envs import EnvClasses
from agentrl.errors import SettingsError
from agentrl.gateway.server import Gateway
from agentrl.groups import Group, group_id
from agentrl.modelfolder import ImageTokens
from agentrl.rm_hub import GraderRunner
from agentrl.rollout.context import EngineGroup, RolloutContext
from agentrl.rollout.coordinator import Rollout, RolloutCoordinator
from agentrl.rollout.environment import set_up
from agentrl.rollout.evaluate import Evaluated, counted, evaluate
from agentrl.rollout.filters import named_filter
from agentrl.rollout.functions import RewardFunction
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.hosted import NoChat
from agentrl.rollout.rewards import UNGRADED, Grader
from agentrl.rollout.stats import RolloutStats
from agentrl.rollout.teacher import probe_text, same_vocabulary
from agentrl.rollout.user_tasks import UserTasks
from agentrl.rollout.worker import Player, RolloutWorker
from agentrl.run.evalsets import EvalSet, eval_sets
from agentrl.run.metrics import rollout_metrics, staleness_metrics, truncation_metrics
from agentrl.run.preflight import Plugins, load_chat, teacher_pool, ungraded
from agentrl.run.protocols import EVALUATES, Batch, Rollouts
from agentrl.run.resuming import write_evaluation
from agentrl.runfolder import RunFolder
from agentrl.tools.threads import run_in_daemon_thread
from agentrl.train.batch import TrainBatch, check_samples
from agentrl.train.hooks import NO_HOOKS, TrainHooks, hooks_of


@dataclass(frozen=True, slots=True)
class Loaded:
    """The user's code that a process loads: plug-ins for training, and for each evaluation set."""

    settings: RunSettings
    plugins: Plugins
    sets: Sequence[tuple[EvalSet, Plugins]]

    @classmethod
    def of(cls, settings: RunSettings) -> "Loaded":
        """Import everything that the settings name."""
        kinds = EnvClasses()
        plugins = Plugins.load(settings, kinds)
        return cls(settings, plugins, [(held, Plugins.load(held.settings, kinds)) for held in eval_sets(settings)])

    @asynccontextmanager
    async def engines(
        self, urls: Sequence[str], transport: HttpTransport | None = None, *, follows: bool = False
    ) -> AsyncIterator[EnginePool | HostedModel]:
        """Connect to the engines. `follows`: another process updates and repairs them."""
        if self.settings.hosted:
            async with HostedModel(self.settings.engine, transport) as hosted:
                await hosted.check()
                yield hosted
            return
        every = [self.settings.rollout, *(held.settings.rollout for held, _ in self.sets)]
        told = [t for s in every for t in (s.rollout_temperature, s.eval_temperature) if t is not None]
        model = read_model_info(self.settings.train.hf_checkpoint)
        size, engine = model.vocab_size if model else None, self.settings.engine
        async with EnginePool(
            urls, engine, vocab_size=size, transport=transport, temperatures=told, follows=follows
        ) as pool:
            await pool.check()
            if self.settings.data.image_key is not None and not follows:
                await pool.check_sees_images()
            yield pool

    @asynccontextmanager
    async def worker(self, pool: EnginePool | HostedModel) -> AsyncIterator[RolloutWorker]:
        """Load the chat template, start graders and set up environments; yield a worker of this process."""
        settings, plugins, sets = self.settings, self.plugins, self.sets
        rollout, args, teacher, gateway = settings.rollout, settings.args, None, None
        chat = NoChat.as_chat() if settings.hosted else load_chat(settings)
        async with AsyncExitStack() as stack:
            watchdog = stack.enter_context(Watchdog.watching(rollout.event_loop_block_warning))
            user_tasks = stack.enter_context(UserTasks.followed())
            most = await _context_length(settings, pool) if isinstance(pool, EnginePool) else sys.maxsize
            length = min(rollout.rollout_max_context_len or most, most)
            if isinstance(pool, EnginePool):
                if settings.algorithm.opd_type == "self":
                    teacher = pool
                elif (teacher := teacher_pool(settings)) is not None:
                    await stack.enter_async_context(teacher)
                await stack.enter_async_context(plugins.hooks.opened(pool))
                if plugins.agents or any(own.agents for _, own in sets):
                    gateway = Gateway(chat, pool, context_length=length)
                    await stack.enter_async_context(gateway.serving())
            own, follows = (plugins.environments, teacher), isinstance(pool, EnginePool) and pool.follows
            context = RolloutContext(rollout, args, chat, pool, length, *own, gateway, hooks=plugins.hooks)
            context = replace(context, engine_groups=await _groups(settings, context, stack, follows))
            named = {s.rollout.rm_type for s in (settings, *(held.settings for held, _ in sets))}
            graders = await stack.enter_async_context(GraderRunner(settings.rm_hub, preload=[*filter(None, named)]))
            reward = RewardFunction.load(UNGRADED, group=False) if ungraded(settings, plugins) else plugins.reward
            grader = Grader(rollout, args, reward, graders)
            every = (plugins, *(own for _, own in sets))
            entries = [entry for own in every for entry in (own.environments or {}).values()]
            await stack.enter_async_context(set_up(entries, settings.cluster.start_timeout))
            for generate in {id(p.generate.owner): p.generate for p in every if p.generate}.values():
                await stack.enter_async_context(generate.opened(args, settings.cluster.start_timeout))
            player = GroupPlayer(context, grader, plugins.generate)
            players = [_player_of(held, own, player, most) for held, own in sets]

            def figures() -> dict[str, float]:
                return pool.figures() | watchdog.take() | user_tasks.take()

            yield RolloutWorker(player, plugins.group_filter, players, figures, _check_of(settings))


OpenWorkers = Callable[[RunSettings, Sequence[str], EnginePool], AbstractAsyncContextManager[Player]]
"""Starts several rollout workers that use these engines; `agentrl.cluster.workers` has an implementation."""


@dataclass(frozen=True, slots=True)
class RolloutResources:
    """The engines, the workers and the store of trajectories; made by `open`."""

    settings: RunSettings
    folder: RunFolder
    pool: EnginePool | HostedModel
    player: Player
    plugins: Plugins
    store: TrajectoryStore
    sets: Sequence[tuple[EvalSet, Evaluated]]

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: RunSettings,
        folder: RunFolder,
        urls: Sequence[str],
        transport: HttpTransport | None = None,
        workers: OpenWorkers | None = None,
    ) -> "AsyncIterator[RolloutResources]":
        """Connect to the engines and open a worker. `urls`: the engines. `transport`: how requests reach them; default:
        HTTP. `workers`: starts workers in other processes; None: one worker in this process."""
        loaded = Loaded.of(settings)
        async with AsyncExitStack() as stack:
            keep, key = settings.buffer.keep_trajectories, settings.rollout.reward_key
            store = stack.enter_context(TrajectoryStore(folder.trajectories, keep, key))
            if settings.train.hf_checkpoint:
                folder.started_from(settings.train.hf_checkpoint)
            pool = await stack.enter_async_context(loaded.engines(urls, transport))
            opening: AbstractAsyncContextManager[Player] = loaded.worker(pool)
            if workers is not None and isinstance(pool, EnginePool):
                opening = workers(settings, urls, pool)
            player = await stack.enter_async_context(opening)
            sets = [(held, _evaluated(held.name, held.settings, own)) for held, own in loaded.sets]
            yield cls(settings, folder, pool, player, loaded.plugins, store, sets)

    async def evaluate(self, done: int, checkpoint: str | None = None) -> Mapping[str, float]:
        """Evaluate on every set; add trajectories and metrics to the run's folder. `done`: rollouts that trained the
        weights, or the number of an `agentrl eval`. `checkpoint`: their name in the results; default: the run's own."""
        whose = str(checkpoint or (self.folder.checkpoint(done - 1) if done else self.settings.train.hf_checkpoint))
        hooks = self.plugins.hooks
        hooks.begin(done)
        results = [
            (self.settings, counted(_evaluated(name, self.settings, self.plugins), groups))
            for name, groups in (await hooks.evaluate() or {}).items()
        ]
        for number, (held_out, of) in () if results else enumerate(self.sets):
            play = partial(self.player.evaluate, number)
            results.append((held_out.settings, await evaluate(play, of, held_out.groups())))
        metrics: dict[str, float] = {}
        for own, result in results:
            key = own.rollout.eval_reward_key or own.rollout.reward_key
            await to_thread.run_sync(partial(self.store.add, "eval", result.name, done, result.groups, reward_key=key))
            await to_thread.run_sync(write_evaluation, self.folder.path, done, whose, result.name, result.metrics)
            metrics.update({f"eval/{result.name}/{name}": value for name, value in result.metrics.items()})
        unlogged = hooks.log_evaluation({result.name: result.groups for _, result in results}, metrics)
        return {} if unlogged else metrics


def _evaluated(name: str, settings: RunSettings, plugins: Plugins) -> Evaluated:
    return Evaluated(name, settings.rollout, plugins.environments.names if plugins.environments else ())


class LedgerRollouts(Rollouts):
    """Rollouts under a ledger; made by `open`."""

    def __init__(
        self, generation: RolloutResources, queue: GroupQueue, coordinator: RolloutCoordinator, kind: Kind
    ) -> None:
        self.generation, self._queue, self._coordinator, self._kind = generation, queue, coordinator, kind
        self._settings, self._hooks = generation.settings, hooks_of(generation.settings.args)
        environments = generation.plugins.environments
        self._names = environments.names if environments else ()
        self._played = time.monotonic()

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        settings: RunSettings,
        folder: RunFolder,
        urls: Sequence[str],
        resume_step: int | None,
        transport: HttpTransport | None = None,
        *,
        kind: Kind = "train",
        workers: OpenWorkers | None = None,
    ) -> "AsyncIterator[LedgerRollouts]":
        """Open all resources, and reset the ledger to the loaded checkpoint. `resume_step`: the last rollout that the
        checkpoint covers; None without a checkpoint. `kind`: the kind of the trajectories in the run's store.
        `workers`: starts workers in other processes; None: one worker in this process."""
        async with AsyncExitStack() as stack:
            opening = RolloutResources.open(settings, folder, urls, transport, workers)
            generation = await stack.enter_async_context(opening)
            place = place_ledger(folder.ledger, settings.buffer.ledger_dir)
            ledger = stack.enter_context(Ledger(place, keep=settings.buffer.ledger_retention))
            source = load_source(settings.data, settings.args)
            batch = settings.rollout.rollout_batch_size
            queue = GroupQueue(source, ledger, resume_step, generation.store, folder.ledger, batch)
            name = named_filter(chosen) if (chosen := generation.plugins.group_filter) else ""
            carried = ledger.kept(0).tokens
            running = RolloutCoordinator.running(generation.player, queue, settings.rollout, name, carried)
            yield cls(generation, queue, await stack.enter_async_context(running), kind)

    async def next_batch(self, step: int) -> Batch | None:
        groups, metrics, full = await self.play(step)
        if not full:
            return None
        # Other groups are in flight on this event loop, so slow work runs in a thread.
        return await to_thread.run_sync(make_batch, self._settings, groups, metrics, step, self._hooks)

    async def play(self, step: int) -> tuple[list[Group], Mapping[str, float], bool]:
        """Return the groups of step `step` in the data's order, their metrics, and false if the data ended before the batch
        was full. Groups are dumped if the settings ask for it."""
        hooks, began = self.generation.plugins.hooks, time.monotonic()
        hooks.begin(step)
        played = await run_in_daemon_thread(partial(hooks.play, step, self._queue))
        full = len(played or ()) >= self._settings.rollout.rollout_batch_size
        rollout = await self._coordinator.batch(step) if played is None else Rollout(played, RolloutStats(), full)
        groups, stats = rollout.groups, rollout.stats
        stats = stats if stats.seconds else replace(stats, seconds=time.monotonic() - began)
        await to_thread.run_sync(hooks.finished, groups, getattr(self._queue.source, "source", self._queue.source))
        await to_thread.run_sync(self._store, step, groups)
        if groups and (template := self._settings.observability.save_debug_rollout_data):
            await to_thread.run_sync(save_rollout, template, step, groups)
        metrics = await to_thread.run_sync(rollout_metrics, groups, stats, self._settings.rollout, self._names)
        metrics |= await to_thread.run_sync(self._queue.figures)
        metrics |= await self.generation.player.figures()
        before, self._played = self._played, time.monotonic()
        in_tools = sum(row["non_generation_seconds"] for row in stats.offered)
        metrics["tools/in_flight"] = in_tools / max(self._played - before, 1e-9)
        return groups, {} if hooks.log(groups, metrics, stats.seconds) else metrics, rollout.full

    def _store(self, step: int, groups: Sequence[Group]) -> None:
        ledger = self._queue.ledger
        self.generation.store.add(self._kind, "", step, groups, encoded=lambda group: ledger.encoded(group_id(group)))

    async def updated(self, version: int) -> None:
        await self._coordinator.updated(version)

    async def trained(self, group_ids: Sequence[int], step: int, details: Any = None) -> None:
        if details and not self._hooks.makes_rows:  # a hook's rows differ from the stored samples
            await to_thread.run_sync(self.generation.store.add_details, step, details)
        await to_thread.run_sync(self._queue.trained, group_ids, step)

    async def saving(self) -> None:
        await to_thread.run_sync(self._queue.saving)

    async def checkpointed(self, step: int) -> None:
        await to_thread.run_sync(self._queue.checkpointed, step)

    @property
    def engines(self) -> EnginePool:
        """The engines, for weight updates. Raises SettingsError: the model is hosted, so it cannot be updated."""
        if isinstance(self.generation.pool, HostedModel):
            raise SettingsError(UNTRAINABLE)
        return self.generation.pool

    @property
    def eval_engines(self) -> EnginePool:
        assert isinstance(self.generation.player, RolloutWorker)
        pool = self.generation.player.player.context.engine_group(EVALUATES).client
        assert isinstance(pool, EnginePool)
        return pool

    async def set_resident_memory(self, memory: frozenset[str]) -> None:
        await self.engines.set_resident_memory(memory)

    async def evaluate(self, done: int) -> Mapping[str, float]:
        return await self.generation.evaluate(done)


def make_batch(
    settings: RunSettings,
    groups: Sequence[Group],
    metrics: Mapping[str, float],
    step: int,
    hooks: TrainHooks = NO_HOOKS,
) -> Batch:
    """Return the groups of training step `step` as arrays for a trainer."""
    reward_key, supervised = settings.rollout.reward_key, settings.algorithm.supervised
    truncated = settings.rollout.replays_truncation and not supervised
    chosen, rewards = hooks.samples(groups)
    # The model's image placeholders are needed only if samples have their own pixel values.
    brought = any(sample.multimodal_train_inputs is not None for group in chosen for sample in group)
    payload = TrainBatch.from_samples(
        chosen,
        reward_key,
        reward_parts=list(settings.algorithm.gdpo_weights),
        supervised=supervised,
        trained=step,
        truncated=truncated,
        routed=settings.rollout.use_rollout_routing_replay and not supervised,
        rewards=rewards,
        image_tokens=ImageTokens.of(Path(str(settings.train.hf_checkpoint))) if brought else None,
    )
    ids = tuple(-1 if group[0].group_index is None else group[0].group_index for group in groups)
    found = staleness_metrics(payload) | truncation_metrics(payload, settings.rollout)
    return Batch(payload, ids, {**metrics, **found})


def _check_of(settings: RunSettings) -> Callable[[Group], None] | None:
    """Return the check of a group before it is stored; None if it is not trained, or a hook makes other rows of it."""
    played_only = settings.hosted or settings.cluster.debug_rollout_only or settings.algorithm.supervised
    if played_only or hooks_of(settings.args).makes_rows:
        return None
    return partial(check_samples, reward_parts=list(settings.algorithm.gdpo_weights))


def _player_of(held_out: EvalSet, plugins: Plugins, beside: GroupPlayer, most: int) -> GroupPlayer:
    settings, context = held_out.settings, beside.context
    other = settings.data.apply_chat_template_kwargs != context.args.apply_chat_template_kwargs and not context.hosted
    chat, rollout, args = load_chat(settings) if other else context.chat, settings.rollout, settings.args
    length = min(rollout.rollout_max_context_len or most, most)
    context = replace(context, settings=rollout, args=args, chat=chat, environments=plugins.environments)
    context = replace(context, context_length=length)
    grader = Grader(rollout, args, plugins.reward, beside.grader.runner)
    if own := context.engine_groups.get(EVALUATES):
        return GroupPlayer(replace(context, client=own.client), grader, plugins.generate)
    return GroupPlayer(context, grader, plugins.generate, beside)


async def _groups(
    settings: RunSettings, context: RolloutContext, stack: AsyncExitStack, follows: bool
) -> dict[str, EngineGroup]:
    """Connect to the engines of `--engine-groups`. Raises SettingsError: a group has another vocabulary."""
    found: dict[str, EngineGroup] = {}
    for name, said in settings.engine.engine_groups.items():
        pool = EnginePool(str(said).split(","), settings.engine, vocab_size=None)
        await stack.enter_async_context(pool)
        await (pool.check_present() if follows else pool.check())
        tokenizer = context.chat.tokenizer
        for url, ids in (await pool.encode(text := probe_text(tokenizer))).items():
            same_vocabulary(tokenizer, text, ids, f"--engine-groups {name}={url}")
        params = replace(context.params(), return_sampling_mask=False, routed_experts_start_len=None)
        found[name] = EngineGroup(context.chat, pool, params)
    return found


async def _context_length(settings: RunSettings, pool: EnginePool) -> int:
    """Return the smallest context length that engines, settings and model config give."""
    said = [info.get("context_length") for info in (await pool.server_info()).values()]
    model = read_model_info(settings.train.hf_checkpoint)
    said += [settings.engine.engine_context_length, model.context_length if model else None]
    known = [length for length in said if isinstance(length, int) and length > 0]
    if not known and settings.rollout.rollout_max_context_len is None:
        raise SettingsError("neither engine nor model says its context length; set --rollout-max-context-len")
    return min(known, default=sys.maxsize) - 1  # `Conversation` leaves one place free, and engines leave two


_rollouts: type[Rollouts] = LedgerRollouts
