"""Settings of an asynchronous run that contradict each other, and combinations that do not."""

import pytest

from agentrl.config import RunSettings
from agentrl.errors import SettingsError

STALENESS = "--max-staleness"
PARTIAL, MASKED = "--partial-rollout", "--mask-offpolicy-in-partial-rollout"

REFUSED = {
    # flags: words of the error, a working proposal last
    "--max-staleness -1": (STALENESS, "at least 0", "-1"),
    "--max-staleness 1.5": (STALENESS, "a whole number", "1.5"),
    "--update-weights-interval 2": ("--update-weights-interval 2", "--max-staleness 1"),
    "--update-weights-interval 4 --max-staleness 2": ("--update-weights-interval 4", "--max-staleness 3"),
    "--update-weights-interval 0": ("--update-weights-interval", "more than 0", "0"),
    "--partial-rollout": (PARTIAL, STALENESS, MASKED),
    "--partial-rollout --max-staleness 0": (PARTIAL, STALENESS, MASKED),
    "--mask-offpolicy-in-partial-rollout": (MASKED, PARTIAL),
    "--mask-offpolicy-in-partial-rollout --max-staleness 2": (MASKED, PARTIAL),
    "--stale-groups keep": ("--stale-groups", "one of regenerate, drop", "'keep'"),
    "--pause-generation-mode freeze": ("--pause-generation-mode", "one of abort, retract, in_place", "'freeze'"),
}

ACCEPTED: dict[str, dict[str, object]] = {
    "": {"max_staleness": 0, "stale_groups": "regenerate", "partial_rollout": False, "update_weights_interval": 1},
    "--max-staleness 1": {"max_staleness": 1},
    "--update-weights-interval 3 --max-staleness 2": {"max_staleness": 2, "update_weights_interval": 3},
    "--partial-rollout --max-staleness 1": {"partial_rollout": True, "mask_offpolicy_in_partial_rollout": False},
    "--partial-rollout --mask-offpolicy-in-partial-rollout": {"max_staleness": 0, "partial_rollout": True},
    "--stale-groups drop --max-staleness 2": {"stale_groups": "drop"},
    "--pause-generation-mode in_place": {"pause_generation_mode": "in_place"},
}

PYTHON: dict[str, dict[str, object]] = {
    "below zero": {"max_staleness": -1},
    "below the interval": {"update_weights_interval": 3, "max_staleness": 1},
    "partial and synchronous": {"partial_rollout": True},
    "a mask of nothing": {"mask_offpolicy_in_partial_rollout": True},
}
"""The same contradictions, set without flags."""


def _params(table: dict[str, object]) -> list[object]:
    return [pytest.param(line, want, id=line or "defaults") for line, want in table.items()]


@pytest.mark.parametrize(("line", "parts"), _params(dict(REFUSED)))
def test_a_contradiction_is_refused_with_a_way_out(line: str, parts: tuple[str, ...]) -> None:
    with pytest.raises(SettingsError) as caught:
        RunSettings.from_cli(line.split())
    said = str(caught.value)
    assert "unknown flag" not in said
    assert [part for part in parts if part not in said] == [], said


@pytest.mark.parametrize(("line", "values"), _params(dict(ACCEPTED)))
def test_names_that_lead_to_the_same_place(line: str, values: dict[str, object]) -> None:
    flat = RunSettings.from_cli(line.split()).flat()
    assert {name: flat[name] for name in values} == values


@pytest.mark.parametrize(("name", "values"), _params(dict(PYTHON)))
def test_python_is_refused_as_flags_are(name: str, values: dict[str, object]) -> None:
    with pytest.raises(SettingsError) as caught:
        RunSettings.from_flat(values)
    said = str(caught.value)
    assert "unknown setting" not in said
    assert all(field.replace("_", "-") in said.replace("_", "-") for field in values), said
