"""`agentrl sft`: the mask decides what is learned, the loss is the plain one, and it resumes like any run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agentrl.chat import Chat
from agentrl.chat.demonstration import to_sample
from agentrl.cli.main import run
from agentrl.observability.metrics import read_metrics
from tests.support.audit import audit_ledger
from tests.support.checkout import import_path
from tests.support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(900)

TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Add two numbers.",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
    },
}


def chat_row(number: int) -> dict[str, Any]:
    call = {"id": "c0", "type": "function", "function": {"name": "add", "arguments": {"a": number}}}
    shown = {"loss": False} if number == 1 else {}
    return {
        "messages": [
            {"role": "user", "content": f"What is {number} and 1?"},
            {"role": "assistant", "content": "", "tool_calls": [call], **shown},
            {"role": "tool", "tool_call_id": "c0", "name": "add", "content": str(number + 1)},
            {"role": "assistant", "content": f"It is {number + 1}."},
        ],
        "tools": [TOOL],
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(Path(tmp_path_factory.mktemp("kit")) / "model")


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write([chat_row(number) for number in range(8)])
    return tmp_path


def write(rows: list[dict[str, Any]]) -> None:
    Path("chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def sft(model: Path, *flags: str) -> int:
    given = ["--hf-checkpoint", str(model), "--prompt-data", "chats.jsonl", "--output-dir", "run"]
    return run(["sft", *given, "--rollout-batch-size", "4", "--backend", "local", "--progress", "off", *flags])


def plain_loss(model: Path, rows: list[dict[str, Any]]) -> float:
    """Return the mean over learned tokens by transformers alone: one conversation at a time, labels by the template."""
    chat, net = Chat.load(str(model)), AutoModelForCausalLM.from_pretrained(model)
    total, count = 0.0, 0
    for row in rows:
        tokens = chat.render_ids(row["messages"], row["tools"], generation_prompt=False)
        learns: list[int] = []
        turns = [at for at, message in enumerate(row["messages"]) if message["role"] == "assistant"]
        for at in turns:
            if row["messages"][at].get("loss", True):
                begin = len(chat.render_ids(row["messages"][:at], row["tools"]))
                learns += range(begin, tokens.index(chat.stop_token_ids[0], begin) + 1)
        labels = torch.full((1, len(tokens)), -100)
        labels[0, learns] = torch.tensor(tokens)[learns]
        with torch.no_grad():
            total += net(torch.tensor([tokens]), labels=labels).loss.item() * len(learns)
        count += len(learns)
    return total / count


def test_the_first_loss_is_that_of_transformers_and_a_resume_repeats_no_conversation(here: Path, model: Path) -> None:
    rows = [chat_row(number) for number in range(8)]
    assert sft(model, "--no-rollout-shuffle", "--lr", "1e-3", "--num-epoch", "1", "--save-interval", "1") == 0
    first = list(read_metrics(here / "run" / "metrics.jsonl"))
    assert first[0]["train/loss"] == pytest.approx(plain_loss(model, rows[:4]), abs=1e-5)
    assert first[0]["data/conversations"] == 4
    assert len(first) == 2
    assert sft(model, "--no-rollout-shuffle", "--lr", "1e-3", "--num-epoch", "2", "--save-interval", "1") == 0
    losses = [row["train/loss"] for row in read_metrics(here / "run" / "metrics.jsonl")]
    assert len(losses) == 4
    assert losses[2] < losses[0]
    assert losses[3] < losses[1]
    audited = audit_ledger(here / "run" / "ledger.sqlite", through_step=3, groups_per_step=4)
    assert audited.ok, audited.problems
    assert (here / "run" / "model" / "model.safetensors").is_file()


def test_what_does_not_fit_is_counted_and_left_out(here: Path, model: Path) -> None:
    rows = [chat_row(number) for number in range(5)]
    rows[2]["messages"][0]["content"] *= 20
    write(rows)
    chat = Chat.load(str(model))
    lengths = [len(to_sample(chat, row["messages"], row["tools"]).tokens) for row in rows]
    most = str(max(lengths[:2] + lengths[3:]))
    assert sft(model, "--no-rollout-shuffle", "--rollout-max-context-len", most) == 0
    (row,) = read_metrics(here / "run" / "metrics.jsonl")
    assert row["data/conversations"] == 4
    assert row["dropped/too_long"] == 1
    assert row["data/tokens"] == sum(lengths) - lengths[2]


def test_data_of_which_nothing_fits_ends_the_run(here: Path, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--rollout-max-context-len", "20", "--rollout-max-response-len", "8", "--num-rollout", "3")
    assert sft(model, *flags) == 2
    assert "none of 8 conversations in a row fits into 20 tokens" in capsys.readouterr().err


LAST = {"role": "user", "content": "Thanks."}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"messages": "What is 1 and 1?"}, "chats.jsonl line 2: field 'messages' must be a list of chat messages"),
        ({"messages": [LAST]}, "chats.jsonl line 2: field 'messages': a demonstration must end with an assistant"),
        ({"messages": [LAST, {"role": "gpt", "content": "?"}]}, "chats.jsonl line 2: .* message 1 .* one of the roles"),
        ({"messages": [LAST, {"role": "assistant", "content": "?", "train": 0}]}, "line 2: .* no message .* learned"),
        ({"messages": [LAST, {"role": "assistant", "content": "?", "weight": 2}]}, "line 2: .* 'weight' must be true"),
    ],
)
def test_bad_conversations_are_named(
    change: dict[str, Any], said: str, here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write([chat_row(0), chat_row(0) | change, *(chat_row(2) for _ in range(3))])
    assert sft(model) == 2
    assert re.search(said, " ".join(capsys.readouterr().err.split())), said
    assert not Path("run").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--n-samples-per-prompt", "4"], "a conversation is one sample; use 1"),
        (["--loss-type", "policy_loss"], "learned by --loss-type sft_loss only"),
        (["--data-source-path", "a.py"], "--data-source-path: conversations come from --prompt-data"),
        (["--rollout-batch-size", "9", "--num-epoch", "1"], "has 8 rows, and --num-epoch 1 does not fill"),
    ],
)
def test_what_contradicts_learning_from_conversations_is_refused(
    flags: list[str], said: str, here: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert sft(model, *flags) == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_two_processes_on_ray_learn_what_one_does(here: Path, model: Path) -> None:
    def losses(name: str, *flags: str) -> list[float]:
        given = f"sft --hf-checkpoint {model} --prompt-data chats.jsonl --rollout-batch-size 4 --lr 1e-3 --output-dir {name}"
        command = [sys.executable, "-m", "agentrl", *given.split(), *flags]
        environment = {**os.environ, "PYTHONPATH": import_path()}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return [row["train/loss"] for row in read_metrics(here / name / "metrics.jsonl")]

    assert losses("two", "--actor-num-gpus-per-node", "2") == pytest.approx(
        losses("one", "--backend", "local"), rel=1e-4
    )
