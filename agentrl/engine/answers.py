"""Checks of an engine's answers. A contradiction raises `EngineRejected`, because it would be trained on. Ids and
log-probs come from `meta_info.output_token_logprobs`; the ids must agree with `output_ids`. With top-p, top-k or min-p,
`return_sampling_mask` requests each token's sampling support, and log-probs are relative to the support."""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

import orjson

from agentrl.engine.wire import FinishReason, FinishType, Generation
from agentrl.errors import EngineRejected

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_ROUNDING: Final = 1e-4  # maximum error of a log-prob of 0, computed as logit - logsumexp in float32
_LEAST: Final = -3.4e38  # a lower log-prob is not finite in float32


@dataclass(frozen=True, slots=True)
class RequestExpectations:
    """Bounds and ids that an answer must match; None: not checked."""

    prompt_tokens: int
    max_new_tokens: int | None = None
    vocab_size: int | None = None
    scored: Sequence[int] = ()  # last ids of the prompt; the answer must have their log-probs
    kept: bool = False  # the answer must have kept sets
    routed_from: int | None = None  # index of the first token whose experts the answer must have
    prompt: Sequence[int] | None = None  # all ids of a prompt with images


def parse(raw: bytes, asked: RequestExpectations) -> Generation:
    """Parse the bytes of an answer of `/generate`. Raises as `read`."""
    try:
        return read(orjson.loads(raw), asked)
    except orjson.JSONDecodeError as error:
        malformed("the answer", f"JSON ({error})", raw)


def read(answer: Any, asked: RequestExpectations) -> Generation:
    """Check the JSON that `/generate` answered to one prompt with `return_logprob`, and return it as a Generation.
    Raises EngineRejected, kind `malformed_answer`: a field is missing, has the wrong type, or contradicts another field
    or the request; `context_overflow`: the context had no room for a token; `no_sampling_mask`, `no_routed_experts`:
    requested kept sets or experts are missing; `unknown_token`: an id is outside the vocabulary; `other_prompt`: the
    engine read another prompt; `engine_error`, `engine_rejected`: the engine ended the request with an error."""
    meta = _get(answer, "meta_info", dict, "")
    finish = _finish_reason(_get(meta, "finish_reason", dict, "meta_info."))
    for old, name in _NEW_COUNT_NAMES.items():
        if name in meta:
            meta.setdefault(old, meta[name])
    ids, log_probs = _sampled(meta, answer.get("output_ids"), finish)
    _check_tokens(ids, asked)
    if asked.prompt is not None:
        _check_prompt(meta.get("prompt_tokens"), answer.get("prompt_token_ids"), asked.prompt)
    _check_counts(meta, len(ids), asked)
    unscored = finish.type == "abort" and not ids  # interrupted before the prompt was read
    prompt_log_probs = [] if unscored else _scored(meta, asked.scored)
    kept, log_probs = _kept(meta, ids, asked) if asked.kept else (None, log_probs)
    routed = None if asked.routed_from is None else _routed(meta, len(ids), finish.type == "abort", asked)
    if not ids and finish.type == "length" and asked.max_new_tokens != 0:
        said = f"the engine answered a prompt of {asked.prompt_tokens} tokens with no token and finish reason length"
        full = "its context is full (SGLang keeps two places free); compare --rollout-max-context-len with the engine's"
        raise EngineRejected(f"{said}: {full}", status=400, kind="context_overflow")
    for name in ("output_token_logprobs", "input_token_logprobs", "routed_experts", *_MASK):
        meta.pop(name, None)  # large lists, parsed above
    version = str(meta.get("weight_version", ""))
    return Generation(
        ids=ids,
        log_probs=log_probs,
        text=_get(answer, "text", str, ""),
        finish_reason=finish,
        weight_version=version,
        weight_versions=_spans(meta.get("weight_versions"), version, len(ids)),
        prompt_tokens=asked.prompt_tokens,
        cached_tokens=meta.get("cached_tokens") or 0,
        meta_info=meta,
        prompt_log_probs=prompt_log_probs,
        kept=kept,
        routed=routed,
    )


def error_message(body: bytes, status: int = 400) -> str:
    """Return the server's message, at most 500 characters, from an error answer in any of SGLang's forms."""
    if status == 401:
        return f"{error_message(body)}; --sglang-api-key is what is sent, and --sglang-admin-api-key to control routes"
    try:
        found = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode(errors="replace").strip() or "no message"
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:500]


# SGLang's messages for a prompt that exceeds the context, and for one that fills its last, reserved positions.
_TOO_LONG: Final = ("context length", "exceeds the maximum allowed length")


def error_kind(status: int, message: str) -> str:
    """Return the kind of `EngineRejected` for an error status of `/generate`."""
    if status == 400 and any(said in message for said in _TOO_LONG):
        return "context_overflow"
    return "engine_rejected" if status < 500 else "engine_error"


def _finish_reason(data: dict[str, Any]) -> FinishReason:
    if (kind := data.get("type")) not in ("stop", "length", "abort"):
        malformed("meta_info.finish_reason.type", "'stop', 'length' or 'abort'", kind)
    if isinstance(status := data.get("status_code"), int):
        message = str(data.get("message"))[:500]
        said = f"the engine ended the request with status {status}: {message}; its log says more"
        raise EngineRejected(said, status=status, kind=error_kind(status, message))
    return FinishReason(cast(FinishType, kind), data.get("matched"))


def _sampled(meta: dict[str, Any], output_ids: Any, finish: FinishReason) -> tuple[list[int], list[float]]:
    """Return the ids and log-probs of the answer, with types and lengths checked."""
    triples = meta.get("output_token_logprobs")
    if triples is None and finish.type == "abort" and not output_ids:
        triples = []  # aborted before the first token: the engine has no log-probs to report
    ids, log_probs = _triples(triples, "output_token_logprobs")
    if output_ids is not None and output_ids != ids:
        malformed("output_ids", f"the {len(ids)} ids of meta_info.output_token_logprobs", output_ids)
    return ids, log_probs


def _scored(meta: dict[str, Any], wanted: Sequence[int]) -> list[float]:
    """Return the log-probs of the ids `wanted`. The engine's list begins with one more token, without a log-prob."""
    if not wanted:
        return []
    name, found = "input_token_logprobs", meta.get("input_token_logprobs")
    ids, log_probs = _triples(found[1:] if isinstance(found, list) else found, name)
    if ids != list(wanted):
        malformed(f"meta_info.{name}", f"the ids of the prompt's last {len(wanted)} tokens and one before", found)
    return log_probs


def _triples(triples: Any, name: str) -> tuple[list[int], list[float]]:
    """Return the ids and log-probs of `[log-prob, id, text]` triples, with types and range checked."""
    name = f"meta_info.{name}"
    try:
        if not isinstance(triples, list):
            raise TypeError
        ids: list[int] = [triple[1] for triple in triples]
        log_probs: list[float] = [triple[0] for triple in triples]
    except (TypeError, IndexError, KeyError):
        malformed(name, "a list with one [log-prob, id, text] a token", triples)
    if set(map(type, log_probs)) - {float, int} or set(map(type, ids)) - {int}:
        malformed(name, "numbers as log-probs and whole numbers as ids", triples)
    if ids and (max(log_probs) > _ROUNDING or min(log_probs) < _LEAST):
        malformed(name, "log-probs of at most 0 in float32", max(log_probs, key=abs))
    return ids, log_probs


# SGLang's former and new names of counts of draft tokens.
_NEW_COUNT_NAMES: Final = {
    "spec_accept_token_num": "spec_num_correct_drafts",
    "spec_draft_token_num": "spec_num_proposed_drafts",
}
_COUNTS: Final = ("prompt_tokens", "completion_tokens", "cached_tokens", *_NEW_COUNT_NAMES, "spec_verify_ct")


def _check_tokens(ids: list[int], asked: RequestExpectations) -> None:
    if (least := min(ids, default=0)) < 0:
        malformed("meta_info.output_token_logprobs", "ids from 0", least)
    if asked.vocab_size is not None and (most := max(ids, default=0)) >= asked.vocab_size:
        raise unusable(
            f"the engine sampled token {most}, and this pool was told of {asked.vocab_size} ids: vocab_size is that of the "
            "model's embedding (config.json), which may have more ids than its tokenizer; or the engine serves another model",
            "unknown_token",
        )
    if asked.max_new_tokens is not None and len(ids) > asked.max_new_tokens:
        malformed("output_ids", f"at most {asked.max_new_tokens} tokens (max_new_tokens)", f"{len(ids)} tokens")


BAD_ANSWER: Final = 502  # status that is reported for an unusable answer of status 200
NO_KEPT_SETS: Final = (
    "the engine does not say what top-p, top-k or min-p left to sample from (return_sampling_mask, SGLang from 0.5.23), "
    "so that its log-probs cannot be trained with; use such a server or --engine embedded, leave --rollout-top-p and "
    "--rollout-top-k out, or train with a bias: --allow-truncated-sampling"
)
_MASK: Final = ("output_token_sampling_mask", "output_token_sampling_logprobs")


def _kept(meta: dict[str, Any], ids: list[int], asked: RequestExpectations) -> tuple[list[array[int]], list[float]]:
    """Return the kept set of each token, and the tokens' log-probs within these sets."""
    rows, log_probs = (meta.get(name, None if ids else []) for name in _MASK)
    if rows is None or log_probs is None:
        raise unusable(NO_KEPT_SETS, "no_sampling_mask")
    name, vocabulary = f"meta_info.{_MASK[0]}", range(asked.vocab_size or sys.maxsize)
    try:
        kept = [array("i", row) for row in rows]
        triples = list(zip(log_probs, ids, kept, strict=True))
    except (TypeError, ValueError, OverflowError):
        malformed(name, f"the kept ids of each of {len(ids)} tokens, with as many {_MASK[1]}", rows)
    for _, id_, row in triples:
        if id_ not in row or min(row) not in vocabulary or max(row) not in vocabulary:
            malformed(name, f"ids of the model, with the sampled one, {id_}, among them", row.tolist())
    return kept, _triples(triples, _MASK[1])[1]


def _routed(meta: dict[str, Any], count: int, aborted: bool, asked: RequestExpectations) -> NDArray[np.int16] | None:
    """Return `Generation.routed` from SGLang's base64 of little-endian int32 [tokens, layers, experts per token]."""
    import numpy as np

    name, text = "meta_info.routed_experts", meta.get("routed_experts")
    if not count or (text is None and aborted):
        return None
    if text is None:
        raise unusable(
            "the engine does not say which experts its tokens went to (return_routed_experts): start SGLang with "
            "--enable-return-routed-experts, use --engine embedded, or leave --use-rollout-routing-replay out",
            "no_routed_experts",
        )
    rows = asked.prompt_tokens + count - 1 - (asked.routed_from or 0)
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (TypeError, ValueError):
        malformed(name, "base64 of int32 numbers", text)
    experts = numbers.astype(np.int16)
    if rows < 1 or not numbers.size or numbers.size % rows or (experts != numbers).any() or experts.min() < 0:
        malformed(name, f"numbers of experts, as many for each of {rows} tokens", f"{numbers.size} numbers")
    return experts.reshape(rows, -1)


def _check_prompt(count: Any, read: Any, prompt: Sequence[int]) -> None:
    """Compare the engine's prompt with ours, if the prompt has images. An engine without `return_prompt_token_ids`
    reports only the count, or nothing if the request was aborted in the queue."""
    if count in (None, len(prompt)) and read in (None, prompt):
        return
    said = f"the engine read a prompt of {count} tokens, and ours has {len(prompt)} with its images"
    said += ", or other ids" if count == len(prompt) else ""
    why = "its model sees no images, its image processor has other limits on sizes, or it tokenizes prompts again"
    raise unusable(f"{said}: {why} (docs/engines.md, Images)", "other_prompt")


def _check_counts(meta: dict[str, Any], length: int, asked: RequestExpectations) -> None:
    for name in _COUNTS:
        if (count := meta.get(name)) is not None and (type(count) is not int or count < 0):
            malformed(f"meta_info.{name}", "a whole number from 0", count)
    read = meta.get("prompt_tokens", asked.prompt_tokens)  # absent if the request was aborted in the queue
    if read != asked.prompt_tokens:
        expected = f"the prompt's {asked.prompt_tokens} tokens (does the server run with --allow-auto-truncate?)"
        malformed("meta_info.prompt_tokens", expected, read)
    if (counted := meta.get("completion_tokens", length)) != length:
        malformed("meta_info.completion_tokens", f"the answer's {length} tokens", counted)


def _spans(data: Any, version: str, length: int) -> tuple[tuple[str, int, int], ...]:
    """Return (version, start, end) over all `length` tokens, in order and without gaps; empty spans are left out."""
    if not data:
        return ((version, 0, length),) if length else ()
    try:
        spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in data)
    except (TypeError, KeyError, ValueError):
        malformed("meta_info.weight_versions", "a list of {version, start, end}", data)
    ends = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != length or any(a > b for a, b in pairwise(ends)):
        malformed("meta_info.weight_versions", f"spans that cover the answer's {length} tokens in order", data)
    return tuple(span for span in spans if span[1] < span[2])


def _get(data: Any, key: str, want: type[Any], prefix: str) -> Any:
    if not isinstance(data, dict):
        malformed(prefix or "the answer", "a JSON object", data)
    if not isinstance(value := data.get(key), want):
        malformed(prefix + key, f"a JSON {want.__name__}", value)
    return value


def malformed(where: str, expected: str, came: Any) -> NoReturn:
    """Raise EngineRejected: an answer is not as expected."""
    raise unusable(f"malformed engine answer: {where} should be {expected}, got {came!r:.120}", "malformed_answer")


def unusable(message: str, kind: str) -> EngineRejected:
    """Return the error for an answer of status 200 that cannot be used."""
    return EngineRejected(message, status=BAD_ANSWER, kind=kind)
