"""`agentrl check --agent`: one session of a program, and what it shows."""

import shlex
import sys

import pytest

from agentrl.cli.main import run

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


def test_an_agent_without_a_request_fails_with_its_last_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert check("raise SystemExit('no key for {provider}')") == 1
    assert "failed: no answered request; no key for {provider}" in capsys.readouterr().out
