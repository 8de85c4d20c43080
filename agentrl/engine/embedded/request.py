"""The body of POST /generate, checked and expanded into jobs.

1. `parse_generate` raises `RequestError` with SGLang's status and body. Ids that the model cannot embed are refused.
2. Unknown top-level fields are ignored; fields in `UNSERVED` are refused. The `MAX_*` constants limit a request.
3. A batch or `n > 1` returns an array in batch order. Sample i of n uses `sampling_seed + i`."""

import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from operator import mul
from typing import Annotated, Any

from pydantic import BaseModel, FailFast, Field, Strict, TypeAdapter, ValidationError

from agentrl.engine.embedded.images import ImageReader, PromptImages
from agentrl.engine.embedded.model import Vocabulary
from agentrl.engine.embedded.sequence import SequenceState, Wanted
from agentrl.engine.embedded.stopping import StopRules
from agentrl.engine.request_sampling import RequestSampling
from agentrl.serving.http import fields_of, invalid_body, refused

MAX_SEQUENCES, MAX_TOKENS, MAX_LOG_PROBS = 4096, 1 << 24, 1 << 22
"""Limits of one request: prompts times `n`; tokens of all these prompts; log-probs of tokens that were not sampled."""

UNSERVED = "input_embeds video_data audio_data custom_logit_processor session_params sampling_logprobs_mode"
UNSERVED += " return_hidden_states"
_IDS = TypeAdapter(Annotated[list[Annotated[int, Strict()]], FailFast()])


class GenerateBody(BaseModel):
    """The fields of a whole body."""

    input_ids: list[Any] | None = None
    text: Any = None
    image_data: Any = None
    image_spans: Any = None
    rid: Any = None
    lora_path: Any = None
    return_text_in_logprobs: bool = False
    return_prompt_token_ids: bool = False
    stream: bool = False


class PromptBody(Wanted):
    """The fields that a body has once for all prompts, or as a list with an entry for each prompt."""

    sampling_params: dict[str, Any] = Field(default_factory=dict)


@dataclass(frozen=True)
class GenerateRequest:
    """A checked body with its jobs."""

    body: GenerateBody
    jobs: list[SequenceState]  # in the order of the answer
    rids: list[str]  # the client's names of its prompts, for `abort_request`
    single: bool  # the answer is one object


def parse_generate(
    raw: object, vocab: Vocabulary, context: int, adapter: str | None = None, reader: ImageReader | None = None
) -> GenerateRequest:
    """Check `raw` (decoded JSON) against vocabulary, context length and adapter name. `reader` reads images, if any."""
    if not isinstance(raw, dict):
        raise invalid_body("dataclass_type", "Input should be a dictionary or an instance of GenerateReqInput")
    if asked := [name for name in UNSERVED.split() if raw.get(name)]:
        raise refused(f"{asked[0]} is not supported by the embedded engine: use a real SGLang server for it.")
    body = fields_of(GenerateBody, raw)
    _check_adapter(body.lora_path, adapter)
    members, single = _prompts(body)
    at_most(MAX_SEQUENCES, len(members), "prompts")
    bodies = _prompt_bodies(raw, len(members))
    sampling = [RequestSampling.decode(own.sampling_params, vocab_size=vocab.size) for own in bodies]
    copies = [max(1, params.n) for params in sampling]
    at_most(MAX_SEQUENCES, sum(copies), "sequences (prompts times n)")
    prompts, images = _with_images(body, [_ids(member, vocab, context) for member in members], single, reader)
    at_most(MAX_TOKENS, sum(map(mul, copies, map(len, prompts))), "prompt tokens times n")
    rids = _rids(body.rid, len(members), single)
    jobs: list[SequenceState] = []
    decode, log_probs = None if vocab.tokenizer is None else vocab.decode, 0
    for prompt, seen, params, own, count, rid in zip(prompts, images, sampling, bodies, copies, rids, strict=True):
        limit = output_limit(len(prompt), params.max_new_tokens, context)
        want = _checked(own, params, len(prompt), vocab.size)
        scored = limit + (len(prompt) - want.logprob_start_len if want.logprob_start_len >= 0 else 0)
        log_probs += count * scored * (min(want.top_logprobs_num, vocab.size) + len(want.token_ids_logprob))
        at_most(MAX_LOG_PROBS, log_probs, "log-probs of other tokens (positions times top_logprobs_num)")
        for k in range(count):
            rules = StopRules(params, eos=vocab.eos, limit=limit, decode=decode)
            seed = None if params.sampling_seed is None else params.sampling_seed + k
            name = rid if count == 1 else f"{rid}-{k}"
            jobs.append(SequenceState(name, prompt, params, rules, seed, want, images=seen))
    return GenerateRequest(body, jobs, rids, single and len(jobs) == 1)


def _prompt_bodies(raw: Mapping[str, Any], count: int) -> list[PromptBody]:
    """Return one body for each prompt."""
    given = {name: raw[name] for name in PromptBody.model_fields if raw.get(name) is not None}
    lists = {name: value for name, value in given.items() if isinstance(value, list)}
    if (ids := lists.get("token_ids_logprob")) is not None and not (ids and isinstance(ids[0], list)):
        del lists["token_ids_logprob"]
    for name, value in lists.items():
        if len(value) != count:
            raise refused(f"The length of {name} ({len(value)}) does not match the number of prompts ({count}).")
    if not lists:
        return [fields_of(PromptBody, given)] * count
    return [fields_of(PromptBody, given | {name: value[i] for name, value in lists.items()}) for i in range(count)]


def _checked(own: PromptBody, params: RequestSampling, prompt_tokens: int, vocab_size: int) -> PromptBody:
    """Return the checked body of a prompt, without log-prob fields if no log-probs are wanted."""
    if own.return_sampling_mask and not params.filtered:
        raise refused("return_sampling_mask requires top_k, top_p < 1 or min_p > 0: nothing is cut off otherwise.")
    _check_start("routed_experts_start_len", "recv_req", own.routed_experts_start_len, prompt_tokens, least=0)
    if not own.return_logprob:
        return own.model_copy(update={"logprob_start_len": -1, "top_logprobs_num": 0, "token_ids_logprob": []})
    if own.token_ids_logprob:
        check_ids(own.token_ids_logprob, vocab_size, "token_ids_logprob")
    _check_start("logprob_start_len", "req", own.logprob_start_len, prompt_tokens, least=-1)
    return own


def output_limit(prompt_tokens: int, max_new_tokens: int | None, context: int) -> int:
    """Return the maximum number of tokens after the prompt. Like SGLang, keep two positions free, so the last token of
    an exactly full context is not sampled. Raises RequestError: the requested tokens do not fit the context."""
    if prompt_tokens >= context:
        longer = f"is longer than the model's context length ({context} tokens)."
        raise refused(f"The input ({prompt_tokens} tokens) {longer}")
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
    """Return `ids`, checked: a flat, non-empty list of ids that the model can embed."""
    try:
        found = _IDS.validate_python(ids)
    except ValidationError as error:
        wrong = type(error.errors()[0]["input"]).__name__
        raise invalid_body("value_error", f"Value error, elements must be int or list; got {wrong}", *loc) from None
    if not found:
        raise refused("input_ids cannot be empty.")
    low, high = min(found), max(found)
    if low < 0 or high >= size:
        raise refused(f"input_ids must be in [0, {size - 1}], got {low if low < 0 else high}.")
    return found


def strings(value: object, *loc: str) -> list[str]:
    """Return the texts of a field that contains a text or a list of texts."""
    members = [value] if isinstance(value, str) else value
    if not isinstance(members, list) or not all(isinstance(member, str) for member in members):
        raise invalid_body("string_type", "Input should be a valid string", *loc)
    return members


def _check_adapter(asked: object, there: str | None) -> None:
    if asked and there is None:
        raise refused(f"LoRA adapter {asked!r:.200} was requested, but none is loaded: POST /load_lora_adapter first.")
    if there is not None and asked != there:
        raise refused(f"the embedded engine has the adapter {there!r} and answers with no other: send it as lora_path.")


def _prompts(body: GenerateBody) -> tuple[list[Any], bool]:
    """Return the prompts as they were sent, and true if the body has a single prompt instead of a list."""
    if (ids := body.input_ids) is not None:
        return (ids, False) if ids and isinstance(ids[0], list) else ([ids], True)
    if body.text is None:
        raise refused("Either text, input_ids or input_embeds should be provided.")
    if not (members := strings(body.text, "text")):
        raise refused("text cannot be empty.")
    return members, isinstance(body.text, str)


def _ids(prompt: object, vocab: Vocabulary, context: int) -> list[int]:
    if isinstance(prompt, str):
        return check_ids(vocab.encode(prompt, context), vocab.size, "text")
    if isinstance(prompt, list):
        output_limit(len(prompt), 0, context)
    return check_ids(prompt, vocab.size, "input_ids")


def _with_images(
    body: GenerateBody, prompts: list[list[int]], single: bool, reader: ImageReader | None
) -> tuple[list[list[int]], list[PromptImages | None]]:
    """Return the prompts with all placeholders, and the images of each."""
    if not body.image_data:
        return prompts, [None] * len(prompts)
    if reader is None:
        raise refused("image_data: this model sees no images; serve one that does (docs/engines.md), or send none.")
    if body.input_ids is None:
        raise refused("image_data: send input_ids with the images' placeholders instead of text.")
    data, spans = ([body.image_data], [body.image_spans]) if single else (body.image_data, body.image_spans)
    spans = [None] * len(prompts) if spans is None else spans
    if not all(isinstance(each, list) and len(each) == len(prompts) for each in (data, spans)):
        raise refused(f"image_data and image_spans must have an entry for each of {len(prompts)} prompts.")
    found: list[tuple[list[int], PromptImages | None]] = []
    for ids, urls, places in zip(prompts, data, spans, strict=True):
        members = strings(urls, "image_data") if urls else []
        found.append(reader.read(ids, members, places) if members else (ids, None))
    return [ids for ids, _ in found], [images for _, images in found]


def _rids(rid: Any, count: int, single: bool) -> list[str]:
    if rid is None:
        return [uuid.uuid4().hex for _ in range(count)]
    if isinstance(rid, str):
        return [rid] if single else [f"{rid}_{i}" for i in range(count)]
    if len(members := strings(rid, "rid")) != count:
        raise refused("The specified rids length mismatch with the batch_size for batch processing.")
    if doubled := sorted(member for member, times in Counter(members).items() if times > 1):
        raise refused(f"Duplicate request IDs detected within the request: {doubled}")
    return members


def _check_start(name: str, owner: str, start: int, prompt_tokens: int, *, least: int) -> None:
    if start > prompt_tokens:
        higher = f"is higher than the number of input tokens len(req.origin_input_ids)={prompt_tokens}"
        raise refused(f"{owner}.{name}={start} {higher}. Please use a smaller {name}.")
    if start < least:
        raise refused(f"{name} must be at least {least}, got {start}.")
