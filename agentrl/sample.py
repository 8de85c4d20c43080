"""`Sample`: the record of one trajectory, from its prompt to training.

1. `tokens` is the whole sequence (prompt, then response). The response is everything after the first prompt:
   the model's tokens and the observations in between.
2. `loss_mask` and `rollout_log_probs` cover exactly the response: `response_length` entries each.
3. A sample grows in two ways only: `append_model` (mask 1, real log-probs) and `append_observation` (mask 0,
   log-prob 0). Lengths that disagree raise `SampleError` at the call that caused them. `validate` checks lengths and
   types of fields again when a sample leaves user code, and `from_dict` when a sample is read.
4. `to_dict` (plain JSON types) is lossless. `to_arrays` (compact numpy arrays) rounds log-probs to float32, the type
   that training uses.
5. The numbers of a growing sample are lists. A finished sample that waits to be trained is `compact`: its numbers are
   arrays, of 9 bytes a token instead of 80.
6. If sampling was truncated, `rollout_top_p_token_ids`, always an array, has the kept sets (the ids that top-p, top-k
   or min-p left for a token), concatenated. The set of response token i ends at `rollout_top_p_token_offsets[i + 1]`.
7. If the engine reports the experts of a mixture, `rollout_routed_experts` has a row for each token that the engine has
   processed, from the first token on. The rows of an answer's last token and of the next observation come with the next
   answer. An existing row never changes: later tokens were sampled with it.
8. `images` has the files of images, `image_spans` the positions of their placeholder ids. An id outside these spans is
   never an image, even if the model sampled the placeholder's id."""

from __future__ import annotations

import functools
import math
import typing
from array import array
from collections.abc import Callable, Iterable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Self, cast

from agentrl.errors import SampleError
from agentrl.media import UNLIMITED, Image, ImageSpan, image_from_url

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from pydantic_core import SchemaValidator, ValidationError

VersionSpan = tuple[str, int, int]  # (weight version, start, end): range of an answer's tokens that a version sampled


def version_number(label: str | None) -> int | None:
    """Return the number of a weight version; None if an engine's label is not a number."""
    return int(label) if label is not None and label.isdecimal() else None


Message = dict[str, Any]  # `role`, `content`; optional: `reasoning_content`, `tool_calls`, `tool_call_id`, `name`


def content_text(content: Any) -> str:
    """Return the text of a message's content; images are left out."""
    if isinstance(content, (list, tuple)):
        return "".join(str(part.get("text") or "") for part in content if isinstance(part, Mapping))
    return str(content or "")


RECORDED = frozenset(
    {"attempt", "close_failure", "counters", "failure", "gateway", "generate_seconds", "grade", "hosted", "messages"}
    | {"rewards", "step_credit", "step_rewards", "step_seconds"}
)
"""Keys of `Sample.metadata` that the rollout and the graders write; a data row's own metadata has none of them."""

_KEPT = ("rollout_top_p_token_ids", "rollout_top_p_token_offsets")
_ROUTED, _PIXELS = "rollout_routed_experts", "multimodal_train_inputs"
# The fields that grow with a sample, besides its text.
GROWN: tuple[str, ...] = ("tokens", "response_length", "loss_mask", "rollout_log_probs", *_KEPT, _ROUTED)
GROWN += ("weight_versions", "segments", "image_spans")
# The fields that are numbers, and their types as `array` and numpy name them: int32, uint8, float32.
_COMPACT = {"tokens": "i", "loss_mask": "B", "rollout_log_probs": "f", "teacher_log_probs": "f"}
_COMPACT |= dict.fromkeys(_KEPT, "i")


class Status(Enum):
    """State of a sample: still generating, or the way in which it ended."""

    PENDING = "pending"
    """Not yet generated."""
    COMPLETED = "completed"
    """The model (or the environment) ended it."""
    TRUNCATED = "truncated"
    """It reached a length, turn or context limit; its tokens may be trained."""
    ABORTED = "aborted"
    """It was cancelled from outside, for example by a weight update or a shutdown."""
    FAILED = "failed"
    """It failed; `metadata["failure"]` has the kind and the blame."""


STOPS: Mapping[str, Status] = {
    "done": Status.COMPLETED,
    **dict.fromkeys(("max_turns", "length", "context"), Status.TRUNCATED),
    "aborted": Status.ABORTED,
}
"""The stop reasons of the agent loop and their status. An environment's own stop reason means `COMPLETED`."""


class Origin(StrEnum):
    """Author of a segment of the response."""

    MODEL = "model"  # sampled by the model: loss mask 1
    CLOSE = "close"  # closing tokens that the model left out and the chat template needs: loss mask 0
    ENV = "env"  # tool results, user turns and generation prompts: loss mask 0


@dataclass(slots=True)
class Segment:
    """One contiguous run of response tokens with one author; `start` and `end` index into the response.

    A turn that a weight update interrupted has several model segments, one per version."""

    origin: Origin
    start: int
    end: int
    turn: int
    version: str | None = None  # the weight version that sampled a model segment, if known


@dataclass(slots=True)
class SpecInfo:
    """Speculative-decoding counts summed over a sample's requests."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        """Add the counts of one engine answer's `meta_info`."""
        self.spec_accept_token_num += int(meta_info.get("spec_accept_token_num", 0) or 0)
        self.spec_draft_token_num += int(meta_info.get("spec_draft_token_num", 0) or 0)
        self.spec_verify_ct += int(meta_info.get("spec_verify_ct", 0) or 0)
        self.completion_token_num += int(meta_info.get("completion_tokens", 0) or 0)


@dataclass(slots=True)
class Sample:
    """One trajectory: a prompt, the tokens that followed, their authors, and the reward.

    Attributes:
        group_index: index of the prompt's group; the group's samples share it.
        index: running number of the sample over the whole run.
        rollout_id: samples that one trajectory was split into share it; None: the sample is the whole trajectory.
        prompt: the prompt text, or a list of chat messages.
        tokens: int token ids, prompt then response.
        response: the response as text (for people and graders; never re-encoded).
        response_length: number of response tokens.
        reward: a finite number, or a dict of them (`--reward-key` picks one).
        loss_mask: 1 if the token is trained; one entry per response token.
        rollout_log_probs: natural-log probability of each response token at sampling time; 0.0 if masked.
        teacher_log_probs: natural-log probability of each response token under a teacher; None unless asked for.
        weight_versions: the weight versions that wrote the sample, in order of first use.
        rollout_top_p_token_ids, rollout_top_p_token_offsets: the kept sets of truncated sampling and their
            `response_length` + 1 bounds. A set may be empty. None if no token has a set.
        rollout_routed_experts: int16 [tokens, layers x experts per token] from the engine, for the first tokens (in a
            whole sample all but the last). Lists and [tokens, layers, experts per token] are accepted too.
        remove_sample: keep the sample for statistics but give it no loss.
        non_generation_time: seconds spent in tools and environment.
        segments: the parts of the response by author; empty if user code set `tokens` itself.
        stop_reason: why the sample ended: a key of `STOPS`, or an environment's own reason. `stop` also sets `status`.
        images: the images of the prompt and of observations, by hash; samples of a group share them.
        image_spans: the images' positions in `tokens`, in order."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    prompt: str | list[Message] = ""
    tokens: MutableSequence[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: MutableSequence[int] | None = None
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    multimodal_inputs: Any = None
    multimodal_train_inputs: Any = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: MutableSequence[float] | None = None
    teacher_log_probs: MutableSequence[float] | None = None
    rollout_top_p_token_ids: MutableSequence[int] | None = None
    rollout_top_p_token_offsets: MutableSequence[int] | None = None
    rollout_routed_experts: Any = field(default=None, compare=False)
    remove_sample: bool = False
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    segments: list[Segment] = field(default_factory=list)
    stop_reason: str = ""
    images: dict[str, Image] = field(default_factory=dict)
    image_spans: list[ImageSpan] = field(default_factory=list)

    Status = Status
    SpecInfo = SpecInfo

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    @property
    def version_spans(self) -> list[tuple[str | None, int, int]]:
        """The weight version of each range `[start, end)` of the response; None if it is unknown."""
        if self.segments:
            return [(segment.version, segment.start, segment.end) for segment in self.segments]
        return [(self.weight_versions[0] if len(self.weight_versions) == 1 else None, 0, self.response_length)]

    @property
    def trained_tokens(self) -> int:
        """Number of response tokens with mask 1."""
        if self.remove_sample:
            return 0
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    @property
    def hosted(self) -> str | None:
        """The hosted model that generated the sample, and its address; else None. Such a sample has no tokens."""
        name = self.metadata.get("hosted")
        return name if isinstance(name, str) else None

    @property
    def model_turns(self) -> int:
        """Number of the model's turns that the sample records."""
        if self.hosted:
            return len(self.metadata.get("generate_seconds", ()))
        return max((segment.turn for segment in self.segments), default=0)

    @property
    def finished(self) -> bool:
        """True if the sample has a response, and is completed or truncated."""
        return self.status in (Status.COMPLETED, Status.TRUNCATED) and self.response_length > 0

    def stop(self, reason: str) -> None:
        """Set the stop reason, and the status that follows from it."""
        self.stop_reason, self.status = reason, STOPS.get(reason, Status.COMPLETED)

    def set_prompt_tokens(self, ids: Sequence[int], spans: Sequence[ImageSpan] = ()) -> None:
        """Start (or restart) the sample from prompt token ids, without a response. `spans`: positions of images."""
        self.tokens, self.image_spans = list(ids), list(spans)
        self.response, self.response_length = "", 0
        self.loss_mask, self.rollout_log_probs, self.teacher_log_probs = [], [], None
        self.rollout_top_p_token_ids = self.rollout_top_p_token_offsets = self.rollout_routed_experts = None
        self.weight_versions, self.segments = [], []

    def append_model(
        self,
        ids: Sequence[int],
        log_probs: Sequence[float],
        version: str | Sequence[VersionSpan] | None = None,
        *,
        text: str = "",
        turn: int = 0,
        kept: Sequence[Sequence[int]] | None = None,
        routed: NDArray[np.int16] | None = None,
    ) -> None:
        """Append tokens that the model sampled (mask 1).

        Args:
            ids: the sampled token ids, exactly as the engine returned them.
            log_probs: natural-log probability of each id under the sampling policy.
            version: the weight version that sampled the ids, or spans over `ids` if several versions did.
            text: the decoded text, appended to `response`.
            turn: the model turn of the ids, from 1.
            kept: the kept set of each id, if sampling was truncated; `log_probs` are then normalised over it.
            routed: rows of `rollout_routed_experts` to append, at most up to the second-last of `ids`.

        Raises SampleError: `ids`, `log_probs` and `kept` differ in length, a log-prob is not a finite number, the spans do
        not cover `ids` one after the other, or `routed` does not fit."""
        if len(ids) != len(log_probs):
            got = f"append_model got {len(ids)} ids but {len(log_probs)} log-probs"
            raise SampleError(f"{got}; pass one log-prob an id")
        if not all(map(math.isfinite, log_probs)):
            bad = next(i for i, p in enumerate(log_probs) if not math.isfinite(p))
            raise SampleError(f"append_model got log-prob {log_probs[bad]} at position {bad}; log-probs must be finite")
        spans: Sequence[tuple[str | None, int, int]] = [(None, 0, len(ids))]
        if isinstance(version, str):
            spans = [(version, 0, len(ids))]
        elif version is not None:
            spans = version
            cuts = [0, *(end for _, _, end in spans)]
            starts = [start for _, start, _ in spans]
            if starts != cuts[:-1] or cuts[-1] != len(ids) or (ids and sorted(set(cuts)) != cuts):
                said = f"that do not cover {len(ids)} ids one after the other"
                raise SampleError(f"append_model got versions {spans} {said}")
        self._keep(len(ids), kept)
        if routed is not None:
            self._route(routed, len(self.tokens) + len(ids))
        for name, start, end in spans:
            self._append(ids[start:end], log_probs[start:end], Origin.MODEL, turn, name)
            if name is not None and name not in self.weight_versions:
                self.weight_versions.append(name)
        self.response += text

    def append_observation(
        self,
        ids: Sequence[int],
        *,
        text: str = "",
        turn: int = 0,
        origin: Origin = Origin.ENV,
        spans: Sequence[ImageSpan] = (),
    ) -> None:
        """Append tokens that the model was shown (mask 0, log-prob 0). `spans`: positions of images in `ids`."""
        if origin is Origin.MODEL:
            raise SampleError("append_observation cannot append model tokens; use append_model")
        self.image_spans += [span.moved(len(self.tokens)) for span in spans]
        self._keep(len(ids), None)
        self._append(ids, [0.0] * len(ids), origin, turn)
        self.response += text

    def _keep(self, count: int, kept: Sequence[Sequence[int]] | None) -> None:
        """Record the kept sets of `count` tokens that will be appended; None: their sets are empty."""
        ids, bounds = self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets
        if kept is None and bounds is None:
            return
        if kept is not None and len(kept) != count:
            raise SampleError(f"append_model got {count} ids but {len(kept)} kept sets; pass one an id")
        if ids is None or bounds is None:
            ids, bounds = array("i"), array("i", [0] * (self.response_length + 1))
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = ids, bounds
        for row in [()] * count if kept is None else kept:
            ids.extend(row)
            bounds.append(len(ids))

    def _route(self, more: NDArray[np.int16], length: int) -> None:
        """Append rows of routing. The sample will have `length` tokens."""
        import numpy as np

        known = self.routing()
        self.rollout_routed_experts = more if known is None or not len(known) else np.concatenate([known, more])
        if len(self.rollout_routed_experts) >= length:
            raise SampleError(f"append_model got experts for {len(more)} tokens more, of which {length} - 1 have some")

    def _append(
        self, ids: Sequence[int], log_probs: Iterable[float], origin: Origin, turn: int, version: str | None = None
    ) -> None:
        if self.loss_mask is None or self.rollout_log_probs is None:
            if self.response_length:
                said = f"the sample has {self.response_length} response tokens but no loss_mask or rollout_log_probs"
                remedy = "set both before appending, or build the sample with set_prompt_tokens and append_*"
                raise SampleError(f"{said}; {remedy}")
            self.loss_mask, self.rollout_log_probs = [], []
        if not ids:
            return
        start = self.response_length
        self.tokens.extend(ids)
        self.loss_mask.extend([int(origin is Origin.MODEL)] * len(ids))
        self.rollout_log_probs.extend(log_probs)
        self.teacher_log_probs = None
        self.response_length += len(ids)
        self.segments.append(Segment(origin, start, self.response_length, turn, version))

    def validate(self) -> Self:
        """Check that lengths, mask, log-probs and segments agree; returns the sample. Raises SampleError: a
        field is wrong. The error names the field, the expected value and the given value."""
        where = f"sample index={self.index!r:.40} group_index={self.group_index!r:.40}"
        try:
            _shape().validate_python({name: getattr(self, name) for name in self.__dataclass_fields__})
        except ValueError as error:
            wrong = cast("ValidationError", error).errors(include_url=False)[0]
            name = ".".join(map(str, wrong["loc"]))
            raise SampleError(f"{where}: {name}: {wrong['msg']}, got {wrong['input']!r:.80}") from error
        tokens, mask, log_probs, teacher, kept, bounds = map(self._numbers, _COMPACT)
        n, length = self.response_length, len(tokens or ())
        if not 0 <= n <= length:
            raise SampleError(f"{where}: response_length is {n} but there are {length} tokens")
        if n and n == length:
            raise SampleError(f"{where}: response_length covers all {n} tokens; the prompt's tokens are missing")
        for name, values in (("loss_mask", mask), ("rollout_log_probs", log_probs), ("teacher_log_probs", teacher)):
            if values is not None and len(values) != n:
                raise SampleError(f"{where}: {name} has {len(values)} entries, response_length is {n}")
        if (kept is None) is not (bounds is None):
            raise SampleError(f"{where}: {' and '.join(_KEPT)} go together: set both or none")
        if kept is not None and bounds is not None:
            rising = len(bounds) == n + 1 and all(a <= b for a, b in pairwise(bounds))
            if not rising or (bounds[0], bounds[-1]) != (0, len(kept)):
                raise SampleError(f"{where}: {_KEPT[1]} must be {n + 1} numbers that rise from 0 to {len(kept)}")
        self.routing()
        self._pixels()
        edges = [0, *(edge for span in self.image_spans for edge in (span.start, span.end)), length]
        if any(a > b for a, b in pairwise(edges)) or any(span.start == span.end for span in self.image_spans):
            raise SampleError(f"{where}: image_spans must be places in {length} tokens, one after the other")
        if (marks := b"\1" * n if mask is None else mask.tobytes()).strip(b"\0\1"):
            raise SampleError(f"{where}: loss_mask holds values other than 0 and 1")
        if marks or mask is not None:  # without a mask all tokens train
            self._validate_segments(where, marks)
        return self

    def _numbers(self, name: str) -> array[Any] | None:
        """Return a field of numbers as `compact` stores it. Raises SampleError: training cannot use its values."""
        values, kind = getattr(self, name), _COMPACT[name]
        if (values is None and name != "tokens") or (isinstance(values, array) and values.typecode == kind):
            return values
        try:
            if not isinstance(values, MutableSequence):
                raise TypeError(f"expected a list, got {values!r:.80}")
            plain = values if isinstance(values, list) else list(values)
            if name == "tokens" and bool in set(map(type, plain)):
                raise TypeError("it holds true or false, expected token ids, which are whole numbers")
            numbers = array(kind, bytes(plain) if kind == "B" else plain)  # from bytes: three times as fast
            if kind == "f" and not math.isfinite(sum(numbers)):
                raise ValueError("a value is not finite as a float32")
        except (TypeError, ValueError, OverflowError) as error:
            raise SampleError(f"sample index={self.index!r:.40}: {name} cannot be trained with: {error}") from error
        return numbers

    def routing(self) -> NDArray[np.int16] | None:
        """Return `rollout_routed_experts` as int16 [tokens, layers x experts per token]. Raises SampleError: the values
        are not numbers of experts, or have more rows than the sample has tokens."""
        if self.rollout_routed_experts is None:
            return None
        import numpy as np

        where = f"sample index={self.index!r:.40}: rollout_routed_experts"
        try:
            given = np.asarray(self.rollout_routed_experts)
            kept = given.astype(np.int16, copy=False) if given.dtype.kind in "iu" else given
            rows = kept.reshape(len(given), -1 if given.size else 0)
        except (TypeError, ValueError, OverflowError) as error:
            raise SampleError(f"{where} is no array of whole numbers, one row a token: {error}") from error
        if rows.dtype != np.int16 or (rows.size and (rows.min() < 0 or given.max() != rows.max())):
            raise SampleError(f"{where} must hold numbers of experts, from 0; got {given.dtype}")
        if len(rows) > len(self.tokens):
            raise SampleError(f"{where} has {len(rows)} rows, and the sample {len(self.tokens)} tokens")
        return rows

    def _pixels(self) -> dict[str, NDArray[Any]]:
        """Return `multimodal_train_inputs` as arrays; {} for None. Raises SampleError: a value is not numeric."""
        if (given := self.multimodal_train_inputs) is None:
            return {}
        import numpy as np

        where = f"sample index={self.index!r:.40}: {_PIXELS} must be a dict with arrays of numbers"
        if not isinstance(given, Mapping):
            raise SampleError(f"{where}, got {given!r:.80}")
        try:
            arrays = {str(name): np.asarray(values) for name, values in given.items()}
        except (TypeError, ValueError) as error:
            raise SampleError(f"{where}: {error}") from error
        if any(values.dtype.kind not in "fiub" for values in arrays.values()):
            raise SampleError(f"{where}, got {given!r:.80}")
        return arrays

    def _validate_segments(self, where: str, marks: bytes) -> None:
        at = 0
        for segment in self.segments:
            if segment.start != at or segment.end <= at or segment.end > self.response_length:
                raise SampleError(f"{where}: segments do not cover the response: {segment} after position {at}")
            trains = marks.count(1, at, segment.end)
            if trains and (segment.origin is not Origin.MODEL or trains < segment.end - at):
                raise SampleError(f"{where}: loss_mask disagrees with who wrote {segment}")
            at = segment.end
        if self.segments and at != self.response_length:
            raise SampleError(f"{where}: segments cover {at} of {self.response_length} response tokens")

    def get_reward_value(self, reward_key: str | None = None) -> float:
        """Return the scalar reward; `reward_key` selects from a dict. Raises SampleError: there is no reward, the dict
        lacks the key, or the value is not a finite number."""
        value: Any = self.reward
        if isinstance(value, dict):
            if reward_key is None:
                raise SampleError(f"reward is a dict with keys {sorted(value)}; set --reward-key to one of them")
            if reward_key not in value:
                raise SampleError(f"reward has no entry {reward_key!r}; it has {sorted(value)}")
            value = value[reward_key]
        if not isinstance(value, (int, float)) or not math.isfinite(value):
            raise SampleError(f"sample index={self.index}: reward must be a finite number, got {value!r}")
        return float(value)

    def to_dict(self) -> dict[str, Any]:
        """Return the sample as plain JSON types; `from_dict` restores an equal sample."""
        out = {name: getattr(self, name) for name in self.__dataclass_fields__}
        out |= {name: list(out[name]) for name in _COMPACT if out[name] is not None}
        routing = self.routing()
        out[_ROUTED] = None if routing is None else routing.tolist()
        out[_PIXELS] = {name: values.tolist() for name, values in self._pixels().items()} or None
        out["status"] = self.status.value
        out["spec_info"] = {name: getattr(self.spec_info, name) for name in self.spec_info.__dataclass_fields__}
        out["segments"] = [[s.origin.value, s.start, s.end, s.turn, s.version] for s in self.segments]
        out["images"] = {name: image.url for name, image in self.images.items()}
        out["image_spans"] = [[span.hash, span.start, span.end] for span in self.image_spans]
        return out

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Build and validate a sample from the dict of `to_dict`. Raises SampleError: a key is not a field, a value
        has a wrong type or is out of range, or the lengths disagree."""
        if not isinstance(data, Mapping):
            raise SampleError(f"a sample must be an object with its fields, got {data!r:.80}")
        if unknown := sorted(map(str, data.keys() - cls.__dataclass_fields__)):
            raise SampleError(f"unknown sample fields {unknown!s:.200}; known are {sorted(cls.__dataclass_fields__)}")
        kept = dict(data)
        for name in _READ.keys() & kept.keys():
            try:
                kept[name] = _READ[name](kept[name])
            except (AttributeError, TypeError, ValueError) as error:
                raise SampleError(f"{name} cannot be read: {error}; expected it as `to_dict` writes it") from error
        return cls(**kept).validate()

    def compact(self) -> Self:
        """Convert the numbers to arrays of int32, uint8 and float32; returns the sample. Only for samples that user
        code does not see any more: an array is not equal to a list, and cannot be added to a list."""
        for name in _COMPACT:
            setattr(self, name, self._numbers(name))
        return self

    def to_arrays(self) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
        """Split into numpy arrays and the small rest.

        Returns:
            arrays: `tokens` int32 [T], `loss_mask` uint8 [R], `rollout_log_probs` and `teacher_log_probs` float32 [R], the
                kept sets, int32 [K] and [R + 1], the routing, and each of `multimodal_train_inputs`; absent if None.
            rest: `to_dict` without these fields, and without the images, which a group stores once."""
        import numpy as np

        held = {**{name: self._numbers(name) for name in _COMPACT}, _ROUTED: self.routing()}
        arrays = {name: np.asarray(values) for name, values in held.items() if values is not None}
        arrays |= {f"{_PIXELS}.{name}": values for name, values in self._pixels().items()}
        small: dict[str, Any] = {**dict.fromkeys((*_COMPACT, _ROUTED, _PIXELS)), "tokens": [], "images": {}}
        rest = replace(self, **small).to_dict()
        return arrays, {name: value for name, value in rest.items() if name not in small}

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], rest: Mapping[str, Any], *, compact: bool = False) -> Self:
        """Build a sample from the results of `to_arrays`, with lists, or with arrays as `compact` makes them. Raises
        SampleError as `from_dict` does."""
        held: dict[str, array[Any]] = {}
        pixels, routing = dict[str, Any](), arrays.get(_ROUTED)
        for name, values in arrays.items():
            if name.startswith(f"{_PIXELS}."):
                pixels[name.removeprefix(f"{_PIXELS}.")] = values
                continue
            if name == _ROUTED and values.dtype.char in "hB":
                continue
            if values.dtype.char != _COMPACT.get(name):
                raise SampleError(f"the array {name!r:.80} of {values.dtype} is none of a sample's: {_COMPACT}")
            held[name] = array(_COMPACT[name], values.tobytes())
        sample = cls.from_dict({**rest, **held, _ROUTED: routing, _PIXELS: pixels or None})
        for name in () if compact else held.keys() - set(_KEPT):
            setattr(sample, name, held[name].tolist())
        return sample


_READ: Mapping[str, Callable[[Any], Any]] = {
    "status": Status,
    "spec_info": lambda counts: SpecInfo(**counts),
    "segments": lambda rows: [Segment(Origin(origin), *rest) for origin, *rest in rows],
    "images": lambda urls: {name: image_from_url(url, UNLIMITED) for name, url in urls.items()},
    "image_spans": lambda rows: [ImageSpan(*row) for row in rows],
    _PIXELS: lambda arrays: None if arrays == {} else arrays,
    **dict.fromkeys(_KEPT, lambda numbers: numbers if numbers is None else array("i", numbers)),
}
"""The readers of `from_dict` for fields that are not plain values."""


@functools.cache
def _shape() -> SchemaValidator:
    """Return pydantic's strict validator of the fields' annotations: a bool or a text is not a number."""
    from pydantic import ConfigDict, create_model

    hints: dict[str, Any] = {name: (hint, ...) for name, hint in typing.get_type_hints(Sample).items()}
    for name in _COMPACT:
        del hints[name]
    config = ConfigDict(strict=True, revalidate_instances="always")
    return cast("SchemaValidator", create_model("Sample", __config__=config, **hints).__pydantic_validator__)
