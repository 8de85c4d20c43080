"""slime's training hooks, called at slime's moments in slime's form: the rows of `hooks.tsv` with side `training`.

1. Paths are loaded, and parameters checked, before the start. Exceptions of hooks name flag, path and the user's line.
2. Hooks of a whole rollout get all of it on every rank (in slime, a part), and must write the same on every rank.
3. Rewards from a hook are final, as in slime: no estimator compares them within their group again.
4. Three settings (`OURS`) also take functions in our form, which can be called with two arguments."""

from __future__ import annotations

import functools
import inspect
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from agentrl.algorithms.base import Amend, Computed
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.compat.calls import adapted
from agentrl.compat.conformance import hooks
from agentrl.compat.modules import install
from agentrl.errors import PluginError, SettingsError
from agentrl.files import read_table
from agentrl.plugins import find_object, user_code
from agentrl.sample import Sample
from agentrl.settings import flag_of
from agentrl.train.batch import TrainBatch
from agentrl.train.hooks import Groups, TrainHooks

if TYPE_CHECKING:
    from torch import Tensor, device

    from agentrl.algorithms.algorithm import Algorithm
    from agentrl.train.microbatches import MicrobatchTensors
    from agentrl.train.objective import StepInputs

_COMPARING = ("rloo", "reinforce_plus_plus_baseline", "gdpo", "pass_at_k")
REWARDS, CONVERT = "custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"
ADVANTAGE, AFTER = "custom_advantage_function_path", "rollout_data_postprocess_path"
MODEL, WRITTEN = "custom_model_provider_path", "custom_update_weight_post_write_path"
STEP = "custom_megatron_before_train_step_hook_path"
LOSS, REDUCER, TIS = OURS = tuple(f"custom_{name}_function_path" for name in ("loss", "pg_loss_reducer", "tis"))

_COLUMNS = dict(read_table(__file__, "columns.tsv"))
_NEEDED = {"tokens", "response_lengths", "rewards", "sample_indices", "loss_masks"}
_FOLLOWS = {"raw_reward", "truncated", "round_number", "total_lengths", "rollout_mask_sums", "source_names"}
"""Columns of slime's train data: fields of a sample, required columns, and derived columns."""


class SlimeHooks(TrainHooks):
    """The hooks of a run in one process."""

    def __init__(self, args: Any) -> None:
        self.args = args
        named = (name for name, hook in hooks().items() if hook.side == "training" and name in args)
        paths = {name: path for name in named if (path := getattr(args, name))}
        self._hooks = {n: _load(n, path) for n, path in paths.items() if n not in OURS or foreign(path, flag_of(n))}
        if {ADVANTAGE, AFTER, LOSS} & self._hooks.keys():
            self.reads = frozenset[Computed]({"old_log_probs"})
        self.takes_logits, self.makes_rows = LOSS in self._hooks, CONVERT in self._hooks
        self._final = self.makes_rows or REWARDS in self._hooks
        if WRITTEN in self._hooks and args.update_weight_mode != "disk":
            raise SettingsError(f"{flag_of(WRITTEN)} has no effect on a broadcast; set --update-weight-mode disk")
        if self._final and args.advantage_estimator in _COMPARING:
            raise SettingsError(
                f"--advantage-estimator {args.advantage_estimator} compares rewards within their group, and a hook gives final "
                "ones; use grpo (with --normalize-advantages it whitens them as reinforce_plus_plus_baseline does)"
            )

    def _call(self, name: str, *given: Any, **named: Any) -> Any:
        return self._hooks[name](*given, **named) if name in self._hooks else None

    def samples(self, groups: Groups) -> tuple[Groups, list[float] | None]:
        samples = [sample for group in groups for sample in group]
        if CONVERT in self._hooks:
            return converted(self._call(CONVERT, self.args, samples), groups)
        if REWARDS not in self._hooks:
            return groups, None
        found, count = self._call(REWARDS, self.args, samples), len(samples)
        if not isinstance(found, tuple) or len(found) != 2 or len(found[1]) != count:
            raise PluginError(f"{flag_of(REWARDS)}: expected (raw_rewards, rewards), {count} each, got {found!r:.80}")
        return groups, list(map(float, found[1]))

    def objective(self, algorithm: AlgorithmSettings) -> AlgorithmSettings:
        return algorithm.model_copy(update={"rewards_normalization": False}) if self._final else algorithm

    def started(self) -> None:
        self._call("custom_megatron_init_path", self.args)

    def model(self, build: Callable[..., Any], *, pre_process: bool, post_process: bool) -> Any:
        _default[:] = [build]
        return self._hooks.get(MODEL, build)(pre_process=pre_process, post_process=post_process)

    def before_log_probs(self, model: Any, prefix: str) -> None:
        self._call("custom_megatron_before_log_prob_hook_path", self.args, [model], prefix)

    def advantages(self, batch: TrainBatch, algorithm: Algorithm) -> tuple[Tensor, Tensor] | None:
        if ADVANTAGE not in self._hooks:
            return None
        import torch

        from agentrl.algorithms.ops.kl import approximate_kl
        from agentrl.compat.losses import flat, rollout_batch

        data, what = rollout_batch(batch, torch.device("cpu"), algorithm), flag_of(ADVANTAGE)
        references = data["ref_log_probs"] if self.args.kl_coef else data["log_probs"]
        pairs = zip(data["log_probs"], references, strict=True)
        data["kl"] = [approximate_kl(old, reference, self.args.kl_loss_type) for old, reference in pairs]
        self._call(ADVANTAGE, self.args, data)
        return flat(data, "advantages", what), flat(data, "returns", what)

    def prepared(self, batch: TrainBatch, step: int, device: device) -> TrainBatch:
        if AFTER not in self._hooks:
            return batch
        from agentrl.compat.losses import PER_TOKEN, flat, rollout_batch

        data, what, arrays = rollout_batch(batch, device), flag_of(AFTER), batch.arrays()
        self._call(AFTER, self.args, step, data)
        kept = {ours: key for key, ours in PER_TOKEN.items() if ours in arrays}
        changed: dict[str, Any] = {ours: flat(data, key, what).float().cpu().numpy() for ours, key in kept.items()}
        mask = flat(data, "loss_masks", what).cpu().numpy().astype("uint8")
        if (mask > batch.loss_mask).any():
            raise PluginError(f"{what}: loss_masks may only take tokens out; nothing was computed of the others")
        if not self.args.calculate_per_token_loss:  # slime divides by the trajectories' masks as they were before
            changed["counted"] = batch.loss_mask
        return replace(batch, loss_mask=mask, **changed)

    def before_step(self, number: int, model: Any, optimizer: Any) -> None:
        if STEP in self._hooks:
            schedule = SimpleNamespace(num_steps=number, get_lr=lambda group: group["lr"])
            self._call(STEP, self.args, *divmod(number, self.args.num_steps_per_rollout), [model], optimizer, schedule)

    def amend(self, step: StepInputs, mb: MicrobatchTensors) -> Amend | None:
        if not {TIS, REDUCER} & self._hooks.keys():
            return None
        from agentrl.compat.losses import amended

        return functools.partial(amended, self._hooks.get(TIS), self._hooks.get(REDUCER), self.args, step, mb)

    def loss(self, step: StepInputs, mb: MicrobatchTensors, logits: Tensor) -> tuple[Tensor, Mapping[str, Tensor]]:
        from agentrl.compat.losses import own_loss

        return own_loss(self._hooks[LOSS], self.args, step, mb, logits)

    def weights_written(self, folder: str) -> None:
        self._call(WRITTEN, self.args, folder, [])


def converted(data: Any, groups: Groups) -> tuple[list[list[Sample]], list[float]]:
    """Return the rows of slime's train data in the groups of the samples that they name, and their rewards in that
    order. A row with its sample's tokens keeps the sample's other data: turns, weight versions, log-probs. Raises
    PluginError: a key is missing, unknown or of another length, or a row names no sample."""
    what = flag_of(CONVERT)
    keys = data.keys() if isinstance(data, Mapping) else set()
    if wrong := sorted(_NEEDED - keys or keys - _COLUMNS.keys() - _NEEDED - _FOLLOWS):
        told = f"something is wrong with {', '.join(wrong)}" if isinstance(data, Mapping) else f"got {data!r:.80}"
        raise PluginError(f"{what}: expected a dict with the lists {', '.join(sorted(_NEEDED))}; {told}")
    if len(sizes := {key: len(column) for key, column in data.items()}) and len(set(sizes.values())) > 1:
        raise PluginError(f"{what}: the lists have different lengths: {sizes}")
    origins = defaultdict[Any, list[tuple[int, Sample]]](list)  # the samples of one trajectory share an index
    for number, group in enumerate(groups):
        for sample in group:
            origins[sample.index].append((number, sample))
    out: list[list[Sample]] = [[] for _ in groups]
    for row, index in enumerate(data["sample_indices"]):
        if index not in origins:
            raise PluginError(f"{what}: sample_indices[{row}] is {index!r}, which no sample of the rollout has")
        values = {ours: data[key][row] for key, ours in _COLUMNS.items() if key in data}
        fields = {ours: v.tolist() if hasattr(v, "tolist") else v for ours, v in values.items()}
        same = [each for each in origins[index] if list(each[1].tokens) == fields["tokens"]]
        number, origin = (same or origins[index])[0]
        if not same:
            origin = Sample(index=index, group_index=origin.group_index, rollout_id=origin.rollout_id)
        out[number].append(replace(origin, **fields, reward=float(data["rewards"][row])))
    kept = [group for group in out if group]
    return kept, [sample.get_reward_value() for group in kept for sample in group]


_default: list[Callable[..., Any]] = []  # the builder of our own model, for users' providers that call it


def get_model_provider_func(args: Any, role: str = "actor") -> Callable[..., Any]:
    """Return slime's default provider, `(pre_process, post_process, vp_stage)`."""
    return lambda pre_process=True, post_process=True, vp_stage=None: _default[0](
        pre_process=pre_process, post_process=post_process
    )


def foreign(path: str, flag: str) -> bool:
    """Return true if a path names a function of slime's form for a flag that also takes ours."""
    install()
    found, form = find_object(path, what=flag), hooks()[flag[2:].replace("-", "_")].form
    return callable(found) and not _binds(found, "view, settings") and _binds(found, form)


def _binds(function: Callable[..., Any], form: str) -> bool:
    plain, _, named = form.strip("()").partition("*, ")
    try:
        inspect.signature(function).bind(*plain.replace(",", " ").split(), **dict.fromkeys(re.findall(r"\w+", named)))
    except TypeError:
        return False
    return True


def _load(setting: str, path: str) -> Callable[..., Any]:
    install()
    what, form = f"{flag_of(setting)} {path}", hooks()[setting].form
    found = find_object(path, what=flag_of(setting))
    if not callable(found) or not _binds(found, form):
        raise PluginError(f"{what}: expected a function {form}, got {found!r:.80}")
    called: Callable[..., Any] = user_code(what)(adapted(found))
    return called
