"""`agentrl check --agent`: one session of a program, and what it shows."""

import shlex
import sys
from pathlib import Path

import pytest

from agentrl.chat import Chat
from agentrl.check.findings import wrong_ids
from agentrl.check.policy import Exchange
from agentrl.cli.main import run
from agentrl.sample import Sample
from tests.support.tiny_models import make_tiny_model

ENVIRONMENT = """
import httpx
from agentrl.envs import AgentEnvironment

class Ask(AgentEnvironment):
    opened = []

    @classmethod
    async def setup(cls, args):
        cls.opened.append("setup")

    @classmethod
    async def teardown(cls):
        print("teardown")

    async def act(self, base_url, sample):
        history = [{"role": "user", "content": "begin"}]
        async with httpx.AsyncClient() as client:
            for _ in range(2):
                answer = await client.post(f"{base_url}/v1/chat/completions", json={"model": "m", "messages": history})
                history += [answer.json()["choices"][0]["message"], {"role": "user", "content": "go on"}]

    async def reward(self, sample):
        return 0.25 * len(self.opened)
"""

TURNS = """
import json, os, urllib.error, urllib.request
def ask(messages, **more):
    body = json.dumps({"model": "m", "messages": messages, "temperature": 0, **more}).encode()
    request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request))["choices"][0]["message"]
history = [{"role": "user", "content": "begin"}]
history += [ask(history), {"role": "user", "content": "go on"}]
ask(history)
try:
    ask(history, n=2)
except urllib.error.HTTPError:
    pass
"""


def check(program: str) -> int:
    command = f"{sys.executable} -c {shlex.quote(program)}"
    return run(["check", "--agent", command, "--agent-sandbox", "none"])


def test_the_tree_and_the_refusals_of_a_session_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert check(TURNS) == 0
    said = capsys.readouterr().out
    assert "turn 0 (root, main): first," in said
    assert "turn 1 (behind 0): extend," in said
    assert "refused: n: " in said
    assert "without effect: temperature" in said
    assert "1 samples in" in said


@pytest.mark.slow
def test_an_agent_without_a_request_fails_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("raise SystemExit('no key for {provider}')") == 1
    assert "failed: no answered request; no key for {provider}" in capsys.readouterr().out


@pytest.mark.parametrize("other", [["--env", "x.py:E"], ["--config", "run.yaml"], ["x.py:E"]])
def test_an_agent_beside_an_environment_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.yaml").write_text("env: x.py:E\n")
    assert run(["check", "--agent", "true {prompt}", *other]) == 2
    assert "has no effect with --env, which plays itself; leave one out" in capsys.readouterr().err


def test_an_environment_of_an_agent_plays_one_session_and_its_masks_are_proved(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "ask.py").write_text(ENVIRONMENT)
    assert run(["check", f"{tmp_path}/ask.py:Ask"]) == 0
    said = capsys.readouterr().out
    assert "turn 1 (behind 0): extend," in said
    assert "reward: 0.25" in said
    assert "teardown" in said
    assert "1 samples in" in said
    assert "ids and masks are right" in said


@pytest.mark.parametrize(
    ("act", "reward", "said"),
    [
        (
            "return await super().act(base_url, sample)",
            "return float(bool(sample.metadata['messages']))",
            "reward: 1.0",
        ),
        ("raise TimeoutError('of its own')", "return 1.0", "Wrong.act raised TimeoutError: of its own"),
        ("raise KeyError('token')", "return 1.0", "Wrong.act raised KeyError: 'token'"),
        ("return await super().act(base_url, sample)", "raise KeyError('x')", "Wrong.reward raised KeyError: 'x'"),
        ("return await super().act(base_url, sample)", "return 'x'", "failed: Wrong.reward: the reward of sample"),
    ],
)
def test_act_and_reward_are_called_as_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], act: str, reward: str, said: str
) -> None:
    methods = f"""
class Wrong(Ask):
    async def act(self, base_url, sample):
        {act}
    async def reward(self, sample):
        {reward}
"""
    (tmp_path / "wrong.py").write_text(ENVIRONMENT + methods)
    run(["check", f"{tmp_path}/wrong.py:Wrong"])
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("method", "status", "said"),
    [
        ("def __init__(self)", 2, "error: making a Wrong raised ValueError: no at"),
        ("async def close(self)", 1, "failed: Wrong.close raised ValueError: no at"),
    ],
)
def test_errors_of_init_and_close_are_reported_as_in_a_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], method: str, status: int, said: str
) -> None:
    wrong = f"class Wrong(Ask):\n    {method}:\n        raise ValueError('no')\n"
    (tmp_path / "wrong.py").write_text(ENVIRONMENT + wrong)
    assert run(["check", f"{tmp_path}/wrong.py:Wrong"]) == status
    assert said in "".join(capsys.readouterr())


def test_a_wrong_mask_is_named_also_in_a_session_of_several_samples(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    chat = Chat.load(str(tmp_path))
    turns = [Exchange([5, 6], [7, 8]), Exchange([5, 6, 7, 8, 9], [10])]

    def wrong(mask: list[int], siblings: bool = False, tokens: tuple[int, ...] = (5, 6, 7, 8, 9, 10)) -> str:
        sample = Sample(tokens=list(tokens), response_length=4, loss_mask=mask)
        return "; ".join(wrong_ids(chat, "Ask", sample, turns, siblings))

    assert wrong([1, 1, 0, 1]) == wrong([0, 0, 0, 1], siblings=True) == ""
    assert "Ask leaves loss mask 0 at token 2" in wrong([0, 0, 0, 1])
    assert "Ask leaves loss mask 1 at token 4" in wrong([1, 1, 1, 1], siblings=True)
    assert "Ask leaves other tokens in the sample" in wrong([1, 1, 0, 1], tokens=(5, 6, 7, 8, 8, 10))
