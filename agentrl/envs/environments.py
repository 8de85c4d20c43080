"""`Environments`: the environments of a run, one or several by name, each with the arguments of its instances."""

from collections.abc import Mapping
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from agentrl.envs.base import Environment
from agentrl.envs.load import load_environment, read_arguments
from agentrl.errors import EnvFailure, PluginError, SettingsError, raised_as
from agentrl.sample import Sample

ALONE = ""  # the name of an environment that is the run's only one
_OWN = ("__module__", "__qualname__", "__doc__", "tools", "max_turns", "when_interrupted")
"""Attributes that a class's further use has itself: the `setup` of the first may change those of the class."""


@dataclass(frozen=True, slots=True)
class EnvSpec:
    """One environment of a run."""

    kind: type[Environment]
    args: Any = None  # the run's, as its code sees them
    arguments: Mapping[str, Any] = field(default_factory=dict)  # of its instances, of the types that `__init__` says

    def make(self, *, evaluating: bool = False) -> Environment:
        arguments = dict(self.arguments)
        with suppress(TypeError):  # instances share what cannot be copied, a lock for example
            arguments = deepcopy(arguments)
        return self.kind.create(self.args, evaluating=evaluating, **arguments)


class EnvClasses(dict[type[Environment], list[tuple[Mapping[str, Any], type[Environment]]]]):
    """The environments' classes in a process, one for each set of arguments. What `setup` keeps on its class is then
    not overwritten by the `setup` of the same class with other arguments."""

    def of(self, cls: type[Environment], given: Mapping[str, Any]) -> type[Environment]:
        """`cls`, or a subclass that differs in nothing where `cls` is there with other arguments already."""
        same = self.setdefault(cls, [])
        if (found := next((kind for arguments, kind in same if arguments == given), None)) is None:
            found = type(cls.__name__, (cls,), {name: getattr(cls, name) for name in _OWN}) if same else cls
            same.append((given, found))
        return found


class Environments(dict[str, EnvSpec]):
    """The environments by name; a run's only one is called `ALONE`. With several, a sample's `metadata["env"]` says
    which one plays it: it comes from the field of the data's row that `--env-key` names."""

    @classmethod
    def alone(cls, kind: type[Environment], args: Any = None) -> "Environments":
        """One environment that takes no arguments."""
        return cls({ALONE: EnvSpec(kind, args)})

    @classmethod
    def load(
        cls, env: str | Mapping[str, str], given: Mapping[str, Any], args: Any, kinds: EnvClasses | None = None
    ) -> "Environments":
        """The environments that `--env` and `--env-args` name, each with its own path and arguments in its `args`.
        `given`: the arguments; with several environments, by their names. `kinds`: the classes that this process has
        already. Raises PluginError: a class is not found or badly defined, or its arguments are wrong. Raises
        SettingsError: arguments for an environment that is none of the run's."""
        kinds = EnvClasses() if kinds is None else kinds
        if isinstance(env, str):
            return cls({ALONE: _entry("--env", env, given, args, kinds)})
        for name, own in given.items():
            if name not in env or not isinstance(own, Mapping):
                said = f"with several environments it is a mapping by their names ({', '.join(env)}) to each one's arguments"
                raise SettingsError(f"--env-args {name}: {said}, as in {next(iter(env))}='{{\"size\": 3}}'")
        entries = {name: _entry(f"--env {name}", path, given.get(name, {}), args, kinds) for name, path in env.items()}
        return cls(entries)

    @property
    def names(self) -> tuple[str, ...]:
        """The names that samples give; none where there is one environment for all."""
        return () if ALONE in self else tuple(self)

    def unknown(self, name: object) -> str | None:
        """Describe why `name` is not a valid environment of a sample; None if it is valid."""
        if not self.names or name in self.names:
            return None
        given = "none" if name is None else f"{name!r:.100}"
        return f"the run has several environments, {', '.join(self.names)}, and the row names {given}"

    def of(self, sample: Sample) -> EnvSpec:
        """The environment that plays `sample`. Raises EnvFailure: the sample names none of the run's."""
        if problem := self.unknown(name := sample.metadata.get("env")):
            raise EnvFailure(f"{problem}; set metadata['env']", kind="env_unknown")
        return self[str(name) if self.names else ALONE]


def _entry(flag: str, path: str, given: Mapping[str, Any], args: Any, kinds: EnvClasses) -> EnvSpec:
    cls = load_environment(path, what=flag)
    with raised_as(PluginError, flag.replace("--env", "--env-args", 1) if given else f"{flag} {path!r}", PluginError):
        arguments = read_arguments(cls, given)
    return EnvSpec(kinds.of(cls, given), args.changed(env=path, env_args=arguments), arguments)
