"""What travels to and from an engine, as typed values.

1. `SamplingParams` holds SGLang's sampling parameters; `to_wire` leaves out what is None, because an engine
   answers an unknown or ill-typed field with an error.
2. `Generation` is one finished answer of `/generate`. Ids and log-probs come from
   `meta_info.output_token_logprobs`, one entry a sampled token, and must agree with `output_ids`.
3. A malformed answer raises `EngineRejected` naming the field; nothing is guessed.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Self, cast

from agentrl.errors import EngineRejected

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishType = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to sample one answer; None leaves a field to the engine's default.

    Attributes:
        temperature: 0 means greedy.
        max_new_tokens: most tokens to sample; prompt plus this must fit into the engine's context.
        stop: strings that end the answer; ids and log-probs are not cut at them, text is unless `no_stop_trim`.
        stop_token_ids: ids that end the answer, besides the model's own end-of-sequence ids.
        sampling_seed: same seed, prompt and weights give the same tokens.
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

    def to_wire(self) -> dict[str, Any]:
        """The fields that are set, under SGLang's names."""
        return {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}


_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams))


@dataclass(frozen=True, slots=True)
class FinishReason:
    """Why an answer ended: `matched` is the stop id, string or pattern for type `stop`, else None."""

    type: FinishType
    matched: int | str | None = None


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished answer.

    Attributes:
        ids: the sampled token ids, stop token included.
        log_probs: natural-log probability of each id under the temperature-scaled distribution.
        text: the decoded ids as the engine trims them.
        weight_version: the engine's version when it wrote the answer.
        weight_versions: (version, start, end) spans over `ids`; one span where the engine does not report spans.
        prompt_tokens, cached_tokens: prompt length, and how much of it the engine had in its cache.
        meta_info: everything else that the engine said about the request.
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

    @classmethod
    def from_wire(cls, answer: Any) -> Self:
        """Read the JSON object that `/generate` answered for one prompt with `return_logprob`.

        Raises:
            EngineRejected: a field is missing, has the wrong type, or disagrees with another one.
        """
        meta = _get(answer, "meta_info", dict, "")
        finish = _finish_reason(_get(meta, "finish_reason", dict, "meta_info."))
        output_ids = answer.get("output_ids")
        triples = meta.get("output_token_logprobs")
        if triples is None and finish.type == "abort" and not output_ids:
            triples = []  # aborted before the first token: the engine has no log-probs to report
        if not isinstance(triples, list):
            _malformed("meta_info.output_token_logprobs", "a list with one [log-prob, id, text] a token", triples)
        try:
            ids: list[int] = [triple[1] for triple in triples]
            log_probs: list[float] = [triple[0] for triple in triples]
        except (TypeError, IndexError, KeyError):
            _malformed("meta_info.output_token_logprobs", "a list with one [log-prob, id, text] a token", triples)
        if set(map(type, log_probs)) - _NUMBERS or set(map(type, ids)) - {int}:
            _malformed("meta_info.output_token_logprobs", "numbers as log-probs and whole numbers as ids", triples)
        if output_ids is not None and output_ids != ids:
            _malformed("output_ids", f"the {len(ids)} ids of meta_info.output_token_logprobs", output_ids)
        meta.pop("output_token_logprobs", None)  # a list of lists a token: costly to keep, and all of it is kept
        version = str(meta.get("weight_version", ""))
        return cls(
            ids=ids,
            log_probs=log_probs,
            text=_get(answer, "text", str, ""),
            finish_reason=finish,
            weight_version=version,
            weight_versions=_spans(meta.get("weight_versions"), version, len(ids)),
            prompt_tokens=_get(meta, "prompt_tokens", int, "meta_info."),
            cached_tokens=meta.get("cached_tokens") or 0,
            meta_info=meta,
        )

    def routed_experts(self, layers: int, top_k: int) -> NDArray[np.int32] | None:
        """MoE routing as int32 [rows, layers, top_k], or None if the engine sent none.

        One row a token of prompt and answer except the last, from the requested start on.

        Raises:
            EngineRejected: the payload is not base64 or not a whole number of rows.
        """
        encoded = self.meta_info.get("routed_experts")
        return None if encoded is None else decode_routed_experts(encoded, layers, top_k)


_NUMBERS = {float, int}


def decode_routed_experts(encoded: str, layers: int, top_k: int) -> NDArray[np.int32]:
    """Decode base64 of little-endian int32 in C order into [rows, layers, top_k].

    Raises:
        EngineRejected: the payload is not base64 or not a whole number of rows.
    """
    import numpy as np

    try:
        raw = base64.b64decode(encoded, validate=True)
    except (binascii.Error, TypeError, ValueError):
        _malformed("meta_info.routed_experts", "base64 text", encoded)
    row = 4 * layers * top_k
    if len(raw) % row:
        _malformed("meta_info.routed_experts", f"rows of {layers} layers x {top_k} int32", f"{len(raw)} bytes")
    return np.frombuffer(raw, dtype="<i4").astype(np.int32, copy=False).reshape(-1, layers, top_k)


def error_message(body: bytes) -> str:
    """The server's own words from an error answer, whichever of SGLang's forms it has; at most 500 characters."""
    import orjson

    try:
        data = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:500].decode(errors="replace").strip() or "no message"
    found: Any = data
    for key in ("error", "message", "detail"):
        if isinstance(found, dict) and key in found:
            found = found[key]
    return str(found)[:500]


def _finish_reason(data: dict[str, Any]) -> FinishReason:
    kind = data.get("type")
    if kind not in ("stop", "length", "abort"):
        _malformed("meta_info.finish_reason.type", "'stop', 'length' or 'abort'", kind)
    return FinishReason(cast(FinishType, kind), data.get("matched"))


def _spans(data: Any, version: str, length: int) -> tuple[tuple[str, int, int], ...]:
    if not data:
        return ((version, 0, length),) if length else ()
    try:
        spans = tuple((str(span["version"]), int(span["start"]), int(span["end"])) for span in data)
    except (TypeError, KeyError, ValueError):
        _malformed("meta_info.weight_versions", "a list of {version, start, end}", data)
    return spans


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
