"""Command-line flags made from the settings' fields.

1. Each field is a flag: `rollout_batch_size` is `--rollout-batch-size`; a boolean has `--x/--no-x`.
2. `read_flags` returns the given flags as plain values, which pydantic checks. All errors are one `SettingsError`.
3. slime's spellings work: underscores, `--flag true`, `--eval-prompt-data name path ...`, and `--sglang-*`.
4. `foreign` translates flags of other trainers. A number that such a flag implies is a minimum."""

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from agentrl.config.compat_interface import Part, foreign
from agentrl.config.fields import RENAMED, SECTIONS, FieldRef, all_fields
from agentrl.config.problems import Problems, one_error, sentences, unknown
from agentrl.config.values import TRUTH, json_or_text, read_texts
from agentrl.errors import SettingsError, raised_as
from agentrl.files import read_table
from agentrl.settings import flag_of

ESSENTIAL: Mapping[str, Sequence[str]] = {name: names.split() for name, names in read_table(__file__, "essential.tsv")}
"""Settings that a command's `--help` shows first, because its first use needs them."""

SGLANG_PREFIX, SGLANG_FIELD = "--sglang-", "sglang_options"
_FLAG = re.compile(r"-(?![\d.])")  # other tokens are values: `-1` and `-0.5` are numbers
MERGED = (SGLANG_FIELD, "compat_options")
"""Settings whose values from several places are merged. For other settings, one place wins."""


def help_text(field: FieldRef, presets: Mapping[str, Any] = MappingProxyType({})) -> str:
    """Return the field's description with its default; a command's `presets` replace defaults."""
    default = presets.get(field.name, field.default)
    if default in (None, "", (), [], {}) or field.kind is dict:
        return field.info.description or ""
    said = ("on" if default else "off") if field.is_bool else getattr(default, "value", default)
    return f"{field.info.description} [default: {said}]"


def read_flags(
    argv: Sequence[str], own: Collection[str] = (), problems: Problems | None = None
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Read a command line. Returns the values of given flags by field name, each field's flag for messages, and the
    arguments of the command itself, whose flags are `own`. With `problems`, the valid flags are returned. Raises
    SettingsError: flags are unknown, or values are missing or malformed; the message lists all."""
    reader, values = _Reader(own), dict[str, Any]()
    with problems or Problems.raised():
        reader.read(list(argv), values)
    return values, {name: flag_of(name) for name in values}, reader.rest


def read_script(path: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Read another trainer's launch script as `read_flags` does, with notes; `given` settings override the script."""
    if (compat := foreign()) is None:
        raise SettingsError(f"--slime-script {path}: agentrl.compat, which reads such scripts, is not installed")
    argv, lines, notes = compat.script(path, {*given, *(given.get("compat_options") or ())})
    with raised_as(SettingsError, path, SettingsError):
        values, origins, rest = read_flags(argv)
    if rest:
        raise SettingsError(f"{path}: {' '.join(rest)} belongs to no flag")
    return values, {name: lines.get(name, f"{path}, {flag}") for name, flag in origins.items()}, notes


def merged(low: Part, high: Part) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge two parts. A value of `high` wins as a whole; settings of `MERGED` are merged by key."""
    values = {**low[0], **high[0]}
    for name in MERGED:
        below, above = low[0].get(name), high[0].get(name)
        if isinstance(below, Mapping) and isinstance(above, Mapping):
            values[name] = {**below, **above}
    return values, {**low[1], **{name: high[1].get(name, "") for name in high[0]}}


class _Reader:
    """One command line: the texts of each setting's flag, and the problems."""

    def __init__(self, own: Collection[str]) -> None:
        self.fields = {field.flag: field for field in all_fields().values()}
        self.renamed = {flag_of(old): self.fields[flag_of(new)] for old, new in RENAMED.items()}
        self.own, self.foreign = own, foreign()
        self.texts, self.many, self.sglang = dict[str, list[str]](), dict[str, list[str]](), dict[str, Any]()
        self.rest, self.unknown, self.problems = list[str](), list[str](), list[str]()
        self.spelt: list[tuple[bool, str, str, str]] = []

    def read(self, argv: list[str], values: dict[str, Any]) -> None:
        """Put the valid values into `values`. Raises SettingsError: there are problems; lists all."""
        while argv:
            token = argv.pop(0)
            name, equals, value = token.partition("=")
            if not token.startswith("--") or token == "--" or name in self.own:
                self.rest.append(token)
            else:
                self._flag(name.replace("_", "-"), [value] if equals else [], argv)
        known = [*self.fields, *self.own, *(f"--no-{flag[2:]}" for flag, field in self.fields.items() if field.is_bool)]
        problems = [*unknown(self.unknown, known, "flag"), *self.problems]
        for spelling in () if problems else sorted(self.spelt):
            self._agree(*spelling)
        wrong = [said for name in self.texts for said in self._value(all_fields()[name], values, bool(problems))]
        if self.sglang:
            values[SGLANG_FIELD] = {**values.get(SGLANG_FIELD, {}), **self.sglang}
        if problems or wrong:
            raise one_error([*problems, *wrong])

    def _value(self, field: FieldRef, values: dict[str, Any], alone: bool) -> Iterator[str]:
        """Put a setting's value into `values`, and yield its problems. `alone`: validate this value by itself too."""
        try:
            values[field.name] = read_texts(field, self.texts[field.name])
            if alone:
                SECTIONS[field.section].model_validate({field.name: values[field.name]})
        except SettingsError as error:
            yield str(error)
        except ValidationError as error:
            del values[field.name]
            said = sentences(error, {field.name: field}, {})
            yield from (sentence for sentence in said if sentence.startswith(f"{field.flag}: "))

    def _agree(self, least: bool, written: str, name: str, text: str) -> None:
        """Apply another spelling, which must not contradict the field's own flag. A `least` value may be exceeded."""
        others = [other for other in self.texts.get(name, ()) if other != text]
        numbers = [n for other in others if isinstance(n := json_or_text(other), int | float)]
        more = least and len(numbers) == len(others) and min(numbers, default=0) > float(text)
        if others and not more:
            flag = flag_of(name)
            raise SettingsError(f"{written} is {flag} {text}, and {flag} {others[0]} says otherwise")
        if not others:
            self.texts[name] = [text]

    def _flag(self, flag: str, values: list[str], after: list[str]) -> None:
        positive = f"--{flag[5:]}" if flag.startswith("--no-") else ""
        opposite = self.fields.get(positive) or self.renamed.get(positive)
        if self.foreign and (kind := self.foreign.kind(flag)):
            self._foreign(flag, kind, values, after)
        elif opposite and opposite.is_bool:
            text = (values or _truth(after) or ["true"])[0]
            self._add(opposite, [json.dumps(not TRUTH[text.lower()]) if text.lower() in TRUTH else text])
        elif field := self.fields.get(flag) or self.renamed.get(flag):
            # One `--env my.py:E` may stand before an argument of the command.
            many = field.kind is tuple or (field.is_named and "=" in "".join(after[:1]))
            if field.is_bool:
                self._add(field, values or _truth(after) or ["true"])
            elif found := values or _taken(after, None if many else 1):
                self._add(field, found)
            else:
                self.problems.append(f"{flag}: expected {field.expected()}; got nothing")
        elif flag.startswith(SGLANG_PREFIX) and not (self.foreign and self.foreign.answer(flag)):
            read = [json_or_text(text) for text in values or _taken(after)]
            self.sglang[flag.removeprefix(SGLANG_PREFIX).replace("-", "_")] = read if read[1:] else (read or [True])[0]
        else:
            self.unknown.append(flag)
            _taken(after)

    def _add(self, field: FieldRef, texts: list[str]) -> None:
        self.texts.setdefault(field.name, []).extend(texts)

    def _foreign(self, flag: str, kind: str, values: list[str], after: list[str]) -> None:
        if kind == "many":
            self.many[flag] = values = [*self.many.get(flag, ()), *values, *_taken(after)]
        else:
            values = values or (_truth(after) if kind == "flag" else _taken(after, 1))
        try:
            assert self.foreign is not None
            taken = self.foreign.ours(flag, values)
        except SettingsError as error:
            self.problems.append(str(error))
            return
        for name, value in taken.items():
            field = all_fields()[name]
            if field.is_bool or isinstance(value, dict):
                self._add(field, [json.dumps(value)])
            elif isinstance(value, list) or field.flag == flag:
                self._add(field, value if isinstance(value, list) else [value])
            else:
                least = not values and isinstance(value, int)
                self.spelt.append((least, " ".join([flag, *values]), name, str(value)))


def _taken(after: list[str], most: int | None = None) -> list[str]:
    """Remove the values at the beginning of `after`, at most `most`, and return them."""
    end = next((at for at, token in enumerate(after) if _FLAG.match(token)), len(after))
    end = end if most is None else min(end, most)
    found, after[:end] = after[:end], []
    return found


def _truth(after: list[str]) -> list[str]:
    return [after.pop(0)] if after and after[0].lower() in ("true", "false") else []
