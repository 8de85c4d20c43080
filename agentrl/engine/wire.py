"""Typed values of requests to and answers of an engine; `answers` reads them from its JSON. An answer may come in
parts, each the continuation of the prompt and the parts before it: `SamplingParams.after` says how to ask for the next
one, `join` makes one `Generation` of them."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, Final, Literal, Self

import orjson

from agentrl.errors import EngineRejected

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

FinishType = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Sampling of one answer; None leaves a field to the engine's default. The last two are fields of the request, beside
    its `sampling_params`. Name the model's own end-of-sequence ids in `stop_token_ids` too: an answer that is interrupted
    right behind one would go on."""

    temperature: float | None = None  # 0 means greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None  # prompt plus this must fit into the engine's context
    min_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None  # text is cut at them unless `no_stop_trim`, ids and log-probs are not
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
    sampling_seed: int | None = None  # same seed, prompt and weights give the same tokens
    json_schema: str | None = None
    regex: str | None = None
    custom_params: Mapping[str, Any] | None = None
    return_sampling_mask: bool = False  # ask for the kept sets too
    routed_experts_start_len: int | None = None  # ask for the experts of the tokens from this one on

    def to_wire(self) -> dict[str, Any]:
        """The fields that are set, under SGLang's names."""
        return {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}

    def sampled_otherwise(self, temperatures: Collection[float]) -> str:
        """Return the fields for which log-probs are not the model's own at one of these temperatures; "" if there are none."""
        changed = {name: value for name in _BIASES if (value := getattr(self, name))}
        if self.repetition_penalty not in (None, 1):
            changed["repetition_penalty"] = self.repetition_penalty
        if self.temperature not in temperatures:
            changed["temperature"] = self.temperature
        return ", ".join(f"{name} {value!r:.60}" for name, value in changed.items())

    def after(self, count: int, routed: int = 0) -> Self:
        """Return the parameters that go on after `count` tokens, and after experts of `routed` tokens; penalties and stop
        strings start anew. A seed moves with the count: an engine would draw the same random numbers as for the tokens
        before. Without `max_new_tokens` every part has the engine's default anew."""
        if not count:
            return self
        start = self.routed_experts_start_len
        return replace(
            self,
            max_new_tokens=None if self.max_new_tokens is None else self.max_new_tokens - count,
            min_new_tokens=None if self.min_new_tokens is None else max(0, self.min_new_tokens - count),
            sampling_seed=None if self.sampling_seed is None else (self.sampling_seed + _STRIDE * count) % 2**31,
            routed_experts_start_len=None if start is None else start + routed,
        )


# Fields that log-probs include and a trainer cannot compute.
_BIASES: Final = ("logit_bias", "custom_params", "json_schema", "regex", "frequency_penalty", "presence_penalty")
_STRIDE: Final = 1_000_003  # a prime far from the distances between seeds of one run

# The fields of `SamplingParams` that go beside SGLang's `sampling_params`, not into them.
REQUEST_LEVEL_FIELDS: Final = ("return_sampling_mask", "routed_experts_start_len")
_SAMPLING_FIELDS = tuple(f.name for f in fields(SamplingParams) if f.name not in REQUEST_LEVEL_FIELDS)


@dataclass(frozen=True, slots=True)
class FinishReason:
    """The reason why an answer ended."""

    type: FinishType
    matched: int | str | None = None  # the stop id, string or pattern of type `stop`


@dataclass(frozen=True, slots=True)
class Generation:
    """One finished answer.

    Attributes:
        log_probs: natural-log probability of each id under the temperature-scaled distribution; among the kept ids
            where `kept` has them.
        kept: for each id, the ids (int32, its own among them) that top-p, top-k and min-p left to sample from; None if
            not asked for.
        routed: int16 [tokens, layers x experts a token], the experts of each token from the one that was asked for to the
            last but one of `ids`, the ones that went through the model; None if not asked for, or none did."""

    ids: list[int]  # the sampled token ids, stop token included
    log_probs: list[float]
    text: str  # the decoded ids as the engine trims them
    finish_reason: FinishReason
    weight_version: str  # the engine's version when it wrote the answer
    weight_versions: tuple[tuple[str, int, int], ...]  # (version, start, end) over `ids`; one span if none are reported
    prompt_tokens: int
    cached_tokens: int  # part of the prompt that the engine had in its cache
    meta_info: Mapping[str, Any] = field(repr=False, compare=False)  # everything else that the engine said
    prompt_log_probs: list[float] = field(default_factory=list)  # of the last tokens asked for, at temperature 1
    kept: list[array[int]] | None = None
    routed: NDArray[np.int16] | None = field(default=None, repr=False, compare=False)
    raw: tuple[bytes, ...] = field(default=(), repr=False, compare=False)  # of requests with a caller's own fields
    parts: int = field(default=1, compare=False)  # that `text` was joined of, each decoded by itself


def join(parts: Sequence[Generation], prompt_tokens: int) -> Generation:
    """The parts of one answer as one; no part at all is an answer that was aborted before its first token.

    Ids, log-probs and texts follow each other, version spans are shifted, and touching spans of one version are one.
    Finish reason, version and everything in `meta_info` are the last part's, but the counts of `_SUMMED` are sums. What
    was found in the cache is the first part's: later ones find mostly what this answer itself has put there."""
    if not parts:
        return Generation([], [], "", FinishReason("abort"), "", (), prompt_tokens, 0, {})
    if len(parts) == 1:
        return parts[0]
    import numpy as np  # train --dry-run goes without it

    first, last = parts[0], parts[-1]
    spans, length = list[tuple[str, int, int]](), 0
    routed = [part.routed for part in parts if part.routed is not None]
    for part in parts:
        for version, start, end in part.weight_versions:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1], length + end)
            else:
                spans.append((version, length + start, length + end))
        length += len(part.ids)
    meta = dict(last.meta_info)
    for name in _SUMMED:
        counts = [part.meta_info[name] for part in parts if isinstance(part.meta_info.get(name), int | float)]
        meta |= {name: sum(counts)} if counts else {}
    return replace(
        last,
        ids=[id_ for part in parts for id_ in part.ids],
        log_probs=[log_prob for part in parts for log_prob in part.log_probs],
        text="".join(part.text for part in parts),
        weight_versions=tuple(spans),
        prompt_tokens=prompt_tokens,
        cached_tokens=first.cached_tokens,
        meta_info=meta,
        prompt_log_probs=first.prompt_log_probs,
        kept=[ids for part in parts for ids in part.kept or ()] if first.kept is not None else None,
        routed=np.concatenate(routed) if routed else None,
        raw=tuple(raw for part in parts for raw in part.raw),
        parts=len(parts),
    )


_SUMMED: Final = (
    *("completion_tokens", "num_retractions", "reasoning_tokens", "e2e_latency", "queue_time"),
    *("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"),
)


def encode(ids: Sequence[int], vocab_size: int | None) -> bytes:
    """A prompt as a JSON array. An id outside the vocabulary ends a real SGLang server; None leaves that to the
    engine. Raises EngineRejected, kind `bad_prompt`: it is empty, or has something that is not a token id."""
    if not ids:
        raise EngineRejected("the prompt is empty; expected at least one token id", kind="bad_prompt")
    if isinstance(ids, array):
        import numpy as np

        whole = np.frombuffer(ids, ids.typecode)
        if vocab_size is None or (whole.min() >= 0 and whole.max() < vocab_size):
            return orjson.dumps(whole, option=orjson.OPT_SERIALIZE_NUMPY)
    try:
        text = orjson.dumps(ids if isinstance(ids, list) else list(ids))
    except TypeError as error:
        said = f"the prompt holds something that is not a token id: {error}"
        raise EngineRejected(said, kind="bad_prompt") from error
    plain = text.translate(None, b"0123456789,") == b"[]"  # ten times as fast as asking every id for its type
    if vocab_size is None or (plain and max(ids) < vocab_size):
        return text
    at, bad = next((i, v) for i, v in enumerate(ids) if type(v) is not int or not 0 <= v < vocab_size)
    said = f"prompt token {at} is {bad!r}; expected whole numbers from 0 to {vocab_size - 1}"
    raise EngineRejected(said, kind="bad_prompt")
