"""Sampling parameters: decoded, defaulted and range-checked as in SGLang.

1. `RequestSampling.decode(mapping)` is the entry point. Unknown names, wrong types and bad ranges raise `RequestError`
   (HTTP 400) with SGLang's wording; `null` for a field means its default.
2. Temperature below 1e-6 becomes greedy: temperature 1, top_k 1.
3. At most one grammar may be set: json_schema, regex, ebnf or structural_tag. Beam search, watermarks are refused."""

import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Self

import regex as patterns
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, FailFast, Field, Strict, ValidationError
from pydantic_core import ErrorDetails

from agentrl.errors import raised_as
from agentrl.serving.http import RequestError, refused, undecodable

GREEDY_BELOW = 1e-6
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
# Expected types in the words of SGLang's decoder, by pydantic's error types.
_EXPECTED = {"int_type": "i64", "float_type": "f64", "bool_type": "a boolean"}
_EXPECTED |= {"string_type": "a string", "list_type": "a sequence", "dict_type": "a map"}


def _must(rule: str, fine: Callable[[Any], bool]) -> AfterValidator:
    def check(value: Any) -> Any:
        if not fine(value):
            raise ValueError(f"must {rule}")
        return value

    return AfterValidator(check)


def _compiled(given: list[str]) -> list[str]:
    for pattern in given:
        with raised_as(ValueError, "is no regular expression", patterns.error, OverflowError, RecursionError):
            patterns.compile(pattern)
    return given


_Strings = Annotated[
    list[str],
    FailFast(),
    BeforeValidator(lambda given: [given] if isinstance(given, str) else given),
    Field(max_length=32),
    AfterValidator(lambda given: [text for text in given if text]),
]
_Penalty = Annotated[float, _must("be in [-2, 2]", lambda x: -2 <= x <= 2)]
_Count = Annotated[int, _must("be at least 0", lambda n: n >= 0)]


class RequestSampling(BaseModel):
    """One request's sampling parameters; names and order are those of SGLang's protocol."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")

    max_new_tokens: _Count | None = 128  # None: as many as the context allows
    stop: _Strings = []
    stop_token_ids: Annotated[list[int], FailFast()] = []
    stop_regex: Annotated[_Strings, AfterValidator(_compiled)] = []
    temperature: Annotated[float, _must("be a non-negative finite number", lambda t: math.isfinite(t) and t >= 0)] = 1.0
    top_p: Annotated[float, _must("be in (0, 1]", lambda p: 0 < p <= 1)] = 1.0
    top_k: Annotated[int, _must("be -1 (disable) or at least 1", lambda k: k == -1 or k >= 1)] = -1  # -1: all tokens
    min_p: Annotated[float, _must("be in [0, 1]", lambda p: 0 <= p <= 1)] = 0.0
    frequency_penalty: _Penalty = 0.0
    presence_penalty: _Penalty = 0.0
    repetition_penalty: Annotated[float, _must("be in (0, 2]", lambda x: 0 < x <= 2)] = 1.0
    min_new_tokens: _Count = 0
    n: _Count = 1
    json_schema: str | None = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: str | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: Any = None  # ignored, like `stream_interval`, `custom_params`
    no_stop_trim: bool = False
    stream_interval: Any = None
    logit_bias: dict[Annotated[int, Strict(False)], float] = {}
    sampling_seed: Annotated[int, _must("be in [0, 2**63)", lambda seed: 0 <= seed < 2**63)] | None = None
    custom_params: Any = None
    beam_width: None = None  # refused, like `watermark` and `choice`
    watermark: None = None
    choice: None = None

    @classmethod
    def decode(cls, raw: Mapping[str, Any], *, vocab_size: int) -> Self:
        """Check `raw` (the wire's mapping) and fill in defaults. Raises `RequestError`."""
        defaulted = cls.model_fields.keys() - {"max_new_tokens"}
        given = {name: value for name, value in raw.items() if value is not None or name not in defaulted}
        try:
            params = cls.model_validate(given)
        except ValidationError as error:
            raise _refusal(error.errors(include_url=False)[0]) from None
        params._check_together(vocab_size)
        greedy = params.temperature < GREEDY_BELOW
        return params.model_copy(update={"temperature": 1.0, "top_k": 1}) if greedy else params

    def _check_together(self, vocab_size: int) -> None:
        if len(given := [name for name in GRAMMARS if getattr(self, name) is not None]) > 1:
            raise refused(f"Only one of {', '.join(GRAMMARS)} can be set, got {' and '.join(given)}.")
        limit, least = self.max_new_tokens, self.min_new_tokens
        if least and (given or (limit is not None and least > limit)):
            rule = "0 with a grammar, which knows where to end" if given else f"in [0, max_new_tokens({limit})]"
            raise refused(f"min_new_tokens must be {rule}, got {least}.")
        for name, ids in (("keys of logit_bias", self.logit_bias), ("stop_token_ids", self.stop_token_ids)):
            if wrong := [i for i in ids if not 0 <= i < vocab_size]:
                raise refused(f"{name} must be in [0, {vocab_size - 1}], got {wrong[0]}.")

    @property
    def grammar(self) -> tuple[str, str] | None:
        """Name (one of `GRAMMARS`) and text of the grammar; None without a grammar."""
        return next(((name, text) for name in GRAMMARS if (text := getattr(self, name)) is not None), None)

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def filtered(self) -> bool:
        """True if filters may remove tokens of the vocabulary from the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0


def _refusal(found: ErrorDetails) -> RequestError:
    name, kind, value = found["loc"][0], found["type"], found["input"]
    if kind == "extra_forbidden":
        expected = ", ".join(f"`{known}`" for known in RequestSampling.model_fields)
        return undecodable(f"unknown field `{name}`, expected one of {expected}")
    if kind == "none_required":
        return refused(f"{name} is not supported by the embedded engine: use a real SGLang server for it.")
    if kind == "value_error":
        return refused(f"{name} {found['ctx']['error']}, got {value!s:.200}.")
    if kind in _EXPECTED:
        return undecodable(f"invalid type: {_shown(value)}, expected {_EXPECTED[kind]}")
    return refused(f"{name}: {found['msg']}.")


def _shown(value: object) -> str:
    if isinstance(value, list | dict):
        return "sequence" if isinstance(value, list) else "map"
    kind = {str: "string", bool: "boolean", float: "floating point", int: "integer"}.get(type(value), "null")
    return f'{kind} "{value:.200}"' if isinstance(value, str) else f"{kind} `{str(value).lower()}`"
