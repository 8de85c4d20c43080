"""Checks across rooms: what each room accepts by itself but a run cannot do together.

Each check is a pure function from the flat settings (and the model's shapes, where its config.json can be read) to
sentences; a sentence names the flags, shows the numbers, and proposes numbers that work. No sentence means fine.
"""

import math
import os.path
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from agentrl.algorithms.registry import algorithm_of, built_in
from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.config.model_info import ModelInfo, read_model_info
from agentrl.config.placement import ClusterSettings
from agentrl.settings import flag_of
from agentrl.train.settings import TrainSettings

Flat = Mapping[str, Any]
Check = Callable[[Flat, ModelInfo | None], Iterator[str]]


_CRITICS_PROCESSES = ("critic_num_nodes", "critic_num_gpus_per_node")
_CRITICS = ("critic_load", "critic_lr", "critic_lr_warmup_iters", "num_critic_only_steps", *_CRITICS_PROCESSES)
_PARTS = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")


def steps_and_batch(flat: Flat) -> tuple[int, int]:
    """The resolved (global_batch_size, num_steps_per_rollout): whichever is not given follows from the other.

    With neither given, one optimiser step trains on the whole rollout. A value that does not divide the rollout is
    rounded down here; `batch_arithmetic` is what reports it.
    """
    total = flat["rollout_batch_size"] * flat["n_samples_per_prompt"]
    batch, steps = flat["global_batch_size"], flat["num_steps_per_rollout"]
    if batch is None:
        return max(total // (steps or 1), 1), steps or 1
    return batch, steps or max(total // batch, 1)


def batch_arithmetic(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """rollout_batch_size x n_samples_per_prompt = global_batch_size x num_steps_per_rollout."""
    prompts, n = flat["rollout_batch_size"], flat["n_samples_per_prompt"]
    batch, steps, total = flat["global_batch_size"], flat["num_steps_per_rollout"], prompts * n
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
    yield f"{made}, but {used} does not use them up; set {_batch_proposal(prompts, n, batch, steps)}"


def _batch_proposal(prompts: int, n: int, batch: int, steps: int | None) -> str:
    total, wanted, ways = prompts * n, batch * (steps or 1), []
    if total % (steps or 1) == 0:
        ways.append(f"--global-batch-size {total // steps if steps else _nearest_divisor(total, batch)}")
    if wanted % n == 0:
        ways.append(f"--rollout-batch-size {wanted // n}")
    elif steps is None:
        groups = max(round(batch / n), 1)
        ways.append(f"--rollout-batch-size {groups} with --global-batch-size {groups * n}")
    if steps is not None and total % batch == 0:
        ways.append(f"--num-steps-per-rollout {total // batch}")
    return " or ".join(ways or [f"--num-steps-per-rollout 1 --global-batch-size {total}"])


def layout(flat: Flat, model: ModelInfo | None) -> Iterator[str]:
    """Trainer processes divide by TP x PP x CP, the model by TP and PP, and each data-parallel rank has a sample."""
    tensor, pipeline, context = (flat[part] for part in _PARTS)
    product = tensor * pipeline * context
    nodes, per_node = flat["actor_num_nodes"], flat["actor_num_gpus_per_node"]
    world = nodes * per_node
    if world % product:
        up, down = -(-world // product) * product, world // product * product
        fits = " or ".join(str(w) for w in (down, up) if w)
        yield (
            f"--actor-num-nodes {nodes} x --actor-num-gpus-per-node {per_node} = {world} trainer processes cannot hold "
            f"tensor {tensor} x pipeline {pipeline} x context {context} = {product} "
            f"model parts; use {fits} processes, or smaller parallel sizes"
        )
    if model:
        yield from _model_splits(model, tensor, pipeline)
    ranks, batch = world // product, steps_and_batch(flat)[0]
    if world % product == 0 and batch < ranks:
        yield (
            f"--global-batch-size {batch} gives {ranks} data-parallel ranks less than one sample each; "
            f"use at least {ranks}, or fewer trainer processes"
        )


def experts(flat: Flat, model: ModelInfo | None) -> Iterator[str]:
    """Expert parallelism needs experts, whose parts divide the processes and the experts; under TP, sequence parallelism."""
    parts, cut = flat["expert_model_parallel_size"], flat["expert_tensor_parallel_size"]
    tensor, pipeline, _ = (flat[part] for part in _PARTS)
    if model and not model.experts:
        for name, size in (("expert-model", parts), ("expert-tensor", cut or 1)):
            if size > 1:
                yield f"--{name}-parallel-size {size}: the model's config.json has no experts; leave it out"
        if flat["use_rollout_routing_replay"]:
            yield "--use-rollout-routing-replay: the model's config.json has no experts; leave it out"
        return
    world, product = flat["actor_num_nodes"] * flat["actor_num_gpus_per_node"], parts * (cut or tensor) * pipeline
    if (parts > 1 or cut) and world % product:
        yield (
            f"{world} trainer processes cannot hold experts in expert {parts} x expert tensor {cut or tensor} x pipeline "
            f"{pipeline} = {product} parts; change --expert-model-parallel-size or --expert-tensor-parallel-size"
        )
    if model and (model.experts or 1) % parts:
        sizes = ", ".join(map(str, _divisors(model.experts or 1)))
        yield f"--expert-model-parallel-size {parts} does not divide the {model.experts} experts; sizes that do: {sizes}"
    if model and tensor > 1 and not flat["sequence_parallel"]:
        yield f"--tensor-model-parallel-size {tensor} with a mixture of experts needs --sequence-parallel; set it"


def sharding(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """FSDP copies its shards evenly, and recomputes each layer or none."""
    copies, world = flat["data_parallel_replicate_degree"], flat["actor_num_nodes"] * flat["actor_num_gpus_per_node"]
    if world % copies:
        yield f"--data-parallel-replicate-degree {copies} does not divide the {world} trainer processes"
    asked = tuple(flat[f"recompute_{name}"] for name in ("granularity", "method", "num_layers"))
    if flat["train_backend"] == "fsdp" and asked[0] and asked != ("full", "uniform", 1):
        yield (
            "--train-backend fsdp recomputes each layer or none: set --recompute-granularity full --recompute-method uniform "
            "--recompute-num-layers 1, or --train-backend megatron"
        )


def critic(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """A critic's own processes divide by TP x PP x CP too, and each data-parallel rank of it has a sample."""
    own = ClusterSettings(**{name: flat[name] for name in ClusterSettings.model_fields}).critic_world_size
    product = math.prod(flat[part] for part in _PARTS)
    batch = steps_and_batch(flat)[0]
    if own % product:
        yield (
            f"--critic-num-nodes x --critic-num-gpus-per-node = {own} processes of the critic cannot hold its {product} "
            f"model parts, which are cut as the actor's; use a multiple of {product}, or smaller parallel sizes"
        )
    elif own // product > batch:
        yield (
            f"--global-batch-size {batch} gives {own // product} data-parallel ranks of the critic less than one sample "
            "each; use fewer --critic-num-gpus-per-node"
        )


def _model_splits(model: ModelInfo, tensor: int, pipeline: int) -> Iterator[str]:
    heads = (model.heads, "attention heads") if (model.heads or 0) % tensor else (model.kv_heads, "key-value heads")
    for part, size, count, what in (("tensor", tensor, *heads), ("pipeline", pipeline, model.layers, "layers")):
        if count and count % size:
            yield (
                f"--{part}-model-parallel-size {size} does not divide the model's {count} {what}; "
                f"sizes that do: {', '.join(map(str, _divisors(count)))}"
            )


def engines(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """Engines must share their devices evenly; taking turns on one set of devices needs enough of them."""
    total, each = flat["rollout_num_gpus"], flat["rollout_num_gpus_per_engine"]
    if total % each:
        fits = " or ".join(str(n) for n in (total // each * each, -(-total // each) * each) if n)
        yield (
            f"--rollout-num-gpus {total} is no multiple of --rollout-num-gpus-per-engine {each}; "
            f"use --rollout-num-gpus {fits}"
        )
    if each > 1 and flat["engine"] == "embedded":
        yield f"--rollout-num-gpus-per-engine {each}: the built-in engine uses one device; use 1, or --engine sglang"


def lengths(flat: Flat, model: ModelInfo | None) -> Iterator[str]:
    """Prompt and one answer must fit the context that the run and the model allow."""
    response, prompt = flat["rollout_max_response_len"], flat["rollout_max_prompt_len"]
    own, limit = flat["rollout_max_context_len"], model.context_length if model else None
    if own and limit and own > limit:
        yield f"--rollout-max-context-len {own} is more than the model's context of {limit} tokens"
    context = min(filter(None, (own, limit)), default=None)
    if context is None or response is None or (prompt or 1) + response <= context:
        return
    whose = f"--rollout-max-context-len {own}" if context == own else f"the model's context of {context} tokens"
    asked = f"--rollout-max-response-len {response}"
    if prompt:
        asked = f"--rollout-max-prompt-len {prompt} + {asked} = {prompt + response} tokens"
    room = context - (prompt or 1)
    fix = f"set --rollout-max-response-len to at most {room}" if room > 0 else f"prompts must be below {context} tokens"
    yield f"{asked} does not fit {whose}; {fix}"


def overlong(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """The lengths that cost reward must lie below the longest."""
    buffer, limit = flat["overlong_buffer_len"], flat["loss_max_length"]
    if buffer is not None and buffer > limit:
        yield (
            f"--overlong-buffer-len {buffer} is more than the {limit} tokens of --loss-max-length (by default "
            f"--rollout-max-response-len); use at most {limit}, a fifth of it is usual"
        )


def over_sampling(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """Over-sampling must not be under-sampling."""
    over, prompts = flat["over_sampling_batch_size"], flat["rollout_batch_size"]
    if over is not None and over < prompts:
        yield f"--over-sampling-batch-size {over} is below --rollout-batch-size {prompts}; use at least {prompts}"


def staleness(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """Weights that are sent seldom, and trajectories that go on after an update, make tokens older than allowed."""
    allowed, interval = flat["max_staleness"], flat["update_weights_interval"]
    if allowed < interval - 1:
        yield (
            f"--update-weights-interval {interval} trains on tokens up to {interval - 1} rollout(s) old, and "
            f"--max-staleness is {allowed}; use --max-staleness {interval - 1} or more, or send weights more often"
        )
    partial, masked = flat["partial_rollout"], flat["mask_offpolicy_in_partial_rollout"]
    if partial and not masked and allowed == 0:
        yield (
            "--partial-rollout goes on with trajectories that older weights began, and --max-staleness 0 trains no older "
            "token; use --max-staleness 1 or more, or --mask-offpolicy-in-partial-rollout"
        )
    if masked and not partial:
        yield "--mask-offpolicy-in-partial-rollout has no effect without --partial-rollout; set both or none"
    kept = flat["mask_staleness"]
    if kept is not None and (masked or kept >= allowed):
        none = f"--max-staleness {allowed} allows none that is staler"
        why = "--mask-offpolicy-in-partial-rollout masks them all" if masked else none
        yield f"--mask-staleness {kept} has no effect: {why}; leave it out"


def on_policy(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """What engine and trainer compute alike, and what they do not."""
    if not flat["true_on_policy_mode"]:
        return
    same = "engine and trainer do not compute the same to the bit"
    if flat["engine"] != "embedded":
        remedy = "use --engine embedded, or --ci-train-rollout-logprob-abs-diff-threshold alone"
        yield f"--true-on-policy-mode with --engine {flat['engine']}: {same}; {remedy}"
    if flat["max_staleness"] or flat["partial_rollout"]:
        yield "--true-on-policy-mode trains what the newest weights sampled; use --max-staleness 0 without --partial-rollout"
    if flat["rollout_top_p"] < 1 or flat["rollout_top_k"] > 0:
        yield f"--true-on-policy-mode: {same} where sampling is cut off; leave --rollout-top-p and --rollout-top-k out"
    for part in (_PARTS[0], _PARTS[2]):
        if flat[part] > 1:
            yield f"{flag_of(part)} above 1: {same} with --true-on-policy-mode; use 1"


def sharing_devices(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """Whoever takes turns has the devices of the other, and waits for it."""
    offloads = [flag_of(name) for name in ("offload_train", "offload_rollout") if flat[name]]
    if not flat["colocate"]:
        if offloads:
            yield (
                f"{', '.join(offloads)} without --colocate: trainer and engines have devices of their own, and nobody waits "
                "for that memory; leave it out, or set --colocate"
            )
        return
    if (allowed := flat["max_staleness"]) > 0:
        yield (
            f"--colocate with --max-staleness {allowed}: on shared devices nothing is generated while the trainer trains; "
            "leave one of them out"
        )
    trainers, devices = flat["actor_num_nodes"] * flat["actor_num_gpus_per_node"], flat["rollout_num_gpus"]
    if devices > trainers:
        yield (
            f"--colocate: the trainer has {trainers} devices, and --rollout-num-gpus is {devices}; use at most {trainers}, "
            "or leave it out"
        )


def adapters(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """What a run that trains adapters cannot do beside it."""
    if flat["lora_rank"] is None:
        return
    for name in ("only_train_params_name_list", "freeze_params_name_list"):
        if flat[name]:
            yield f"{flag_of(name)}: with --lora-rank adapters learn and nothing else; --target-modules says which layers have one"
    if flat["ref_update_interval"]:
        yield "--ref-update-interval: with --lora-rank the reference stays --ref-load's, or the model without its adapter; leave it out"
    if flat["optimizer"] == "muon":
        yield "--optimizer muon: adapters learn by adam; leave it out with --lora-rank"
    if (mode := flat["pause_generation_mode"]) != "abort" and flat["engine"] != "embedded":
        yield f"--pause-generation-mode {mode}: SGLang goes on with the adapter that a request began with; use abort"


def machines(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """What must lie on one machine fits onto it."""
    most = flat["num_gpus_per_node"]
    for name in ("actor_num_gpus_per_node", "critic_num_gpus_per_node", "rollout_num_gpus_per_engine"):
        if most is not None and (flat[name] or 0) > most:
            yield f"{flag_of(name)} {flat[name]} is more than --num-gpus-per-node {most}; use at most {most}"


def one_process(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """What `--backend local` cannot be: more than one trainer, more than one built-in engine, joined to Ray."""
    if flat["backend"] != "local":
        return
    trainers, devices = flat["actor_num_nodes"] * flat["actor_num_gpus_per_node"], flat["rollout_num_gpus"]
    if trainers > 1:
        yield f"--backend local has one trainer process, and {trainers} were asked for; use --backend ray"
    if flat["engine"] == "embedded" and devices > 1:
        yield f"--backend local has one built-in engine, and --rollout-num-gpus is {devices}; use --backend ray"
    for name in ("ray_address", "num_gpus_per_node", "reduce_to_fit", *_CRITICS_PROCESSES):
        if flat[name]:
            yield f"{flag_of(name)} has no effect with --backend local, which is one process; leave one of them out"
    threads = {flat["train_threads"], flat["embedded_threads"]} - {None}
    if len(threads) > 1:
        yield (
            f"--train-threads {flat['train_threads']} and --embedded-threads {flat['embedded_threads']}: with "
            "--backend local trainer and engine share one number of threads; set one of them"
        )


def teacher(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """One teacher, of the kind that was asked for, where the algorithm listens to one and only there."""
    algorithm = built_in(_algorithm_settings(flat))
    kinds = {"sglang": "opd_teacher_url", "megatron": "opd_teacher_load"}
    given = [kind for kind, name in kinds.items() if flat[name]]
    flags = " and ".join(flag_of(kinds[kind]) for kind in given)
    if algorithm and given and not algorithm.distills:
        remedy = "set --use-opd too, or leave it out" if "use_opd" in algorithm.takes else "leave it out"
        yield f"{flags}: {algorithm.name} listens to no teacher; {remedy}"
    elif len(given) > 1:
        yield f"{flags}: a teacher is asked over HTTP or held by the trainer; leave one of them out"
    elif flat["opd_type"] and given and given != [flat["opd_type"]]:
        yield f"--opd-type {flat['opd_type']} needs {flag_of(kinds[flat['opd_type']])}, not {flags}"
    if held := read_model_info(flat["opd_teacher_load"]):
        yield from (f"--opd-teacher-load: {s}" for s in _model_splits(held, flat[_PARTS[0]], flat[_PARTS[1]]))
    if given == ["sglang"] and flat["rollout_temperature"] != 1:
        yield (
            f"--rollout-temperature {flat['rollout_temperature']:g} with --opd-teacher-url: SGLang says log-probs of given "
            "tokens at temperature 1 only; use 1, or --opd-teacher-load, to whose logits the temperature is applied as well"
        )


def evaluation(flat: Flat, _: ModelInfo | None) -> Iterator[str]:
    """The sets are named in one place."""
    if flat["eval_config"] and flat["eval_prompt_data"]:
        yield "--eval-config and --eval-prompt-data both say what to evaluate on; leave one of them out"


CHECKS: tuple[Check, ...] = (
    evaluation,
    adapters,
    one_process,
    on_policy,
    sharing_devices,
    machines,
    batch_arithmetic,
    layout,
    sharding,
    experts,
    critic,
    engines,
    lengths,
    overlong,
    over_sampling,
    staleness,
    teacher,
)


def contradictions(flat: Flat, model: ModelInfo | None) -> list[str]:
    """Everything that cannot hold together."""
    return [problem for check in CHECKS for problem in check(flat, model)]


def missing(flat: Flat, purpose: str) -> Iterator[str]:
    """What `train`, `eval` or `rollout` needs and was not given."""
    checkpoint, data = flat["hf_checkpoint"], flat["prompt_data"]
    if not checkpoint:
        yield "--hf-checkpoint is missing: the folder of the model to start from (`agentrl init DIR` makes a tiny one)"
    elif not os.path.isdir(os.path.expanduser(checkpoint)):
        yield f"--hf-checkpoint {checkpoint}: no such folder{_on_the_hub(checkpoint, '')}"
    reached = flat["rollout_external_engine_addrs"] or flat["load_debug_rollout_data"]
    if flat["engine"] == "external" and not reached:
        yield "--engine external: give the engines' addresses by --rollout-external-engine-addrs HOST:PORT"
    if purpose == "eval":
        if not (flat["eval_prompt_data"] or flat["eval_config"]):
            yield "--eval-prompt-data NAME PATH is missing: the prompts to evaluate on (or --eval-config FILE)"
        return
    sources = ("prompt_data", "env", "data_source_path", "load_debug_rollout_data")
    if not any(flat[name] for name in sources):
        yield "no prompts: give --prompt-data FILE.jsonl, or --env pkg.mod:Name with an environment that makes its own"
    if data and not os.path.isfile(os.path.expanduser(data.partition("@[")[0])):
        hub = _on_the_hub(data, " --repo-type dataset")
        yield f"--prompt-data {data}: no such file; expected one .jsonl or .parquet file{hub}"


def _on_the_hub(name: str, kind: str) -> str:
    """What to do with a name of the Hugging Face Hub; nothing where it is none."""
    if not re.fullmatch(r"[\w-]+/[\w.-]+", name) or name.endswith((".jsonl", ".parquet")):
        return ""
    return f"; nothing is fetched from the Hub: `hf download {name}{kind} --local-dir DIR` fetches it into a folder"


def untrainable(flat: Flat) -> Iterator[str]:
    """What generates and evaluates well but cannot train, or would be asked for in vain."""
    if not flat["rollout_temperature"] or flat["rollout_top_k"] == 1:
        greedy = "--rollout-top-k 1" if flat["rollout_temperature"] else "--rollout-temperature 0"
        yield (
            f"{greedy}: the policy that is trained is the one that samples, and greedy choice has no "
            "probabilities to train; leave it out (--eval-temperature 0 evaluates greedily)"
        )
    truncated, allowed = flat["rollout_top_p"] < 1 or flat["rollout_top_k"] > 0, flat["allow_truncated_sampling"]
    if truncated and not allowed and flat["opd_teacher_url"]:
        yield (
            "--opd-teacher-url with --rollout-top-p or --rollout-top-k: such a teacher's log-probs are over the whole "
            "vocabulary, those of the student among what was kept of it; use --opd-teacher-load, or leave these out"
        )
    if allowed and not truncated:
        yield "--allow-truncated-sampling has no effect without --rollout-top-p or --rollout-top-k; leave it out"
    if "preferred_sampling_params" in {name.replace("-", "_") for name in flat["sglang_options"]}:
        yield (
            "--sglang-preferred-sampling-params: penalties and the like change what is sampled from, and the trainer would "
            "not know; leave it out"
        )
    algorithm = algorithm_of(_algorithm_settings(flat))
    if "teacher_log_probs" in algorithm.reads and not (flat["opd_teacher_url"] or flat["opd_teacher_load"]):
        yield f"{algorithm.name} needs a teacher here: give --opd-teacher-url or --opd-teacher-load"
    for name in ("ref_load", "ref_update_interval"):
        if flat[name] and "ref_log_probs" not in algorithm.reads:
            yield (
                f"{flag_of(name)} has no effect: {algorithm.name} reads no reference model; set --use-kl-loss or --kl-coef, "
                "or leave it out"
            )
    yield from _demonstrations(flat, algorithm.supervised)
    alone = flat["n_samples_per_prompt"] == 1 and flat["load_debug_rollout_data"] is None
    if alone and algorithm.compares_within_group and not algorithm.distills:
        otherwise = ", or --no-rewards-normalization" if "rewards_normalization" in algorithm.takes else ""
        yield (
            f"--n-samples-per-prompt 1: {algorithm.name} compares a trajectory with the others of its prompt, so that "
            f"one alone has advantage 0 and nothing is learned; use at least 2{otherwise}"
        )
    if "values" not in algorithm.reads:
        defaults = ClusterSettings.model_fields | TrainSettings.model_fields
        for name in _CRITICS:
            if flat[name] != defaults[name].default:
                yield f"{flag_of(name)} {flat[name]} has no effect with {algorithm.name}, which learns no critic; leave it out"
    elif (alone := flat["num_critic_only_steps"]) >= flat["num_rollout"]:
        yield f"--num-critic-only-steps {alone}: the actor would not learn in --num-rollout {flat['num_rollout']}; use fewer"


def _demonstrations(flat: Flat, supervised: bool) -> Iterator[str]:
    """Conversations have no log-probs and no rewards, and are learned once an epoch."""
    if flat["sft_turns"] is None:
        return
    given = f"--sft-turns {flat['sft_turns']}"
    if not supervised:
        yield f"{given}: conversations are learned by --loss-type sft_loss only; `agentrl sft` sets both"
    if flat["n_samples_per_prompt"] != 1:
        yield f"{given} with --n-samples-per-prompt {flat['n_samples_per_prompt']}: a conversation is one sample; use 1"
    for name in ("load_debug_rollout_data", "data_source_path", "eval_prompt_data", "eval_config"):
        if flat[name]:
            yield f"{given} with {flag_of(name)}: conversations come from --prompt-data; leave it out"


def _algorithm_settings(flat: Flat) -> AlgorithmSettings:
    return AlgorithmSettings(**{name: flat[name] for name in AlgorithmSettings.model_fields})


def _divisors(number: int) -> list[int]:
    """All of them up to 10^10; of larger numbers those with a part of at most 10^5, which are found as fast."""
    small = [d for d in range(1, min(math.isqrt(max(number, 0)), 100_000) + 1) if number % d == 0]
    return sorted({*small, *(number // d for d in small)})


def _nearest_divisor(number: int, wanted: int) -> int:
    return min(_divisors(number), key=lambda d: (abs(d - wanted), d))
