"""retrain's settings files, recognised by `backend` or `hyperparameters` in `algorithm`, and their translation to our
settings. `keys.yaml` has the keys (of hyperparameters: the names) that are settings of ours, or have a few values."""

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
from agentrl.engine.commands import has_gpu
from agentrl.errors import SettingsError

_HERE = "agentrl.compat.retrain"
_KEYS: Mapping[str, str | Mapping[Any, Any]] = yaml.safe_load((files(_HERE) / "keys.yaml").read_text())
_SECTIONS = ("algorithm", "model", "environment", "prompt_source")
_MAPPINGS = {*_SECTIONS, "algorithm.hyperparameters", "environment.env_specific_config", "reward_setup"}
_MAPPINGS.add("prompt_source.source_config")
_COUNTS = ("num_episodes", "batch_size")
_READ = {*_MAPPINGS, *_COUNTS, "environment.type", "experiment_name", "run_name"}
_FASTMCP = ("server_url", "initial_prompt_template", "max_steps")


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
        return cls(**read_document(path, "TrainingConfig.from_yaml")[1])

    def settings(self, **more: Any) -> RunSettings:
        """Return the run's settings. `more` overrides them, by flat name. Raises SettingsError: they are invalid."""
        values, origins = sort("TrainingConfig", self.document, {})
        return RunSettings.from_flat({**values, **more}, origins)


def read(document: Mapping[str, Any]) -> Iterable[Said] | None:
    """Return the settings in a retrain file, key by key; None for any other file."""
    algorithm = document.get("algorithm")
    known = isinstance(algorithm, Mapping) and not {"backend", "hyperparameters"}.isdisjoint(algorithm)
    return _said(document) if known else None


_reads: TakesFile = read


def _said(document: Mapping[str, Any]) -> Iterator[Said]:
    known = {key.split(".")[-1] for key in (*_KEYS, *_READ)}
    part: dict[str, Any] = {}
    for path, value in _leaves(document):
        name = ".".join(path)
        if name in _MAPPINGS and not isinstance(value, Mapping):
            yield path, "", f"expected keys below {path[-1]}; got {value!r:.100}"
        elif name in _COUNTS and not _counts(value):
            yield path, "", f"expected a whole number, at least 1, for {name}; got {value!r:.100}"
        elif name in _READ:
            part[name] = value
        else:
            yield from _one(path, name, value, known)
    own, kind = part.get("algorithm.hyperparameters", {}), part.get("environment.type")
    if document["algorithm"].get("backend") == "slime" and has_gpu():
        yield ("algorithm", "backend"), "engine", "sglang"
    # The user's functions find these in `args`.
    kept = {name: part[name] for name in (*_COUNTS, "experiment_name", "run_name") if name in part}
    yield from _hyperparameters(own, part)
    if kind is not None and own.get("slime_use_retrain_environment") is not False:
        yield from _environment(str(kind), part.get("environment.env_specific_config", {}))
    for name in part.get("prompt_source.source_config", {}):
        path = ("prompt_source", "source_config", str(name))
        yield path, "", f"unknown key {name}; prompts of the environment need none"
    if "reward_setup" in part and own.get("slime_use_retrain_rewards") is not False:
        kept["reward_setup"] = dict(part["reward_setup"])
        # The environment's file may register more functions, so names are not checked if there is one.
        yield from _rewards(kept["reward_setup"], checked=":" not in str(kind))
    yield ("algorithm",), "compat_options", kept


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, section in document.items():
        for name, value in section.items() if key in _SECTIONS and isinstance(section, Mapping) else [("", section)]:
            if value is not None:
                yield (str(key), str(name))[: 2 if name else 1], value


def _one(path: tuple[str, ...], name: str, value: Any, known: Iterable[str]) -> Iterator[Said]:
    """Yield the settings of one key. `name`: the key's name in the table."""
    choices = _KEYS.get(name, name if name in all_fields() or path[-1].startswith("slime_") else "")
    if isinstance(choices, str):
        unknown = f"unknown key {path[-1]}{did_you_mean(path[-1], known)}"
        yield (path, choices, value) if choices else (path, "", unknown)
        return
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, list | dict) or each == "else" or each not in choices:
            words = ", ".join(str(c).lower() if isinstance(c, bool) else c for c in choices if c != "else")
            why = f"; {choices['else']}" if "else" in choices else ""
            yield path, "", f"expected {words}; got {each!r:.100}{why}"
        else:
            yield from ((path, setting, meant) for setting, meant in choices[each].items())


def _hyperparameters(own: Mapping[str, Any], part: Mapping[str, Any]) -> Iterator[Said]:
    said: list[Said] = []
    for key, value in own.items():
        path = ("algorithm", "hyperparameters", str(key))
        if key == "beta":
            # The KL term of TRL, which retrain trains with.
            kl = {"use_kl_loss": True, "kl_loss_coef": value, "kl_loss_type": "k3"}
            said += [(path, setting, given) for setting, given in kl.items()] if value else []
        else:
            said += _one(path, str(key).removeprefix("slime_"), value, [*_KEYS, *all_fields()])
    given = {setting: value for _, setting, value in said}
    yield from [*said, *_episodes(given, part.get("batch_size"), part.get("num_episodes"))]


def _episodes(given: Mapping[str, Any], batch: int | None, episodes: int | None) -> Iterator[Said]:
    """Yield settings for `batch` trajectories per rollout and `episodes` in all, unless hyperparameters set them."""
    sizes = ("n_samples_per_prompt", "rollout_batch_size")
    n, prompts = (given.get(name, all_fields()[name].default) for name in sizes)
    if not _counts(n, prompts):
        return  # the reader of settings refuses them
    if batch is not None and "rollout_batch_size" not in given:
        if "n_samples_per_prompt" not in given:
            n = next(size for size in range(n, 0, -1) if batch % size == 0)
            yield ("batch_size",), "n_samples_per_prompt", n
        if batch % n:
            yield ("batch_size",), "", f"{batch} episodes are not whole groups of {n}; give a multiple of {n}"
        prompts = max(batch // n, 1)
        yield ("batch_size",), "rollout_batch_size", prompts
    if episodes is not None and "num_rollout" not in given:
        yield ("num_episodes",), "num_rollout", math.ceil(episodes / (prompts * n))


def _counts(*values: Any) -> bool:
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


def _rewards(section: Mapping[str, Any], *, checked: bool) -> Iterator[Said]:
    try:
        setup = RewardSetupConfig.model_validate(section)
        for name in setup.names if checked else ():
            find(name)
    except ValidationError as error:
        names = [*RewardSetupConfig.model_fields, *RewardFunctionConfig.model_fields]
        for item in error.errors(include_url=False):
            path = ("reward_setup", *map(str, item["loc"]))
            extra = f"unknown key {path[-1]}{did_you_mean(path[-1], names)}"
            yield path, "", extra if item["type"] == "extra_forbidden" else f"{item['msg']}; got {item['input']!r:.100}"
    except SettingsError as error:
        yield ("reward_setup",), "", str(error)
    else:
        if setup.names:
            yield ("reward_setup",), "custom_rm_path", f"{_HERE}.rewards:{'rewards_of' if setup.scale else 'reward_of'}"
        if setup.scale:
            yield ("reward_setup", "scale"), "group_rm", True
