"""The evaluation sets of `--eval-prompt-data` or `--eval-config`. Each set has its own settings: the run's settings,
overridden by the file's `defaults` and then by the set's values. A set may change sampling, number of samples, reward,
environment, generate function and field names."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config import RunSettings
from agentrl.config.files import read_document
from agentrl.config.problems import did_you_mean, one_error
from agentrl.data.prompts import PromptData
from agentrl.data.source import pending_group
from agentrl.errors import AgentRLError, SettingsError
from agentrl.groups import Group
from agentrl.rowfiles import split_slice

_LENGTHS = ("max_prompt_len", "max_context_len")

SETTINGS: Mapping[str, str] = {
    **{n: f"eval_{n}" for n in ("temperature", "top_p", "top_k", "max_response_len", "reward_key", "min_new_tokens")},
    **{name: f"rollout_{name}" for name in (*_LENGTHS, "stop", "stop_token_ids", "skip_special_tokens")},
    **{name: name for name in ("n_samples_per_eval_prompt", "max_turns", "env", "env_args", "env_key")},
    **{name: name for name in ("custom_generate_function_path", "rm_type", "custom_rm_path", "group_rm")},
    **{name: name for name in ("input_key", "label_key", "metadata_key", "tool_key")},
    **{name: name for name in ("apply_chat_template", "apply_chat_template_kwargs")},
}
"""By key of a set, the run's setting that the key overrides. A key has slime's name if slime has the key."""

REPLACES = {"rm_type": ("custom_rm_path", "group_rm"), "env": ("env_args", "env_key", "custom_generate_function_path")}
"""By key of a set, other settings of the same purpose that the key removes."""


@dataclass(frozen=True, slots=True)
class EvalSet:
    """A named set of held-out prompts. `where`: the flag or the file's line that names the set. `settings`: the run's,
    overridden by the set's. `metadata`: overrides the metadata of the rows."""

    name: str
    where: str
    settings: RunSettings
    data: PromptData
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def groups(self) -> list[Group]:
        n, given = self.settings.rollout.n_samples_per_eval_prompt, {**self.metadata, "attempt": "eval"}
        return [pending_group(row, row.index, n, **given) for row in self.data]


@contextmanager
def named(where: str) -> Iterator[None]:
    """Prefix an error of a set with the set's flag or line."""
    try:
        yield
    except AgentRLError as error:
        raise type(error)(f"{where}: {error}") from error


def eval_sets(settings: RunSettings) -> list[EvalSet]:
    """Open every set. A path without a name is named after its file. Raises SettingsError: a name occurs twice, or the
    file is not a list of sets. Raises DataError: a data file is missing or empty."""
    file, values = settings.rollout.eval_config, settings.rollout.eval_prompt_data
    pairs = name_paths(values) if file is None else ()
    said = [_Said(f"--eval-prompt-data {name}", {"name": name, "path": path}) for name, path in pairs]
    said += [] if file is None else _read(file)
    names = [one.values["name"] for one in said]
    if len(set(names)) != len(names):
        raise SettingsError(f"{file or '--eval-prompt-data'}: each set needs its own name, got {', '.join(names)}")
    return [_open(one, settings) for one in said]


@dataclass(slots=True)
class _Said:
    """The entry of a set: its location, its values, and the location of each value."""

    where: str
    values: dict[str, Any] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)
    replaced: set[str] = field(default_factory=set)

    def add(self, given: Mapping[str, Any], lines: Mapping[str, str]) -> None:
        """Add values of the set. Later values replace earlier ones; null values are ignored."""
        given = {key: value for key, value in given.items() if value is not None}
        self.replaced |= (gone := {old for key in given for old in REPLACES.get(key, ())})
        self.values = {key: value for key, value in self.values.items() if key not in gone} | given
        self.lines.update(lines)

    def problems(self) -> Iterator[str]:
        known = {"name", "path", "metadata_overrides", *SETTINGS}
        for key in self.values.keys() - known:
            yield f"{self.lines[key]}: a set has no {key}{did_you_mean(key, known)}; it may say {', '.join(sorted(known))}"
        for key, kind in (("name", str), ("path", str), ("metadata_overrides", dict)):
            if not isinstance(value := self.values.get(key, {} if kind is dict else None), kind):
                yield f"{self.lines.get(key, self.where)}: {key} must be {'text' if kind is str else 'a mapping'}, got {value!r:.100}"


def _read(path: str) -> list[_Said]:
    """Read the sets of a file: `datasets:` (list, or mapping by name) and `defaults:`, at top level or in `eval:`."""
    file, document, lines = read_document(path, "--eval-config")
    above = ("eval",) if "eval" in document else ()
    body = document.get("eval", document)
    body = body if isinstance(body, Mapping) else {}
    defaults, listed = body.get("defaults") or {}, body.get("datasets")
    items: Mapping[Any, Any] = dict(enumerate(listed)) if isinstance(listed, list) else listed or {}
    items = items if isinstance(items, Mapping) else {}
    sound = all(isinstance(entry, Mapping) for entry in (defaults, *items.values()))
    if not items or not sound or body.keys() - {"defaults", "datasets"}:
        told = f"{file}: expected `eval:` with `datasets:` below it, a list of sets with name and path,"
        raise SettingsError(f"{told} and if wanted `defaults:` for all of them")

    def numbered(path: tuple[str, ...], keys: Mapping[str, Any]) -> dict[str, str]:
        return {key: f"{file} line {lines.get((*path, key), '?')}, {key}" for key in keys}

    said = []
    for key, entry in items.items():
        at = (*above, "datasets", str(key))
        one = _Said(f"{file} line {lines.get(at, '?')}")
        one.add(defaults, numbered((*above, "defaults"), defaults))
        one.add({"name": key, **entry} if listed is items else entry, numbered(at, entry))
        said.append(one)
    if problems := list(dict.fromkeys(problem for one in said for problem in one.problems())):
        raise one_error(problems)
    return said


def _open(said: _Said, settings: RunSettings) -> EvalSet:
    own = {SETTINGS[key]: value for key, value in said.values.items() if key in SETTINGS}
    metadata = dict(said.values.get("metadata_overrides", {}))
    env, several = own.get("env"), settings.rollout.env
    if isinstance(env, str) and isinstance(several, dict) and env in several:  # the name of an environment of the run
        own = {"env_args": settings.rollout.env_args.get(env, {}), **own, "env": several[env]}
        metadata["env"] = env
    replaced = said.replaced | {f"eval_{n}" for n in _LENGTHS if f"rollout_{n}" in own}
    given = {key: value for key, value in settings.flat().items() if key in settings.given() - replaced}
    name, path = said.values["name"], said.values["path"]
    # By setting, the run's `eval_...` setting that overrides it in all sets.
    of_sets = {f"rollout_{n}": f"eval_{n}" for n in _LENGTHS}
    of_sets |= {n: f"eval_{n}" for n in ("input_key", "label_key", "tool_key")}
    ours = {name: given[flag] for name, flag in of_sets.items() if flag in given}
    values = {**given, "eval_config": None, **ours, **own, "eval_prompt_data": (name, path)}
    origins = {SETTINGS[key]: line for key, line in said.lines.items() if key in SETTINGS}
    if "rm_type" in own and "custom_rm_path" not in own:
        metadata["rm_type"] = own["rm_type"]
    response = own.get("eval_max_response_len", given.get("eval_max_response_len"))
    if response and (room := {**ours, **own}.get("rollout_max_context_len")):  # its context holds its own answers
        values["rollout_max_response_len"] = max(1, min(int(response), int(room) - 1))
    with named(said.where):
        mine = RunSettings.from_flat(values, origins)
        return EvalSet(name, said.where, mine, PromptData(path, mine.data), metadata)


def name_paths(values: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the pairs of `NAME PATH NAME PATH ...` or of a bare `PATH`. Raises SettingsError: a name has no path."""
    if len(values) == 1:
        return [(Path(split_slice(values[0])[0]).stem, values[0])]
    if len(values) % 2 or any(split_slice(name)[0].endswith((".jsonl", ".parquet")) for name in values[::2]):
        raise SettingsError(f"--eval-prompt-data expects NAME PATH pairs, got {' '.join(values)}")
    return list(zip(values[::2], values[1::2], strict=True))
