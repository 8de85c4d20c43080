"""A person, or a served model, instead of the scripts."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import click
import pytest
from click.testing import CliRunner

from agentrl.chat import Chat
from agentrl.check.harness import Episode, Harness
from agentrl.check.play import CheckedPlay, play
from agentrl.check.policy import Endpoint, Live, Person
from agentrl.check.script import Lines, arguments, guessed, read_lines
from agentrl.cli.main import run
from agentrl.config import RunSettings
from agentrl.demo.task import CalculatorEnv
from agentrl.errors import SettingsError
from agentrl.sample import Message, Sample
from agentrl.tiny import create
from tests.support.embedded_server import embedded_server
from tests.support.tiny_models import make_tokenizer

ENV = f"{CalculatorEnv.__module__}:{CalculatorEnv.__name__}"


async def played(live: Live | Sequence[Lines], chat: Chat, rows: Path) -> tuple[CheckedPlay, list[Episode]]:
    found, shown = CheckedPlay(), list[Episode]()

    def show(stage: Harness, episode: Episode | None) -> None:
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
    # The person is shown the same as a model: the prompt, and the tool's answer.
    assert "How much is 40+2?" in said
    assert "<tool_response>" in said


@pytest.mark.parametrize(("lines", "said"), [([], 0), (["no idea", '!calculator {"expression": "1"}'], 1)])
def test_the_end_of_the_input_ends_the_session_without_a_problem(rows: Path, lines: list[str], said: int) -> None:
    @click.command()
    def command() -> None:
        found, shown = anyio.run(played, Person, Chat(make_tokenizer()), rows)
        assert (found.problems, len(shown), len(found.episodes), found.rows) == ([], said, said, 3)

    CliRunner().invoke(command, input="".join(f"{line}\n" for line in lines), catch_exceptions=False)


def test_a_short_file_is_played_once(rows: Path) -> None:
    rows.write_text('{"input": "How much is 40+2?", "label": "42"}\n')
    assert typing(["<answer>42</answer>"] * 3, rows).endswith("[1.0]\n")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("async def step(self, turn):\n        import anyio\n        await anyio.sleep(60)", "Own.step"),
        ("async def reward(self, sample):\n        return {'score': 1.0}", "--reward-key"),
    ],
)
def test_an_episode_without_a_sample_is_a_finding(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], body: str, said: str
) -> None:
    (tmp_path / "own.py").write_text(f"from agentrl import Environment\nclass Own(Environment):\n    {body}\n")
    (tmp_path / "play.txt").write_text("no idea\n")
    command = ["check", f"{tmp_path}/own.py:Own", "--play", f"{tmp_path}/play.txt", "--seconds", "2"]
    assert run(command) == 1
    assert said in capsys.readouterr().out


RIGHT = '# a comment\n!calculator {"expression": "40+2"}\n<answer>42</answer>\nexpect reward 1\n'


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        (RIGHT, []),
        (f"{RIGHT}---\n<answer>2</answer>\nexpect reward 1.0\n\nno idea\nexpect reward 0\n", []),
        (RIGHT.replace("reward 1", "reward 0.5"), ["line 4 expects reward 0.5, the episode earned 1.0"]),
        (f"{RIGHT}and more\n", ["it ended with turn 2, before line 5"]),
        (
            '!calculator {"expression": "1"}\n',
            ["behind line 1 the environment waits for turn 2, and the episode has no more"],
        ),
    ],
)
async def test_a_file_of_turns_is_played_and_its_rewards_are_compared(
    rows: Path, text: str, problems: list[str]
) -> None:
    file = rows.with_name("play.txt")
    file.write_text(text)
    found, shown = await played(read_lines(str(file)), Chat(make_tokenizer()), rows)
    assert len(shown) == text.count("<answer>") + text.count("no idea") or problems
    assert len(found.problems) == len(problems)
    for problem, said in zip(found.problems, problems, strict=True):
        assert said in problem.what
        assert str(file) in problem.what


def test_only_a_newline_ends_a_turn_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "play.txt").write_text("one\u2028two\x0cthree\n\nlast\n", encoding="utf-8")
    episodes = read_lines(str(tmp_path / "play.txt"))
    assert [episode.turns for episode in episodes] == [[(1, "one\u2028two\x0cthree")], [(3, "last")]]


async def test_a_file_with_more_episodes_than_prompts_is_refused(rows: Path) -> None:
    file = rows.with_name("play.txt")
    file.write_text("no idea\n\n" * 4)
    with pytest.raises(SettingsError, match=r"play.txt line 7: no prompt for it: the data has 3"):
        await played(read_lines(str(file)), Chat(make_tokenizer()), rows)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("hm\n!calculator 40+2\n", "line 2: arguments are a JSON object, as in !calculator {...}"),
        ("!calculator [1]\n", "line 1: arguments are a JSON object"),
        ("hm\nexpect reward high\n", "line 2: could not convert string to float: 'high'"),
        ("hm\n\nexpect reward 1\n", "line 3: an episode without a turn"),
        ("\n# nothing\n", "has no turn"),
        (None, "cannot be read"),
    ],
)
def test_a_file_of_turns_that_cannot_be_played_is_refused(tmp_path: Path, text: str | None, said: str) -> None:
    if text is not None:
        (tmp_path / "play.txt").write_text(text)
    with pytest.raises(SettingsError, match=re.escape(said)):
        read_lines(str(tmp_path / "play.txt"))


@pytest.mark.parametrize(
    ("prompt", "schema", "value"),
    [
        ("How many people live in Oslo?", {"type": "string"}, "Oslo"),
        ("Don't guess. Who wrote 'War and Peace', and when?", {"type": "string"}, "War and Peace"),
        ([{"role": "user", "content": "How much is 40 + 2?"}], {"type": "string"}, "40 + 2"),
        ("Wait for 12 seconds.", {"type": "string"}, "12"),
        ("say yes", {"type": "string"}, "say yes"),
        ("How many people live in Oslo?", {"type": "string", "examples": ["Rome"]}, "Rome"),
        ("How many people live in Oslo?", {"enum": ["a", "b"]}, "a"),
    ],
)
def test_a_tools_arguments_come_from_the_prompt_or_the_schema_and_never_from_the_label(
    prompt: str | list[Message], schema: dict[str, Any], value: str
) -> None:
    parameters = {"type": "object", "properties": {"x": schema}, "required": ["x"]}
    sample = Sample(prompt=prompt, label="0.7 million")
    assert arguments({"function": {"name": "f", "parameters": parameters}}, guessed(sample)) == {"x": value}


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
