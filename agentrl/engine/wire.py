"""Typed requests to an engine, and its typed answers, which `answers` parses. An answer may come in parts that continue
each other: `SamplingParams.after` has the parameters for the next part, and `join` merges the parts."""

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
    """Sampling parameters of one answer; None means the engine's default. The last two fields are sent beside SGLang's
    `sampling_params`. `stop_token_ids` needs the EOS ids too: else an answer interrupted after one continues."""

    temperature: float | None = None  # 0 means greedy
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    max_new_tokens: int | None = None  # prompt plus this must fit into the engine's context
    min_new_tokens: int | None = None
    stop: str | Sequence[str] | None = None  # the text is cut at a stop string unless `no_stop_trim`
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
    return_sampling_mask: bool = False  # request the kept sets too
    routed_experts_start_len: int | None = None  # request the experts of the tokens from this index on

    def to_wire(self) -> dict[str, Any]:
        """Return the fields that are set, under SGLang's names."""
        return {name: value for name in _SAMPLING_FIELDS if (value := getattr(self, name)) is not None}

    def sampled_otherwise(self, temperatures: Collection[float]) -> str:
        """Return the fields that make log-probs differ from the model's own at these temperatures; "" if none does."""
        changed = {name: value for name in _BIASES if (value := getattr(self, name))}
        if self.repetition_penalty not in (None, 1):
            changed["repetition_penalty"] = self.repetition_penalty
        if self.temperature not in temperatures:
            changed["temperature"] = self.temperature
        return ", ".join(f"{name} {value!r:.60}" for name, value in changed.items())

    def after(self, count: int, routed: int = 0) -> Self:
        """Return the parameters of the next part, after `count` tokens and the experts of `routed` tokens. Penalties
        and stop strings start anew. The seed changes with the count, because an engine would repeat its random numbers.
        Without `max_new_tokens`, each part gets the engine's default again."""
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


# Fields that change log-probs in a way that a trainer cannot compute.
_BIASES: Final = ("logit_bias", "custom_params", "json_schema", "regex", "frequency_penalty", "presence_penalty")
_STRIDE: Final = 1_000_003  # a prime far from the distances between seeds of one run

# Fields of `SamplingParams` that are sent beside SGLang's `sampling_params`, not inside.
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
        log_probs: natural log-prob of each id under the temperature-scaled distribution, restricted to the kept ids if
            `kept` is set.
        kept: for each id, the ids (int32, itself included) that top-p, top-k and min-p left to sample from; None if not
            requested.
        routed: int16 [tokens, layers x experts per token]: experts from token `routed_experts_start_len` to the last
            but one of `ids` (the last is never a model input). None if not requested, or if no token has experts."""

    ids: list[int]  # the sampled token ids, stop token included
    log_probs: list[float]
    text: str  # the decoded ids as the engine trims them
    finish_reason: FinishReason
    weight_version: str  # the engine's version when it wrote the answer
    weight_versions: tuple[tuple[str, int, int], ...]  # (version, start, end) over `ids`; one span if none are reported
    prompt_tokens: int
    cached_tokens: int  # part of the prompt that the engine had in its cache
    meta_info: Mapping[str, Any] = field(repr=False, compare=False)  # all other fields of `meta_info`
    prompt_log_probs: list[float] = field(default_factory=list)  # of the last tokens asked for, at temperature 1
    kept: list[array[int]] | None = None
    routed: NDArray[np.int16] | None = field(default=None, repr=False, compare=False)
    raw: tuple[bytes, ...] = field(default=(), repr=False, compare=False)  # raw answers, if `extra` is given
    parts: int = field(default=1, compare=False)  # number of answers that `text` joins, each decoded by itself


def join(parts: Sequence[Generation], prompt_tokens: int) -> Generation:
    """Merge the parts of one answer. Without any part, the answer was aborted before its first token. Ids, log-probs
    and texts are concatenated, version spans are shifted, and adjacent spans of one version are merged. Finish reason,
    version and `meta_info` are the last part's, except that the counts of `_SUMMED` are summed. `cached_tokens` is the
    first part's: later parts mostly find tokens that this answer itself has cached."""
    if not parts:
        return Generation([], [], "", FinishReason("abort"), "", (), prompt_tokens, 0, {})
    if len(parts) == 1:
        return parts[0]
    import numpy as np  # imported here: train --dry-run does not need numpy

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
        prompt_log_probs=next((part.prompt_log_probs for part in parts if part.prompt_log_probs), []),
        kept=[ids for part in parts for ids in part.kept or ()] if first.kept is not None else None,
        routed=np.concatenate(routed) if routed else None,
        raw=tuple(raw for part in parts for raw in part.raw),
        parts=len(parts),
    )


_SUMMED: Final = (
    *("completion_tokens", "num_retractions", "reasoning_tokens", "e2e_latency", "queue_time"),
    *("spec_accept_token_num", "spec_draft_token_num", "spec_verify_ct"),
)


class Prompt(array):  # type: ignore[type-arg] # Python 3.11 has no array[int]
    """The ids of a prompt. `known`: the number of ids at the front whose JSON is known, and this JSON; see `encode`."""

    known = 0, b""


def encode(ids: Sequence[int], vocab_size: int | None) -> bytes:
    """Return a prompt as a JSON array. Only the new ids of a `Prompt` are checked and encoded. An id outside the
    vocabulary would crash an SGLang server. If `vocab_size` is None, ids are not checked. Raises EngineRejected, kind
    `bad_prompt`: the prompt is empty, or an item is no id."""
    if isinstance(ids, Prompt):
        count, text = ids.known
        if count < len(ids) or not count:
            more = encode(ids[count:], vocab_size)
            ids.known = len(ids), b"".join((text[:-1], b",", more[1:]) if count else (more[:-1], b"]"))  # of exact size
        return ids.known[1]
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
    plain = text.translate(None, b"0123456789,") == b"[]"  # ten times as fast as a type check per id
    if vocab_size is None or (plain and max(ids) < vocab_size):
        return text
    at, bad = next((i, v) for i, v in enumerate(ids) if type(v) is not int or not 0 <= v < vocab_size)
    said = f"prompt token {at} is {bad!r}; expected whole numbers from 0 to {vocab_size - 1}"
    raise EngineRejected(said, kind="bad_prompt")
