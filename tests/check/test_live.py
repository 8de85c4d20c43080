"""A person, or a served model, in the place of the scripts."""

from pathlib import Path

import anyio
import click
import pytest
from click.testing import CliRunner

from agentrl.chat import Chat
from agentrl.check.play import Played, play
from agentrl.check.policy import Endpoint, Live, Person
from agentrl.check.stage import Episode, Stage
from agentrl.config import RunSettings
from agentrl.demo.task import CalculatorEnv
from agentrl.tiny import create
from tests.support.embedded_server import embedded_server
from tests.support.tiny_models import make_tokenizer

ENV = f"{CalculatorEnv.__module__}:{CalculatorEnv.__name__}"


async def played(live: Live, chat: Chat, rows: Path) -> tuple[Played, list[Episode]]:
    found, shown = Played(), list[Episode]()

    def show(stage: Stage, episode: Episode | None) -> None:
        assert episode is not None
        shown.append(episode)

    settings = RunSettings.from_flat(
        {"env": ENV, "prompt_data": str(rows), "label_key": "label", "rollout_max_response_len": 100}
    )
    await play(settings, chat, 60.0, found, lambda: None, show, live)
    return found, shown


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    file = tmp_path / "rows.jsonl"
    file.write_text(
        '{"input": "How much is 40+2?", "label": "42"}\n' + '{"input": "How much is 1+1?", "label": "2"}\n' * 2
    )
    return file


def typing(lines: list[str], rows: Path) -> str:
    @click.command()
    def command() -> None:
        found, shown = anyio.run(played, Person, Chat(make_tokenizer()), rows)
        assert found.problems == []
        click.echo([episode.samples[0].reward for episode in shown])

    result = CliRunner().invoke(command, input="".join(f"{line}\n" for line in lines), catch_exceptions=False)
    return result.output


def test_what_a_person_types_is_the_models_turn(rows: Path) -> None:
    said = typing(['!calculator {"expression": "40+2"}', "<answer>42</answer>", "no idea", "none"], rows)
    assert said.endswith("[1.0, 0.0, 0.0]\n")
    # The person is shown what a model would be: the prompt, and what the tool answered.
    assert "How much is 40+2?" in said
    assert "<tool_response>" in said


def test_arguments_that_are_no_json_are_asked_for_again(rows: Path) -> None:
    said = typing(["!calculator 40+2", '!calculator {"expression": "40+2"}', "<answer>42</answer>", "no", "none"], rows)
    assert "arguments are a JSON object" in said
    assert said.endswith("[1.0, 0.0, 0.0]\n")


async def test_a_server_that_does_not_answer_is_named(rows: Path) -> None:
    found, _ = await played(lambda chat, tools: Endpoint(chat, "http://127.0.0.1:9"), Chat(make_tokenizer()), rows)
    assert "--model http://127.0.0.1:9/v1 gave no completion" in found.problems[0].what


@pytest.mark.slow
async def test_a_served_model_plays(tmp_path: Path, rows: Path) -> None:
    model = str(tmp_path / "model")
    create(model)
    with embedded_server(model) as url:
        found, shown = await played(lambda chat, tools: Endpoint(chat, url), Chat.load(model), rows)
    assert found.problems == []
    assert len(shown) == 3
    assert all(episode.samples[0].trained_tokens for episode in shown)
