"""Results of a check that plays: it names the mistake and the function, and reports nothing in a sound environment."""

import os
import subprocess
from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.check.harness import Harness, first_rows
from agentrl.check.play import CheckedPlay, play
from agentrl.config import RunSettings
from tests.check import plays
from tests.support.nightly import nightly
from tests.support.tiny_models import CHAT_TEMPLATE, make_tokenizer
from tests.support.warm import python

MISTAKES = {
    "Blocks": ("Blocks.step (", "blocks the event loop"),
    "Hangs": ("Hangs.step (", "takes longer than"),
    "HangsInClose": ("HangsInClose.close (", "takes longer than"),
    "HangsInThread": ("HangsInThread.wait (", "takes longer than"),
    "Swallows": ("Swallows.step goes on when its trajectory is cancelled",),
    "Shares": ("Shares.reset differs in a second episode", "token "),
    "Race": ("Race.step differs in a second episode", "beside others"),
    "ByIndex": ("ByIndex.reset begins the samples of one group with different prompts", "sample.group_index"),
    "Speaks": ("Speaks.step gives a message of the assistant",),
    "OneAnswer": ("OneAnswer.step answers 2 tool calls with 1 tool messages",),
    "Rewrites": ("Rewrites leaves other tokens", "from token "),
    "Unkept": ("field 'metadata' cannot be stored", "keep only finite numbers"),
    "Pleased": ("Pleased.reward gives the same reward, 1.0",),
    "Backwards": ("Backwards.reward gives the label as the answer less",),
    "Careless": ("tool `count` does not work: NameError", "docstring describes 'thing'", "name"),
    "LeavesTasks": ("LeavesTasks.reset leaves a task running that it started at", "plays.py:145"),
    "LeavesFiles": ("LeavesFiles.close leaves open files behind",),
    "Moves": ("Moves.reset changes $CHECK_ROW",),
    "Replays": ("Replays.step of turn 1 gave a different answer in the replay",),
}


EVERYDAY = ("Blocks", "Swallows", "Race", "Rewrites", "Careless", "LeavesTasks", "Replays")
"""Mistakes of each kind; the others are tested nightly."""


async def checked(env: str | None, chat: Chat | None = None, seconds: float = 60.0, **settings: object) -> CheckedPlay:
    played = CheckedPlay()

    def stuck() -> None:
        raise AssertionError("nothing stops the loop for as long")

    chosen = RunSettings.from_flat({"env": env, **settings})
    await play(chosen, chat or Chat(make_tokenizer()), seconds, played, stuck, lambda stage, episode: None)
    return played


async def test_dict_rewards_are_judged_by_their_trained_entry() -> None:
    played = await checked("tests.check.plays:BackwardsByKey", reward_key="score")
    assert any("gives the label as the answer less" in found.what for found in played.problems)


async def test_each_of_several_environments_plays_rows_of_its_own_wherever_they_are(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    lines = ['{"input": "How much is 1+1?", "label": "2", "env": "a"}\n'] * 70
    data.write_text("".join([*lines, '{"input": "How much is 40+2?", "label": "42", "env": "b"}\n']))
    env = {name: "tests.check.plays:Sound" for name in "ab"}
    settings = RunSettings.from_flat({"env": env, "prompt_data": str(data), "label_key": "label", "env_key": "env"})
    async with Harness.opened(settings, Chat(make_tokenizer()), 10.0) as stages:
        assert [(stage.rows[0].label, stage.made_up) for stage in stages] == [("2", False), ("42", False)]


def test_without_data_an_environment_of_a_library_gets_an_empty_prompt_as_in_a_run() -> None:
    for env, prompt in (
        ("openenv:http://127.0.0.1:8000", ""),
        ("gymnasium:CartPole-v1", ""),
        ("own.py:Env", "What is"),
    ):
        rows, made_up = first_rows(RunSettings.from_flat({"env": env}), 2)
        assert made_up
        assert [str(row.prompt and row.prompt[0]["content"])[:7] for row in rows] == [prompt, prompt]  # type: ignore[index]


@pytest.mark.parametrize("name", nightly(MISTAKES, EVERYDAY))
async def test_a_mistake_is_named(name: str) -> None:
    seconds = 6.0 if name.startswith("Hangs") else 60.0
    played = await checked(f"tests.check.plays:{name}", seconds=seconds)
    said = "\n".join(f"{found.what}; {found.detail}" for found in played.found)
    assert [part for part in MISTAKES[name] if part not in said] == [], said


async def test_a_busy_processor_is_not_a_problem_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.clock.cause", lambda *_: ("other programs on the processor", "the processor was busy"))
    played = await checked("tests.check.plays:Blocks", seconds=3.0)
    assert [found.what for found in played.found if "blocks the event loop" in found.what] == []


async def test_what_is_sound_has_no_problem_and_all_of_it_is_tried() -> None:
    played = await checked("tests.check.plays:Sound", seconds=30.0)
    assert (played.problems, played.untried) == ([], [])
    shown = played.shown
    assert shown is not None
    assert shown.name == "calls look, then answers"
    assert [e.name for e in played.episodes].count("is cancelled") == 2
    assert plays.Sound.reset.__qualname__ == "Sound.reset", "the class is as it was"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("env", "grader"),
    [
        ("agentrl.demo.task:CalculatorEnv", None),
        ("examples.retool.env:RetoolEnv", "gsm8k"),
        ("examples.search_r1.env:SearchR1Env", "search_r1"),
    ],
)
async def test_the_demo_and_the_examples_have_no_problem(env: str, grader: str | None) -> None:
    assert (await checked(env, rm_type=grader)).problems == []


async def test_generate_functions_are_played_and_their_tokens_compared(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(
        "from agentrl.rollout.helpers import generate_single\n"
        "async def right(args, sample, sampling_params):\n"
        "    text = await generate_single([{'role': 'user', 'content': 'Say yes.'}])\n"
        "    sample.reward = float(len(text))\n"
        "    return sample\n"
        "async def wrong(args, sample, sampling_params):\n"
        "    sample = await right(args, sample, sampling_params)\n"
        "    from agentrl.rollout.helpers import build_loss_mask\n"
        "    build_loss_mask(sample)\n"
        "    sample.tokens[-1] += 1\n"
        "    return sample\n"
    )
    ways = {way: f"{tmp_path}/own.py:{way}" for way in ("right", "wrong")}
    assert (await checked(None, custom_generate_function_path=ways["right"])).problems == []
    found = (await checked(None, custom_generate_function_path=ways["wrong"])).problems
    assert "leaves other tokens in the sample than the model's: from token" in found[0].what


async def test_a_message_that_the_template_leaves_out_is_named() -> None:
    deaf = CHAT_TEMPLATE.replace("messages[0].content + ", "'' + ")
    played = await checked("tests.check.plays:Sound", Chat(make_tokenizer(), chat_template=deaf))
    assert (
        "Sound.reset gives a message of role 'system' that the chat template does not show" in played.problems[0].what
    )


async def test_several_environments_are_played_each_with_its_own_rows(tmp_path: Path) -> None:
    rows = '{"input": "a?", "label": "a", "env": "one"}\n{"input": "b?", "label": "b", "env": "two"}\n'
    (tmp_path / "rows.jsonl").write_text(rows)
    envs = {"one": "tests.check.plays:Sound", "two": "tests.check.plays:Pleased"}
    played = await checked(envs, prompt_data=f"{tmp_path}/rows.jsonl", label_key="label")  # type: ignore[arg-type]
    assert [found.what.split()[0] for found in played.problems] == ["Pleased.reward"]
    assert {e.samples[0].label for e in played.episodes if e.samples} == {"a", "b"}


def agentrl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [python(), "-m", "agentrl", "check", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=os.environ | {"COLUMNS": "100"})


def test_the_command_shows_the_prompt_an_episode_and_the_problems() -> None:
    done = agentrl("tests.check.plays:Sound", "--schemas")
    assert done.returncode == 0, done.stdout + done.stderr
    parts = (
        "class Sound",
        "| Look before you answer.",
        '"name": "look"',
        "<tool_response>",
        "reward 1.0",
        ": no problem",
    )
    assert [part for part in parts if part not in done.stdout] == []


@pytest.mark.slow
def test_a_template_of_ones_own_is_played_without_a_model(tmp_path: Path) -> None:
    loud = CHAT_TEMPLATE.replace("messages[0].content + ", "'Hear! ' + messages[0].content + ")
    (tmp_path / "loud.jinja").write_text(loud)
    done = agentrl("tests.check.plays:Sound", "--chat-template-path", f"{tmp_path}/loud.jinja")
    assert "Hear! Look before you answer." in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "line", ["while True: pass", pytest.param("import time; time.sleep(600)", marks=pytest.mark.slow)]
)
def test_what_never_returns_is_named_and_ended(tmp_path: Path, line: str) -> None:
    code = f"from agentrl import Environment\nclass Env(Environment):\n    async def reset(self, sample):\n        {line}\n"
    (tmp_path / "stuck.py").write_text(code)
    done = agentrl(f"{tmp_path}/stuck.py:Env", "--seconds", "3")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "stuck.py:4 in reset) blocks the event loop" in done.stdout
