"""What travels to and from an engine, as typed values.

1. `SamplingParams` holds SGLang's sampling parameters; `to_wire` leaves out what is None, because an engine
   answers an unknown or ill-typed field with an error.
2. `Generation` is one finished answer of `/generate`. Ids and log-probs come from
   `meta_info.output_token_logprobs`, one entry a sampled token, and must agree with `output_ids`.
3. An answer that contradicts itself or what was `Asked` raises `EngineRejected` naming the field: it would be trained
   on. What SGLang leaves out (versions before 0.5.23, counts of a request aborted in the queue) is no contradiction.
4. An answer may come in parts, each the continuation of the prompt and the parts before it: `SamplingParams.after`
   says how to ask for the next one, `join` makes one `Generation` of them.
5. Where top-p, top-k or min-p cut the distribution, `return_sampling_mask` (SGLang from 0.5.23) asks for what they left
   of it for each token; log-probs are those among what was left then.
"""

from __future__ import annotations

import base64
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn, Self, cast

import orjson

from agentrl.errors import EngineRejected

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishType = Literal["stop", "length", "abort"]

_ROUNDING: Final = 1e-4
"""A log-prob of 0 computed as logit - logsumexp in float32 misses 0 by the rounding of the logit."""
_LEAST: Final = -3.4e38  # less is not finite in float32


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one answer; None leaves a field to the engine's default.

    Attributes:
        temperature: 0 means greedy.
        max_new_tokens: most tokens to sample; prompt plus this must fit into the engine's context.
        stop: strings that end the answer; ids and log-probs are not cut at them, text is unless `no_stop_trim`.
        stop_token_ids: ids that end the answer, besides the model's own end-of-sequence ids; name those too, or an answer
            that is interrupted right behind one goes on.
        sampling_seed: same seed, prompt and weights give the same tokens.
        return_sampling_mask: ask for the kept sets too; a field of the request, beside its `sampling_params`.
        routed_experts_start_len: ask for the experts of the tokens from this one on; a field of the request too.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None
    min_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    stop_regex: str | Sequence[str] | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Mapping[str, float] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    json_schema: str | None = None
    regex: str | None = None
    custom_params: Mapping[str, Any] | None = None
    return_sampling_mask: bool = False
    routed_experts_start_len: int | None = None

    def to_wire(self) -> dict[str, Any]:
        """The fields that are set, under SGLang's names."""
        return {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}

    def after(self, count: int) -> Self:
        """How to go on after `count` tokens; what looks back over an answer (penalties, stop strings) starts anew.

        A seed moves with the count: an engine would draw the same random numbers as for the tokens before.
        Without `max_new_tokens` every part has the engine's default anew.
        """
        if not count:
            return self
        return replace(
            self,
            max_new_tokens=None if self.max_new_tokens is None else self.max_new_tokens - count,
            min_new_tokens=None if self.min_new_tokens is None else max(0, self.min_new_tokens - count),
            sampling_seed=None if self.sampling_seed is None else (self.sampling_seed + _STRIDE * count) % 2**31,
        )


_STRIDE: Final = 1_000_003
"""A prime far from the distances between seeds of one run."""

BESIDE: Final = ("return_sampling_mask", "routed_experts_start_len")
"""What `SamplingParams` has that goes beside SGLang's `sampling_params`, not into them."""
_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name not in BESIDE)


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why an answer ended: `matched` is the stop id, string or pattern for type `stop`, else None."""

    type: FinishType
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Asked:
    """What an answer must fit: tokens of the prompt, most tokens to sample, ids of the model; None: not known.

    `scored` is the end of the prompt whose log-probs the answer must have, `kept` whether it must have kept sets,
    `routed_from` the first token whose experts it must say.
    """

    prompt_tokens: int
    max_new_tokens: int | None = None
    vocab_size: int | None = None
    scored: Sequence[int] = ()
    kept: bool = False
    routed_from: int | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished answer.

    Attributes:
        ids: the sampled token ids, stop token included.
        log_probs: natural-log probability of each id under the temperature-scaled distribution; among the kept ids
            where `kept` has them.
        text: the decoded ids as the engine trims them.
        weight_version: the engine's version when it wrote the answer.
        weight_versions: (version, start, end) spans over `ids`; one span where the engine does not report spans.
        prompt_tokens, cached_tokens: prompt length, and how much of it the engine had in its cache.
        meta_info: everything else that the engine said about the request.
        prompt_log_probs: of the prompt's last tokens, where they were asked for; at temperature 1.
        kept: for each id, the ids (int32, its own among them) that top-p, top-k and min-p left to sample from; None if
            not asked for.
        routed: int16 [tokens, layers x experts a token], the experts of each token from the one that was asked for to the
            last but one of `ids`, which are those that went through the model; None if not asked for, or none did.
        raw: the engine's answers as they came, one a part, where fields of a caller's own were sent along.
    """

    ids: list[int]
    log_probs: list[float]
    text: str
    finish_reason: FinishReason
    weight_version: str
    weight_versions: tuple[tuple[str, int, int], ...]
    prompt_tokens: int
    cached_tokens: int
    meta_info: Mapping[str, Any] = field(repr=False, compare=False)
    prompt_log_probs: list[float] = field(default_factory=list)
    kept: list[array[int]] | None = None
    routed: NDArray[np.int16] | None = field(default=None, repr=False, compare=False)
    raw: tuple[bytes, ...] = field(default=(), repr=False, compare=False)

    @classmethod
    def from_wire(cls, answer: Any, asked: Asked) -> Self:
        """Read the JSON object that `/generate` answered to one prompt with `return_logprob`.

        Raises:
            EngineRejected: kind `malformed_answer`: a field is missing, has the wrong type, or disagrees with another
                one or with what was asked; `context_overflow`: the engine had no room for a single token;
                `no_sampling_mask`, `no_routed_experts`: kept sets or experts were asked for and are not there;
                `engine_error`, `engine_rejected`: the engine ended the request with an error.
        """
        meta = _get(answer, "meta_info", dict, "")
        finish = _finish_reason(_get(meta, "finish_reason", dict, "meta_info."))
        for old, name in _NOW_CALLED.items():
            if name in meta:
                meta.setdefault(old, meta[name])
        ids, log_probs = _sampled(meta, answer.get("output_ids"), finish)
        _check_tokens(ids, asked)
        _check_counts(meta, len(ids), asked)
        prompt_log_probs = _scored(meta, asked.scored)
        kept, log_probs = _kept(meta, ids, asked) if asked.kept else (None, log_probs)
        routed = None if asked.routed_from is None else _routed(meta, len(ids), finish, asked)
        if not ids and finish.type == "length" and asked.max_new_tokens != 0:
            raise EngineRejected(
                f"the engine answered a prompt of {asked.prompt_tokens} tokens with no token and finish reason length: its "
                "context is full (SGLang keeps two places free); compare --rollout-max-context-len with the engine's",
                status=200,
                kind="context_overflow",
            )
        for name in ("output_token_logprobs", "input_token_logprobs", "routed_experts", *_MASK):
            meta.pop(name, None)  # lists a token: costly to keep, and all of it is kept
        version = str(meta.get("weight_version", ""))
        return cls(
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


def parse(raw: bytes, asked: Asked) -> Generation:
    """The answer of `/generate` as it came over the wire; raises as `Generation.from_wire` does."""
    try:
        return Generation.from_wire(orjson.loads(raw), asked)
    except orjson.JSONDecodeError as error:
        _malformed("the answer", f"JSON ({error})", raw)


def join(parts: Sequence[Generation], prompt_tokens: int) -> Generation:
    """The parts of one answer as one; no part at all is an answer that was aborted before its first token.

    Ids, log-probs and texts follow each other, version spans are shifted, and touching spans of one version are one.
    Finish reason, version and everything in `meta_info` are the last part's, but the counts of `_SUMMED` are sums. What
    was found in the cache is the first part's: later ones find mostly what this answer itself has put there.
    """
    if len(parts) == 1:
        return parts[0]
    spans: list[tuple[str, int, int]] = []
    length, routed = 0, [part.routed for part in parts if part.routed is not None]
    for part in parts:
        for version, start, end in part.weight_versions:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], length + end)
            else:
                spans.append((version, length + start, length + end))
        length += len(part.ids)
    meta = dict(parts[-1].meta_info) if parts else {}
    for name in _SUMMED:
        counts = [part.meta_info[name] for part in parts if isinstance(part.meta_info.get(name), int | float)]
        meta |= {name: sum(counts)} if counts else {}
    return Generation(
        ids=[id_ for part in parts for id_ in part.ids],
        log_probs=[log_prob for part in parts for log_prob in part.log_probs],
        text="".join(part.text for part in parts),
        finish_reason=parts[-1].finish_reason if parts else FinishReason("abort"),
        weight_version=parts[-1].weight_version if parts else "",
        weight_versions=tuple(spans),
        prompt_tokens=prompt_tokens,
        cached_tokens=parts[0].cached_tokens if parts else 0,
        meta_info=meta,
        prompt_log_probs=parts[0].prompt_log_probs if parts else [],
        kept=[ids for part in parts for ids in part.kept or ()] if parts and parts[0].kept is not None else None,
        routed=_joined(routed) if routed else None,
        raw=tuple(raw for part in parts for raw in part.raw),
    )


_SUMMED: Final = (
    *("completion_tokens", "num_retractions", "reasoning_tokens", "e2e_latency", "queue_time"),
    *("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"),
)


def error_message(body: bytes, status: int = 400) -> str:
    """The server's own words from an error answer, whichever of SGLang's forms it has; at most 500 characters."""
    if status == 401:
        return f"{error_message(body)}; --sglang-api-key is what is sent"
    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode(errors="replace").strip() or "no message"
    found: Any = data
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:500]


def error_kind(status: int, message: str) -> str:
    """The kind of the `EngineRejected` that stands for an error status of `/generate`."""
    if status == 400 and "context length" in message:
        return "context_overflow"
    return "engine_rejected" if status < 500 else "engine_error"


def _finish_reason(data: dict[str, Any]) -> FinishReason:
    kind = data.get("type")
    if kind not in ("stop", "length", "abort"):
        _malformed("meta_info.finish_reason.type", "'stop', 'length' or 'abort'", kind)
    if isinstance(status := data.get("status_code"), int):
        message = str(data.get("message"))[:500]
        raise EngineRejected(
            f"the engine ended the request with status {status}: {message}; its log says more",
            status=status,
            kind=error_kind(status, message),
        )
    return FinishReason(cast(FinishType, kind), data.get("matched"))


def _sampled(meta: dict[str, Any], output_ids: Any, finish: FinishReason) -> tuple[list[int], list[float]]:
    """Ids and log-probs of the answer, of the right types and of one length."""
    triples = meta.get("output_token_logprobs")
    if triples is None and finish.type == "abort" and not output_ids:
        triples = []  # aborted before the first token: the engine has no log-probs to report
    ids, log_probs = _triples(triples, "output_token_logprobs")
    if output_ids is not None and output_ids != ids:
        _malformed("output_ids", f"the {len(ids)} ids of meta_info.output_token_logprobs", output_ids)
    return ids, log_probs


def _scored(meta: dict[str, Any], wanted: Sequence[int]) -> list[float]:
    """The log-probs of the ids `wanted`, behind one token of which the engine says none."""
    if not wanted:
        return []
    name, found = "input_token_logprobs", meta.get("input_token_logprobs")
    ids, log_probs = _triples(found[1:] if isinstance(found, list) else found, name)
    if ids != list(wanted):
        _malformed(f"meta_info.{name}", f"the ids of the prompt's last {len(wanted)} tokens and one before", found)
    return log_probs


def _triples(triples: Any, name: str) -> tuple[list[int], list[float]]:
    """Ids and log-probs of `[log-prob, id, text]`, of the right types; log-probs in range."""
    name = f"meta_info.{name}"
    if not isinstance(triples, list):
        _malformed(name, "a list with one [log-prob, id, text] a token", triples)
    try:
        ids: list[int] = [triple[1] for triple in triples]
        log_probs: list[float] = [triple[0] for triple in triples]
    except (TypeError, IndexError, KeyError):
        _malformed(name, "a list with one [log-prob, id, text] a token", triples)
    if set(map(type, log_probs)) - _NUMBERS or set(map(type, ids)) - {int}:
        _malformed(name, "numbers as log-probs and whole numbers as ids", triples)
    if ids and (max(log_probs) > _ROUNDING or min(log_probs) < _LEAST):
        _malformed(name, "log-probs of at most 0 in float32", max(log_probs, key=abs))
    return ids, log_probs


_NUMBERS = {float, int}
_SPECULATION: Final = ("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct")
_NOW_CALLED: Final = {
    "spec_accept_token_num": "spec_num_correct_drafts",
    "spec_draft_token_num": "spec_num_proposed_drafts",
}
"""What SGLang calls counts since it tells drafts from the token that every pass gives besides."""
_COUNTS: Final = ("prompt_tokens", "completion_tokens", "cached_tokens", *_SPECULATION)


def _check_tokens(ids: list[int], asked: Asked) -> None:
    if not ids:
        return
    if min(ids) < 0 or (asked.vocab_size is not None and max(ids) >= asked.vocab_size):
        known = "" if asked.vocab_size is None else f" to {asked.vocab_size - 1}; does it serve the model of this run?"
        bad = min(ids) if min(ids) < 0 else max(ids)
        _malformed("meta_info.output_token_logprobs", f"ids from 0{known}", bad)
    if asked.max_new_tokens is not None and len(ids) > asked.max_new_tokens:
        _malformed("output_ids", f"at most {asked.max_new_tokens} tokens (max_new_tokens)", f"{len(ids)} tokens")


NO_KEPT_SETS: Final = (
    "the engine does not say what top-p, top-k or min-p left to sample from (return_sampling_mask, SGLang from 0.5.23), "
    "so that its log-probs cannot be trained with; use such a server or --engine embedded, leave --rollout-top-p and "
    "--rollout-top-k out, or train with a bias: --allow-truncated-sampling"
)
_MASK: Final = ("output_token_sampling_mask", "output_token_sampling_logprobs")


def _kept(meta: dict[str, Any], ids: list[int], asked: Asked) -> tuple[list[array[int]], list[float]]:
    """The kept set of each token, and the tokens' log-probs among them."""
    rows, log_probs = (meta.get(name, None if ids else []) for name in _MASK)
    if rows is None or log_probs is None:
        raise EngineRejected(NO_KEPT_SETS, status=200, kind="no_sampling_mask")
    name, vocabulary = f"meta_info.{_MASK[0]}", range(asked.vocab_size or sys.maxsize)
    try:
        kept = [array("i", row) for row in rows]
        triples = list(zip(log_probs, ids, kept, strict=True))
    except (TypeError, ValueError, OverflowError):
        _malformed(name, f"the kept ids of each of {len(ids)} tokens, with as many {_MASK[1]}", rows)
    for _, id_, row in triples:
        if id_ not in row or min(row) not in vocabulary or max(row) not in vocabulary:
            _malformed(name, f"ids of the model, with the sampled one, {id_}, among them", row.tolist())
    return kept, _triples(triples, _MASK[1])[1]


NO_ROUTING: Final = (
    "the engine does not say which experts its tokens went to (return_routed_experts): start SGLang with "
    "--enable-return-routed-experts, use --engine embedded, or leave --use-rollout-routing-replay out"
)


def _joined(parts: list[NDArray[np.int16]]) -> NDArray[np.int16]:
    import numpy as np

    return np.concatenate(parts)


def _routed(meta: dict[str, Any], count: int, finish: FinishReason, asked: Asked) -> NDArray[np.int16] | None:
    """`Generation.routed`, of SGLang's base64 of little-endian int32 [tokens, layers, experts a token]."""
    import numpy as np

    name, text = "routed_experts", meta.get("routed_experts")
    if not count or (text is None and finish.type == "abort"):
        return None
    if text is None:
        raise EngineRejected(NO_ROUTING, status=200, kind="no_routed_experts")
    rows = asked.prompt_tokens + count - 1 - (asked.routed_from or 0)
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
    except (TypeError, ValueError):
        _malformed(f"meta_info.{name}", "base64 of int32 numbers", text)
    experts = numbers.astype(np.int16)
    if rows < 1 or not numbers.size or numbers.size % rows or (experts != numbers).any() or experts.min() < 0:
        _malformed(
            f"meta_info.{name}", f"numbers of experts, as many for each of {rows} tokens", f"{numbers.size} numbers"
        )
    return experts.reshape(rows, -1)


def _check_counts(meta: dict[str, Any], length: int, asked: Asked) -> None:
    for name in _COUNTS:
        if (count := meta.get(name)) is not None and (type(count) is not int or count < 0):
            _malformed(f"meta_info.{name}", "a whole number from 0", count)
    read = meta.get("prompt_tokens", asked.prompt_tokens)  # absent where the request was aborted in the queue
    if read != asked.prompt_tokens:
        _malformed(
            "meta_info.prompt_tokens",
            f"the prompt's {asked.prompt_tokens} tokens (does the server run with --allow-auto-truncate?)",
            read,
        )
    if (counted := meta.get("completion_tokens", length)) != length:
        _malformed("meta_info.completion_tokens", f"the answer's {length} tokens", counted)


def _spans(data: Any, version: str, length: int) -> tuple[tuple[str, int, int], ...]:
    """(version, start, end) over all `length` tokens, in order and without a gap; empty spans are left out."""
    if not data:
        return ((version, 0, length),) if length else ()
    try:
        spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in data)
    except (TypeError, KeyError, ValueError):
        _malformed("meta_info.weight_versions", "a list of {version, start, end}", data)
    ends = [0, *(end for _, _, end in spans)]
    if [start for _, start, _ in spans] != ends[:-1] or ends[-1] != length or any(a > b for a, b in pairwise(ends)):
        _malformed("meta_info.weight_versions", f"spans that cover the answer's {length} tokens in order", data)
    return tuple(span for span in spans if span[1] < span[2])


def _get(data: Any, key: str, want: type[Any], prefix: str) -> Any:
    if not isinstance(data, dict):
        _malformed(prefix or "the answer", "a JSON object", data)
    value = data.get(key)
    if not isinstance(value, want):
        _malformed(prefix + key, f"a JSON {want.__name__}", value)
    return value


def _malformed(where: str, expected: str, came: Any) -> NoReturn:
    shown = repr(came)
    shown = shown if len(shown) <= 120 else shown[:120] + "..."
    raise EngineRejected(
        f"malformed engine answer: {where} should be {expected}, got {shown}", status=200, kind="malformed_answer"
    )
