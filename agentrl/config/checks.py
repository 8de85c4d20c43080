"""Checks across sections: settings that each section accepts but a run cannot combine. Each check is a pure function
of the settings (and of the model's shapes, if its config.json can be read) that yields a sentence per problem. A
sentence names the flags, shows the numbers, and proposes numbers that work."""

import difflib
import math
import os.path
import re
from collections.abc import Callable, Iterator

from agentrl.algorithms.registry import algorithm_of, built_in
from agentrl.config.fields import Sections, all_fields
from agentrl.config.model_info import ModelInfo, read_model_info
from agentrl.errors import TrainError
from agentrl.files import read_table
from agentrl.media import ImageLimits
from agentrl.settings import Settings, flag_of
from agentrl.train.settings import PATTERNS, TrainSettings

Check = Callable[[Sections, ModelInfo | None], Iterator[str]]
# Options of SGLang that the launcher sets, and the settings that decide them.
_LAUNCHED = {"host": "engine_host", "port": "engine_port_base", "model": "hf_checkpoint", "model_path": "hf_checkpoint"}
_TEACHERS = {"sglang": "--opd-teacher-url", "megatron": "--opd-teacher-load", "self": "--opd-type self"}


def _given(section: Settings, name: str) -> int | None:
    """Return the number if it was given; None if it is a default."""
    return getattr(section, name) if name in section.model_fields_set else None


def steps_and_batch(s: Sections) -> tuple[int, int]:
    """Return the resolved (global_batch_size, num_steps_per_rollout). A value that is not given follows from the other.
    If both are not given, one optimizer step trains on the whole rollout. A quotient is rounded down here;
    `batch_arithmetic` reports values that do not divide the rollout."""
    total = s.rollout.rollout_batch_size * s.rollout.n_samples_per_prompt
    batch, steps = _given(s.train, "global_batch_size"), _given(s.train, "num_steps_per_rollout")
    if batch is None:
        return max(total // (steps or 1), 1), steps or 1
    return batch, steps or max(total // batch, 1)


def batch_arithmetic(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check that rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    prompts, n = s.rollout.rollout_batch_size, s.rollout.n_samples_per_prompt
    batch, steps, total = _given(s.train, "global_batch_size"), _given(s.train, "num_steps_per_rollout"), prompts * n
    made = f"--rollout-batch-size {prompts} x --n-samples-per-prompt {n} = {total} samples a rollout"
    if batch is None:
        if steps is not None and total % steps:
            divisor = _nearest_divisor(total, steps)
            yield f"{made}, which {steps} equal steps cannot share; set --num-steps-per-rollout {divisor}"
        return
    wanted = batch * (steps or 1)
    if total == wanted or (steps is None and total % batch == 0):
        return
    used = f"--global-batch-size {batch}" + (f" x --num-steps-per-rollout {steps} = {wanted}" if steps else "")
    ways = list[str]()
    if total % (steps or 1) == 0:
        ways.append(f"--global-batch-size {total // steps if steps else _nearest_divisor(total, batch)}")
    if wanted % n == 0:
        ways.append(f"--rollout-batch-size {wanted // n}")
    proposal = " or ".join(ways or [f"--num-steps-per-rollout 1 --global-batch-size {total}"])
    yield f"{made}, but {used} does not use them up; set {proposal}"


def layout(s: Sections, model: ModelInfo | None) -> Iterator[str]:
    """Check that TP x PP x CP divides actor and critic processes, and that each data-parallel rank has a sample."""
    tensor, pipeline = s.train.tensor_model_parallel_size, s.train.pipeline_model_parallel_size
    context, product, batch = s.train.context_parallel_size, s.train.model_parallel_size, steps_and_batch(s)[0]
    if model and s.train.train_backend != "fsdp":
        yield from _model_splits(model, s.train)
    for who, world in (("actor", s.cluster.world_size), ("critic", s.cluster.critic_world_size)):
        if world % product:
            yield (
                f"--{who}-num-nodes x --{who}-num-gpus-per-node = {world} processes of the {who} cannot hold tensor {tensor} x "
                f"pipeline {pipeline} x context {context} = {product} model parts; use {_multiples(world, product)} processes, "
                "or smaller parallel sizes"
            )
        elif (ranks := world // product) > batch:
            yield (
                f"--global-batch-size {batch} gives {ranks} data-parallel ranks of the {who} less than one sample each; "
                f"use at least {ranks}, or fewer processes"
            )


def _model_splits(model: ModelInfo, train: TrainSettings) -> Iterator[str]:
    tensor = train.tensor_model_parallel_size
    heads = (model.heads, "attention heads") if (model.heads or 0) % tensor else (model.kv_heads, "key-value heads")
    if heads[0] and heads[0] % tensor:
        said = f"--tensor-model-parallel-size {tensor} does not divide the model's {heads[0]} {heads[1]}"
        yield f"{said}; sizes that do: {', '.join(map(str, _divisors(heads[0])))}"
    try:
        train.stage_sizes(model.layers or train.pipeline_model_parallel_size)
    except TrainError as error:
        sizes = ", ".join(map(str, _divisors(model.layers or 1)))
        yield f"{error}; sizes that do: {sizes}" if not train.own_stages else str(error)


def experts(s: Sections, model: ModelInfo | None) -> Iterator[str]:
    """Check that expert layouts divide processes and experts, and that experts under TP have sequence parallelism."""
    train, parts, cut = s.train, s.train.expert_model_parallel_size, s.train.expert_tensor_parallel
    if model and not model.experts:
        for name in ("expert_model_parallel_size", "expert_tensor_parallel_size"):
            if (size := getattr(train, name) or 1) > 1:
                yield f"{flag_of(name)} {size}: the model's config.json has no experts; leave it out"
        if s.rollout.use_rollout_routing_replay:
            yield "--use-rollout-routing-replay: the model's config.json has no experts; leave it out"
        return
    if train.train_backend == "fsdp":
        return
    tensor, pipeline, world = train.tensor_model_parallel_size, train.pipeline_model_parallel_size, s.cluster.world_size
    if (parts > 1 or train.expert_tensor_parallel_size) and world % (product := parts * cut * pipeline):
        yield (
            f"{world} trainer processes are no multiple of expert {parts} x expert tensor {cut} x pipeline "
            f"{pipeline} = {product}; change --expert-model-parallel-size or --expert-tensor-parallel-size"
        )
    if model and (model.experts or 1) % parts:
        sizes = ", ".join(map(str, _divisors(model.experts or 1)))
        yield f"--expert-model-parallel-size {parts} does not divide the {model.experts} experts; sizes that do: {sizes}"
    if model and tensor > 1 and not train.sequence_parallel:
        yield f"--tensor-model-parallel-size {tensor} with a mixture of experts needs --sequence-parallel; set it"


def sharding(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check that FSDP's replicas divide the processes, and that it recomputes each layer or none."""
    copies, world, train = s.train.data_parallel_replicate_degree, s.cluster.world_size, s.train
    if world % copies:
        yield f"--data-parallel-replicate-degree {copies} does not divide the {world} trainer processes"
    asked = (train.recompute_granularity, train.recompute_method, train.recompute_num_layers)
    if train.train_backend == "fsdp" and asked[0] and asked != ("full", "uniform", 1):
        yield (
            "--train-backend fsdp recomputes each layer or none: set --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1, or --train-backend megatron"
        )


def engines(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check that the engines share the devices evenly, that the built-in engine has one device, and options of SGLang."""
    total, each = s.cluster.rollout_num_gpus, s.cluster.rollout_num_gpus_per_engine
    if total % each:
        said = f"--rollout-num-gpus {total} is no multiple of --rollout-num-gpus-per-engine {each}"
        yield f"{said}; use --rollout-num-gpus {_multiples(total, each)}"
    if each > 1 and s.engine.engine == "embedded":
        yield f"--rollout-num-gpus-per-engine {each}: the built-in engine uses one device; use 1, or --engine sglang"
    limits, flat = ImageLimits(), s.flat()
    mosts = {"image_max_pixels": limits.pixels, "image_max_bytes": limits.file_bytes, "image_max_count": limits.count}
    for name, most in mosts.items():
        if s.engine.engine == "embedded" and flat[name] > most:
            yield f"{flag_of(name)} {flat[name]}: the built-in engine takes at most {most}; lower it, or use --engine sglang"
    options = {name.replace("-", "_") for name in s.engine.sglang_options} if s.engine.engine == "sglang" else ()
    for name in sorted(_LAUNCHED.keys() & options):
        yield f"{flag_of(f'sglang_{name}')}: a run gives its engines this option itself; use {flag_of(_LAUNCHED[name])}"
    if (nodes := s.cluster.nodes_per_engine) > 1 and each % nodes:
        yield (
            f"--rollout-num-gpus-per-engine {each}: {nodes} machines of --num-gpus-per-node {s.cluster.num_gpus_per_node} "
            f"do not share it evenly; use a multiple of {nodes}"
        )


def engine_groups(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check that the run can have its engine groups, and can evaluate while it trains."""
    started, evaluates = s.engine.started_groups, "eval" in s.engine.engine_groups
    if started and (s.cluster.colocate or s.engine.engine in ("external", "openai")):
        why = "--colocate" if s.cluster.colocate else f"--engine {s.engine.engine}"
        yield f"--engine-groups {next(iter(started))}: not with {why}; start the engines yourself, and give their addresses"
    if s.engine.engine_groups and s.engine.engine == "openai":
        yield "--engine-groups: a hosted model has no token ids to share with them; leave it out"
    for flag, given in {"--colocate": s.cluster.colocate, "--rollout-workers": s.cluster.rollout_workers > 1}.items():
        if evaluates and given:
            yield f"--engine-groups eval with {flag}: not supported; leave one of them out"
    if s.rollout.eval_while_training and any(map(s.compat.compat_options.get, _SLIMES)):
        yield "--eval-while-training: slime's functions know one rollout id at a time; leave out the flag or the functions"
    if s.rollout.eval_while_training and not evaluates:
        yield "--eval-while-training: evaluation needs engines of its own; give --engine-groups eval=1, or leave it out"


def lengths(s: Sections, model: ModelInfo | None) -> Iterator[str]:
    """Check that prompt and answer fit the context, and that the overlong buffer fits the longest answer."""
    buffer, longest = s.algorithm.overlong_buffer_len, s.algorithm.loss_max_length
    if buffer is not None and longest is not None and buffer > longest:
        yield (
            f"--overlong-buffer-len {buffer} is more than the {longest} tokens of --loss-max-length (by default "
            f"--rollout-max-response-len); use at most {longest}, a fifth of it is usual"
        )
    response, prompt = _given(s.rollout, "rollout_max_response_len"), s.rollout.rollout_max_prompt_len
    own, limit = s.rollout.rollout_max_context_len, model.context_length if model else None
    if own and limit and own > limit:
        yield f"--rollout-max-context-len {own} is more than the model's context of {limit} tokens"
    context = min(filter(None, (own, limit)), default=None)
    if context is None or response is None or (prompt or 1) + response <= context:
        return
    whose = f"--rollout-max-context-len {own}" if context == own else f"the model's context of {context} tokens"
    asked, room = f"--rollout-max-response-len {response}", context - (prompt or 1)
    if prompt:
        asked = f"--rollout-max-prompt-len {prompt} + {asked} = {prompt + response} tokens"
    fix = f"set --rollout-max-response-len to at most {room}" if room > 0 else f"prompts must be below {context} tokens"
    yield f"{asked} does not fit {whose}; {fix}"


def prompts(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check that over-sampling is not below the batch size, and that only one setting names evaluation sets."""
    over, wanted = s.rollout.over_sampling_batch_size, s.rollout.rollout_batch_size
    if over is not None and over < wanted:
        yield f"--over-sampling-batch-size {over} is below --rollout-batch-size {wanted}; use at least {wanted}"
    if s.rollout.eval_config and s.rollout.eval_prompt_data:
        yield "--eval-config and --eval-prompt-data both say what to evaluate on; leave one of them out"


def staleness(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check that rare weight updates and partial rollouts do not make tokens older than allowed."""
    allowed, interval = s.rollout.max_staleness, s.cluster.update_weights_interval
    if allowed < interval - 1:
        yield (
            f"--update-weights-interval {interval} trains on tokens up to {interval - 1} rollout(s) old, and "
            f"--max-staleness is {allowed}; use --max-staleness {interval - 1} or more, or send weights more often"
        )
    masked, kept = s.rollout.mask_offpolicy_in_partial_rollout, s.rollout.max_token_staleness
    if s.rollout.partial_rollout and not masked and allowed == 0:
        yield (
            "--partial-rollout goes on with trajectories that older weights began, and --max-staleness 0 trains no older "
            "token; use --max-staleness 1 or more, or --mask-offpolicy-in-partial-rollout"
        )
    if masked and not s.rollout.partial_rollout:
        yield "--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout; set both or none"
    if kept is not None and (masked or kept >= allowed):
        why = f"--max-staleness {allowed} allows no older token"
        why = "--mask-offpolicy-in-partial-rollout masks all older tokens" if masked else why
        yield f"--max-token-staleness {kept} has no effect: {why}; leave it out"


def on_policy(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check that engine and trainer compute the same log-probs."""
    if not s.train.true_on_policy_mode:
        return
    same = "engine and trainer do not compute the same to the bit"
    remedy = "use --engine embedded, or --ci-train-rollout-logprob-abs-diff-threshold alone"
    if s.engine.engine != "embedded":
        yield f"--true-on-policy-mode with --engine {s.engine.engine}: {same}; {remedy}"
    if s.rollout.max_staleness or s.rollout.partial_rollout:
        yield "--true-on-policy-mode trains what the newest weights sampled; use --max-staleness 0 without --partial-rollout"
    if s.rollout.rollout_top_p < 1 or s.rollout.rollout_top_k > 0:
        yield f"--true-on-policy-mode: {same} with truncated sampling; leave --rollout-top-p and --rollout-top-k out"
    for part in ("tensor_model_parallel_size", "context_parallel_size"):
        if getattr(s.train, part) > 1:
            yield f"{flag_of(part)} above 1: {same} with --true-on-policy-mode; use 1"


def devices(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check colocation, weight updates by ipc, and the number of devices per machine."""
    allowed, trainers, wanted = s.rollout.max_staleness, s.cluster.world_size, s.cluster.rollout_num_gpus
    if s.cluster.colocate and allowed > 0:
        said = f"--colocate with --max-staleness {allowed}:"
        yield f"{said} on shared devices nothing is generated while the trainer trains; leave one of them out"
    if s.cluster.colocate and wanted > trainers:
        said = f"--colocate: the trainer has {trainers} devices, and --rollout-num-gpus is {wanted}"
        yield f"{said}; use at most {trainers}, or leave it out"
    if s.cluster.update_weight_mode == "ipc" and not (s.cluster.colocate and s.engine.engine == "sglang"):
        said = "--update-weight-mode ipc: trainer processes share their memory with SGLang on the same devices"
        yield f"{said}; use --engine sglang --colocate, or leave it out"
    stages = {"pp_size", "pipeline_parallel_size"} & {name.replace("-", "_") for name in s.engine.sglang_options}
    if s.cluster.update_weight_mode == "ipc" and stages:
        yield f"--update-weight-mode ipc: SGLang supports it with one pipeline stage only; leave {flag_of(f'sglang_{min(stages)}')} out"
    most = s.cluster.num_gpus_per_node
    for name in ("actor_num_gpus_per_node", "critic_num_gpus_per_node"):
        if most is not None and (asked := getattr(s.cluster, name) or 0) > most:
            yield f"{flag_of(name)} {asked} is more than --num-gpus-per-node {most}; use at most {most}"


def adapters(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check for settings that a run with LoRA adapters does not support."""
    if s.train.lora_rank is None:
        return
    for name in PATTERNS:
        if getattr(s.train, name):
            yield f"{flag_of(name)}: with --lora-rank adapters learn and nothing else; --target-modules says which layers have one"
    if s.train.ref_update_interval:
        yield "--ref-update-interval: with --lora-rank the reference is fixed (--ref-load, or the model without its adapter); leave it out"
    if s.train.optimizer == "muon":
        yield "--optimizer muon: adapters learn by adam; leave it out with --lora-rank"
    if (mode := s.engine.pause_generation_mode) != "abort" and s.engine.engine != "embedded":
        yield f"--pause-generation-mode {mode}: SGLang goes on with the adapter that a request began with; use abort"


def one_process(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check for what `--backend local` lacks: a second trainer, engine or worker, or two numbers of threads."""
    if s.cluster.backend != "local":
        return
    if (trainers := s.cluster.world_size) > 1:
        yield f"--backend local has one trainer process, and {trainers} were asked for; use --backend ray"
    if s.engine.engine == "embedded" and (wanted := s.cluster.rollout_num_gpus) > 1:
        yield f"--backend local has one built-in engine, and --rollout-num-gpus is {wanted}; use --backend ray"
    if s.cluster.rollout_workers > 1:
        yield "--backend local generates in its own process; use --backend ray for --rollout-workers above 1"
    threads = s.train.train_threads, s.engine.embedded_threads
    if len({*threads} - {None}) > 1:
        yield (
            "--train-threads {} and --embedded-threads {}: with --backend local trainer and engine share one number of "
            "threads; set one of them".format(*threads)
        )


def teacher(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check that the run has at most one teacher, of the requested kind, and that its algorithm uses a teacher."""
    algorithm, asked = built_in(s.algorithm), s.algorithm.opd_type
    kinds = zip(_TEACHERS, (s.rollout.opd_teacher_url, s.train.opd_teacher_load, asked == "self"), strict=True)
    given = [kind for kind, value in kinds if value]
    flags = " and ".join(_TEACHERS[kind] for kind in given)
    if algorithm and given and not algorithm.distills:
        remedy = "set --use-opd too, or leave it out" if "use_opd" in algorithm.takes else "leave it out"
        yield f"{flags}: {algorithm.name} uses no teacher; {remedy}"
    elif len(given) > 1:
        yield f"{flags}: a run has one teacher; leave one of them out"
    elif asked and given and given != [asked]:
        yield f"--opd-type {asked} needs {_TEACHERS[asked]}, not {flags}"
    if held := read_model_info(s.train.opd_teacher_load):
        yield from (f"--opd-teacher-load: {said}" for said in _model_splits(held, s.train))
    key = s.rollout.opd_privileged_key
    if given == ["self"] and key is None:
        yield "--opd-type self: the teacher must see more than the student; name that entry with --opd-privileged-key"
    if key is not None and given not in (["self"], ["sglang"]):
        yield f"--opd-privileged-key {key}: only --opd-type self and --opd-teacher-url show it to a teacher; set one of them"
    if "{text}" not in s.rollout.opd_privileged_prompt:
        yield "--opd-privileged-prompt must hold {text}, where the entry of --opd-privileged-key goes"
    if given in (["sglang"], ["self"]) and (temperature := s.rollout.rollout_temperature) != 1:
        yield (
            f"--rollout-temperature {temperature:g} with {flags}: SGLang scores given tokens "
            "at temperature 1 only; use 1, or --opd-teacher-load, which applies the temperature"
        )


def hosts(s: Sections) -> bool:
    """Return true if a hosted model generates. A run on conversations or dumps needs no such model."""
    return s.data.sft_turns is None and s.cluster.load_debug_rollout_data is None and s.engine.engine == "openai"


UNTRAINABLE = (
    "--engine openai: RL trains on token ids and their log-probs, and a hosted model gives neither; collect demonstrations "
    "with `agentrl rollout` and learn them with `agentrl sft`, or train with --engine embedded, sglang or external"
)
_NOT_HOSTED = read_table(__file__, "hosted.tsv")
"""Settings that a hosted model cannot follow, and why."""
_SLIMES = ("rollout_function_path", "eval_function_path")


def hosted(s: Sections, _: ModelInfo | None) -> Iterator[str]:
    """Check for settings that a hosted model's API does not support."""
    if not hosts(s):
        return
    flat, known = s.flat(), all_fields()
    for names, why in _NOT_HOSTED:
        for name in names.split():
            if flat[name] not in (known[name].default, -1):  # -1: no top-k
                yield f"{flag_of(name)} with --engine openai: {why}; leave it out"
    for name in filter(s.compat.compat_options.get, _SLIMES):
        yield f"{name} with --engine openai: it needs token ids, and a hosted model gives none; leave it out"
    if s.cluster.rollout_workers > 1:
        yield "--rollout-workers with --engine openai: one process only uses a hosted model; leave it out"


CHECKS: tuple[Check, ...] = (
    hosted, prompts, adapters, one_process, on_policy, devices, batch_arithmetic, layout, sharding, experts, engines,
    engine_groups, lengths, staleness, teacher,
)  # fmt: skip
_TRAINERS: tuple[Check, ...] = (batch_arithmetic, layout, sharding, experts)  # checks for runs with a trainer


def contradictions(s: Sections, model: ModelInfo | None) -> list[str]:
    """Return a sentence for each contradiction between settings."""
    own = None if hosts(s) else model  # a hosted model has other shapes
    left_out = _TRAINERS if s.cluster.debug_rollout_only else ()
    return [problem for check in CHECKS if check not in left_out for problem in check(s, own)]


def missing(s: Sections, purpose: str) -> Iterator[str]:
    """Name the settings that `train`, `eval` or `rollout` needs and that were not given."""
    data, dump = s.data.prompt_data, s.cluster.load_debug_rollout_data
    if hosts(s) and purpose == "train":
        yield UNTRAINABLE
    elif hosts(s):
        engine = s.engine
        if not engine.base_url:
            yield "--engine openai: give the server's address by --base-url, for example https://api.openai.com/v1"
        if not engine.hosted_model:
            yield "--engine openai: name the server's model by --hosted-model"
        if "hosted_api_key_env" in engine.model_fields_set and not engine.api_key:
            yield f"--hosted-api-key-env {engine.hosted_api_key_env}: no such environment variable is set"
    elif not s.train.hf_checkpoint:
        yield "--hf-checkpoint is missing: the folder of the model to start from (`agentrl init DIR` makes a tiny one)"
    if s.engine.engine == "external" and not (s.engine.rollout_external_engine_addrs or dump):
        yield "--engine external: give the engines' addresses by --rollout-external-engine-addrs HOST:PORT"
    if purpose == "eval" and not s.rollout.evaluates:
        yield "--eval-prompt-data NAME PATH is missing: the prompts to evaluate on (or --eval-config FILE)"
    if purpose != "eval" and not (data or s.rollout.env or s.data.data_source_path or dump):
        yield "no prompts: give --prompt-data FILE.jsonl, or --env pkg.mod:Name with an environment that makes its own"


def absent(s: Sections, purpose: str) -> Iterator[str]:
    """Name the model's folder and the file of prompts if they are given but do not exist."""
    checkpoint, data = s.train.hf_checkpoint, s.data.prompt_data
    if checkpoint and not hosts(s) and not os.path.isdir(checkpoint):
        yield f"--hf-checkpoint {checkpoint}: no such folder{_elsewhere(checkpoint, '')}"
    if purpose != "eval" and data and not os.path.isfile(os.path.expanduser(data.partition("@[")[0])):
        yield f"--prompt-data {data}: no such file; expected one .jsonl or .parquet file{_elsewhere(data, ' --data')}"


def _elsewhere(name: str, kind: str) -> str:
    """Return a hint for a missing path: similar names, or the command that fetches it from the Hugging Face Hub."""
    folder, last = os.path.split(os.path.expanduser(name))
    if os.path.isdir(folder or "."):
        close = difflib.get_close_matches(last, sorted(os.listdir(folder or ".")), 2)
        if near := " or ".join(os.path.join(folder, one) for one in close):
            return f"; did you mean {near}?"
        if folder:
            return f"; {folder} has no {last}"
    if not re.fullmatch(r"[\w-]+/[\w.-]+", name) or name.endswith((".jsonl", ".parquet")):
        return ""
    return f"; a run downloads nothing; if this is a name on the Hub, use `agentrl fetch {name} DIR{kind}`"


def untrainable(s: Sections) -> Iterator[str]:
    """Name settings that work in generation and evaluation, but that cannot train or would have no effect."""
    if not s.rollout.rollout_temperature or s.rollout.rollout_top_k == 1:
        greedy = "--rollout-top-k 1" if s.rollout.rollout_temperature else "--rollout-temperature 0"
        yield (
            f"{greedy}: the policy that is trained is the one that samples, and greedy choice has no "
            "probabilities to train; leave it out (--eval-temperature 0 evaluates greedily)"
        )
    itself = s.algorithm.opd_type == "self"
    if s.rollout.replays_truncation and (itself or s.rollout.opd_teacher_url):
        yield (
            f"{_TEACHERS['self' if itself else 'sglang']} with --rollout-top-p or --rollout-top-k: such a teacher's log-probs "
            "are over the whole vocabulary, the student's over the tokens that sampling kept; use --opd-teacher-load, or leave top-p and top-k out"
        )
    if "preferred_sampling_params" in {name.replace("-", "_") for name in s.engine.sglang_options}:
        said = "--sglang-preferred-sampling-params: penalties and the like change what is sampled from,"
        yield f"{said} and the trainer would not know; leave it out"
    algorithm, kind, unbiased = algorithm_of(s.algorithm), s.algorithm.kl_loss_type, s.algorithm.use_unbiased_kl
    if s.algorithm.kl_loss_coef and "kl_loss_type" in algorithm.takes:
        if kind == "k1" and not unbiased:
            yield (
                "--kl-loss-coef with --kl-loss-type k1: the expected gradient of k1 is zero, so that nothing holds the policy "
                "near the reference; use --kl-loss-type low_var_kl, or add --use-unbiased-kl"
            )
        if kind == "k2" and unbiased:
            said = "--use-unbiased-kl with --kl-loss-type k2: k2's gradient is already unbiased,"
            yield f"{said} and the ratio would bias it; leave one of them out"
    if "teacher_log_probs" in algorithm.reads and not (itself or s.rollout.opd_teacher_url or s.train.opd_teacher_load):
        yield f"{algorithm.name} needs a teacher here: give {' or '.join(_TEACHERS.values())}"
    yield from _demonstrations(s, algorithm.supervised)
    alone = s.rollout.n_samples_per_prompt == 1 and s.cluster.load_debug_rollout_data is None
    if alone and algorithm.compares_within_group and not algorithm.distills:
        otherwise = ", or --no-rewards-normalization" if "rewards_normalization" in algorithm.takes else ""
        said = f"--n-samples-per-prompt 1: {algorithm.name} compares a trajectory with the others of its prompt,"
        yield f"{said} so that one alone has advantage 0 and nothing is learned; use at least 2{otherwise}"
    critic, rollouts = s.train.num_critic_only_steps, s.rollout.num_rollout
    if "values" in algorithm.reads and critic >= rollouts:
        yield f"--num-critic-only-steps {critic}: the actor would not learn in --num-rollout {rollouts}; use fewer"


def _demonstrations(s: Sections, supervised: bool) -> Iterator[str]:
    """Check an SFT run: conversations have no log-probs or rewards, and one sample each."""
    if s.data.sft_turns is None:
        return
    given, flat = f"--sft-turns {s.data.sft_turns}", s.flat()
    if not supervised:
        yield f"{given}: conversations are learned by --loss-type sft_loss only; `agentrl sft` sets both"
    if (n := s.rollout.n_samples_per_prompt) != 1:
        yield f"{given} with --n-samples-per-prompt {n}: a conversation is one sample; use 1"
    for name in ("load_debug_rollout_data", "data_source_path", "eval_prompt_data", "eval_config"):
        if flat[name]:
            yield f"{given} with {flag_of(name)}: conversations come from --prompt-data; leave it out"


def _multiples(number: int, of: int) -> str:
    """Return the nearest multiples below and above a number, in words."""
    return " or ".join(str(n) for n in (number // of * of, -(-number // of) * of) if n)


def _divisors(number: int) -> list[int]:
    """Return all divisors of a number up to 10^10; of a larger number only pairs with a divisor up to 10^5."""
    small = [d for d in range(1, min(math.isqrt(max(number, 0)), 100_000) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(_divisors(number), key=lambda d: (abs(d - wanted), d))
