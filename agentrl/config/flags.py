"""Command-line flags made from the settings' fields.

1. Every field of every room is a flag: `rollout_batch_size` is `--rollout-batch-size`; a boolean has `--x/--no-x`.
2. `read_flags(argv)` gives only what was written on the command line, as plain values; pydantic judges them later.
3. Spellings that slime users have in their scripts work: underscores for dashes, `--flag true`, `--eval-prompt-data name path [name path ...]`, and `--sglang-*` for any option of the engine's server.
4. Flags of other trainers are what `foreign` says that they are here. A number that one of them stands for (`--train-async`
   is `--max-staleness 1`) is the least: the setting's own flag may say more.
5. All that is unknown is one `SettingsError`: flags of other trainers with what to do instead, others with the nearest.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import click
from pydantic import ValidationError

from agentrl.config.fields import SECTIONS, FieldRef, all_fields
from agentrl.config.foreign import Part, foreign
from agentrl.config.problems import one_error, sentences, unknown
from agentrl.config.values import json_or_text, read_texts
from agentrl.errors import SettingsError

_PLAYED = ("env", "custom_generate_function_path", "hf_checkpoint")
_GRADED = ("label_key", "rm_type", "custom_rm_path")
ESSENTIAL: Mapping[str, tuple[str, ...]] = {
    "train": (
        *("env", "hf_checkpoint", "prompt_data", *_GRADED),
        *(
            "num_rollout",
            "rollout_batch_size",
            "n_samples_per_prompt",
            "rollout_max_response_len",
            "lr",
            "max_staleness",
        ),
        *("eval_prompt_data", "eval_interval", "save", "save_interval", "load", "output_dir"),
    ),
    "sft": (
        *("hf_checkpoint", "prompt_data", "input_key", "sft_turns", "num_epoch", "rollout_batch_size", "lr"),
        *("rollout_max_context_len", "save_interval", "output_dir", "backend"),
    ),
    "rollout": (
        *(*_PLAYED, "prompt_data", *_GRADED),
        *("num_rollout", "rollout_batch_size", "n_samples_per_prompt", "rollout_max_response_len"),
        *("rollout_temperature", "save_debug_rollout_data", "output_dir"),
    ),
    "check": (*_PLAYED[:2], "prompt_data", "input_key", *_GRADED, "tool_call_parser", "chat_template_path"),
    "replay": ("env", "rm_type", "custom_rm_path", "reward_key"),
    "eval": (
        *(*_PLAYED, "eval_prompt_data", *_GRADED),
        *("n_samples_per_eval_prompt", "eval_max_response_len", "eval_temperature", "output_dir"),
    ),
}
"""Shown first in a command's `--help`: what its first use needs."""

SGLANG_PREFIX = "--sglang-"
SGLANG_FIELD = "sglang_options"


def options() -> list[click.Option]:
    """One click option a setting, room by room; defaults live in the models, not here."""
    return [_option(field) for field in all_fields().values()]


def _option(field: FieldRef) -> click.Option:
    if field.is_bool:
        return click.Option([f"{field.flag}/--no-{field.flag[2:]}", field.name], default=None, help=help_text(field))
    return click.Option([field.flag, field.name], type=str, multiple=True, metavar=field.metavar, help=help_text(field))


def help_text(field: FieldRef, presets: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The field's description with its choices and default, which `presets` may give way to a command's own."""
    text = field.info.description or ""
    notes = []
    if field.info.is_required():
        notes.append("required")
    elif (default := presets.get(field.name, field.default)) not in (None, "", (), [], {}) and not field.is_mapping:
        if field.is_bool:
            notes.append("default: on" if default else "default: off")
        else:
            notes.append(f"default: {getattr(default, 'value', default)}")
    return f"{text} [{'; '.join(notes)}]" if notes else text


def read_flags(argv: Sequence[str]) -> tuple[dict[str, Any], dict[str, str], str | None]:
    """Read a command line that holds settings only, and `--config FILE`.

    Returns:
        values: field name to plain value, only for flags that were given.
        origins: field name to the flag as written, for messages.
        config: the file.

    Raises:
        SettingsError: an unknown flag, a missing or ill-formed value, or an argument that belongs to no flag.
    """
    own = [click.Option(["--config"]), click.Option(["--slime-script"])]
    command = click.Command("settings", params=[*own, *options()], add_help_option=False)
    plain, sglang = rewrite(argv, extra=["--config", "--slime-script"])
    try:
        context = command.make_context("settings", plain)
    except click.UsageError as error:
        raise SettingsError(error.format_message()) from error
    values, origins = collect(context.params, sglang)
    if script := context.params["slime_script"]:
        values, origins = merged(read_script(script, values)[:2], (values, origins))
    return values, origins, context.params["config"]


def read_script(path: str, given: Collection[str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """The settings in another trainer's launch script: as `read_flags`, and what to tell about the script.

    Args:
        given: settings that win over the script's.
    """
    door = foreign()
    if door is None:
        raise SettingsError(f"--slime-script {path}: this installation has no agentrl.compat, which reads such scripts")
    argv, lines, notes = door.script(path, given)
    try:
        values, origins, _ = read_flags(argv)
    except SettingsError as error:
        raise SettingsError(f"{path}: {error}") from error
    return values, {name: lines.get(name, f"{path}, {flag}") for name, flag in origins.items()}, notes


def merged(low: Part, high: Part) -> tuple[dict[str, Any], dict[str, str]]:
    """Values of `high` win, each as a whole; only the engine server's options and `compat_options` merge key by key."""
    values = {**low[0], **high[0]}
    for name in (SGLANG_FIELD, "compat_options"):
        below, above = low[0].get(name), high[0].get(name)
        if isinstance(below, Mapping) and isinstance(above, Mapping):
            values[name] = {**below, **above}
    origins = {**low[1], **{name: high[1].get(name, "") for name in high[0]}}
    return values, origins


def collect(params: Mapping[str, Any], sglang: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Pick the settings that were given out of click's parameters; `sglang` is what `rewrite` set aside."""
    values: dict[str, Any] = {}
    for name, field in all_fields().items():
        given = params.get(name)
        if field.is_bool and given is not None:
            values[name] = given
        elif not field.is_bool and given:
            values[name] = read_texts(field, given)
    if sglang:
        values[SGLANG_FIELD] = {**values.get(SGLANG_FIELD, {}), **sglang}
    return values, {name: all_fields()[name].flag for name in values}


def rewrite(argv: Sequence[str], *, extra: Sequence[str] = ()) -> tuple[list[str], dict[str, Any]]:
    """Bring a command line into click's form.

    Args:
        argv: the arguments after the command's name.
        extra: flags of the command itself (`--config`, `--dry-run`), left alone.

    Returns:
        the rewritten arguments, and the `--sglang-*` options by their server names.

    Raises:
        SettingsError: unknown flags, all of them, with the nearest known ones.
    """
    return _Rewriter(extra).run(list(argv))


class _Rewriter:
    def __init__(self, extra: Sequence[str]) -> None:
        self.fields = {f.flag: f for f in all_fields().values()}
        self.bools = {flag for flag, f in self.fields.items() if f.is_bool}
        self.extra = set(extra)
        self.out: list[str] = []
        self.spelt: list[tuple[bool, str, str]] = []
        self.sglang: dict[str, Any] = {}
        self.unknown: list[str] = []
        self.disagree: list[str] = []
        self.foreign = foreign()
        self.many: dict[str, list[str]] = {}

    def run(self, argv: list[str]) -> tuple[list[str], dict[str, Any]]:
        while argv:
            token = argv.pop(0)
            if not token.startswith("--") or token == "--":
                self.out.append(token)
                continue
            name, equals, value = token.partition("=")
            self._flag(name if name in self.extra else name.replace("_", "-"), value if equals else None, argv)
        if self.unknown or self.disagree:
            known = [*self.fields, *self.extra, *(f"--no-{b[2:]}" for b in self.bools)]
            raise one_error([*unknown(self.unknown, known, "flag"), *self.disagree, *self._wrong()])
        for least, name, written in sorted(self.spelt):
            self._agree(least, name, written)
        return self.out, self.sglang

    def _wrong(self) -> Iterator[str]:
        """What is wrong with single values: told together with what is unknown."""
        for flag in dict.fromkeys(word.partition("=")[0] for word in self.out if "=" in word):
            if field := self.fields.get(flag):
                texts = [word[len(flag) + 1 :] for word in self.out if word.startswith(f"{flag}=")]
                try:
                    SECTIONS[field.section].model_validate({field.name: read_texts(field, texts)})
                except SettingsError as error:
                    yield str(error)
                except ValidationError as error:
                    yield from (
                        said for said in sentences(error, {field.name: field}, {}) if said.startswith(f"{flag}: ")
                    )

    def _agree(self, least: bool, name: str, written: str) -> None:
        """Another spelling must not contradict the field's own flag; a least value gives way to a larger one."""
        flag, _, value = written.partition("=")
        others = [other for other in self.out if other.startswith(f"{flag}=") and other != written]
        if others and not (least and all(float(other.partition("=")[2]) > float(value) for other in others)):
            raise SettingsError(
                f"{name} is {written.replace('=', ' ')}, and {others[0].replace('=', ' ')} says otherwise"
            )
        if not others:
            self.out.append(written)

    def _flag(self, name: str, value: str | None, rest: list[str]) -> None:
        if name in self.extra:
            self.out.append(name if value is None else f"{name}={value}")
        elif self.foreign and (kind := self.foreign.kind(name)):
            self._foreign(name, kind, [] if value is None else [value], rest)
        elif name in self.bools or (name.startswith("--no-") and f"--{name[5:]}" in self.bools):
            self._bool(name, value, rest)
        elif name in self.fields:
            self._valued(self.fields[name], value, rest)
        elif name.startswith(SGLANG_PREFIX) and not (self.foreign and self.foreign.answer(name)):
            self._sglang(name, value, rest)
        else:
            self.unknown.append(name)
            while rest and _is_value(rest[0]):
                rest.pop(0)

    def _foreign(self, name: str, kind: str, values: list[str], rest: list[str]) -> None:
        most = {"flag": 0, "one": 1, "many": len(rest)}[kind]
        while (
            rest
            and _is_value(rest[0])
            and (len(values) < most or (not values and rest[0].lower() in ("true", "false")))
        ):
            values.append(rest.pop(0))
        if kind == "many":
            self.many[name] = values = [*self.many.get(name, ()), *values]
        try:
            assert self.foreign is not None
            taken = self.foreign.ours(name, values)
        except SettingsError as error:
            self.disagree.append(str(error))
            return
        for setting, value in taken.items():
            flag = "--" + setting.replace("_", "-")
            if flag in self.bools:
                self.out.append(flag if value else f"--no-{flag[2:]}")
            elif isinstance(value, list):
                self.out += [f"{flag}={one}" for one in value]
            elif isinstance(value, dict) or flag == name:
                self.out.append(f"{flag}={value if isinstance(value, str) else json.dumps(value)}")
            else:
                self.spelt.append((not values and isinstance(value, int), " ".join([name, *values]), f"{flag}={value}"))

    def _valued(self, field: FieldRef, value: str | None, rest: list[str]) -> None:
        values = [value] if value is not None else []
        if value is None and rest and _is_value(rest[0]):
            values.append(rest.pop(0))
            while (field.is_sequence or field.is_named) and rest and _is_value(rest[0]):
                values.append(rest.pop(0))
        if not values:
            raise SettingsError(f"{field.flag}: expected {field.expected()}; got nothing")
        self.out += [f"{field.flag}={v}" for v in values]

    def _bool(self, name: str, value: str | None, rest: list[str]) -> None:
        text = self._bool_text(value, rest)
        positive = "--" + name.removeprefix("--no-") if name not in self.bools else name
        on = _truth(name, text) if name == positive else not _truth(name, text)
        self.out.append(positive if on else f"--no-{positive[2:]}")

    def _bool_text(self, value: str | None, rest: list[str]) -> str:
        if value is not None:
            return value
        if rest and rest[0].lower() in ("true", "false"):
            return rest.pop(0)
        return "true"

    def _sglang(self, name: str, value: str | None, rest: list[str]) -> None:
        values = [] if value is None else [value]
        while value is None and rest and _is_value(rest[0]):
            values.append(rest.pop(0))
        key = name.removeprefix(SGLANG_PREFIX).replace("-", "_")
        read = [json_or_text(one) for one in values]
        self.sglang[key] = read if read[1:] else (read or [True])[0]


def _truth(flag: str, text: str) -> bool:
    words = {"true": True, "1": True, "yes": True, "on": True, "false": False, "0": False, "no": False, "off": False}
    if text.lower() not in words:
        raise SettingsError(f"{flag}: expected true or false; got {text!r}")
    return words[text.lower()]


def _is_value(token: str) -> bool:
    """A token is a value unless it looks like a flag; `-1` and `-0.5` are numbers."""
    return not token.startswith("-") or token[1:2].isdigit() or token[1:2] == "."
