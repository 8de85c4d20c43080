"""Sampling parameters: decoded, defaulted and range-checked as SGLang does it.

1. `SamplingParams.decode(mapping)` is the only way in. Unknown names, wrong types and bad ranges raise `RequestError`
   (HTTP 400) with SGLang's wording; `null` for a field means its default.
2. Temperature below 1e-6 becomes greedy: temperature 1, top_k 1.
3. A grammar is one of json_schema, regex, ebnf and structural_tag, see `grammar`. Beam search and the like are refused.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any

import regex

from agentrl.engine.embedded.errors import RequestError, refused, undecodable

Decoder = Callable[[str, Any], Any]
"""(field name, wire value) -> checked value."""
MAX_STOP_STRINGS = 32
GREEDY_BELOW = 1e-6
_WIRE_TABLE = """
    max_new_tokens stop stop_token_ids stop_regex temperature top_p top_k min_p frequency_penalty presence_penalty
    repetition_penalty min_new_tokens n json_schema regex ebnf structural_tag ignore_eos skip_special_tokens
    spaces_between_special_tokens no_stop_trim stream_interval logit_bias sampling_seed custom_params beam_width
    watermark choice
"""
WIRE_NAMES = _WIRE_TABLE.split()
"""In the order of SGLang's error message."""
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
UNSERVED = ("beam_width", "watermark", "choice")


@dataclass(frozen=True)
class SamplingParams:
    """One request's sampling parameters; field names are the wire's."""

    max_new_tokens: int | None = 128
    """None: as many as the context allows."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    no_stop_trim: bool = False
    sampling_seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()
    grammar: tuple[str, str] | None = None
    """Which of `GRAMMARS`, and its text."""

    @classmethod
    def decode(cls, raw: Mapping[str, Any], *, vocab_size: int) -> "SamplingParams":
        """Check `raw` (the wire's mapping) and fill in defaults. Raises `RequestError`."""
        _refuse_unknown(raw)
        given: dict[str, Any] = {}
        for field in fields(cls):
            value = raw.get(field.name)
            if value is not None and field.name in _DECODERS:
                given[field.name] = _DECODERS[field.name](field.name, value)
        given["grammar"] = _grammar(raw)
        params = cls(**given)
        _check_ranges(params, vocab_size)
        if params.temperature < GREEDY_BELOW:
            params = cls(**{**given, "temperature": 1.0, "top_k": 1})
        return params

    @property
    def greedy(self) -> bool:
        return self.top_k == 1

    @property
    def filtered(self) -> bool:
        """Whether some tokens of the vocabulary may be cut from the distribution."""
        return self.top_k > 0 or self.top_p < 1 or self.min_p > 0

    @property
    def penalised(self) -> bool:
        return bool(self.frequency_penalty or self.presence_penalty or self.repetition_penalty != 1)


def _refuse_unknown(raw: Mapping[str, Any]) -> None:
    for name in raw:
        if name not in WIRE_NAMES:
            expected = ", ".join(f"`{known}`" for known in WIRE_NAMES)
            raise undecodable(f"unknown field `{name}`, expected one of {expected}")
    for name in UNSERVED:
        if raw.get(name) is not None:
            raise refused(f"{name} is not supported by the embedded engine: use a real SGLang server for it.")


def _wrong_type(value: object, expected: str) -> RequestError:
    kind = {str: "string", bool: "boolean", float: "floating point", int: "integer", list: "sequence", dict: "map"}
    shown = f'"{value}"' if isinstance(value, str) else f"`{str(value).lower()}`"
    name = kind.get(type(value), type(value).__name__)
    return undecodable(
        f"invalid type: {name if isinstance(value, list | dict) else f'{name} {shown}'}, expected {expected}"
    )


def _scalar(expected: str, *kinds: type) -> Decoder:
    def decode(_: str, value: Any) -> Any:
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise _wrong_type(value, expected)
        return value

    return decode


_int, _float, _bool = _scalar("i64", int), _scalar("f64", int, float), _scalar("a boolean", bool)


def _grammar(raw: Mapping[str, Any]) -> tuple[str, str] | None:
    given = [name for name in GRAMMARS if raw.get(name) is not None]
    if len(given) > 1:
        raise refused(f"Only one of {', '.join(GRAMMARS)} can be set, got {' and '.join(given)}.")
    return (given[0], _scalar("a string", str)(given[0], raw[given[0]])) if given else None


def _strings(name: str, value: object) -> tuple[str, ...]:
    items = [value] if isinstance(value, str) else value
    if not isinstance(items, list) or not all(isinstance(item, str) for item in items):
        raise _wrong_type(value, "a string or a sequence of strings")
    if len(items) > MAX_STOP_STRINGS:
        raise refused(f"{name} supports at most {MAX_STOP_STRINGS} entries, got {len(items)}.")
    return tuple(item for item in items if item)


def _patterns(name: str, value: object) -> tuple[str, ...]:
    patterns = _strings(name, value)
    for pattern in patterns:
        try:
            regex.compile(pattern)
        except (regex.error, OverflowError, RecursionError) as error:
            raise refused(f"{name} {pattern!r} is not a regular expression: {error}.") from None
    return patterns


def _ids(name: str, value: object) -> frozenset[int]:
    if not isinstance(value, list):
        raise _wrong_type(value, "a sequence")
    return frozenset(_int(name, item) for item in value)


def _bias(name: str, value: object) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, dict):
        raise _wrong_type(value, "a map")
    try:
        return tuple((int(key), _float(name, bias)) for key, bias in value.items())
    except ValueError:
        raise refused(f"logit_bias keys must be token ids written as strings, got {sorted(value)[:5]}.") from None


_DECODERS: dict[str, Decoder] = {
    **dict.fromkeys(("max_new_tokens", "top_k", "min_new_tokens", "n", "sampling_seed"), _int),
    **dict.fromkeys(
        ("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty"), _float
    ),
    **dict.fromkeys(("ignore_eos", "skip_special_tokens", "no_stop_trim"), _bool),
    "stop": _strings,
    "stop_regex": _patterns,
    "stop_token_ids": _ids,
    "logit_bias": _bias,
}


def _check_ranges(p: SamplingParams, vocab_size: int) -> None:
    limit, last = p.max_new_tokens, vocab_size - 1
    most = math.inf if limit is None else limit
    checks = (
        ("temperature", math.isfinite(p.temperature) and p.temperature >= 0, "be a non-negative finite number"),
        ("top_p", 0 < p.top_p <= 1, "be in (0, 1]"),
        ("min_p", 0 <= p.min_p <= 1, "be in [0, 1]"),
        ("top_k", p.top_k == -1 or p.top_k >= 1, "be -1 (disable) or at least 1"),
        ("frequency_penalty", -2 <= p.frequency_penalty <= 2, "be in [-2, 2]"),
        ("presence_penalty", -2 <= p.presence_penalty <= 2, "be in [-2, 2]"),
        ("repetition_penalty", 0 < p.repetition_penalty <= 2, "be in (0, 2]"),
        ("max_new_tokens", limit is None or limit >= 0, "be at least 0"),
        ("min_new_tokens", 0 <= p.min_new_tokens <= most, f"be in [0, max_new_tokens({limit})]"),
        ("min_new_tokens", not (p.grammar and p.min_new_tokens), "be 0 with a grammar, which knows where to end"),
        ("n", p.n >= 0, "be at least 0"),
        ("sampling_seed", p.sampling_seed is None or 0 <= p.sampling_seed < 2**63, "be in [0, 2**63)"),
    )
    for name, fine, rule in checks:
        if not fine:
            raise refused(f"{name} must {rule}, got {getattr(p, name)}.")
    for name, ids, rule in (
        ("logit_bias", dict(p.logit_bias), "have keys"),
        ("stop_token_ids", p.stop_token_ids, "be"),
    ):
        if wrong := [i for i in ids if not 0 <= i <= last]:
            raise refused(f"{name} must {rule} in [0, {last}], got {wrong[0]}.")
