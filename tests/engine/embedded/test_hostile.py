"""`agentrl serve` among hostile clients: it serves the others, and it always ends."""

import contextlib
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from agentrl.engine.embedded.request import MAX_SEQUENCES
from agentrl.run.training import free_port
from tests.support.checkout import import_path
from tests.support.hostile_clients import DEAD, GOOD, SLOW, attacks, request
from tests.support.warm import python

WAIT, END = 30.0, 30.0
"""Maximum seconds for a good client among hostile ones, and for a server to end. A starved client would wait
for minutes."""
SERVE = [python(), "-c", "from agentrl.cli.main import main; main()", "serve"]
LONG = {"input_ids": [1, 2], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}}


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    port = free_port()
    command = [*SERVE, str(folder), "--port", str(port), "--threads", "1", "--dtype", "float32"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert server.stdout is not None
        assert server.stdout.readline() == f"ready on http://127.0.0.1:{port}\n"
        yield server, port
    finally:
        server.kill()
        server.wait()


def ask(port: int) -> float:
    """Return the seconds until a good client, on its own connection, has its four tokens."""
    began = time.monotonic()
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", "/generate", json.dumps(GOOD), {"content-type": "application/json"})
    answer = connection.getresponse()
    assert answer.status == 200
    assert len(json.loads(answer.read())["output_ids"]) == 4
    connection.close()
    return time.monotonic() - began


def ended(server: subprocess.Popen[str]) -> float:
    """Return the seconds from SIGTERM to the server's end."""
    began = time.monotonic()
    server.send_signal(signal.SIGTERM)
    server.wait(120)
    return time.monotonic() - began


@pytest.mark.slow
def test_64_hostile_clients_delay_no_good_client_and_do_not_prevent_the_end(folder: Callable[..., Path]) -> None:
    waited: list[float] = []
    with serving(folder()) as (server, port):
        ask(port)
        environment = {"PYTHONPATH": import_path(), "PATH": "/usr/bin:/bin"}
        command = [python(), "-m", "tests.support.hostile_clients", "127.0.0.1", str(port)]
        attackers = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        assert attackers.stdout is not None
        said: list[str] = [attackers.stdout.readline()]
        reader = threading.Thread(target=lambda: said.extend(attackers.stdout or ()))
        reader.start()
        process, most = psutil.Process(server.pid), 0
        end = time.monotonic() + 20
        while time.monotonic() < end:
            waited.append(ask(port))
            most = max(most, process.memory_info().rss)
        took = ended(server)
        attackers.kill()
        reader.join(120)
    waited.sort()
    sys.stdout.write(
        f"\n{len(said)} hostile requests; {len(waited)} good ones: median {waited[len(waited) // 2]:.2f} s, most "
        f"{waited[-1]:.2f} s; {most >> 20} MB; ended in {took:.2f} s\n{Counter(line.strip() for line in said)}"
    )
    assert waited[-1] < WAIT
    assert took < END
    assert most < 2 << 30


@pytest.mark.slow
@pytest.mark.parametrize("name", ["n", "text", "weights", "regex", "half a body"])
def test_a_signal_ends_it_whatever_it_does(folder: Callable[..., Path], name: str) -> None:
    with serving(folder()) as (server, port), contextlib.ExitStack() as stack:
        for content in (attacks()[name], request("/generate", LONG)):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
            connection.sendall(content)
        ask(port)
        assert ended(server) < END


def test_a_process_whose_gil_is_held_ends_too() -> None:
    """The alarm needs no Python code after the signal handler has run."""
    script = (
        "import threading, time, uvicorn\nfrom agentrl.serving import server as serving\n"
        "async def app(scope, receive, send):\n    pass\n"
        "def hold():\n    sum(range(10**12))\n"
        "here = serving.listen('127.0.0.1', 0)\n"
        "serving.serve(app, here, '127.0.0.1', ready='ready', on_signal=hold)\n"
    )
    process = subprocess.Popen([python(), "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert ended(process) < END


@pytest.mark.parametrize(
    ("path", "body", "part"),
    [
        ("/generate", {"text": "a", "sampling_params": {"n": MAX_SEQUENCES + 1}}, "may ask for 4096 sequences"),
        ("/generate", {"text": ["a"] * (MAX_SEQUENCES + 1)}, "may ask for 4096 prompts"),
        ("/generate", {"text": ["a"] * 2049, "sampling_params": {"n": 2}}, "this one asks for 4098"),
        ("/generate", {"text": "abc " * 100_000}, "has more than"),
        ("/generate", {"input_ids": [1] * 100_000}, "longer than the model's context length"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "n": 10**9}, "4096 sequences"),
        ("/v1/completions", {"prompt": ["a"] * 5000}, "4096 prompts"),
        ("/v1/tokenize", {"prompt": ["a"] * 5000}, "4096 texts"),
        ("/v1/detokenize", {"tokens": [[1]] * 5000}, "4096 lists"),
        ("/init_weights_update_group", {**DEAD, "rank_offset": 0}, "rank_offset must be in"),
        ("/generate", {"text": "a", "sampling_params": {"stop_regex": "(" * 3000}}, "stop_regex"),
    ],
)
def test_what_a_request_may_ask_for_is_named(server: str, path: str, body: dict[str, Any], part: str) -> None:
    refused = httpx.post(f"{server}{path}", json=body, timeout=120, trust_env=False)
    assert refused.status_code == 400
    assert part in refused.text


def test_log_probs_of_others_are_bounded(server: str) -> None:
    body = {"input_ids": [1], "return_logprob": True, "top_logprobs_num": 512, "sampling_params": {"n": 4000}}
    refused = httpx.post(f"{server}/generate", json=body, timeout=120, trust_env=False)
    assert refused.status_code == 400
    assert "log-probs of other tokens" in refused.text


def test_a_pattern_that_takes_for_ever_ends_its_own_request(server: str) -> None:
    sampling = {"stop_regex": SLOW, "max_new_tokens": 500, "ignore_eos": True}
    answer = httpx.post(
        f"{server}/generate", json={"text": "a", "sampling_params": sampling}, timeout=30, trust_env=False
    )
    assert answer.status_code == 400
    assert "stop_regex" in answer.text


def test_a_weight_group_that_stays_incomplete_blocks_no_request(server: str) -> None:
    """The server waits for the group's members in separate threads. The name is taken, and others are served."""
    with socket.create_server(("127.0.0.1", 0)) as deaf, contextlib.ExitStack() as stack:
        host, port = server.removeprefix("http://").split(":")
        for i in range(50):
            body = {**DEAD, "master_address": "127.0.0.1", "master_port": deaf.getsockname()[1], "group_name": f"g{i}"}
            connection = stack.enter_context(socket.create_connection((host, int(port))))
            connection.sendall(request("/init_weights_update_group", body))
        chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        assert httpx.post(f"{server}/v1/chat/completions", json=chat, timeout=120, trust_env=False).status_code == 200
        taken = httpx.post(f"{server}/init_weights_update_group", json={**DEAD, "group_name": "g0"}, trust_env=False)
        assert taken.status_code == 400
        assert "exists already" in taken.text
        gone = httpx.post(f"{server}/destroy_weights_update_group", json={"group_name": "g0"}, trust_env=False)
        assert "does not exist" in gone.text
