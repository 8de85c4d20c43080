"""Mutated settings: files in YAML and TOML, command lines."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config import RunSettings
from agentrl.config.fields import FieldRef, all_fields
from tests.fuzz.mutate import ODD, ODD_TEXTS, few, fuzz, of_bytes, of_tree

NUMBERS: dict[type, tuple[Any, ...]] = {
    int: (1, 2, 8, 0, 64),
    float: (0.5, 1.0, 1e-6, 0),
    str: ("a", "x/y"),
    bool: (True, False),
}
WORDS = tuple(
    text.encode("utf-8", "replace") for text in (*ODD_TEXTS, ".nan", ".inf", "0x" + "f" * 5000, "lr: ", "? ", "--- ")
)


def plausible(rng: random.Random, field: FieldRef) -> Any:
    if field.choices:
        return rng.choice(field.choices)
    if field.kind in (dict, tuple) or rng.random() < 0.3:
        default = field.default
        return list(default) if isinstance(default, tuple) else dict(default) if isinstance(default, dict) else default
    return rng.choice(NUMBERS.get(field.kind, ("a",)))


def document(rng: random.Random) -> dict[str, Any]:
    """Draw a settings document that may be valid, flat or by section."""
    chosen = rng.sample(list(all_fields().values()), rng.randint(1, 6))
    found: dict[str, Any] = {}
    for field in chosen:
        holder = found.setdefault(field.section, {}) if rng.random() < 0.5 and field.section != "engine" else found
        value = plausible(rng, field)
        holder[field.name] = {str(k): str(v) for k, v in value.items()} if field.kind is dict else value
    return found


def as_yaml(rng: random.Random) -> bytes:
    tree = document(rng)
    if rng.random() < 0.6:
        tree = of_tree(rng, tree, (*ODD, math.nan, math.inf, -math.inf))
    try:
        text = yaml.dump(tree, allow_unicode=rng.random() < 0.5).encode("utf-8", "replace")
    except RecursionError:
        text = b"rollout_stop: " + b"[" * 900 + b"]" * 900
    return of_bytes(rng, text, WORDS) if rng.random() < 0.5 else text


def as_toml(rng: random.Random) -> bytes:
    flat = {name: value for name, value in document(rng).items() if not isinstance(value, dict) and value is not None}
    odd = (
        "nan",
        "inf",
        "2020-01-01",
        "2020-99-99",
        "0x" + "f" * 5000,
        "9" * 5000,
        "[" * 3000,
        "{a = 1}",
        '"\\ud800"',
        "1_0",
    )
    lines = [f"{n} = {rng.choice(odd) if rng.random() < 0.3 else json.dumps(v)}" for n, v in flat.items()]
    text = "\n".join(["seed = 3", *lines]).encode()
    return of_bytes(rng, text, WORDS) if rng.random() < 0.6 else text


def as_flags(rng: random.Random) -> list[str]:
    out: list[str] = []
    for field in rng.sample(list(all_fields().values()), rng.randint(1, 4)):
        value = plausible(rng, field) if rng.random() < 0.5 else rng.choice((*ODD, math.nan, math.inf))
        text = value if isinstance(value, str) else json.dumps(value, default=str)
        out += [field.flag, *([text] if rng.random() < 0.95 else [])]
    if rng.random() < 0.2:
        out += ["--sglang-" + rng.choice(("x", "options", "", "\0")), str(rng.choice(ODD))]
    return out


def sound(found: RunSettings) -> None:
    assert json.loads(found.model_dump_json(), parse_constant=pytest.fail)
    assert not any(isinstance(value, float) and not math.isfinite(value) for value in numbers(found.flat()))
    flat = found.flat()
    assert RunSettings.from_flat({name: flat[name] for name in found.given()}) == found
    assert found.replace() == found
    assert dict(found.args._values)["seed"] == found.flat()["seed"]


def numbers(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [number for item in value.values() for number in numbers(item)]
    return [number for item in value for number in numbers(item)] if isinstance(value, (list, tuple)) else [value]


@few
@pytest.mark.parametrize(("name", "make"), [("run.yaml", as_yaml), ("run.toml", as_toml)])
def test_mutated_files(tmp_path: Path, count: int, name: str, make: Any) -> None:
    def read(mutant: bytes) -> RunSettings:
        (tmp_path / name).write_bytes(mutant)
        return RunSettings.from_file(tmp_path / name)

    assert fuzz(count, make, read, sound)["accepted"] > count // 50


@few
def test_mutated_command_lines(count: int) -> None:
    assert fuzz(count, as_flags, RunSettings.from_cli, sound)["accepted"] > count // 50
