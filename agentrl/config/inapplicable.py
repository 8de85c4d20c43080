"""Conditions under which a setting has an effect, and messages for settings without effect in this run. Settings of
another command give a note (`possibly_inapplicable`). A setting whose condition does not hold gives an error
(`inapplicable`), or a note if data rows or user code may still use it. Defaults are never reported."""

from collections.abc import Iterator
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from agentrl.config.fields import FieldRef, Sections, all_fields
from agentrl.config.values import holds
from agentrl.files import read_table
from agentrl.rollout.settings import DEFAULT_FAILURE_POLICY, FailureAction
from agentrl.settings import shown


class Effect(NamedTuple):
    """Condition under which settings have an effect."""

    names: str  # separated by spaces; `x_*` matches a prefix
    needs: str  # a condition (`values.holds`) on settings, and on values that `_sentences` adds
    named: str  # not empty if something else can use the settings: a note, not an error
    why: str  # completes "has no effect"


EFFECTS = tuple(Effect(*row) for row in read_table(__file__, "effects.tsv"))

_TRAINING = """algorithm.* train.* cluster.* allow_truncated_sampling - loss_type advantage_estimator use_opd opd_type
    hf_checkpoint rollout_num_gpus* rollout_workers ray_address start_timeout debug_rollout_only"""
_EVALUATION = "eval_* n_samples_per_eval_prompt"
_BATCHES = """num_rollout rollout_batch_size n_samples_per_prompt over_sampling_batch_size max_staleness stale_groups
    partial_rollout mask_* dynamic_sampling_filter_path prompt_data prompt_data_check rollout_shuffle prompt_order
    num_epoch data_source_path buffer_filter_path ledger_retention ledger_dir log_interval use_tensorboard tensorboard_dir
    use_wandb wandb_* metrics_sinks prometheus_*
    save_debug_rollout_data dump_details opd_teacher_url opd_privileged_* eval_interval eval_before_train"""
_PLAYING = """rollout.* rm_hub.* engine.* keep_trajectories update_weight* weight_sync_timeout rollout_num_gpus*
    colocate offload_* - num_rollout rollout_batch_size n_samples_per_prompt reward_key max_staleness rollout_temperature rollout_top_*
    allow_truncated_sampling rollout_max_response_len chat_template_path *_parser template_rewrite_policy rollout_seed
    rollout_max_context_len"""
_OF_ALGORITHMS = "critic_* num_critic_only_steps ref_load ref_update_interval"


@cache
def matching(names: str) -> frozenset[str]:
    """Return the settings that `names` match: `data.*` is a package, `x_*` a prefix; names after ` - ` are left out."""
    wanted, _, but = (part.split() for part in names.partition(" - "))
    known = [(name, f"{field.section}.{name}") for name, field in all_fields().items()]

    def found(patterns: list[str]) -> set[str]:
        return {name for name, full in known for p in patterns if fnmatchcase(full if "." in p else name, p)}

    return frozenset(found(wanted) - found(but))


def _unread(settings: Sections, purpose: str) -> tuple[frozenset[str], str]:
    """Return the settings that this kind of run does not read, and the name of the kind."""
    if purpose == "eval":
        return matching(_TRAINING) | matching(_BATCHES), "agentrl eval"
    if purpose == "rollout" or settings.cluster.debug_rollout_only:
        kind = "agentrl rollout" if purpose == "rollout" else "--debug-rollout-only"
        return matching(_TRAINING) | matching(_EVALUATION), kind
    if purpose == "train" and settings.cluster.load_debug_rollout_data:
        return matching(_PLAYING) | matching("data.* buffer.*"), "--load-debug-rollout-data"
    if purpose == "train" and settings.data.sft_turns:
        return matching(_PLAYING), "agentrl sft"
    return frozenset(), ""


def inapplicable(settings: Sections, purpose: str) -> list[str]:
    return list(_sentences(settings, purpose, certain=True))


def possibly_inapplicable(settings: Sections, purpose: str) -> list[str]:
    """Return sentences about settings that were given and have no effect, without being a mistake."""
    names, kind = _unread(settings, purpose)
    others = [all_fields()[name].flag for name in _differing(settings) if name in names]
    unread = [f"{kind} does not read {', '.join(others)}"] if others else []
    rollouts, epochs = settings.rollout.num_rollout, settings.data.num_epoch
    if epochs and {"num_rollout", "num_epoch"} <= settings.given() - names:
        both = f"--num-rollout {rollouts} and --num-epoch {epochs}: the run ends with whichever comes first"
        unread.append(f"{both}; leave one of them out")
    certain = _sentences(settings, purpose, certain=True) if settings.compat.slime_defaults else ()
    return [*unread, *certain, *_sentences(settings, purpose, certain=False)]


def _sentences(settings: Sections, purpose: str, *, certain: bool) -> Iterator[str]:
    unread, _ = _unread(settings, purpose)
    flat, rollout, engine, differing = settings.flat(), settings.rollout, settings.engine, _differing(settings)
    # An algorithm may be a user's file: it is loaded only if a setting depends on what it reads.
    asked = not matching(_OF_ALGORITHMS).isdisjoint(set(differing) - unread)
    seen = {
        **flat,
        "grader": str(rollout.rm_type).removeprefix("boxed_"),
        "several": isinstance(rollout.env, dict),
        "retries": FailureAction.RETRY in (DEFAULT_FAILURE_POLICY | rollout.failure_policy).values(),
        # Of the options, a running server can use only the API key.
        "key_alone": engine.engine == "external" and set(engine.sglang_options) <= {"api_key"},
        # Only training may use one process. A derived path of dumps does not count as set.
        "eval_before_train": purpose != "train" or rollout.eval_before_train,
        "backend": settings.cluster.backend if purpose == "train" else "ray",
        "save_debug_rollout_data": "save_debug_rollout_data" in settings.given() and flat["save_debug_rollout_data"],
        "load_debug_rollout_data": purpose == "train" and flat["load_debug_rollout_data"],
        "critic": asked and "values" in settings.algorithm.reads,
        "reference": asked and "ref_log_probs" in settings.algorithm.reads,
    }
    for effect in EFFECTS:
        alike = [name for name in differing if name in matching(effect.names) - unread]
        if alike and bool(effect.named) != certain and not holds(effect.needs, seen):
            written = [text for name in alike for text in _written(all_fields()[name], flat[name])]
            has, it = ("has", "it") if len(written) == 1 else ("have", "them")
            leave = f"; leave {it} out" if certain and ";" not in effect.why else ""
            else_ = f"; leave {it} out otherwise" if ", unless" in effect.why else ""
            yield f"{', '.join(written)} {has} no effect {effect.why}{leave or else_}"


def _differing(settings: Sections) -> list[str]:
    flat, given = settings.flat(), settings.given()
    return [name for name, field in all_fields().items() if name in given and flat[name] != field.default]


def _written(field: FieldRef, value: Any) -> list[str]:
    if field.is_bool:
        return [field.flag if value else f"--no-{field.flag[2:]}"]
    if field.name == "sglang_options":
        return [f"--sglang-{name.replace('_', '-')}" for name in value]
    return [field.flag if field.kind in (dict, tuple) else f"{field.flag} {shown(value)}"]
