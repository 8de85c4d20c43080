"""`TrainBatch`: the data that training gets from rollouts, as flat numpy arrays. The tokens of all samples are
concatenated; offsets say where each sample begins. The batch is immutable, so Ray's object store shares it without
copies. Routing (one array per sample) and images can be most of the batch's bytes. A rank fetches them only for its own
samples. For data that a trainer cannot use, `from_samples` raises an error with the sample's index."""

from __future__ import annotations  # `_KINDS` reads annotations as text

import hashlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Self, TypeVar

import numpy as np
import orjson
from numpy.typing import ArrayLike, NDArray

from agentrl.errors import SampleError, TrainError, raised_as
from agentrl.media import Image
from agentrl.modelfolder import ImageTokens
from agentrl.sample import Sample, version_number
from agentrl.train.observations import credit_of, gives_credit, observation_ids_of, turns_of, weights_of

K = TypeVar("K", bound=np.generic)
PerToken = NDArray[K]
PerResponseToken = NDArray[K]
PerSample = NDArray[K]
Ints = NDArray[np.int64]
Routing = NDArray[np.int16] | Callable[[], NDArray[np.int16]]  # one sample's array, or a function that fetches it
Pixels = Mapping[str, NDArray[Any]]  # arrays of an image for `get_image_features`: `pixel_values`, `image_grid_thw`


class Picture(NamedTuple):
    """An image of the batch."""

    hash: str  # equal for equal images
    held: Image | Pixels | Callable[[], Image | Pixels]
    """The file, pixels from the sample's `multimodal_train_inputs`, or a function that fetches one of the two."""


@dataclass(frozen=True, slots=True, eq=False, repr=False, kw_only=True)
class TrainBatch:
    """S samples, T tokens, R response tokens: `PerToken` [T], `PerResponseToken` [R], `PerSample` [S]. -1: no index."""

    tokens: PerToken[np.int32]  # each sample's prompt and response
    offsets: NDArray[np.int64]
    """[S + 1]; sample i is `tokens[offsets[i]:offsets[i + 1]]`. `response_offsets` are those of response arrays."""
    loss_mask: PerResponseToken[np.uint8]  # 1 where the token trains
    rollout_log_probs: PerResponseToken[np.float32] | None = None  # the engine's natural logs, 0 where masked; or None
    turns: PerResponseToken[np.int32]  # the turn that each token belongs to, from 1; 0 where unknown
    staleness: PerResponseToken[np.int32]
    """Age, in rollouts, of the weights that sampled the token; -1 where masked or unknown."""
    step_rewards: PerResponseToken[np.float64] | None = None
    """The reward of each turn, at the turn's last model token; 0 elsewhere. The sum is all that the sample
    earned, see `observations.credit_of`. None if no step gave a reward."""
    observation_ids: PerResponseToken[np.int32]
    """A number for the tokens that the model was shown just before the token's turn (for the first turn: the
    prompt). Within a group, equal numbers mean equal tokens. -1 where the turn is unknown."""
    loss_weights: PerResponseToken[np.float32] | None = None  # the user's factors of token weights; or None
    response_offsets: NDArray[np.int64]
    rewards: PerSample[np.float64]  # NaN for a removed sample without a reward
    reward_parts: PerSample[np.float64] | None = None  # [S, K], the entries of dict rewards that the run names
    group_ids: PerSample[np.int64]
    trajectory_ids: PerSample[np.int64]  # as `group_ids`, numbers in the batch; fan-out siblings share a trajectory
    group_indices: PerSample[np.int64]  # `Sample.group_index`
    sample_indices: PerSample[np.int64]  # `Sample.index`
    teacher_log_probs: PerResponseToken[np.float32] | None = None  # natural logs; None if a trained sample lacks them
    old_log_probs: PerResponseToken[np.float32] | None = None
    """This and the next four fields are as in `TokenView`. The trainer adds the fields that its algorithm reads."""
    ref_log_probs: PerResponseToken[np.float32] | None = None
    values: PerResponseToken[np.float32] | None = None
    advantages: PerResponseToken[np.float32] | None = None
    chosen: PerResponseToken[np.float32] | None = None
    returns: PerResponseToken[np.float32] | None = None  # the targets of a critic
    counted: PerResponseToken[np.uint8] | None = None  # the mask for token weights, if not `loss_mask`
    support_ids: NDArray[np.int32] | None = None
    """[K], the sampling supports of all response tokens, concatenated; None if sampling was not truncated."""
    support_offsets: NDArray[np.int64] | None = None
    """[R + 1]; token i was sampled from `support_ids[support_offsets[i]:support_offsets[i + 1]]`, or from all
    tokens if this support is empty. The supports of trained tokens are not empty."""
    routed_experts: tuple[Routing, ...] | None = None
    """For each sample int16 [tokens, layers x experts per token]: the experts that the engine chose for each token, or
    -1 if unknown. They are known for all tokens before the last trained one. None if nothing is replayed."""
    pictures: tuple[Picture, ...] = ()  # the images of all samples, each once
    image_spans: NDArray[np.int32] = field(default_factory=lambda: np.zeros((0, 3), np.int32))
    """[K, 3], for each occurrence of an image its index in `pictures`, and the bounds of its placeholder ids in the
    sample's tokens. Rows are in the order of samples."""
    image_offsets: NDArray[np.int64] | None = None  # [S + 1], bounds of each sample's `image_spans`
    metadata: PerSample[np.bytes_] | None = None  # the samples' `train_metadata` as JSON; None if no sample has any

    def __post_init__(self) -> None:
        for array in self.arrays().values():
            array.flags.writeable = False

    @classmethod
    def from_samples(
        cls,
        groups: Sequence[Sequence[Sample]],
        reward_key: str | None = None,
        *,
        reward_parts: Sequence[str] = (),
        supervised: bool = False,
        trained: int | None = None,
        truncated: bool = False,
        routed: bool = False,
        rewards: Sequence[float] | None = None,
        image_tokens: ImageTokens | None = None,
    ) -> Self:
        """Check the samples and build a batch, in the given order.

        `train_metadata` may have weights for the loss: "weight" of the sample, and "turn_weights" (entry k - 1 is turn
        k's). A token's weight is their product; 0 masks it. A sample with `remove_sample` keeps its tokens and reward
        (group statistics use it), but its mask becomes all 0. Its reward and log-probs may be missing. A sample without
        a `loss_mask` trains on its whole response. Raises SampleError: a sample is inconsistent, or lacks something
        that it must have. TrainError: there are no samples.

        Args:
            groups: groups of samples; the samples of one group are compared with each other.
            reward_key, reward_parts: the entry of dict rewards to train on; the entries that become `reward_parts`.
            supervised: the batch is for sft_loss, so rewards (then 0), log-probs and supports may be missing.
            trained: number of rollouts on which the weights were trained before; None: the staleness is unknown.
            truncated: every trained token must have a sampling support. This also holds if any sample has supports.
            routed: routing is replayed, so each sample must have its routing up to its last trained token.
            rewards: [S], to train on in place of the samples' own rewards.
            image_tokens: the trained model's image tokens, which mark the images of `multimodal_train_inputs`."""
        samples = [sample for group in groups for sample in group]
        if not samples:
            raise TrainError("a train batch needs at least one sample; all groups were dropped or empty")
        for sample in samples:
            _check(sample, supervised)
        if rewards is None:
            rewards = [_reward(sample, reward_key, supervised) for sample in samples]

        def flat(of: Callable[[Sample], ArrayLike], dtype: type[np.generic], known: bool = True) -> Any:
            return np.concatenate([np.asarray(of(sample), dtype) for sample in samples]) if known else None

        def unsaid(sample: Sample) -> list[float]:
            return [0.0] * sample.response_length

        weights = [np.asarray(weights_of(sample), np.float32) for sample in samples]
        masks = [_mask(sample, given) for sample, given in zip(samples, weights, strict=True)]
        tokens, offsets = flat(lambda s: s.tokens, np.int32), _offsets([len(s.tokens) for s in samples])
        pictures, spans = _images(samples, image_tokens)
        image_offsets = _offsets([len(own) for own in spans])
        image_spans = np.array([span for own in spans for span in own], np.int32).reshape(-1, 3)
        credit = None
        if any(map(gives_credit, samples)):
            credit = np.concatenate([credit_of(s, reward) for s, reward in zip(samples, rewards, strict=True)])
        sampled = all(s.rollout_log_probs is not None or s.remove_sample for s in samples)
        taught = all(s.teacher_log_probs is not None or not s.trained_tokens for s in samples)
        cut = truncated or not (supervised or all(s.rollout_top_p_token_offsets is None for s in samples))
        return cls(
            tokens=tokens,
            offsets=offsets,
            loss_mask=np.concatenate(masks),
            rollout_log_probs=flat(lambda s: s.rollout_log_probs or unsaid(s), np.float32, sampled),
            teacher_log_probs=flat(lambda s: s.teacher_log_probs or unsaid(s), np.float32, taught),
            turns=flat(turns_of, np.int32),
            staleness=np.concatenate([_staleness(s, mask, trained) for s, mask in zip(samples, masks, strict=True)]),
            step_rewards=credit,
            observation_ids=observation_ids_of(groups, _keys(tokens, offsets, image_spans, image_offsets), offsets),
            loss_weights=np.concatenate(weights) if any((given != 1).any() for given in weights) else None,
            response_offsets=_offsets([sample.response_length for sample in samples]),
            rewards=np.array(rewards, np.float64),
            reward_parts=_reward_parts(samples, reward_parts) if reward_parts else None,
            group_ids=np.repeat(np.arange(len(groups)), [len(group) for group in groups]).astype(np.int64),
            trajectory_ids=_number_rollouts(groups),
            group_indices=np.array([-1 if s.group_index is None else s.group_index for s in samples], np.int64),
            sample_indices=np.array([-1 if s.index is None else s.index for s in samples], np.int64),
            **(_kept(samples, masks) if cut else {}),
            routed_experts=_routed(samples, masks) if routed else None,
            pictures=pictures,
            image_spans=image_spans,
            image_offsets=image_offsets,
            metadata=_metadata(samples),
        )

    def __len__(self) -> int:
        return len(self.rewards)

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return all arrays by field name, without absent ones."""
        found = {f.name: getattr(self, f.name) for f in fields(self)}
        return {name: array for name, array in found.items() if isinstance(array, np.ndarray)}

    @property
    def lengths(self) -> NDArray[np.int64]:
        """Return the number of tokens of each sample, [S]."""
        return np.diff(self.offsets)

    @property
    def response_lengths(self) -> NDArray[np.int64]:
        """Return the number of response tokens of each sample, [S]."""
        return np.diff(self.response_offsets)

    def sample_tokens(self, i: int) -> NDArray[np.int32]:
        """Return the tokens of sample i, a view."""
        return self.tokens[self.offsets[i] : self.offsets[i + 1]]

    def sample_routing(self, i: int) -> NDArray[np.int16]:
        """Return `routed_experts` of sample i; the batch must have routing."""
        assert self.routed_experts is not None
        found = self.routed_experts[i]
        return found if isinstance(found, np.ndarray) else found()

    def sample_images(self, i: int) -> NDArray[np.int32]:
        """Return the rows of `image_spans` of sample i, a view."""
        offsets = self.image_offsets
        return self.image_spans[:0] if offsets is None else self.image_spans[offsets[i] : offsets[i + 1]]

    @property
    def keys(self) -> PerToken[np.int32]:
        """Return `tokens` with -1 - n at the placeholders of image n. Equal numbers are equal inputs of the model."""
        offsets = self.image_offsets
        return self.tokens if offsets is None else _keys(self.tokens, self.offsets, self.image_spans, offsets)

    def with_parts(self, convert: Callable[[Any], Any]) -> Self:
        """Return the batch with `convert` applied to each sample's routing and to each image."""
        found, pictures = self.routed_experts, tuple(Picture(p.hash, convert(p.held)) for p in self.pictures)
        routed = None if found is None else tuple(map(convert, found))
        return replace(self, routed_experts=routed, pictures=pictures)

    def sample_loss_mask(self, i: int) -> NDArray[np.uint8]:
        """Return the loss mask of sample i's response, a view."""
        return self.loss_mask[self.response_slice(i)]

    def sampling_support(self, response_index: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]] | None:
        """Return the supports of the response tokens at `response_index` [N]: ids [K'] and offsets [N + 1], or None."""
        if self.support_ids is None or self.support_offsets is None:
            return None
        offsets = _offsets(np.diff(self.support_offsets)[response_index])
        return self.support_ids[_ranges(self.support_offsets, response_index)], offsets

    def response_slice(self, i: int) -> slice:
        """Return the slice of sample i's response in flat response arrays [R]."""
        return slice(int(self.response_offsets[i]), int(self.response_offsets[i + 1]))

    def response_positions(self, indices: ArrayLike) -> NDArray[np.int64]:
        """Return the indices, in flat response arrays, of the responses of samples `indices` [K], in that order."""
        return _ranges(self.response_offsets, np.asarray(indices, dtype=np.int64))

    @property
    def response_tokens(self) -> NDArray[np.int32]:
        """Return the tokens of all responses, [R]."""
        shift = self.offsets[1:] - self.response_offsets[1:]
        return self.tokens[np.arange(len(self.loss_mask)) + np.repeat(shift, self.response_lengths)]

    def select(self, indices: ArrayLike) -> Self:
        """Return a new batch of the samples at `indices` [K], in that order. Group and trajectory ids are kept."""
        chosen = np.asarray(indices, dtype=np.int64).reshape(-1)
        if chosen.size and (chosen.min() < 0 or chosen.max() >= len(self)):
            raise IndexError(f"sample indices must be in 0..{len(self) - 1}, got {chosen.min()}..{chosen.max()}")
        response, whole = self.response_positions(chosen), _ranges(self.offsets, chosen)
        places = {"PerToken": whole, "PerResponseToken": response, "PerSample": chosen}
        kept: dict[str, Any]
        kept = {name: array[places[kind]] for name, array in self.arrays().items() if (kind := _KINDS[name]) in places}
        if self.routed_experts is not None:
            kept["routed_experts"] = tuple(self.routed_experts[i] for i in chosen)
        kept["offsets"] = _offsets(self.lengths[chosen])
        kept["response_offsets"] = _offsets(self.response_lengths[chosen])
        kept["pictures"] = self.pictures
        if self.image_offsets is not None:
            kept["image_spans"] = self.image_spans[_ranges(self.image_offsets, chosen)]
            kept["image_offsets"] = _offsets(np.diff(self.image_offsets)[chosen])
        if sets := self.sampling_support(response):
            kept["support_ids"], kept["support_offsets"] = sets
        return type(self)(**kept)

    def split(self, num_steps: int) -> Iterator[NDArray[np.int64]]:
        """Yield the sample indices of each optimizer step: `num_steps` steps, or one per trajectory if there are fewer.
        Each has whole trajectories in order, as evenly as possible. Advantages are known, so steps may cut groups."""
        trajectory_of_sample = np.unique(self.trajectory_ids, return_inverse=True)[1]
        trajectories = int(trajectory_of_sample.max()) + 1 if len(self) else 0
        for chunk in np.array_split(np.arange(trajectories), max(1, min(num_steps, trajectories))):
            yield np.flatnonzero(np.isin(trajectory_of_sample, chunk))


class Prepared(NamedTuple):
    """The results of the passes before a rollout's first step: fields of its batch, and metrics."""

    arrays: dict[str, Any]
    metrics: Mapping[str, float]


_KINDS = {f.name: str(f.type).partition("[")[0] for f in fields(TrainBatch)}
"""The declared layout of each field, for example `PerToken`."""


def check_samples(samples: Sequence[Sample], reward_parts: Sequence[str] = ()) -> None:
    """Raise SampleError if a rollout's samples cannot form a batch; `reward_parts` as in `TrainBatch.from_samples`."""
    for sample in samples:
        _check(sample, supervised=False)
        weights_of(sample)
    if reward_parts:
        _reward_parts(samples, reward_parts)


def _check(sample: Sample, supervised: bool) -> None:
    where = f"sample index={sample.index} group_index={sample.group_index}"
    sample.validate()
    if sample.hosted:
        raise SampleError(
            f"{where}: the hosted model {sample.hosted} generated it (--engine openai), so it has no token ids to train on; "
            "learn from its conversation with `agentrl sft --prompt-data demonstrations.jsonl`"
        )
    if not sample.tokens:
        raise SampleError(f"{where}: it has no tokens (status {sample.status.value}); only generated samples train")
    if min(sample.tokens) < 0:
        raise SampleError(f"{where}: token id {min(sample.tokens)} is negative")
    if sample.rollout_log_probs is None and not supervised and not sample.remove_sample:
        raise SampleError(f"{where}: rollout_log_probs is missing; append tokens with append_model, or set it yourself")


def _images(
    samples: Sequence[Sample], image_tokens: ImageTokens | None
) -> tuple[tuple[Picture, ...], list[list[tuple[int, int, int]]]]:
    """Return each image once, and for each sample its rows of `image_spans`."""
    pictures: dict[str, Picture] = {}
    found = []
    for sample in samples:
        where = f"sample index={sample.index} group_index={sample.group_index}"
        if lacking := [span.hash for span in sample.image_spans if span.hash not in sample.images]:
            raise SampleError(f"{where}: image_spans name the image {lacking[0]}, which is not in images")
        placed = [(Picture(s.hash, sample.images[s.hash]), s.start, s.end) for s in sample.image_spans]
        if sample.multimodal_train_inputs is not None and not placed:
            placed = _given(sample, image_tokens, f"{where}: multimodal_train_inputs")
        if any(end == start for (*_, end), (_, start, _) in itertools.pairwise(placed)):
            raise SampleError(f"{where}: two images follow each other without a token between them; models need one")
        for picture, *_ in placed:
            pictures.setdefault(picture.hash, picture)
        found.append(placed)
    numbers = {name: number for number, name in enumerate(pictures)}
    return tuple(pictures.values()), [[(numbers[p.hash], start, end) for p, start, end in placed] for placed in found]


def _given(sample: Sample, image_tokens: ImageTokens | None, where: str) -> list[tuple[Picture, int, int]]:
    """Return the images that a sample has as pixels, each at the next run of placeholders with its length."""
    if image_tokens is None:
        raise SampleError(f"{where}: the model of --hf-checkpoint sees no images")
    given: Any = sample.multimodal_train_inputs
    names = given.keys() if isinstance(given, Mapping) else set()
    if not {"pixel_values", "image_grid_thw"} <= names or any("video" in name for name in names):
        raise SampleError(f"{where}: expected pixel_values and image_grid_thw, and no videos, got {given!r:.80}")
    values, grids = (np.asarray(given[name]) for name in ("pixel_values", "image_grid_thw"))
    patches = grids.prod(-1) if grids.ndim == 2 and grids.shape[1] == 3 else np.zeros(0, int)
    if values.ndim != 2 or len(values) != patches.sum():
        raise SampleError(
            f"{where}: pixel_values {values.shape} needs one row for each patch of image_grid_thw {grids.shape}"
        )
    runs = iter(image_tokens.runs(sample.tokens))
    placed: list[tuple[Picture, int, int]] = []
    for own, grid in zip(np.split(values.astype(np.float32), patches.cumsum()[:-1]), grids, strict=True):
        wanted = len(own) // image_tokens.patches
        if (run := next((run for run in runs if run[1] - run[0] == wanted), None)) is None:
            raise SampleError(
                f"{where}: image {len(placed)} has {len(own)} patches, but tokens have no run of {wanted} "
                f"placeholders {image_tokens.id}"
            )
        pixels = {"pixel_values": own, "image_grid_thw": grid[None].astype(np.int64)}
        digest = hashlib.sha256(b"".join([*(array.tobytes() for array in pixels.values())])).hexdigest()
        placed.append((Picture(digest, pixels), *run))
    return placed


def _keys(tokens: NDArray[np.int32], offsets: Ints, spans: NDArray[np.int32], span_offsets: Ints) -> NDArray[np.int32]:
    """Compute `TrainBatch.keys`."""
    if not len(spans):
        return tokens
    keys, first = tokens.copy(), np.repeat(offsets[:-1], np.diff(span_offsets))
    for (number, start, end), begin in zip(spans, first, strict=True):
        keys[begin + start : begin + end] = -1 - number
    return keys


def _kept(samples: Sequence[Sample], masks: Sequence[NDArray[np.uint8]]) -> dict[str, NDArray[Any]]:
    """Return `support_ids` and `support_offsets`. Raises SampleError: a trained token is not in its own support."""
    sets = []
    for sample, mask in zip(samples, masks, strict=True):
        ids = np.asarray(sample.rollout_top_p_token_ids or (), np.int32)
        sizes = np.diff(sample.rollout_top_p_token_offsets or [0] * (sample.response_length + 1))
        response = np.asarray(sample.tokens[sample.prompt_length :], np.int32)
        place = np.repeat(np.arange(len(sizes)), sizes)
        found = np.zeros(len(sizes), bool)
        found[place[ids == response[place]]] = True
        if missing := int((mask > found).sum()):
            raise SampleError(
                f"sample index={sample.index}: {missing} of its trained tokens are not in the sets that truncated sampling "
                "kept; ask the engine for return_sampling_mask and append tokens with append_model(..., kept=...), or accept "
                "a bias with --allow-truncated-sampling"
            )
        sets.append((ids, sizes))
    kept, sizes = map(np.concatenate, zip(*sets, strict=True))
    return {"support_ids": kept, "support_offsets": _offsets(sizes)}


def _routed(samples: Sequence[Sample], masks: Sequence[NDArray[np.uint8]]) -> tuple[Routing, ...] | None:
    """Return `routed_experts`; None if no sample has routing."""
    rows = [np.zeros((0, 0), np.int16) if (found := sample.routing()) is None else found for sample in samples]
    widths = {found.shape[1] for found in rows if len(found)}
    if len(widths) > 1:
        raise SampleError(f"rollout_routed_experts has rows of {sorted(widths)} numbers; all need the same model's")
    parts = []
    for sample, found, mask in zip(samples, rows, masks, strict=True):
        trained = np.flatnonzero(mask)
        if len(trained) and len(found) < (needed := sample.prompt_length + int(trained[-1])):
            raise SampleError(
                f"sample index={sample.index}: rollout_routed_experts has {len(found)} rows, and {needed} tokens come before "
                "its last trained one; ask the engine with routed_experts_start_len and append tokens with "
                "append_model(..., routed=...), or leave out --use-rollout-routing-replay"
            )
        part = np.full((len(sample.tokens), *widths), -1, np.int16) if widths else None
        if part is not None:
            part[: len(found)] = found.reshape(len(found), *widths)
            parts.append(part)
    return tuple(parts) or None


def _metadata(samples: Sequence[Sample]) -> NDArray[np.bytes_] | None:
    if all(sample.train_metadata is None for sample in samples):
        return None
    with raised_as(SampleError, "train_metadata must be plain JSON to reach the trainer", TypeError):
        return np.array([orjson.dumps(sample.train_metadata) for sample in samples], np.bytes_)


def _mask(sample: Sample, weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Return 1 for each response token that trains; a weight of 0 masks a token."""
    if sample.remove_sample:
        return np.zeros(sample.response_length, np.uint8)
    mask = np.ones(sample.response_length, np.uint8) if sample.loss_mask is None else sample.loss_mask
    return np.asarray(mask, np.uint8) * (weights > 0)


def _staleness(sample: Sample, mask: NDArray[np.uint8], trained: int | None) -> NDArray[np.int32]:
    """Return the staleness of each response token; -1 where masked or unknown."""
    ages = np.full(sample.response_length, -1, np.int32)
    for version, start, end in sample.version_spans:
        if trained is not None and (known := version_number(version)) is not None:
            ages[start:end] = max(trained - known, 0)
    return np.where(mask > 0, ages, np.int32(-1))


def _reward(sample: Sample, reward_key: str | None, supervised: bool) -> float:
    if sample.reward is None and sample.remove_sample:
        return float("nan")
    if sample.reward is None and supervised:
        return 0.0
    return sample.get_reward_value(reward_key)


def _reward_parts(samples: Sequence[Sample], keys: Sequence[str]) -> NDArray[np.float64]:
    """Return the entries `keys` of dict rewards, [S, K]. A failed sample's single number is the value of each entry."""
    for sample in samples:
        whole = isinstance(sample.reward, dict) and sample.reward.keys() >= set(keys)
        if not (whole or sample.reward is None or "failure" in sample.metadata):
            raise SampleError(
                f"sample index={sample.index}: its reward {sample.reward!r:.80} is no dict with the entries {', '.join(keys)}; "
                "return such a dict, or name other entries in --gdpo-weights"
            )
    return np.array([[_reward(sample, key, supervised=False) for key in keys] for sample in samples], np.float64)


def _number_rollouts(groups: Sequence[Sequence[Sample]]) -> NDArray[np.int64]:
    """Number the trajectories: samples of a group that share a rollout id, or one sample without a rollout id."""
    keys = [
        (g, sample.rollout_id is None, i if sample.rollout_id is None else sample.rollout_id)
        for g, group in enumerate(groups)
        for i, sample in enumerate(group)
    ]
    numbers = {key: number for number, key in enumerate(dict.fromkeys(keys))}
    return np.array([numbers[key] for key in keys], np.int64)


def _offsets(lengths: ArrayLike) -> NDArray[np.int64]:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(np.asarray(lengths, dtype=np.int64))])


def _ranges(offsets: NDArray[np.int64], chosen: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the flat indices of the chosen samples' entries, in order."""
    starts, lengths = offsets[chosen], np.diff(offsets)[chosen]
    first = np.repeat(starts - (_offsets(lengths)[:-1]), lengths)
    return first + np.arange(int(lengths.sum()), dtype=np.int64)
