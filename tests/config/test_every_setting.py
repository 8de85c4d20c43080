"""Every setting is toggled somewhere; settings that need no run are toggled here."""

from pathlib import Path

import pytest

from agentrl.config.fields import all_fields
from agentrl.config.inapplicable import possibly_inapplicable
from agentrl.errors import SettingsError
from tests.config.toggles import BASE, ELSEWHERE, RUNS, SAID, UNSHOWN
from tests.support.produced import settings_of
from tests.support.toggled import flag

TESTS = Path(__file__).parents[1]


def test_each_setting_is_toggled_in_one_way() -> None:
    ways = [name for toggles in RUNS.values() for name in toggles] + [*SAID, *ELSEWHERE, *UNSHOWN]
    assert sorted(ways) == sorted(all_fields())


@pytest.mark.parametrize("name", SAID)
def test_a_setting_without_effect_is_spoken_of(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.jsonl").touch()
    value, part = SAID[name]
    try:
        settings = settings_of(BASE, flag(name, value))
        said = "\n".join(possibly_inapplicable(settings, "train"))
        settings.check_complete("train")
    except SettingsError as error:
        said = str(error)
    assert part in said


@pytest.mark.parametrize("name", ELSEWHERE)
def test_the_test_that_shows_a_setting_names_it(name: str) -> None:
    file, word = ELSEWHERE[name]
    assert word in (TESTS / file).read_text(encoding="utf-8")
