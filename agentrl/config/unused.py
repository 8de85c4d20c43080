"""When a setting has an effect: one table, and what is said of settings that have none in this run.

1. Settings of another command, as a file that several commands share holds them, are named (`named`).
2. A setting whose condition does not hold is refused (`refused`); it is named where rows or somebody's code may ask for
   it after all.
3. Only what was given another value than its default is spoken of. What an algorithm reads is its own matter
   (`Algorithm.takes`); what cannot hold together is in `checks`.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, NamedTuple

from agentrl.config.fields import FieldRef, all_fields
from agentrl.rollout.settings import DEFAULT_FAILURE_POLICY, FailureAction
from agentrl.settings import shown

Flat = Mapping[str, Any]


class Effect(NamedTuple):
    """When settings have an effect."""

    names: str
    """With spaces between; `x_*` are all that begin so."""
    when: Callable[[Flat], Any]
    why: str
    """Completes "has no effect"."""
    certain: bool = True
    """Whether nobody else can ask for them, so that they are refused."""


def _is(name: str, *values: object) -> Callable[[Flat], bool]:
    return lambda flat: flat[name] in values


def _not(name: str, value: object) -> Callable[[Flat], bool]:
    return lambda flat: bool(flat[name] != value)


def _any(*names: str) -> Callable[[Flat], bool]:
    return lambda flat: any(flat.get(name) for name in names)


def _graded_by(name: str) -> Callable[[Flat], bool]:
    return lambda flat: str(flat["rm_type"]).removeprefix("boxed_") == name


def _retries(flat: Flat) -> bool:
    return FailureAction.RETRY in (DEFAULT_FAILURE_POLICY | flat["failure_policy"]).values()


def _has_port(flat: Flat) -> bool:
    return bool(flat["engine"] != "embedded" or flat["backend"] != "local")


def _key_alone(flat: Flat) -> bool:
    """What is said to a server that is already up."""
    return flat["engine"] == "sglang" or (flat["engine"] == "external" and set(flat["sglang_options"]) <= {"api_key"})


_SETS = ("eval_prompt_data", "eval_config")
_PROMPTS = ("prompt_data", "data_source_path")
_ASK = ", unless rows or your code ask for that grader"
_BESIDE = "with --custom-generate-function-path, unless your function uses its tools"
_CONSTANT = "with --lr-decay-style constant"
_THEIRS = "with engines that are up already"
_MINE = "with --backend local, whose engine is in its process"

EFFECTS: tuple[Effect, ...] = (
    Effect("env_args", _any("env"), "without --env"),
    Effect(
        "env_key", lambda flat: isinstance(flat["env"], dict), "without several environments, --env NAME=PATH for each"
    ),
    Effect("env", _is("custom_generate_function_path", None), _BESIDE, False),
    Effect("group_rm", _any("custom_rm_path"), "without --custom-rm-path"),
    Effect("rm_url rm_timeout rm_concurrency", _graded_by("remote_rm"), f"without --rm-type remote_rm{_ASK}", False),
    Effect("judge_*", _graded_by("llm_judge"), f"without --rm-type llm_judge{_ASK}", False),
    Effect("code_*", _graded_by("code"), f"without --rm-type code{_ASK}", False),
    Effect("rollout_max_retries", _retries, "without a failure in --failure-policy that leads to retry"),
    Effect(
        "rollout_seed", _any("rollout_deterministic", "rollout_shuffle"), "with --no-rollout-deterministic alone", False
    ),
    Effect(
        "stale_groups",
        _any("max_staleness", "over_sampling_batch_size"),
        "without --max-staleness or --over-sampling-batch-size",
    ),
    Effect("eval_* n_samples_per_eval_prompt", _any(*_SETS), "without --eval-prompt-data NAME PATH to evaluate on"),
    Effect("rollout_shuffle num_epoch prompt_data_check", _any(*_PROMPTS), "without --prompt-data"),
    Effect(
        "input_key label_key metadata_key tool_key prompt_data_limit",
        _any(*_PROMPTS, *_SETS),
        "without --prompt-data or --eval-prompt-data",
        False,
    ),
    Effect(
        "apply_chat_template",
        _any("custom_generate_function_path", "data_source_path", "sft_turns"),
        "where an environment plays: it shows a text as the user's message anyway",
        False,
    ),
    Effect(
        "prompt_data num_epoch rollout_shuffle",
        _is("data_source_path", None),
        "with --data-source-path, unless your source reads it",
        False,
    ),
    Effect("use_kl_loss", _any("kl_loss_coef"), "on the loss with --kl-loss-coef 0: the KL is only measured", False),
    Effect("turn_credit_weight", _any("turn_credit_weight"), "at 0; --turn-credit none says the same"),
    Effect("opd_kl_coef", _any("opd_kl_coef"), "at 0, and the teacher is asked in vain; leave it out"),
    Effect("min_lr", _not("lr_decay_style", "constant"), _CONSTANT),
    Effect(
        "lr_decay_iters",
        lambda flat: flat["lr_decay_style"] != "constant" or flat["lr_warmup_fraction"] is not None,
        f"{_CONSTANT} and without --lr-warmup-fraction",
    ),
    Effect(
        "lr_warmup_init",
        _any("lr_warmup_iters", "lr_warmup_fraction", "critic_lr_warmup_iters"),
        "without --lr-warmup-iters or --lr-warmup-fraction",
    ),
    Effect(
        "fsdp_cpu_offload data_parallel_replicate_degree",
        _is("train_backend", "fsdp"),
        "without --train-backend fsdp",
    ),
    Effect(
        "*_parallel_size sequence_parallel use_distributed_optimizer optimizer muon_lr",
        _not("train_backend", "fsdp"),
        "with --train-backend fsdp, which shards by itself, for AdamW; --train-backend megatron reads it",
    ),
    Effect("lora_alpha target_modules", _any("lora_rank"), "without --lora-rank"),
    Effect("lr_wsd_*", _is("lr_decay_style", "WSD"), "without --lr-decay-style WSD"),
    Effect("seed", _any("lora_rank"), "on the trainer, which draws no random numbers, unless your code does", False),
    Effect("micro_batch_size", _is("use_dynamic_batch_size", False), "with --use-dynamic-batch-size"),
    Effect("rollout_external_engine_addrs", _is("engine", "external"), "with an --engine that is not external"),
    Effect("sglang_options", _key_alone, "without --engine sglang"),
    Effect("sglang_cpu engine_python", _is("engine", "sglang"), "without --engine sglang"),
    Effect("embedded_*", _is("engine", "embedded"), "without --engine embedded", False),
    Effect("engine_host engine_port_base", _has_port, _MINE),
    Effect(
        "router_middleware_paths",
        _any("custom_generate_function_path", "custom_rm_path", "data_source_path", "compat_options"),
        "without a function of slime's, which asks the run's router; agentrl router has the flag too",
        False,
    ),
    Effect(
        "engine_start_timeout engine_connect_timeout engine_hang_timeout engine_max_restarts", _has_port, _MINE, False
    ),
    Effect("engine_host engine_port_base", _not("engine", "external"), _THEIRS),
    Effect("engine_max_restarts engine_hang_timeout rollout_num_gpus*", _not("engine", "external"), _THEIRS, False),
    Effect("update_weight_buffer_size", _is("update_weight_mode", "broadcast"), "with --update-weight-mode disk"),
    Effect("load_debug_rollout_data_subsample", _any("load_debug_rollout_data"), "without --load-debug-rollout-data"),
    Effect("debug_rollout_only", _is("load_debug_rollout_data", None), "with --load-debug-rollout-data"),
    Effect("profile_*", _any("use_pytorch_profiler"), "without --use-pytorch-profiler"),
    Effect("tensorboard_dir", _any("use_tensorboard"), "with --no-use-tensorboard"),
    Effect("dump_details", _is("save_debug_rollout_data", None), "with --save-debug-rollout-data"),
    Effect("wandb_*", _any("use_wandb"), "without --use-wandb"),
)

_TRAINING = """algorithm.* train.* cluster.* allow_truncated_sampling - loss_type advantage_estimator use_opd opd_type
    hf_checkpoint rollout_num_gpus* start_timeout debug_rollout_only"""
_EVALUATION = "eval_* n_samples_per_eval_prompt"
_BATCHES = """num_rollout rollout_batch_size n_samples_per_prompt over_sampling_batch_size max_staleness stale_groups
    partial_rollout mask_* dynamic_sampling_filter_path prompt_data prompt_data_check rollout_shuffle num_epoch
    data_source_path buffer_filter_path ledger_keep log_interval use_tensorboard tensorboard_dir use_wandb wandb_*
    save_debug_rollout_data dump_details opd_teacher_url debug_rollout_only eval_interval eval_before_train"""
_PLAYING = """rollout.* rm_hub.* engine.* keep_trajectories update_weight* weight_sync_timeout rollout_num_gpus*
    colocate offload_* - num_rollout rollout_batch_size n_samples_per_prompt reward_key max_staleness rollout_temperature rollout_top_*
    allow_truncated_sampling rollout_max_response_len chat_template_path *_parser history_policy rollout_seed
    rollout_max_context_len"""


@cache
def matching(names: str) -> frozenset[str]:
    """The settings that `names` stand for: `room.*` is a room's, `x_*` a beginning; those after ` - ` are left out."""
    wanted, _, but = (part.split() for part in names.partition(" - "))
    known = [(name, f"{field.section}.{name}") for name, field in all_fields().items()]

    def found(patterns: list[str]) -> set[str]:
        return {name for name, full in known for p in patterns if fnmatchcase(full if "." in p else name, p)}

    return frozenset(found(wanted) - found(but))


def _unread(flat: Flat, purpose: str) -> tuple[frozenset[str], str]:
    """The settings that this kind of run does not read, and what it is called."""
    if purpose == "eval":
        return matching(_TRAINING) | matching(_BATCHES), "agentrl eval"
    if purpose == "rollout" or flat["debug_rollout_only"]:
        kind = "agentrl rollout" if purpose == "rollout" else "--debug-rollout-only"
        return matching(_TRAINING) | matching(_EVALUATION), kind
    if purpose == "train" and flat["load_debug_rollout_data"]:
        return matching(_PLAYING) | matching("data.* buffer.*"), "--load-debug-rollout-data"
    if purpose == "train" and flat["sft_turns"]:
        return matching(_PLAYING), "agentrl sft"
    return frozenset(), ""


def refused(flat: Flat, given: Collection[str], purpose: str) -> list[str]:
    """Sentences about settings that were given and can have no effect."""
    return list(_sentences(flat, given, purpose, certain=True))


def named(flat: Flat, given: Collection[str], purpose: str) -> list[str]:
    """Sentences about settings that were given and have no effect, which is nobody's mistake."""
    names, kind = _unread(flat, purpose)
    others = [all_fields()[name].flag for name in _differing(flat, given) if name in names]
    unread = [f"{kind} does not read {', '.join(others)}"] if others else []
    both = f"--num-rollout {flat['num_rollout']} and --num-epoch {flat['num_epoch']}: the run ends with whichever comes first"
    if flat["num_epoch"] and {"num_rollout", "num_epoch"} <= set(given) - names:
        unread.append(f"{both}; leave one of them out")
    certain = _sentences(flat, given, purpose, certain=True) if flat["slime_defaults"] else ()
    return [*unread, *certain, *_sentences(flat, given, purpose, certain=False)]


def _sentences(flat: Flat, given: Collection[str], purpose: str, *, certain: bool) -> Iterator[str]:
    unread, _ = _unread(flat, purpose)
    # Only training is ever in one process; what follows from other settings is not there.
    seen = {**flat, **({} if purpose == "train" else {"backend": "ray"})}
    if "save_debug_rollout_data" not in given:
        seen["save_debug_rollout_data"] = None
    for effect in EFFECTS:
        alike = [name for name in _differing(flat, given) if name in matching(effect.names) - unread]
        if alike and effect.certain == certain and not effect.when(seen):
            written = [text for name in alike for text in _written(all_fields()[name], flat[name])]
            has, it = ("has", "it") if len(written) == 1 else ("have", "them")
            leave = f"; leave {it} out" if certain and ";" not in effect.why else ""
            else_ = f"; leave {it} out otherwise" if ", unless" in effect.why else ""
            yield f"{', '.join(written)} {has} no effect {effect.why}{leave or else_}"


def _differing(flat: Flat, given: Collection[str]) -> list[str]:
    return [name for name, field in all_fields().items() if name in given and flat[name] != field.default]


def _written(field: FieldRef, value: Any) -> list[str]:
    """As on a command line."""
    if field.is_bool:
        return [field.flag if value else f"--no-{field.flag[2:]}"]
    if field.name == "sglang_options":
        return [f"--sglang-{name.replace('_', '-')}" for name in value]
    return [field.flag if field.is_mapping or field.is_sequence else f"{field.flag} {shown(value)}"]
