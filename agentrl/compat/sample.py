"""slime's `Sample`: our class, with free attributes and slime's methods.

1. A slime function gets a `SlimeSample` (from `of`) and may set any attribute. `plain` copies it back into our sample.
   Attributes that ours lacks are stored in `metadata[ATTRIBUTES]`, and restored for the next slime function.
2. If the function set tokens or mask itself, and segments no longer fit, they are dropped (as for any custom generate).
3. slime's `multimodal_inputs` has Pillow images. Ours has their hashes, and `images` has the files."""

import io
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Self

from agentrl import sample as ours
from agentrl.dumps import ATTRIBUTES
from agentrl.errors import SampleError
from agentrl.media import Image, reference_hash, references, take_images
from agentrl.sample import Status


class _Counts:
    """Common base of slime's small records of counts."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        return cls(**{f.name: data.get(f.name, 0) for f in fields(cls)})  # type: ignore[arg-type]


@dataclass
class SlimeSpecInfo(_Counts, ours.SpecInfo):
    """Counts of speculative decoding, with their rates."""

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / (self.spec_draft_token_num or 1)

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct else 0.0


@dataclass
class PrefixCacheInfo(_Counts):
    """Numbers of prompt tokens, and of prompt tokens that an engine had cached."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / (self.total_prompt_tokens or 1)

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens") or 0
        self.total_prompt_tokens += meta_info.get("prompt_tokens") or 0


class Rendered(str):
    """A prompt as one text. While a sample has it unchanged, our form of the sample has the `messages`."""

    messages: Any


@dataclass
class SlimeSample(ours.Sample):
    """A sample as slime's functions know it; the fields are those of `agentrl.sample.Sample` and a few more."""

    spec_info: ours.SpecInfo = field(default_factory=SlimeSpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    Status = Status
    SpecInfo = SlimeSpecInfo
    PrefixCacheInfo = PrefixCacheInfo

    @classmethod
    def of(cls, sample: ours.Sample) -> "SlimeSample":
        """Return the sample as a slime function sees it. Lists are shared with `sample`; arrays become lists."""
        made = cls(**{f.name: getattr(sample, f.name) for f in fields(ours.Sample)})
        for name in ("tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs"):
            if (values := getattr(made, name)) is not None and not isinstance(values, list):
                setattr(made, name, list(values))
        made.spec_info = SlimeSpecInfo(**asdict(sample.spec_info))
        made.metadata = {key: value for key, value in sample.metadata.items() if key != ATTRIBUTES}
        made.multimodal_inputs = _opened(sample)
        vars(made).update(sample.metadata.get(ATTRIBUTES, {}))
        if isinstance(made.prefix_cache_info, dict):
            made.prefix_cache_info = PrefixCacheInfo.from_dict(made.prefix_cache_info)
        return made

    def plain(self, into: ours.Sample | None = None) -> ours.Sample:
        """Return this sample in our form: `into`, changed in place, or a new sample."""
        values = {f.name: getattr(self, f.name) for f in fields(ours.Sample)}
        values["prompt"] = getattr(self.prompt, "messages", self.prompt)
        values["status"] = Status(getattr(self.status, "value", self.status))
        values["spec_info"] = ours.SpecInfo(**asdict(self.spec_info))
        more = {k: v for k, v in vars(self).items() if k not in vars(_EMPTY) or vars(_EMPTY)[k] != v}
        if "prefix_cache_info" in more:
            more["prefix_cache_info"] = self.prefix_cache_info.to_dict()
        values["metadata"] = {**(self.metadata or {}), **({ATTRIBUTES: more} if more else {})}
        values["multimodal_inputs"], values["images"] = _named(self)
        new = ours.Sample() if into is None else into
        for name, value in values.items():
            setattr(new, name, value)
        try:
            new.validate()
        except SampleError:
            new.segments = []  # the function set tokens or mask, so it is unknown who wrote which
        return new

    def get_reward_value(self, args: Any = None) -> Any:
        """Return the reward, or the entry `args.reward_key` of a dict reward."""
        key = args if args is None or isinstance(args, str) else getattr(args, "reward_key", None)
        return self.reward[key] if key and isinstance(self.reward, dict) else self.reward

    @property
    def effective_response_length(self) -> int:
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def to_dict(self) -> dict[str, Any]:
        """Return all attributes, added ones included."""
        kept = {"status": self.status.value, "segments": super().to_dict()["segments"]}
        kept |= {"spec_info": asdict(self.spec_info), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return {f.name: getattr(self, f.name) for f in fields(self)} | vars(self) | kept

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Return the inverse of `to_dict`. A key that is no field becomes an attribute."""
        known = {f.name for f in fields(cls)}
        sample = cls(**{name: value for name, value in data.items() if name in known})
        sample.status = Status(data.get("status", "pending"))
        sample.spec_info = SlimeSpecInfo.from_dict(data.get("spec_info", {}))
        sample.prefix_cache_info = PrefixCacheInfo.from_dict(data.get("prefix_cache_info", {}))
        sample.segments = [ours.Segment(ours.Origin(origin), *rest) for origin, *rest in data.get("segments", ())]
        vars(sample).update({name: value for name, value in data.items() if name not in known})
        return sample

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Append tokens that the model wrote (`trainable`, with log-probs) or was shown. `meta_info` comes from the
        engine's answer. Raises ValueError: needed log-probs are missing, or the log-probs do not fit the tokens."""
        ids, meta = _numbers(tokens, int), dict(meta_info or {})
        known = None if log_probs is None else _numbers(log_probs, float)
        if known is not None and (len(known) != len(ids) or (not trainable and any(known))):
            raise ValueError(f"{len(ids)} {'' if trainable else 'non-'}trainable tokens with {len(known)} log-probs")
        if ids and trainable and known is None:
            raise ValueError("trainable response tokens need the log-probs of the rollout")
        before = self.response_length
        self.response += text or ""
        if ids:
            # Changed in place, because user code keeps using the lists that it set.
            self.loss_mask = [1] * before if self.loss_mask is None else self.loss_mask
            self.rollout_log_probs = [0.0] * before if self.rollout_log_probs is None else self.rollout_log_probs
            turn = 1 + max((segment.turn for segment in self.segments), default=0)
            if trainable:
                version, kept = meta.get("weight_version"), meta.get("output_token_sampling_mask")
                known = known if kept is None else meta["output_token_sampling_logprobs"]
                self.append_model(ids, known or [], None if version is None else str(version), turn=turn, kept=kept)
            else:
                self.append_observation(ids, turn=turn - 1)
        if (finish := (meta.get("finish_reason") or {}).get("type")) is None or not update_terminal_info:
            return
        self.prefix_cache_info.add(meta)
        if getattr(args, "sglang_speculative_algorithm", None):
            self.spec_info.add(meta)
        if (version := meta.get("weight_version")) is not None and str(version) not in self.weight_versions:
            self.weight_versions.append(str(version))
        self.status = _FINISHED.get(finish, self.status)


_EMPTY = SlimeSample()
_FINISHED = {"length": Status.TRUNCATED, "abort": Status.ABORTED, "stop": Status.COMPLETED}


def _opened(sample: ours.Sample) -> Any:
    """Return `multimodal_inputs` with Pillow images: the images named there, or the prompt's."""
    import PIL.Image

    given, prompt = sample.multimodal_inputs, sample.prompt
    if given is None and sample.images and isinstance(prompt, list):
        given = {"images": [reference_hash(part) for part in references(prompt)], "videos": None}
    if not isinstance(given, dict) or not given.get("images"):
        return given
    shown = []
    for name in given["images"]:
        shown.append(PIL.Image.open(io.BytesIO(sample.images[name].data)))
        shown[-1].agentrl_image = sample.images[name]  # type: ignore[attr-defined]
    return {**given, "images": shown}


def _named(sample: SlimeSample) -> tuple[Any, dict[str, Image]]:
    """Return the inverse of `_opened`, and all images by hash."""
    if not isinstance(given := sample.multimodal_inputs, dict) or not given.get("images"):
        return given, sample.images
    parts = [{"type": "image", "image": getattr(shown, "agentrl_image", shown)} for shown in given["images"]]
    (message,), new = take_images([{"content": parts}], sample.images)
    return {**given, "images": [reference_hash(part) for part in message["content"]]}, {**sample.images, **new}


def _numbers(values: Any, kind: type) -> list[Any]:
    values = values.tolist() if hasattr(values, "tolist") else values
    return [kind(value) for value in values or ()]


def keep_plain(sample: ours.Sample) -> None:
    """Remove attributes that are not plain JSON, because the ledger could not store them."""
    if more := sample.metadata.get(ATTRIBUTES):
        sample.metadata[ATTRIBUTES] = {name: value for name, value in more.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        return bool(json.loads(json.dumps(value, allow_nan=False)) == value)
    except (TypeError, ValueError):
        return False
