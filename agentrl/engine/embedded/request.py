"""The body of POST /generate, checked and unfolded into single sequences.

1. `parse_generate` raises `RequestError` with the status and body SGLang answers; it never lets an id through that the
   model cannot embed (the real server dies of those).
2. Unknown top-level fields are ignored. Fields that need what this engine has not (adapters, hidden states, images, ...)
   are refused.
3. What one request may ask for is bounded (`MAX_SEQUENCES` and the like): more is refused before anything is built.
4. A batch or `n > 1` answers with an array: batch order, the `n` samples of a prompt side by side. Sample i of n uses
   `sampling_seed + i`.
"""

import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import mul
from typing import TYPE_CHECKING, Any

import numpy as np

from agentrl.engine.embedded.errors import invalid_body, refused
from agentrl.engine.embedded.job import LogProbOptions
from agentrl.engine.embedded.model import Vocabulary
from agentrl.engine.embedded.params import SamplingParams

if TYPE_CHECKING:
    from agentrl.engine.embedded.grammar import Grammar

MAX_SEQUENCES, MAX_TOKENS, MAX_LOG_PROBS = 4096, 1 << 24, 1 << 22
"""Of one request: prompts times `n`; tokens of all these prompts; log-probs beside those of the sampled tokens."""

REFUSED_FIELDS = {
    "input_embeds": "input_embeds is not supported by the embedded engine: send input_ids or text.",
    "image_data": "The embedded engine serves text models only: image_data is not supported.",
    "video_data": "The embedded engine serves text models only: video_data is not supported.",
    "audio_data": "The embedded engine serves text models only: audio_data is not supported.",
    "custom_logit_processor": "The server is not configured to enable custom logit processors.",
    "session_params": "session_params is not supported by the embedded engine.",
    "sampling_logprobs_mode": "sampling_logprobs_mode is not supported by the embedded engine: it knows the default.",
    "return_hidden_states": (
        "The server is not configured to return hidden states. The embedded engine cannot: use a real SGLang server."
    ),
}


@dataclass(frozen=True)
class SequenceRequest:
    """One sequence to generate."""

    rid: str
    front_rid: str
    """What the client called it: `abort_request` names this one."""
    prompt: list[int]
    params: SamplingParams
    limit: int
    return_logprob: bool
    want: LogProbOptions
    grammar: "Grammar | None" = None


@dataclass(frozen=True)
class GenerateRequest:
    """A whole body: `sequences` in the order of the answer; `single` when the answer is one object."""

    sequences: list[SequenceRequest]
    single: bool
    stream: bool
    text_in_logprobs: bool
    prompt_ids_wanted: bool


def parse_generate(body: object, vocab: Vocabulary, context: int, adapter: str | None = None) -> GenerateRequest:
    """Check `body` (decoded JSON) against the model's vocabulary, context length and the name of its adapter."""
    if not isinstance(body, dict):
        raise invalid_body("dataclass_type", "Input should be a dictionary or an instance of GenerateReqInput")
    _refuse_unserved(body)
    _check_adapter(body.get("lora_path"), adapter)
    members, single = _prompts(body)
    count = len(members)
    at_most(MAX_SEQUENCES, count, "prompts")
    raw_params = _each(body, "sampling_params", count, dict, {})
    params = [SamplingParams.decode(one, vocab_size=vocab.size) for one in raw_params]
    copies = [max(1, one.n) for one in params]
    at_most(MAX_SEQUENCES, sum(copies), "sequences (prompts times n)")
    prompts = [_ids(member, vocab, context) for member in members]
    at_most(MAX_TOKENS, sum(map(mul, copies, map(len, prompts))), "prompt tokens times n")
    wants_logprob = _each(body, "return_logprob", count, bool, False)
    starts = _each(body, "logprob_start_len", count, int, -1)
    tops = _each(body, "top_logprobs_num", count, int, 0)
    watched = _each_ids(body, count, vocab.size)
    masks = _each(body, "return_sampling_mask", count, bool, False)
    routed = _routed_from(body, prompts)
    rids = _rids(body, count, single)
    sequences: list[SequenceRequest] = []
    log_probs = 0
    for i, prompt in enumerate(prompts):
        sampling = params[i]
        limit = output_limit(len(prompt), sampling.max_new_tokens, context)
        if masks[i] and not sampling.filtered:
            raise refused("return_sampling_mask requires top_k, top_p < 1 or min_p > 0: nothing is cut off otherwise.")
        want = LogProbOptions(kept=masks[i], routed_from=routed[i])
        if wants_logprob[i]:
            _check_start(starts[i], len(prompt))
            want = replace(want, prompt_from=starts[i], top=max(0, min(tops[i], vocab.size)), ids=watched[i])
            scored = limit + (len(prompt) - starts[i] if starts[i] >= 0 else 0)
            log_probs += copies[i] * scored * (want.top + len(want.ids))
            at_most(MAX_LOG_PROBS, log_probs, "log-probs of other tokens (positions times top_logprobs_num)")
        for k in range(copies[i]):
            rid = rids[i] if copies[i] == 1 else f"{rids[i]}-{k}"
            seed = sampling.sampling_seed
            own = sampling if seed is None else replace(sampling, sampling_seed=seed + k)
            sequences.append(SequenceRequest(rid, rids[i], prompt, own, limit, wants_logprob[i], want))
    return GenerateRequest(
        sequences,
        single=single and len(sequences) == 1,
        stream=bool(body.get("stream")),
        text_in_logprobs=bool(body.get("return_text_in_logprobs")),
        prompt_ids_wanted=bool(body.get("return_prompt_token_ids")),
    )


def output_limit(prompt_tokens: int, max_new_tokens: int | None, context: int) -> int:
    """How many tokens may be sampled behind the prompt; raises `RequestError` when they do not fit the context.

    Like the real server it keeps two positions free, so the last of an exactly full context is not sampled.
    """
    if prompt_tokens >= context:
        raise refused(
            f"The input ({prompt_tokens} tokens) is longer than the model's context length ({context} tokens)."
        )
    room = max(0, context - 2 - prompt_tokens)
    if max_new_tokens is None:
        return room
    if prompt_tokens + max_new_tokens > context:
        raise refused(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. You requested a "
            f"total of {prompt_tokens + max_new_tokens} tokens: {prompt_tokens} tokens from the input messages and "
            f"{max_new_tokens} tokens for the completion. Please reduce the number of tokens in the input messages or "
            "the completion to fit within the limit."
        )
    return min(max_new_tokens, room)


def at_most(limit: int, asked: int, what: str) -> None:
    if asked > limit:
        raise refused(f"a request may ask for {limit} {what}, this one asks for {asked}: send several requests.")


def check_ids(ids: object, size: int, *loc: str) -> list[int]:
    """A flat, non-empty list of ids that the model can embed."""
    if not isinstance(ids, list):
        raise invalid_body("list_type", "Input should be a valid list", *loc)
    if not ids:
        raise refused("input_ids cannot be empty.")
    try:
        array = np.asarray(ids)
    except (ValueError, OverflowError):
        array = np.asarray(ids, dtype=object)
    if array.ndim != 1 or array.dtype.kind != "i":
        wrong = next((i for i in ids if isinstance(i, bool) or not isinstance(i, int)), ids[0])
        message = f"Value error, elements must be int or list; got {type(wrong).__name__}"
        raise invalid_body("value_error", message, *loc)
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= size:
        raise refused(f"input_ids must be in [0, {size - 1}], got {low if low < 0 else high}.")
    return ids


def strings(value: object, *loc: str) -> list[str]:
    """The texts of a field that has one or a list."""
    members = [value] if isinstance(value, str) else value
    if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
        raise invalid_body("string_type", "Input should be a valid string", *loc)
    return members


def _refuse_unserved(body: Mapping[str, Any]) -> None:
    for name, message in REFUSED_FIELDS.items():
        if body.get(name):
            raise refused(message)


def _check_adapter(asked: object, there: str | None) -> None:
    if asked and there is None:
        raise refused(f"LoRA adapter {asked!r:.200} was requested, but none is loaded: POST /load_lora_adapter first.")
    if there is not None and asked != there:
        raise refused(f"the embedded engine has the adapter {there!r} and answers with no other: send it as lora_path.")


def _prompts(body: Mapping[str, Any]) -> tuple[list[Any], bool]:
    """The prompts as they came, and whether the body has one instead of a list."""
    ids, text = body.get("input_ids"), body.get("text")
    if ids is not None:
        if not isinstance(ids, list):
            raise invalid_body("list_type", "Input should be a valid list", "input_ids")
        if ids and isinstance(ids[0], list):
            return ids, False
        return [ids], True
    if text is None:
        raise refused("Either text, input_ids or input_embeds should be provided.")
    members = strings(text, "text")
    if not members:
        raise refused("text cannot be empty.")
    return members, isinstance(text, str)


def _ids(prompt: object, vocab: Vocabulary, context: int) -> list[int]:
    if isinstance(prompt, str):
        return check_ids(vocab.encode(prompt, context), vocab.size, "text")
    if isinstance(prompt, list):
        output_limit(len(prompt), 0, context)
    return check_ids(prompt, vocab.size, "input_ids")


def _each(body: Mapping[str, Any], name: str, count: int, kind: type, default: Any) -> list[Any]:
    """A field that may be one value for all or a list with one value each."""
    value = default if body.get(name) is None else body[name]
    members = _one_each(value if isinstance(value, list) else [value] * count, count, name)
    for member in members:
        if not isinstance(member, kind) or (kind is int and isinstance(member, bool)):
            label = {dict: "dictionary", bool: "boolean", int: "integer"}[kind]
            raise invalid_body(f"{kind.__name__}_type", f"Input should be a valid {label}", name)
    return members


def _one_each(members: list[Any], count: int, name: str) -> list[Any]:
    if len(members) != count:
        raise refused(f"The length of {name} ({len(members)}) does not match the number of prompts ({count}).")
    return members


def _each_ids(body: Mapping[str, Any], count: int, size: int) -> list[tuple[int, ...]]:
    name = "token_ids_logprob"
    value = body.get(name) or [[]] * count
    if not isinstance(value, list):
        raise invalid_body("list_type", "Input should be a valid list", name)
    members = _one_each(value if isinstance(value[0], list) else [value] * count, count, name)
    return [tuple(check_ids(member, size, name)) if member else () for member in members]


def _rids(body: Mapping[str, Any], count: int, single: bool) -> list[str]:
    rid = body.get("rid")
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{i}" for i in range(count)]
    members = strings(rid, "rid")
    if len(members) != count:
        raise refused("The specified rids length mismatch with the batch_size for batch processing.")
    doubled = sorted(member for member, times in Counter(members).items() if times > 1)
    if doubled:
        raise refused(f"Duplicate request IDs detected within the request: {doubled}")
    return members


def _routed_from(body: Mapping[str, Any], prompts: list[list[int]]) -> list[int | None]:
    """The first token of each prompt whose experts are wanted."""
    wanted = _each(body, "return_routed_experts", len(prompts), bool, False)
    starts = _each(body, "routed_experts_start_len", len(prompts), int, 0)
    for start, prompt in zip(starts, prompts, strict=True):
        if not 0 <= start <= len(prompt):
            raise refused(
                f"recv_req.routed_experts_start_len={start} is higher than the number of input tokens "
                f"len(req.origin_input_ids)={len(prompt)}. Please use a smaller routed_experts_start_len."
            )
    return [start if want else None for want, start in zip(wanted, starts, strict=True)]


def _check_start(start: int, prompt_tokens: int) -> None:
    if start > prompt_tokens:
        raise refused(
            f"req.logprob_start_len={start} is higher than the number of input tokens "
            f"len(req.origin_input_ids)={prompt_tokens}. Please use a smaller logprob_start_len."
        )
    if start < -1:
        raise refused(f"logprob_start_len must be -1 or at least 0, got {start}.")
