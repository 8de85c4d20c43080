"""The server as a process: start and end, disconnects, concurrency, the OpenAI endpoints."""

import json
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest

from agentrl import parent_watchdog
from agentrl.engine.embedded.model import load_model
from agentrl.errors import AgentRLError
from tests.support.warm import python

COMMAND = [python(), "-m", "agentrl", "serve", "--port", "0", "--threads", "1", "--slots", "4"]
USER = [{"role": "user", "content": "What is 12 plus 30?"}]


def post(url: str, path: str, body: Any) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, timeout=120, trust_env=False)


def load(url: str) -> dict[str, Any]:
    answer: dict[str, Any] = httpx.get(f"{url}/v1/loads", trust_env=False).json()["loads"][0]
    return answer


def until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"


@pytest.mark.parametrize("ids", [[512], [-1, 3], [1, 2**40], [1, 10**30], [True, "a"], [[1], [600]], [[1], []]])
def test_ids_that_the_model_cannot_embed_are_refused(server: str, ids: list[Any]) -> None:
    assert post(server, "/generate", {"input_ids": ids}).status_code == 400
    assert httpx.get(f"{server}/health", trust_env=False).status_code == 200


@pytest.mark.parametrize(
    "body",
    [
        {"input_ids": [1], "sampling_params": {"json_schema": "{"}},
        {"input_ids": [1], "sampling_params": {"stop_token_ids": [5000]}},
        {"input_ids": [1], "sampling_params": {"logit_bias": {"x": 1}}},
        {"input_ids": [1], "sampling_params": {"logit_bias": {"512": 1}}},
        {"input_ids": [1], "sampling_params": {"stop_regex": "("}},
        {"input_ids": [1], "sampling_params": {"min_new_tokens": 9, "max_new_tokens": 3}},
        {"input_ids": [[1], [2]], "sampling_params": [{}]},
        {"input_ids": [1], "return_logprob": True, "token_ids_logprob": [512]},
        {"text": [1]},
        {"input_ids": [1], "image_data": "x"},
    ],
)
def test_requests_that_cannot_be_served_are_refused(server: str, body: dict[str, Any]) -> None:
    answer = post(server, "/generate", body)
    assert answer.status_code == 400
    assert answer.json()


def test_a_client_that_leaves_aborts_its_request(server: str) -> None:
    for stream in (False, True):
        body = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
        raw = json.dumps({**body, "stream": stream}).encode()
        host, port = server.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as connection:
            head = f"POST /generate HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(raw)}"
            connection.sendall(head.encode() + b"\r\n\r\n" + raw)
            until(lambda: load(server)["num_running_reqs"] == 1)
        until(lambda: load(server)["num_running_reqs"] == 0, seconds=3)


@pytest.mark.slow
def test_many_clients_at_once_get_their_own_answers(server: str) -> None:
    """A request's tokens depend on its own seed and prompt, whatever other requests run."""

    def ask(seed: int) -> list[int]:
        params = {"max_new_tokens": 20, "sampling_seed": seed, "ignore_eos": True}
        answer = post(server, "/generate", {"input_ids": [seed + 1, 5, 9], "sampling_params": params})
        ids: list[int] = answer.json()["output_ids"]
        return ids

    alone = [ask(seed) for seed in range(12)]
    together: dict[int, list[int]] = {}
    threads = [threading.Thread(target=lambda s=s: together.update({s: ask(s)})) for s in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert [together[seed] for seed in range(12)] == alone


def test_a_stream_grows_and_ends_like_the_plain_answer(server: str) -> None:
    sampling = {"max_new_tokens": 30, "sampling_seed": 4, "ignore_eos": True}
    body = {"input_ids": [5, 6, 7], "return_logprob": True, "sampling_params": sampling}
    plain = post(server, "/generate", body).json()
    lines = post(server, "/generate", {**body, "stream": True}).text.split("\n\n")
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    for before, after in pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
    assert chunks[-1]["output_ids"] == plain["output_ids"]
    assert chunks[-1]["text"] == plain["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == plain["meta_info"]["finish_reason"]


@pytest.mark.slow
def test_the_server_stops_if_its_parent_dies_and_requests_are_aborted(folder: Callable[..., Path]) -> None:
    """The watchdog stops the server if its parent dies. Running requests get their tokens, with reason `abort`."""
    command = [*COMMAND, str(folder())]
    script = (
        f"import os, subprocess, sys; guard = [sys.executable, '-I', '-S', {parent_watchdog.__file__!r}, str(os.getpid())]\n"
        f"p = subprocess.Popen([*guard, *{command!r}], start_new_session=True)\n"
        "print(p.pid, flush=True); sys.stdin.read()"
    )
    parent = subprocess.Popen([python(), "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    url = parent.stdout.readline().removeprefix("ready on ").strip()
    answers: list[httpx.Response] = []
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}
    client = threading.Thread(target=lambda: answers.append(post(url, "/generate", body)))
    client.start()
    until(lambda: load(url)["num_running_reqs"] == 1)
    parent.kill()
    parent.wait(120)
    until(lambda: not _alive(child))
    client.join(120)
    assert answers[0].json()["meta_info"]["finish_reason"]["type"] == "abort"


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return False
    return state != "Z"


@pytest.mark.slow
def test_a_folder_that_is_no_model_is_an_error_with_its_name(tmp_path: Path) -> None:
    done = subprocess.run([*COMMAND, str(tmp_path)], capture_output=True, text=True, timeout=600)
    assert done.returncode == 2
    assert str(tmp_path) in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("model_type", "message"),
    [("qwen3", "no weights could be loaded from here"), ("unheard_of", "its config.json cannot be used")],
)
def test_a_folder_that_cannot_be_loaded_is_an_error_with_its_name(
    tmp_path: Path, model_type: str, message: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(AgentRLError, match=f"{tmp_path}: {message}"):
        load_model(str(tmp_path), dtype="float32", device="cpu", trust_remote_code=False)


def chat(url: str, **more: Any) -> httpx.Response:
    return post(url, "/v1/chat/completions", {"model": "m", "messages": USER, "max_tokens": 8, **more})


def test_chat_returns_ids_log_probs_and_choices(server: str) -> None:
    body = {"return_token_ids": True, "return_prompt_token_ids": True, "logprobs": True, "n": 2, "ignore_eos": True}
    answer = chat(server, **body).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1]
    for choice in answer["choices"]:
        assert len(choice["response_token_ids"]) == len(choice["logprobs"]["content"]) == 8
        assert choice["finish_reason"] == "length"
    assert answer["usage"]["prompt_tokens"] == len(answer["choices"][0]["prompt_token_ids"])
    assert answer["usage"]["completion_tokens"] == 16


def test_control_text_in_messages_is_text(server: str) -> None:
    harmless = chat(server, return_prompt_token_ids=True, max_tokens=1).json()
    messages = [{"role": "user", "content": "<|im_end|>"}]
    crafted = chat(server, messages=messages, return_prompt_token_ids=True, max_tokens=1).json()
    ends = [answer["choices"][0]["prompt_token_ids"].count(2) for answer in (harmless, crafted)]
    assert ends[0] == ends[1]


def test_chat_streams_the_same_text(server: str) -> None:
    body = {"seed": 3, "ignore_eos": True}
    plain = chat(server, **body).json()["choices"][0]["message"]["content"]
    lines = chat(server, **body, stream=True).text.split("\n\n")
    deltas = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(delta["delta"].get("content") or "" for delta in deltas) == plain
    assert deltas[-1]["finish_reason"] == "length"


def test_completions_echo_and_log_probs(server: str) -> None:
    body = {"model": "m", "prompt": "The quick", "max_tokens": 3, "echo": True, "logprobs": 2}
    choice = post(server, "/v1/completions", {**body, "ignore_eos": True}).json()["choices"][0]
    assert choice["text"].startswith("The quick")
    prompt = post(server, "/generate", {"text": "The quick", "return_logprob": True, "logprob_start_len": 0}).json()
    known = [log_prob for log_prob, _, _ in prompt["meta_info"]["input_token_logprobs"]]
    found = choice["logprobs"]
    assert found["token_logprobs"][: len(known)] == [None, *(pytest.approx(p, abs=1e-5) for p in known[1:])]
    assert len(found["tokens"]) == len(found["top_logprobs"]) == len(known) + 3
    scored = post(server, "/v1/completions", {**body, "max_tokens": 0}).json()["choices"][0]
    assert scored["text"] == "The quick"
    assert scored["logprobs"]["token_logprobs"] == found["token_logprobs"][: len(known)]
