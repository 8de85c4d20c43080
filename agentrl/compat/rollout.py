"""slime's hooks around rollouts: `hooks.tsv` has their settings, forms and moments, `compat_options` their paths.

1. A rollout function generates whole rollouts from groups of the ledger, so it needs max_staleness 0. Groups that it
   returns are completed, groups that it passes to `data_source.add_samples` wait for a later rollout, and other groups
   are dropped, with that reason. New groups of the function are added to the ledger. Groups beyond `rollout_batch_size`
   are dropped too: later they would be too old. Without more data, `get_samples` ends the function and the run.
2. The sample filter is called with the groups of every batch, also after a resume; it marks samples by `remove_sample`.
3. "All samples" are the samples that this process generated since the previous batch, dropped groups included."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, SupportsFloat

from agentrl.compat.calls import adapted, as_slime, in_use, namespace, served, share
from agentrl.compat.helpers import RolloutFnEvalOutput, RolloutFnTrainOutput, call_rollout_fn
from agentrl.compat.modules import install
from agentrl.compat.sample import keep_plain
from agentrl.compat.sglang_rollout import apply_rollout_sample_hooks
from agentrl.engine.pool import EnginePool
from agentrl.errors import AgentRLError, PluginError, SettingsError
from agentrl.groups import Group, GroupStore
from agentrl.plugins import find_object, load_object, user_code
from agentrl.rollout.functions import normalize_outputs
from agentrl.rollout.hooks import RolloutHooks
from agentrl.rollout.rewards import check_reward
from agentrl.sample import Status
from agentrl.tools.threads import run_in_daemon_thread

OURS = (
    "slime.rollout.sglang_rollout.generate_rollout",
    "slime.rollout.fully_async_rollout.generate_rollout_fully_async",
)
"""slime's rollout functions that the run replaces: rollout by rollout, or ahead of the trainer (max_staleness)."""


class SlimeRollouts(RolloutHooks):
    """The run's slime hooks; see the module."""

    def __init__(self, args: Any) -> None:
        install()
        self._args, self._slime, self._all = args, namespace(args), list[Group]()
        self._metrics, self._evaluated = dict[str, float](), dict[str, float]()  # what functions returned last
        self._play = self._load("rollout_function_path")
        if args.compat_options.get("rollout_function_path") == OURS[1] and not args.max_staleness:
            ahead = "generating ahead of the trainer needs --max-staleness 1 or more"
            raise SettingsError(f"rollout_function_path {OURS[1]}: {ahead}")
        if self._play is not None and args.max_staleness:
            raise SettingsError("rollout_function_path plays whole rollouts between two trainings: --max-staleness 0")
        self._evaluate = self._load("eval_function_path") or self._play
        self._filter = self._load("rollout_sample_filter_path")
        self._process = self._load("rollout_all_samples_process_path")
        needs = ("rollout_function_path", "eval_function_path", "rollout_all_samples_process_path")
        self.alone = next((name for name in needs if self._load(name) is not None), "")
        self._log = self._load("custom_rollout_log_function_path")
        self._log_evaluation = self._load("custom_eval_rollout_log_function_path")
        if args.data_source_path:  # loading shows if it is slime's
            names = ("DataSource", "RolloutDataSource")
            load_object(args.data_source_path, what="--data-source-path", default_names=names)
        self._each = args.compat_options.get("rollout_sample_hook_path")
        for path in self._each or ():
            find_object(path, what="rollout_sample_hook_path")

    def _load(self, setting: str) -> Callable[..., Any] | None:
        path = self._args.compat_options.get(setting)
        return None if path is None or path in OURS else user_code(setting)(find_object(path, what=setting))

    @asynccontextmanager
    async def opened(self, pool: EnginePool) -> AsyncIterator[None]:
        if not in_use() and not any((self._play, self._evaluate, self._each)):
            yield
            return
        from agentrl.gateway.router import router

        async with router(pool, self._args.hf_checkpoint) as url:
            with served(url):
                yield

    def begin(self, step: int) -> None:
        share(rollout_id=step)

    async def generated(self, args: Any, samples: Group, evaluation: bool) -> Group:
        if not self._each:
            return samples
        found: Group = await adapted(apply_rollout_sample_hooks)(args, samples, evaluation=evaluation)
        return [sample.validate() for sample in found]

    def played(self, group: Group) -> None:
        for sample in group:
            keep_plain(sample)
        if self._process is not None:
            self._all.append(group)

    def play(self, step: int, store: GroupStore) -> list[Group] | None:
        if self._play is None:
            return None
        wanted: int = self._args.rollout_batch_size
        self._metrics = {}
        if len(groups := store.next_batch(wanted, step)) < wanted:
            source = _Leases(self._args, store, step)
            try:
                with user_code("rollout_function_path"):
                    output = call_rollout_fn(self._play, self._slime, step, source, evaluation=False)
                    source.record(output)
                self._metrics = _loggable(output.metrics)
            except _DataEnded:
                source.end(store.release, "the data has ended")
            except Exception:
                source.end(store.release, "the rollout function failed")
                raise
            groups = store.next_batch(wanted, step)
            store.expire(step + 1, "more than rollout_batch_size", again=False)
            if len(groups) < wanted and not source.ended:
                found = f"{len(groups)} groups, rollout_batch_size is {wanted}"
                raise PluginError(f"rollout_function_path returned {found}")
        self._all += groups if self._process is not None else []
        return groups

    def finished(self, groups: list[Group], source: Any) -> None:
        if self._filter is None and self._process is None:
            return
        if self._filter is not None:
            before = [len(group) for group in groups]
            adapted(self._filter)(self._args, groups)
            if before != [len(group) for group in groups]:
                raise PluginError("rollout_sample_filter_path removed samples; set remove_sample on them instead")
        if self._process is not None:
            adapted(self._process)(self._args, sorted(self._all, key=lambda group: group[0].index or 0), source)
        self._all = []
        for sample in (sample for group in groups for sample in group):
            sample.validate().compact()

    def log(self, groups: Sequence[Group], metrics: dict[str, float], seconds: float) -> bool:
        call = (self._slime.rollout_id, self._args, [sample for group in groups for sample in group], metrics, seconds)
        metrics |= self._metrics
        return self._log is not None and bool(adapted(self._log)(*call))

    async def evaluate(self) -> Mapping[str, list[Group]] | None:
        if self._evaluate is None:
            return None
        call = (self._evaluate, self._slime, self._slime.rollout_id, None)
        output = await run_in_daemon_thread(lambda: call_rollout_fn(*call, evaluation=True))
        if not isinstance(output, RolloutFnEvalOutput):
            raise PluginError(f"eval_function_path must return RolloutFnEvalOutput, got {type(output).__name__}")
        with user_code("eval_function_path"):
            if absent := [name for name, found in output.data.items() if found.get("samples") is None]:
                needs = "each set needs the evaluated samples, with their rewards"
                raise PluginError(f"eval_function_path: no 'samples' of {', '.join(absent)}; {needs}")
            self._evaluated = _loggable(output.metrics)
            return {name: _groups(found["samples"], f"evaluation of {name}") for name, found in output.data.items()}

    def log_evaluation(self, groups: Mapping[str, Sequence[Group]], metrics: dict[str, float]) -> bool:
        metrics |= self._evaluated
        if self._log_evaluation is None:
            return False
        key = self._args.eval_reward_key or self._args.reward_key
        data = {}
        for name, found in groups.items():
            samples = [sample for group in found for sample in group]
            data[name] = {
                "rewards": [sample.get_reward_value(key) for sample in samples],
                "truncated": [sample.status is Status.TRUNCATED for sample in samples],
                "samples": [as_slime(self._slime, sample) for sample in samples],
            }
        return bool(self._log_evaluation(self._slime.rollout_id, self._slime, data, metrics))


class _DataEnded(AgentRLError):
    """No group is left. It ends a rollout function, which may loop until it has enough groups."""


class _Leases:
    """The data source that a rollout function gets: groups of the ledger."""

    def __init__(self, args: Any, store: GroupStore, step: int) -> None:
        self._args, self._store, self._step = args, store, step
        self._leased: set[int] = set()
        self.ended = False

    def get_samples(self, num_samples: int) -> list[Any]:
        groups = self._store.lease(num_samples, self._step)
        self.ended = len(groups) < num_samples
        if self.ended and not groups:
            raise _DataEnded("get_samples: the data has ended")
        self._leased |= {group[0].group_index for group in groups if group[0].group_index is not None}
        return [[as_slime(self._args, sample) for sample in group] for group in groups]

    def add_samples(self, samples: Sequence[Sequence[Any]]) -> None:
        for group in samples:
            if (number := next(_flat(group)).group_index) not in self._leased:
                raise PluginError(f"rollout_function_path: add_samples got group {number}, not one of get_samples")
            self._leased.remove(number)
            self._store.release(number, "given back by the rollout function")

    def record(self, output: Any) -> None:
        """Complete the groups that the function returned; drop groups that it neither returned nor added back."""
        if not isinstance(output, RolloutFnTrainOutput):
            raise PluginError(f"rollout_function_path must return RolloutFnTrainOutput, got {type(output).__name__}")
        members = [id(member) for member in _flat(output.samples)]
        if len(members) != len(set(members)):
            raise PluginError("rollout_function_path returned a sample twice; return each once, or copies of it")
        for group in _groups(output.samples, "rollout_function_path"):
            if (number := group[0].group_index) not in self._leased:
                (number,) = self._store.insert_external([group], self._step)
                self._leased.add(number)
            for sample in group:
                sample.group_index = number
            rewards = [s.get_reward_value(self._args.reward_key) for s in group if s.reward is not None]
            self._store.complete(number, group, rewards=rewards)
            self._leased.remove(number)
        self.end(self._store.drop, "not returned by the rollout function")

    def end(self, how: Callable[[int, str], None], reason: str) -> None:
        while self._leased:
            how(self._leased.pop(), reason)


def _loggable(metrics: Mapping[str, Any] | None) -> dict[str, float]:
    """Return the metrics that are numbers, also as tensors."""
    numbers = {name: value for name, value in (metrics or {}).items() if isinstance(value, SupportsFloat)}
    return {name: float(value) for name, value in numbers.items() if not getattr(value, "ndim", 0)}


def _flat(group: Any) -> Any:
    for item in group if isinstance(group, (list, tuple)) else [group]:
        yield from _flat(item) if isinstance(item, (list, tuple)) else [item]


def _groups(samples: Sequence[Any], what: str) -> list[Group]:
    """Return finished groups in our form, checked. Single samples with one `group_index` are one group."""
    listed: dict[Any, list[Any]] = {}
    for at, item in enumerate(samples):
        members = list(_flat(item))
        number = None if isinstance(item, (list, tuple)) else members[0].group_index
        listed.setdefault(("list", at) if number is None else number, []).extend(members)
    groups = []
    for members in listed.values():
        groups.append([normalize_outputs([member.plain()], member, what)[0] for member in members])
        for sample in groups[-1]:
            keep_plain(sample)
            check_reward(sample, what)
    return groups
