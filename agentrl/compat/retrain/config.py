"""retrain's settings files, recognised by `algorithm: {backend: ...}`, and what they say in our settings.

`keys.tsv` has the keys (of hyperparameters: the names) that are a setting of ours, `values.yaml` those with a few values.
"""

import csv
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from typing import Any, Self

import yaml
from pydantic import ValidationError

from agentrl.compat.retrain.rewards import RewardFunctionConfig, RewardSetupConfig, find
from agentrl.config.fields import all_fields
from agentrl.config.files import Said, TakesFile, read_document, sort
from agentrl.config.problems import did_you_mean
from agentrl.config.settings import RunSettings
from agentrl.errors import SettingsError

_HERE = "agentrl.compat.retrain"
_KEYS = dict(csv.reader((files(_HERE) / "keys.tsv").read_text().splitlines()[1:], delimiter="\t"))
_VALUES: Mapping[str, Mapping[Any, Any]] = yaml.safe_load((files(_HERE) / "values.yaml").read_text())
_SECTIONS = ("algorithm", "model", "environment", "prompt_source", "reward_setup")
_READ = {
    *(
        "algorithm.hyperparameters",
        "environment.type",
        "environment.env_specific_config",
        "prompt_source.source_config",
    ),
    *("reward_setup.step_reward_configs", "reward_setup.rollout_reward_configs", "reward_setup.scale"),
    *("num_episodes", "batch_size", "experiment_name", "run_name"),
}
_MAPPINGS = {*_SECTIONS, *(name for name in _READ if name.endswith(("parameters", "config", "configs")))}
_FASTMCP = ("server_url", "initial_prompt_template", "mcp_server_config", "max_steps")


@dataclass
class AlgorithmConfig:
    """The section `algorithm`."""

    name: str
    backend: str
    hyperparameters: dict[str, Any] = field(default_factory=dict)


class TrainingConfig:
    """A whole settings file: `TrainingConfig(**sections)`, or `from_yaml`."""

    def __init__(self, algorithm: AlgorithmConfig | Mapping[str, Any], **sections: Any) -> None:
        section = vars(algorithm) if isinstance(algorithm, AlgorithmConfig) else algorithm
        self.document: Mapping[str, Any] = {"algorithm": section, **sections}

    @classmethod
    def from_yaml(cls, path: str) -> Self:
        """Read a file."""
        return cls(**read_document(path, "TrainingConfig.from_yaml")[1])

    def settings(self, **more: Any) -> RunSettings:
        """The settings of the run that it asks for; `more` are flat names of ours that win.

        Raises:
            SettingsError: lists what is wrong with it, key by key.
        """
        found = sort("TrainingConfig", self.document, {})
        return RunSettings.from_flat({**found.values, **more}, found.origins)


def read(document: Mapping[str, Any]) -> Iterable[Said] | None:
    """What a file of retrain's says, key by key; None for any other file."""
    algorithm = document.get("algorithm")
    known = isinstance(algorithm, Mapping) and not {"backend", "hyperparameters"}.isdisjoint(algorithm)
    return _said(document) if known else None


_door: TakesFile = read


def _said(document: Mapping[str, Any]) -> Iterator[Said]:
    known = {key.split(".")[-1] for key in (*_KEYS, *_VALUES, *_READ)}
    kept: dict[str, Any] = {}
    part: dict[str, Mapping[str, Any]] = {}
    for path, value in _leaves(document):
        name = ".".join(path)
        if name in _MAPPINGS and not isinstance(value, Mapping):
            yield path, "", f"expected keys below {path[-1]}; got {value!r:.100}"
        elif name in _READ:
            part[name] = value
        else:
            yield from _one(path, name, value, known)
    own, kind = part.get("algorithm.hyperparameters", {}), part.get("environment.type")
    kept |= {name: part[name] for name in ("experiment_name", "run_name") if name in part}
    yield from _hyperparameters(own, part, kept)
    if kind is not None and own.get("slime_use_retrain_environment") is not False:
        yield from _environment(str(kind), part.get("environment.env_specific_config", {}))
    for name, value in part.get("prompt_source.source_config", {}).items():
        path = ("prompt_source", "source_config", str(name))
        yield from [] if name == "prompts" else [(path, "", f"unknown key {name}; there is prompts")]
        kept[str(name)] = value
    if isinstance(setup := document.get("reward_setup"), Mapping) and own.get("slime_use_retrain_rewards") is not False:
        yield from _rewards(setup, kept, checked=":" not in str(kind))  # a file of the user's may register more
    yield ("algorithm",), "compat_options", kept


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, section in document.items():
        for name, value in section.items() if key in _SECTIONS and isinstance(section, Mapping) else [("", section)]:
            if value is not None:
                yield (str(key), str(name))[: 2 if name else 1], value


def _one(path: tuple[str, ...], name: str, value: Any, known: Iterable[str]) -> Iterator[Said]:
    """What one key says; `name` is what the tables call it."""
    if name in _VALUES:
        choices = _VALUES[name]
        for each in value if isinstance(value, list) else [value]:
            if isinstance(each, list | dict) or each == "else" or each not in choices:
                words = ", ".join(str(c).lower() if isinstance(c, bool) else c for c in choices if c != "else")
                why = f"; {choices['else']}" if "else" in choices else ""
                yield path, "", f"expected {words}; got {each!r:.100}{why}"
            else:
                yield from ((path, setting, meant) for setting, meant in choices[each].items())
    elif name in _KEYS or name in all_fields() or path[-1].startswith("slime_"):
        yield path, _KEYS.get(name, name), value
    else:
        yield path, "", f"unknown key {path[-1]}{did_you_mean(path[-1], known)}"


def _hyperparameters(own: Mapping[str, Any], part: Mapping[str, Any], kept: dict[str, Any]) -> Iterator[Said]:
    said: list[Said] = []
    batch = part.get("batch_size")
    for key, value in own.items():
        path = ("algorithm", "hyperparameters", str(key))
        if key == "beta":
            said += [(path, "kl_loss_coef", value), (path, "use_kl_loss", True)] if value else []
        elif key == "per_device_train_batch_size":
            times = own.get("gradient_accumulation_steps", 1)
            batch = value * times if isinstance(value, int) and isinstance(times, int) else value
            said.append((path, "global_batch_size", batch))
        elif key != "gradient_accumulation_steps":
            said += _one(path, str(key).removeprefix("slime_"), value, [*_KEYS, *all_fields()])
    yield from said
    yield from _episodes({setting: value for _, setting, value in said}, batch, part.get("num_episodes"), kept)


def _episodes(given: Mapping[str, Any], batch: Any, episodes: Any, kept: dict[str, Any]) -> Iterator[Said]:
    """An episode is a trajectory: `batch` of them a rollout, `episodes` in all, where hyperparameters say nothing."""
    n, prompts = (
        given.get(name, all_fields()[name].default) for name in ("n_samples_per_prompt", "rollout_batch_size")
    )
    if batch is not None and "rollout_batch_size" in given:
        kept["batch_size"] = batch
    elif batch is not None:
        if _counts(batch) and "n_samples_per_prompt" not in given:
            n = next(size for size in range(n, 0, -1) if batch % size == 0)
            yield ("batch_size",), "n_samples_per_prompt", n
        whole = _counts(batch, n)
        if whole and batch % n:
            yield ("batch_size",), "", f"{batch} episodes are not whole groups of {n}; give a multiple of {n}"
        prompts = max(batch // n, 1) if whole else batch
        yield ("batch_size",), "rollout_batch_size", prompts
    if episodes is not None and "num_rollout" in given:
        kept["num_episodes"] = episodes
    elif episodes is not None:
        whole = _counts(episodes, prompts, n)
        yield ("num_episodes",), "num_rollout", math.ceil(episodes / (prompts * n)) if whole else episodes


def _counts(*values: Any) -> bool:
    """Whether all are numbers to count with; what is none is said where the setting is read."""
    return all(isinstance(value, int) and value > 0 for value in values)


def _environment(kind: str, config: Mapping[str, Any]) -> Iterator[Said]:
    path = ("environment", "env_specific_config")
    env, arguments, steps = "EnvironmentBridge", {"environment": kind, "config": dict(config)}, config.get("max_steps")
    if kind == "fastmcp_env":
        for name in sorted(config.keys() - set(_FASTMCP)):
            yield (*path, name), "", f"unknown key {name}{did_you_mean(name, _FASTMCP)}"
        env, arguments = "FastMCPEnv", {name: value for name, value in config.items() if name != "max_steps"}
    elif ":" not in kind:
        close = did_you_mean(kind, ["fastmcp_env"]) or "; there is fastmcp_env, and a class as path/file.py:Name"
        yield ("environment", "type"), "", f"no environment {kind!r}{close}"
    yield ("environment", "type"), "env", f"{_HERE}.environments:{env}"
    yield path, "env_args", arguments
    if steps is not None:
        yield (*path, "max_steps"), "max_turns", steps


def _rewards(section: Mapping[str, Any], kept: dict[str, Any], *, checked: bool) -> Iterator[Said]:
    try:
        setup = RewardSetupConfig.model_validate(section)
    except ValidationError as error:
        for item in error.errors(include_url=False):
            path, extra = ("reward_setup", *map(str, item["loc"])), item["type"] == "extra_forbidden"
            if not (extra and len(path) == 2):  # unknown sections are said already
                hint = did_you_mean(path[-1], RewardFunctionConfig.model_fields)
                yield (
                    path,
                    "",
                    f"unknown key {path[-1]}{hint}" if extra else f"{item['msg']}; got {item['input']!r:.100}",
                )
        return
    for name in sorted(setup.names) if checked else ():
        try:
            find(name)
        except SettingsError as error:
            yield ("reward_setup",), "", str(error)
    if setup.names:
        kept["reward_setup"] = dict(section)
        yield ("reward_setup",), "custom_rm_path", f"{_HERE}.rewards:{'rewards_of' if setup.scale else 'reward_of'}"
    if setup.scale:
        yield ("reward_setup", "scale"), "group_rm", True
