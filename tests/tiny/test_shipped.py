"""The shipped models: small, equal to their records, accepted phrase by phrase, and made again at night."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.cli.main import run
from agentrl.sample import Message
from agentrl.tiny import SHIPPED, shipped
from examples.tiny_models.acceptance import LEAST_PROBABILITY, LEAST_RIGHT, PhraseCheck, Row, failures, measure
from examples.tiny_models.calculator import CalculatorLessons
from examples.tiny_models.make import RECIPES, RECORDS, make

NAMES = sorted(RECIPES)


def test_all_shipped_files_together_have_at_most_four_megabytes() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.rglob("*") if file.is_file()) <= 4_000_000
    assert sorted(path.name for path in SHIPPED.iterdir()) == sorted([*NAMES, RECORDS])


@pytest.mark.parametrize("name", NAMES)
def test_the_record_is_of_the_shipped_weights_and_of_the_recipe(name: str) -> None:
    record = json.loads((SHIPPED / RECORDS).read_text())[name]
    assert record["sha256"] == hashlib.sha256((shipped(name) / "model.safetensors").read_bytes()).hexdigest()
    assert record["lessons"] == RECIPES[name].lessons
    assert record["settings"] == json.loads(RECIPES[name].settings.model_dump_json())
    rows = [Row(**row) for row in record["acceptance"]]
    assert all(row.right >= LEAST_RIGHT and row.probability >= LEAST_PROBABILITY for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
async def test_every_phrase_and_form_is_accepted(name: str) -> None:
    rows = await measure(shipped(name), RECIPES[name].load())
    assert not failures(rows)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_stored_in_bfloat16(name: str) -> None:
    import torch
    from safetensors.torch import load_file

    assert {weight.dtype for weight in load_file(shipped(name) / "model.safetensors").values()} == {torch.bfloat16}


class OtherNumbers(CalculatorLessons):
    """The calculator's checks, but questions of one phrase contain other digits than the text that must be written."""

    async def checks(self) -> list[PhraseCheck]:
        return [
            replace(check, messages=[_other_digits(check.messages[0]), *check.messages[1:]])
            if check.phrase == "How much is {}?"
            else check
            for check in await super().checks()
        ]


def _other_digits(message: Message) -> Message:
    return {**message, "content": message["content"].translate(str.maketrans("123456789", "234567891"))}


@pytest.mark.slow
async def test_the_check_names_a_phrase_that_is_not_copied() -> None:
    rows = {row.name: row for row in await measure(shipped("calculator"), OtherNumbers())}
    assert rows["How much is {}?"].right < 0.6
    assert "'How much is {}?'" in failures(rows.values())
    assert "'Compute {}.'" not in failures(rows.values())


def test_init_copies_the_skilled_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["init", "--skilled", str(tmp_path / "model")]) == 0
    for file in shipped("tools").iterdir():
        assert (tmp_path / "model" / file.name).read_bytes() == file.read_bytes()
    assert "agentrl check" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_demos_model_can_be_made_again(tmp_path: Path) -> None:
    """Bits may differ on another processor. Phrases and forms must be accepted (`make` refuses the model otherwise)."""
    rows = make("calculator", tmp_path, print)
    record = json.loads((tmp_path / RECORDS).read_text())["calculator"]
    assert [row.record() for row in rows] == record["acceptance"]
    assert not failures(rows)
