"""slime's `slime.rollout.sglang_rollout`: generation with the run's engines, for users' generate and rollout functions.
The run's own rollouts do not use this module. Functions are looked up in this module when they are called, so that a
test or a user can replace them."""

import asyncio
import inspect
import uuid
from collections.abc import Awaitable
from typing import Any, NoReturn

from agentrl.compat.calls import taken_by
from agentrl.compat.helpers import SingletonMeta, async_rm, batched_async_rm, load_function, load_tokenizer, post
from agentrl.compat.images import build_processor_kwargs, encode_image_for_rollout_engine, load_processor
from agentrl.compat.sample import SlimeSample
from agentrl.errors import PluginError

Generated = SlimeSample | list[SlimeSample]


class GenerateState(metaclass=SingletonMeta):
    """Shared tokenizer, sampling parameters and request limit of generation; one instance per process and run."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.processor: Any = load_processor(args.hf_checkpoint)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency * args.rollout_num_engines)
        same = ("temperature", "top_p", "top_k", "skip_special_tokens")
        self.sampling_params: dict[str, Any] = {name: getattr(args, f"rollout_{name}") for name in same}
        self.sampling_params |= {"no_stop_trim": True, "spaces_between_special_tokens": False}
        self.sampling_params |= {"stop": args.rollout_stop or None, "max_new_tokens": args.rollout_max_response_len}
        self.sampling_params["stop_token_ids"] = args.rollout_stop_token_ids or None
        self.aborted = False


async def generate(args: Any, sample: SlimeSample, sampling_params: dict[str, Any]) -> SlimeSample:
    """Generate an answer to the sample's prompt, or the rest of an answer."""
    state = GenerateState(args)
    if sample.status not in (SlimeSample.Status.PENDING, SlimeSample.Status.ABORTED):
        raise ValueError(f"a sample is generated when it is pending or aborted, this one is {sample.status.value}")
    params = {**sampling_params, "max_new_tokens": sampling_params["max_new_tokens"] - sample.response_length}
    if params["max_new_tokens"] <= 0:
        sample.status = SlimeSample.Status.TRUNCATED
        return sample
    if (images := (sample.multimodal_inputs or {}).get("images") or []) and not sample.tokens:
        made = state.processor(text=sample.prompt, **build_processor_kwargs(sample.multimodal_inputs))
        sample.tokens = made["input_ids"][0]
        pixels = {name: value for name, value in made.items() if name not in ("input_ids", "attention_mask")}
        sample.multimodal_train_inputs = sample.multimodal_train_inputs or pixels
    sample.tokens = list(sample.tokens) or state.tokenizer.encode(sample.prompt, add_special_tokens=False)
    payload = {"input_ids": sample.tokens, "sampling_params": params, "return_logprob": True}
    cut = all(one.get("top_p", 1) < 1 or one.get("top_k", -1) > 0 for one in (params, state.sampling_params))
    payload["return_sampling_mask"] = cut and not args.allow_truncated_sampling
    if images:
        payload["image_data"] = [encode_image_for_rollout_engine(image) for image in images]
    headers = {"X-SMG-Routing-Key": sample.session_id} if sample.session_id else None
    output = await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate", payload, headers=headers)
    meta = output["meta_info"]
    pairs = meta.get("output_token_logprobs") or []
    given: dict[str, Any] = {"tokens": [pair[1] for pair in pairs], "log_probs": [pair[0] for pair in pairs]}
    sample.append_response_tokens(args, **given, meta_info=meta, text=output["text"])
    return sample


async def generate_and_rm(
    args: Any, sample: SlimeSample, sampling_params: dict[str, Any], evaluation: bool = False
) -> Generated:
    """Generate with the sample's function, the run's, or `generate`; call the sample hooks; then reward it."""
    if args.partial_rollout and args.mask_offpolicy_in_partial_rollout and sample.response_length:
        sample.loss_mask = [0] * sample.response_length
    if sample.status in (SlimeSample.Status.COMPLETED, SlimeSample.Status.TRUNCATED):
        return sample
    state = GenerateState(args)
    async with state.semaphore:
        if state.aborted:
            sample.status = SlimeSample.Status.ABORTED
            return sample
        path = sample.generate_function_path or args.custom_generate_function_path
        function = load_function(path) if path else generate
        more = {"evaluation": evaluation} if "evaluation" in inspect.signature(function).parameters else {}
        found: Generated = await function(args, sample, sampling_params, **more)
    found = await apply_rollout_sample_hooks(args, found, evaluation=evaluation)
    members = found if isinstance(found, list) else [found]
    if args.group_rm or any(member.status is SlimeSample.Status.ABORTED for member in members):
        return found
    pending = [member for member in members if member.reward is None]
    if isinstance(found, list):
        rewards = await batched_async_rm(args, pending) if pending else []
    else:
        rewards = [await async_rm(args, member) for member in pending]
    for member, reward in zip(pending, rewards, strict=True):
        member.reward = reward
    return found


async def generate_and_rm_group(
    args: Any, group: list[SlimeSample], sampling_params: dict[str, Any], evaluation: bool = False
) -> list[Any]:
    """Generate and reward all samples of a group concurrently; with `group_rm` reward them together."""
    if (state := GenerateState(args)).aborted:
        return group
    for sample in group:
        sample.session_id = sample.session_id or str(uuid.uuid4())
    played = [generate_and_rm(args, sample, sampling_params.copy(), evaluation=evaluation) for sample in group]
    found: list[Any] = await asyncio.gather(*played)
    if args.group_rm and not state.aborted:
        for sample, reward in zip(found, await batched_async_rm(args, found), strict=True):
            sample.reward = reward
    return found


async def apply_rollout_sample_hooks(args: Any, value: Any, **kwargs: Any) -> Any:
    """Call the functions of `rollout_sample_hook_path` in turn with every sample. A returned sample replaces it."""
    if isinstance(value, list):
        return [await apply_rollout_sample_hooks(args, item, **kwargs) for item in value]
    kwargs.setdefault("rollout_id", getattr(args, "rollout_id", None))
    for path in getattr(args, "rollout_sample_hook_path", None) or ():
        hook = load_function(path)
        changed = hook(args, value, **taken_by(hook, kwargs))
        changed = await changed if isinstance(changed, Awaitable) else changed
        if changed is not None and not isinstance(changed, SlimeSample):
            raise PluginError(f"rollout_sample_hook_path {path} must return a Sample or None, got {changed!r:.80}")
        value = value if changed is None else changed
    return value


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Stand for the run's own rollouts. Users' functions call `generate_and_rm_group`. Raises PluginError: always."""
    raise PluginError("the run generates and evaluates itself; leave rollout_function_path or eval_function_path out")
