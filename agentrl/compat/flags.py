"""slime's and Megatron's settings, and their meaning here, by the table `flags.tsv`.

Columns: the name (`x_*`: all names that begin with `x_`); the number of values (`flag` none, `one`, `many`); the state;
the target; the condition without which slime ignores the setting (`a|b`: one is set, `!a`: not set, `a>1`: above 1);
slime's default, if ours differs or we have none; reason and remedy of a refusal. Targets may begin with
`VALUE>SETTING=VALUE` for single values (nothing behind the arrow: the value is accepted without effect). States:

- `same`: one of our settings. A row of any state becomes `same` once we have a setting of that name.
- `set`: sets the target's settings to the value, or to the value behind `=`; `SETTING{KEY}` to the value's only entry.
- `agrees`: accepted if the value is true here anyway: one of the target's values, for `config` the value that `facts`
  finds, or for `$NAME` the value of the environment variable.
- `own`: a hook, or a key that `agentrl.compat` and user functions read from `args`. It is stored in `compat_options`.
- `hint`: changes neither loss nor samples. Accepted, with one of the target's values if any; last column: a note.
- `args`: a key of slime's `args` without a flag; it has the default.
- `refused`: not supported; the last column has reason and remedy.
- `called`: refused as unknown, with the target as the suggestion.

A setting without effect is refused on our own command lines. On slime's (`--slime-defaults`, `--slime-script`) it is
ignored as in slime, with a note."""

import functools
import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from agentrl.compat.facts import facts
from agentrl.compat.script import read_script
from agentrl.config.compat_interface import CompatInterface, Part
from agentrl.config.fields import Sections, all_fields
from agentrl.config.files import as_words, read_document
from agentrl.config.values import holds, json_or_text
from agentrl.errors import SettingsError, raised_as
from agentrl.files import read_table
from agentrl.settings import flag_of

OWN = "compat_options"


class FlagRow(NamedTuple):
    """A line of the table."""

    name: str
    kind: str
    state: str
    target: str
    needs: str
    default: str
    remedy: str


@functools.cache
def table() -> Mapping[str, FlagRow]:
    return {line[0]: FlagRow(*line) for line in read_table(__file__, "flags.tsv")}


@functools.cache
def defaults(*, ours: bool) -> Mapping[str, Any]:
    """Return slime's defaults: of our settings if slime's differ, or of all other settings (for `args`)."""
    named = (row for row in table().values() if row.default)
    return {row.name: json.loads(row.default) for row in named if (row.name in all_fields()) is ours}


@functools.cache
def row_of(name: str) -> FlagRow | None:
    """Return the row of a name. Its state is `same` if the name is one of our settings."""
    plain = name.lstrip("-").replace("-", "_")
    patterns = (row for row in table().values() if "*" in row.name and fnmatchcase(plain, row.name))
    found = table().get(plain) or next(patterns, None)
    return found._replace(state="same") if found and plain in all_fields() else found


class Flags:
    """The table's entries, in the interface of `agentrl.config`."""

    def called(self) -> Mapping[str, str]:
        return {row.name: row.target for row in table().values() if row.state == "called"}

    def answer(self, name: str) -> str | None:
        row = row_of(name)
        return row.remedy if row and row.state == "refused" else None

    def kind(self, name: str) -> str:
        row = row_of(name)
        taken = row and (row.state in ("set", "agrees", "own", "hint") or (row.state == "same" and ">" in row.target))
        return row.kind if row and taken else ""

    def ours(self, name: str, values: Sequence[str]) -> Mapping[str, Any]:
        row = row_of(name)
        assert row is not None
        if row.target.startswith("$"):
            # The value is a secret, so it must not be in a message.
            if "".join(values) == os.environ.get(row.target[1:], ""):
                return {}
            raise SettingsError(f"{flag_of(row.name)}: it is not what {row.target[1:]} says; {row.remedy}")
        text = " ".join(values) if values else "true"
        for value, arrow, assigned in (word.partition(">") for word in row.target.split()):
            if arrow and value == text:
                return _assigned(assigned.split(","), text)
        flag = flag_of(row.name)
        if row.kind == "flag" and row.state == "set" and text != "true":
            if text == "false":
                return {}
            raise SettingsError(f"{flag}: expected true or false; got {text!r}")
        if not values and row.kind != "flag":
            raise SettingsError(f"{flag}: expected a value; got nothing")
        match row.state, row.target:
            case "same", _:
                return {row.name: values if row.kind == "many" else text}
            case "set", target if target.endswith("}"):
                setting, key = target[:-1].split("{")
                if not isinstance(given := json_or_text(text), dict) or given.keys() != {key}:
                    raise SettingsError(f"{flag}: expected a JSON object with the key {key!r} alone; got {text}")
                return {setting: given[key]}
            case "set", target if not target.count(">"):
                return _assigned(target.split(), text)
            case ("own", _) | ("hint", ""):
                return {OWN: {row.name: list(values) if row.kind == "many" else json_or_text(text)}}
            case "agrees", "config":
                return {OWN: {row.name: json_or_text(text)}}
        known = [word.removesuffix(">") for word in row.target.split()]
        if any(_alike(json_or_text(text), json_or_text(word)) for word in known):
            return {OWN: {row.name: text}} if row.state == "hint" else {}
        if row.state == "hint":
            raise SettingsError(f"{flag} {text}: expected one of {', '.join(known)}")
        so = " or ".join(word.partition(">")[0] for word in known)
        why = f" ({row.remedy})" if row.remedy else ""
        raise SettingsError(f"{flag} {text}: it is {so} here{why}; leave the flag out")

    def script(self, path: str, given: Collection[str]) -> tuple[list[str], Mapping[str, str], list[str]]:
        launch = read_script(path)
        argv: list[str] = ["--slime-defaults"]
        origins, problems, flag, kept = {}, [], "", True
        for found in launch.flags:
            if found.text is not None and found.text.startswith("--"):
                flag = found.text.partition("=")[0]
                name = flag.removeprefix("--").replace("-", "_")
                kept = name.removeprefix("no_") not in given and name not in given
                origins[name] = f"{found.where}, {flag}"
            row = row_of(flag)
            if found.text is None and kept and row is not None and row.target == "config":
                launch.notes.append(f"{flag} is left out: {found.why}; config.json says it")
                argv.remove(flag)
            elif found.text is None and kept and self.answer(flag) is None:
                problems.append(f"{flag}: {found.why}; give {flag} after the script")
            elif kept and found.text is not None:
                argv.append(found.text)
        if problems:
            raise SettingsError("\n".join(problems))
        if launch.asynchronous and not any("sft_rollout" in word for word in argv):
            argv.append("--train-async")
        return argv, origins, launch.notes

    def resolve(self, values: Mapping[str, Any], origins: Mapping[str, str]) -> Part:
        values, origins = dict(values), dict(origins)
        if not isinstance(own := values.get(OWN) or {}, Mapping):
            return values, origins  # the reader of settings refuses it
        if path := own.get("custom_config_path"):
            self._take_file(str(path), values, origins)
        if values.get("custom_rm_path") == f"{_DISTILLATION}.reward_func":
            _distil(values)
        if str(own.get("spec")).startswith(_SEEING):
            values.setdefault("train_vision", True)
        if not values.get("slime_defaults"):
            return values, origins
        low = dict(defaults(ours=True))
        if values.get("rollout_external_engine_addrs"):
            del low["engine"]
        if values.get("loss_type") == "sft_loss":
            del low["use_rollout_logprobs"]
        values = {**low, **values}
        needs = [row for row in table().values() if row.needs and row.name in values]
        ignored = {row.name: values.pop(row.name) for row in needs if not holds(row.needs, values)}
        return {**values, OWN: {**(values.get(OWN) or {}), **ignored}}, origins

    def _take_file(self, path: str, values: dict[str, Any], origins: dict[str, str]) -> None:
        """Read the file as slime does: its keys reach `args`, and keys that are slime's settings override all."""
        name, document, lines = read_document(path, "--custom-config-path")
        for raw, value in document.items():
            key, where = str(raw), f"{name} line {lines.get((str(raw),), 0)}, {raw}"
            if key in all_fields() and key in table():
                values[key], origins[key] = value, where
                continue
            if key in table() and (said := self.answer(key)):
                raise SettingsError(f"{where}: {said.format(it='it')}")
            if value is None and self.kind(key):
                continue
            with raised_as(SettingsError, where, SettingsError):
                taken = self.ours(key, as_words(value)) if self.kind(key) else {OWN: {key: value}}
            own = {**(values.get(OWN) or {}), **taken.get(OWN, {})}
            values.update({**taken, OWN: own})

    def problems(self, settings: Sections) -> Iterator[str]:
        said = {name: value for name, value in settings.compat.compat_options.items() if name not in all_fields()}
        claims = {name: value for name, value in said.items() if (row := row_of(name)) and row.target == "config"}
        for name, what in facts(settings, claims).items():
            if not _alike(claims[name], what):
                remedy = row.remedy if (row := row_of(name)) else ""
                yield f"{flag_of(name)} {claims[name]}: it is {json.dumps(what)} here; {remedy}"
        hooks = [hook for hook, *_ in read_table(__file__, "hooks.tsv")]
        played = {hook for hook in hooks if "megatron" not in hook and "model" not in hook}
        for name in played & said.keys() if settings.data.sft_turns is not None else ():
            if not str(said[name]).startswith("slime."):
                yield f"{flag_of(name)} has no effect with agentrl sft, which plays nothing; leave it out"

    def notes(self, settings: Sections) -> Iterator[str]:
        hints: dict[str, list[str]] = {}
        for name in settings.compat.compat_options:
            if (row := row_of(name)) and row.state == "hint":
                hints.setdefault(row.remedy, []).append(flag_of(name))
        yield from (f"{', '.join(flags)}: {said}" for said, flags in hints.items())
        for name, value in settings.compat.compat_options.items():
            if name in all_fields() and name in table():
                needs = table()[name].needs.replace("_", "-").replace(">", " above ")
                others = " or ".join(f"--{one.lstrip('!')}" for one in needs.split("|"))
                when = f"with{'' if needs.startswith('!') else 'out'} {others}"
                text = json.dumps(value).strip('"')
                yield f"{flag_of(name)} {text} is left out: slime ignores it {when}"


def _assigned(words: Sequence[str], text: str) -> dict[str, Any]:
    """Return the settings in words `field=value`, or `field`, which gets the text."""
    pairs = (word.partition("=") for word in words if word)
    return {name: json_or_text(value) if equals else text for name, equals, value in pairs}


_DISTILLATION, _SEEING = "slime.rollout.on_policy_distillation", "slime_plugins.models.qwen3_5_vl"
"""slime's module of the reward function that asks a teacher, and its model that also trains the vision tower."""


def _distil(values: dict[str, Any]) -> None:
    """Translate slime's distillation by a reward function, which returns 0. Here the run asks the teacher."""
    path, own = values.pop("custom_rm_path"), dict(values.get(OWN) or {})
    hook = own.pop("custom_reward_post_process_path", None)
    if hook not in (None, f"{_DISTILLATION}.post_process_rewards"):
        remedy = "rewards are 0; leave it out, or give your own --custom-rm-path with --use-opd and --opd-teacher-url"
        raise SettingsError(f"--custom-reward-post-process-path {hook} with --custom-rm-path {path}: {remedy}")
    if not (url := str(values.pop("rm_url", None) or "").removesuffix("/generate")):
        raise SettingsError(f"--custom-rm-path {path} needs --rm-url, the address of the teacher")
    values.pop("use_opd", None)
    values |= {OWN: own, "opd_teacher_url": [url], "advantage_estimator": "on_policy_distillation"}


def _alike(said: Any, what: Any) -> bool:
    numbers = isinstance(said, int | float) and isinstance(what, int | float)
    return abs(said - what) <= 1e-9 * abs(what) if numbers else bool(said == what)


_checked: type[CompatInterface] = Flags
