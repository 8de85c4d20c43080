"""`agentrl check --hook NAME=PATH`: a slime hook is called once, with small values of the types that a run passes.
`hooks.tsv` has the expected parameters and results. Of hooks that need a model or its optimizer, only parameters are
checked. Generating hooks are called with the built-in engine, if there is a model folder."""

import ast
import inspect
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any, NamedTuple

import anyio

from agentrl.compat.calls import Namespace, namespace, served, taken_by
from agentrl.compat.helpers import RolloutFnEvalOutput, RolloutFnTrainOutput, call_dynamic_filter
from agentrl.compat.modules import install
from agentrl.compat.sample import SlimeSample
from agentrl.config import RunSettings
from agentrl.data.prompts import open_prompts
from agentrl.errors import PluginError, SettingsError, raised_as
from agentrl.files import read_table
from agentrl.plugins import defined_at, find_object, user_code
from agentrl.rm_hub.combine import result_of


class Hook(NamedTuple):
    """A row of the table."""

    setting: str
    side: str
    form: str
    returns: str
    moment: str


@cache
def hooks() -> Mapping[str, Hook]:
    return {row[0]: Hook(*row) for row in read_table(__file__, "hooks.tsv")}


def check_hook(name: str, path: str | None, settings: RunSettings) -> str:
    """Check a hook; without a path, the hook that the settings name. Return the finding. Raises PluginError: it cannot
    be called as a run calls it, it raised, or its result cannot be used. SettingsError: no such hook, or no path."""
    meant = [setting for setting in hooks() if setting.startswith(name.strip("-").replace("-", "_"))]
    if len(meant) != 1:
        known = ", ".join(meant or hooks())
        raise SettingsError(f"--hook {name}: expected the name, or the beginning, of one of {known}")
    setting = meant[0]
    given = getattr(settings.args, setting, None) if path is None else path
    paths = [path for path in (given if isinstance(given, (list, tuple)) else [given]) if path]
    if not paths:
        raise SettingsError(f"--hook {name}: give {name}=PATH, or set {setting}")
    install()
    return "\n".join(_check(hooks()[setting], one, settings) for one in paths)


def _check(hook: Hook, path: str, settings: RunSettings) -> str:
    found, args = find_object(path, what=hook.setting), namespace(settings.args)
    where = f"{hook.setting} {path} ({defined_at(found)})"
    form = hook.form.rpartition("with group_rm ")[2] if args.group_rm else hook.form
    with raised_as(PluginError, f"{where}: expected {form}", TypeError, ValueError):
        call, values = _call(found, form, args, settings)
    generates, good = hook.setting in _GENERATE, _GOOD.get(hook.setting)
    if good is None or (generates and settings.train.hf_checkpoint is None):
        return f"{where}: takes {form}; not called{' without --hf-checkpoint' if generates else ''}"
    result = anyio.run(_with_engine if generates else _result, call, where, settings)
    wrong = PluginError(f"{where}: expected {hook.returns}, got {result!r:.200}")
    try:
        usable = good(result, values)
    except Exception as error:  # the result lacks the attributes that are checked
        raise wrong from error
    if not usable:
        raise wrong
    return f"{where}: called; returned what it should ({hook.moment})"


def _call(found: Any, form: str, args: Namespace, settings: RunSettings) -> tuple[partial[Any], dict[str, Any]]:
    """Return the call that a run makes, and the values by name. Parameters with a default in the form are optional."""
    prompts = open_prompts(settings.data)
    parts = [part.strip() for part in form.partition("(")[2].partition(")")[0].split(",")]
    names = [part.partition("=")[0] for part in parts if not part.startswith("*")]
    behind = parts[parts.index("*") :] if "*" in parts else []
    values = {"args": args, **{name: _VALUES[name]() for name in names if name in _VALUES}}
    if "sampling_params" in names:
        values["sample"] = _pending()
    for sample in [values.get("sample"), *values.get("samples", ())]:
        if prompts is not None and sample is not None:  # a reward function reads label and metadata
            sample.label, sample.metadata = prompts[0].label, dict(prompts[0].metadata)
    defaults = {name: ast.literal_eval(text) for name, text in (part.split("=") for part in parts if "=" in part)}
    named = {name: values.get(name) for name in behind if name != "*"} | taken_by(found, defaults)
    given = [values.get(name) for name in names if name not in behind and name not in defaults]
    inspect.signature(found).bind(*given, **named)
    return partial(found, *given, **named), values


async def _result(call: partial[Any], where: str, settings: RunSettings) -> Any:
    with user_code(where):
        return await result_of(call)


async def _with_engine(call: partial[Any], where: str, settings: RunSettings) -> Any:
    from agentrl.engine.local import in_process
    from agentrl.engine.pool import EnginePool
    from agentrl.gateway.router import router
    from agentrl.gateway.served.openai import ROUTES

    folder = str(settings.train.hf_checkpoint)
    async with (
        in_process(settings.engine, folder, ROUTES) as engine,
        EnginePool([engine], settings.engine, vocab_size=None) as pool,
        router(pool, folder) as url,
    ):
        with served(url):
            return await _result(call, where, settings)


def _samples(first: int = 0) -> list[SlimeSample]:
    made = [SlimeSample(group_index=first, index=first + at, prompt="What is 1+1?", label="2") for at in range(2)]
    for sample in made:
        sample.tokens, sample.loss_mask = [5, 6], []
        sample.append_response_tokens(tokens=[7, 8], log_probs=[-0.5, -0.25], text="It is 2")
        sample.reward, sample.status = float(sample.index or 0) % 2, SlimeSample.Status.COMPLETED
    return made


def _pending() -> SlimeSample:
    return SlimeSample(group_index=0, index=0, prompt="What is 1+1?", label="2", session_id="0")


def _tensors(value: float = 0.0, kind: str = "float32") -> list[Any]:
    import torch

    return [torch.full((2,), value, dtype=getattr(torch, kind)) for _ in range(2)]


def _batch(*, micro: bool = False) -> dict[str, Any]:
    import numpy as np
    import torch

    from agentrl.compat.losses import PER_TOKEN, microbatch, rollout_batch
    from agentrl.train.batch import TrainBatch

    computed: dict[str, Any] = {name: np.full(4, -0.5, np.float32) for name in PER_TOKEN.values()}
    batch = replace(TrainBatch.from_samples([_samples()]), **computed)
    return (microbatch if micro else rollout_batch)(batch, torch.device("cpu"))


class _Source:
    """A data source with two samples per group."""

    def get_samples(self, num_samples: int) -> list[list[SlimeSample]]:
        return [[_pending() for _ in range(2)] for _ in range(num_samples)]

    def add_samples(self, samples: list[list[SlimeSample]]) -> None:
        """Ignore the samples."""


_VALUES: Mapping[str, Callable[[], Any]] = {
    "sample": lambda: _samples()[1],
    "samples": _samples,
    **{name: partial(json.loads, text) for name, text in read_table(__file__, "values.tsv")},
    **dict.fromkeys(("buffer", "groups", "all_groups"), lambda: [_samples(0), _samples(2)]),
    "data_source": _Source,
    **dict.fromkeys(("rollout_extra_metrics", "extra_metrics"), dict),
    "data": lambda: {"set": {"rewards": [0.0, 1.0], "truncated": [False] * 2, "samples": _samples()}},
    "rollout_data": lambda: _batch() | {"kl": _tensors()},
    "batch": lambda: _batch(micro=True),
    "logits": lambda: _tensors()[0].new_zeros(1, 8, 16).requires_grad_(),
    "sum_of_sample_mean": lambda: lambda losses: losses.sum(),
    "pg_loss": lambda: _tensors(1)[0].repeat(2),
    "train_log_probs": lambda: _tensors(-0.5),
    "rollout_log_probs": lambda: _tensors(-0.25),
    "loss_masks": lambda: _tensors(1, "int32"),
}


def _finished(result: Any, _: Any) -> bool:
    members = result if isinstance(result, list) else [result]
    return bool(members) and all(isinstance(m, SlimeSample) and bool(m.plain().validate().tokens) for m in members)


def _rewards(result: Any, values: Mapping[str, Any]) -> bool:
    found = result if "samples" in values else [result]
    numbers = [n for r in found for n in (r.values() if isinstance(r, dict) else [r]) if isinstance(n, (int, float))]
    return len(found) == len(values.get("samples", [0])) and bool(numbers) and all(map(math.isfinite, numbers))


def _judged(result: Any, _: Any) -> bool:
    keep = call_dynamic_filter(lambda: result).keep
    return isinstance(keep.item() if hasattr(keep, "item") else keep, bool)


_GENERATE = ("custom_generate_function_path", "rollout_function_path", "eval_function_path")
_GOOD: Mapping[str, Callable[[Any, Mapping[str, Any]], bool]] = {
    "custom_generate_function_path": _finished,
    "custom_rm_path": _rewards,
    "dynamic_sampling_filter_path": _judged,
    "buffer_filter_path": lambda r, _: isinstance(r, list) and len(r) <= 1 and all(_finished(g, _) for g in r),
    "data_source_path": lambda r, _: all(isinstance(s, SlimeSample) for group in r.get_samples(1) for s in group),
    "rollout_function_path": lambda r, _: isinstance(r, (RolloutFnTrainOutput, list)),
    "eval_function_path": lambda r, _: isinstance(r, (RolloutFnEvalOutput, dict)),
    "rollout_sample_hook_path": lambda r, _: r is None or isinstance(r, SlimeSample),
    "rollout_sample_filter_path": lambda r, v: [len(group) for group in v["groups"]] == [2, 2],
    "rollout_all_samples_process_path": lambda r, _: True,
    "custom_rollout_log_function_path": lambda r, _: isinstance(r, bool),
    "custom_eval_rollout_log_function_path": lambda r, _: isinstance(r, bool),
    "custom_reward_post_process_path": lambda r, _: [len(part) for part in r] == [2, 2],
    "custom_convert_samples_to_train_data_path": lambda r, _: {"tokens", "response_lengths", "loss_masks"} <= set(r),
    "rollout_data_postprocess_path": lambda r, _: r is None,
    "custom_advantage_function_path": lambda r, v: (
        {len(v["rollout_data"][k]) for k in ("advantages", "returns")} == {2}
    ),
    "custom_tis_function_path": lambda r, _: len(r) == 3 and isinstance(r[2], dict),
    "custom_pg_loss_reducer_function_path": lambda r, _: callable(r) and r(_tensors(1)[0].repeat(2)).numel() == 1,
    "custom_loss_function_path": lambda r, _: r[0].numel() == 1 and isinstance(r[1], dict),
}
"""For each hook that can be called, a check of its result, or of its changes to the values."""
