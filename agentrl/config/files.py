"""Readers of settings files: YAML or TOML, by section or flat or both, to plain values with their lines. Dashes and
underscores are the same in keys; `sglang_*` keys go to the engine's server. An unknown or repeated key is a
`SettingsError`. YAML is read as numbers, true, false, null and text; tags and aliases are refused."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import yaml

from agentrl import plugins
from agentrl.config.compat_interface import CompatInterface, Part, foreign
from agentrl.config.fields import RENAMED, SECTIONS, FieldRef, all_fields
from agentrl.config.flags import MERGED, SGLANG_FIELD
from agentrl.config.problems import Problems, one_error, unknown
from agentrl.errors import SECRET, SECRET_NAME, SettingsError, raised_as

Lines = dict[tuple[str, ...], int]  # the line of each key, by its path; the path of a list's item ends with its index


def read_file(path: str | Path, problems: Problems | None = None) -> Part:
    """Read a settings file: values by field name, and the place of each (`run.yaml line 3`). `problems`: collects
    errors instead of raising; the valid settings are returned. Raises SettingsError: the file is missing or is not YAML
    or TOML, or keys are unknown or repeated (all in one message)."""
    found: Part = ({}, {})
    with problems or Problems.raised():
        found = sort(*read_document(path, "--config"), problems)
    return found  # noqa: RET504 - problems were noted if it is empty


Said = tuple[tuple[str, ...], str, Any]
"""A key's path in a file, our setting that it means, and the value. If the setting is empty, the value is a problem."""
TakesFile = Callable[[Mapping[str, Any]], Iterable[Said] | None]
"""Returns the settings in another trainer's file; None for other files."""


def sort(name: str, document: Mapping[str, Any], lines: Lines, problems: Problems | None = None) -> Part:
    """Return the settings in a file's `document`, in the form and with the errors of `read_file`."""
    sorter, found = _Sorter(name, lines), plugins.compat()
    said: Iterable[Said] | None = None if found is None else found.read(document)
    if said is None:
        sorter.ours(document)
    else:
        sorter.theirs(said)
    with problems or Problems.raised():
        if sorter.problems:
            raise one_error(sorter.problems)
    return sorter.values, sorter.origins


def read_document(path: str | Path, flag: str) -> tuple[str, Mapping[str, Any], Lines]:
    """Read a YAML or TOML file that `flag` names. Returns its name, its content, and the lines of its keys. Raises
    SettingsError: the file is missing, is not YAML or TOML, or has repeated keys."""
    if not os.path.isfile(file := Path(os.path.expanduser(path))):
        raise SettingsError(f"{flag}: no file {file}")
    try:
        with raised_as(SettingsError, f"{flag}: {file} cannot be read", OSError):
            text = file.read_text(encoding="utf-8")
        document, lines = (_read_toml if file.suffix == ".toml" else _read_yaml)(file.name, text)
        repr(document)  # raises ValueError for integers that are too long for Python to print
    except ValueError as error:
        raise SettingsError(f"{file.name}: expected UTF-8 text and numbers of a usual length ({error})") from error
    except RecursionError as error:
        raise SettingsError(f"{file.name}: lists or mappings are nested too deep to be read; take some away") from error
    return file.name, document, lines


class _Sorter:
    """Sorter of a document's keys into settings and problems."""

    def __init__(self, file: str, lines: Lines) -> None:
        self.file, self.lines = file, lines
        self.values, self.origins, self.problems = dict[str, Any](), dict[str, str](), list[str]()

    def ours(self, document: Mapping[str, Any]) -> None:
        for raw, value in document.items():
            if (key := str(raw).replace("-", "_")) in SECTIONS and isinstance(value, Mapping):
                for inner, inner_value in value.items():
                    self._put(key, str(inner), inner_value, self._where((str(raw), str(inner))))
            elif key in SECTIONS and key not in all_fields():
                if value is not None:
                    self.problems.append(f"{self._where((str(raw),))}: {key} is a section and expects keys below it")
            else:
                self._put(None, str(raw), value, self._where((str(raw),)))

    def theirs(self, said: Iterable[Said]) -> None:
        for path, key, value in said:
            near = next((path[:end] for end in range(len(path), 0, -1) if path[:end] in self.lines), path)
            where = f"{self._where(near)}, {'.'.join(path)}"
            if not key:
                self.problems.append(f"{where}: {value}")
            elif key not in self.values or self.values[key] != value:  # a file may say the same twice
                self._put(None, key, value, where)

    def _put(self, section: str | None, written: str, value: Any, where: str) -> None:
        key, known = written.replace("-", "_"), all_fields()
        if (key := RENAMED.get(key, key)) in known and section in (None, known[key].section):
            if key in self.values and key not in MERGED:
                self.problems.append(f"{where}: {key} is given twice (also {self.origins[key]})")
            self._set(key, _as_flags_read_it(known[key], value), where)
        elif key in known:
            self.problems.append(f"{where}: {key} belongs under {known[key].section}, not under {section}")
        elif (compat := foreign()) and compat.kind(key):
            self._take_foreign(compat, key, value, where)
        elif key.startswith("sglang_") and not (compat and compat.answer(key)):
            self._set(SGLANG_FIELD, {key.removeprefix("sglang_"): value}, where)
        else:
            self.problems += [f"{where}: {said}" for said in unknown([written], [*known, *SECTIONS], "setting")]

    def _take_foreign(self, compat: CompatInterface, key: str, value: Any, where: str) -> None:
        try:
            for name, meant in compat.ours(key, as_words(value)).items() if value is not None else ():
                self._set(name, meant, where)
        except SettingsError as error:
            self.problems.append(f"{where}: {error}")

    def _set(self, key: str, value: Any, where: str) -> None:
        if key in MERGED and key in self.values:
            both = (self.values[key], value)
            value = next((part for part in both if not isinstance(part, Mapping)), None) or {**both[0], **both[1]}
        self.values[key], self.origins[key] = value, f"{where}, {key}"

    def _where(self, path: tuple[str, ...]) -> str:
        line = self.lines.get(path)
        return f"{self.file} line {line}" if line else self.file


def as_words(value: Any) -> list[str]:
    """Return a file's value as the words that a command line has after the flag."""
    listed = value if isinstance(value, list) else [] if value is True else [value]
    return [json.dumps(one) if isinstance(one, bool | dict | list | None) else str(one) for one in listed]


def _as_flags_read_it(field: FieldRef, value: Any) -> Any:
    """Return the value that a flag would have: YAML reads the word `off` as false, and `none` as text."""
    if value is False and "off" in field.choices:
        return "off"
    return None if value == "none" and field.optional and field.kind is not str else value


_MAX_NESTED = 64
_HINTS = {
    "mapping values are not allowed": "write `name: value` in each line, put a text with `: ` in quotes, and indent alike",
    "'\\t'": "indent with spaces, not with tabs",
    "expected ':'": "write a setting as `name: value`, with a space behind the colon",
    "expected <block end>": "indent the settings of a section alike",
    "cannot start any token": "put the text in quotes",
}
"""Part of an error message of the YAML reader to a remedy."""


class _Loader(yaml.SafeLoader):
    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except ValueError:
            return node.value


# YAML 1.1 takes 1e-5 for text.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
_Loader.add_constructor("tag:yaml.org,2002:timestamp", yaml.SafeLoader.construct_yaml_str)  # type: ignore[type-var]


def _read_yaml(file: str, text: str) -> tuple[Mapping[str, Any], Lines]:
    try:
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > _MAX_NESTED:
                problem = f"lists or mappings are nested too deep, more than {_MAX_NESTED}; take some away"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
            if isinstance(event, yaml.AliasEvent) or getattr(event, "tag", None) not in (None, "!"):
                problem = "tags (!!...) and aliases (*...) are not for settings; write the plain value where it belongs"
                raise yaml.MarkedYAMLError(problem=problem, problem_mark=event.start_mark)  # type: ignore[arg-type]
        loader = _Loader(text)
        node = loader.get_single_node()
        document = None if node is None else loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = f" line {mark.line + 1}: not valid YAML" if mark else " is not valid YAML"
        said += f": {getattr(error, 'problem', None) or error}"
        if isinstance(error, yaml.MarkedYAMLError) and error.context_mark:  # a quoted text may begin many lines above
            said += f", {error.context} that begins in line {error.context_mark.line + 1}"
        if mark and (hint := next((hint for part, hint in _HINTS.items() if part in said), "")):
            written = (*text.splitlines(), "")[min(mark.line, len(text.splitlines()))].strip()
            names = [part.strip(" '\"") for part in written.split(":")]
            written = SECRET if any(map(SECRET_NAME.search, names)) else written
            said += f"; {hint}" + (f". The line is: {written:.120}" if written else "")
        raise SettingsError(f"{file}{said}") from error
    if document is None:
        return {}, {}
    if not isinstance(document, dict) or not isinstance(node, yaml.MappingNode):
        raise SettingsError(f"{file}: expected settings as `name: value`; got {type(document).__name__}")
    lines: Lines = {}
    _mark(file, node, (), lines)
    return document, lines


def _mark(file: str, node: yaml.Node, above: tuple[str, ...], lines: Lines) -> None:
    """Record each key's line. Raises SettingsError: a key is repeated. In YAML itself, the last value silently wins."""
    listed = isinstance(node, yaml.SequenceNode)
    inside = [(str(at), item, item) for at, item in enumerate(node.value)] if listed else []
    if isinstance(node, yaml.MappingNode):
        inside = [(str(key.value), key, value) for key, value in node.value]
    for key, marked, value in inside:
        path, line = (*above, key), marked.start_mark.line + 1
        if path in lines:
            raise SettingsError(f"{file} line {line}: {'.'.join(path)} is given twice (also line {lines[path]})")
        lines[path] = line
        _mark(file, value, path, lines)


def _read_toml(file: str, text: str) -> tuple[Mapping[str, Any], Lines]:
    # For a number with more digits than Python reads, the error is a plain ValueError.
    with raised_as(SettingsError, f"{file} is not valid TOML", ValueError):
        document = tomllib.loads(text)
    lines, table = Lines(), tuple[str, ...]()
    for number, raw in enumerate(text.splitlines(), start=1):
        line = raw.strip()
        if line.startswith("[") and line.endswith("]"):
            table = (line.strip("[] "),)
        elif "=" in line and not line.startswith("#"):
            lines.setdefault((*table, line.split("=", 1)[0].strip(" \"'")), number)
    return document, lines
