"""The router under many foreign clients: its CPU beside bare proxies, and the share of reusable ids that are reused.

    python benchmarks/router.py [--clients 512] [--turns 6] [--engines 2] [--repeats 3] [--httpx]

1. A client is a conversation: it sends its whole text, appends the answer and a question of 40 words, and sends again;
   or it does so with ids. It uses aiohttp and names no session, and all clients run at once.
2. An engine is a process that answers after 50 ms with 64 random ids whose text encodes to other ids. It keeps every
   id of every prompt and answer, as an unlimited prefix cache. It reports how many ids of a prompt were cached.
3. `bare aiohttp`: only uvicorn and aiohttp: read the body, take the next engine in turn, forward the bytes.
   `bare httpx` (with --httpx, because it takes minutes): uvicorn, Starlette and httpx, whose pool scans its connections
   for each request. `router`: `agentrl router`.
4. CPU is user and system time of the proxy's process over all requests except a warm-up. From texts the router also
   makes the ids; behind a bare proxy the engines make them. `reused` is the share of
   ids of earlier turns (prompts and answers as the engines had them) that the next engine had in its cache.
"""

import argparse
import asyncio
import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil

SENTENCE = "what is the answer when nine of them go to the market and seven come back with bread for all"
SAMPLED, DELAY = 64, 0.05
PARAMS = {"temperature": 1.0, "max_new_tokens": SAMPLED, "skip_special_tokens": False}


def text_of(rng: random.Random, words: int) -> str:
    return " ".join(rng.choice(SENTENCE.split()) for _ in range(words))


# ---- what runs in processes of its own ----------------------------------------------------------------------------


def engine(listener: socket.socket, model: str) -> None:
    from tokenizers import Tokenizer

    tokenizer: Any = Tokenizer.from_file(f"{model}/tokenizer.json")
    rng, known = random.Random(0), set[int]()
    letters = [i for i in range(tokenizer.get_vocab_size()) if tokenizer.decode([i]).strip().isalpha()]

    def chain(ids: list[int]) -> Iterator[int]:
        state = 0
        for id_ in ids:
            state = hash((state, id_))
            yield state

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raw = await whole(receive)
        answer: dict[str, Any] = {"model_path": model, "weight_version": "1"}
        if scope["path"] == "/generate":
            body = orjson.loads(raw)
            prompt = body.get("input_ids") or tokenizer.encode(body["text"]).ids
            cached = next((at for at, state in enumerate(chain(prompt)) if state not in known), len(prompt))
            await asyncio.sleep(DELAY)
            ids = [rng.choice(letters) for _ in range(SAMPLED)]
            known.update(chain(prompt + ids))
            meta = {
                "id": body.get("rid"),
                "finish_reason": {"type": "length", "length": SAMPLED},
                "prompt_tokens": len(prompt),
                "completion_tokens": SAMPLED,
                "cached_tokens": cached,
                "weight_version": "1",
                "output_token_logprobs": [[-1.2345678 - 0.01 * at, id_, None] for at, id_ in enumerate(ids)],
            }
            answer = {"text": tokenizer.decode(ids), "output_ids": ids, "meta_info": meta}
        await respond(send, 200, orjson.dumps(answer))

    serve(app, listener)


def bare_httpx(listener: socket.socket, engines: list[str]) -> None:
    import itertools

    import httpx
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route

    turn = itertools.cycle(engines)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=None)
    client = httpx.AsyncClient(limits=limits, timeout=None)

    async def proxy(request: Request) -> Response:
        headers = {"content-type": "application/json"}
        got = await client.post(next(turn) + request.url.path, content=await request.body(), headers=headers)
        return Response(got.content, got.status_code, media_type="application/json")

    serve(Starlette(routes=[Route("/{path:path}", proxy, methods=["POST"])]), listener)


def bare_aiohttp(listener: socket.socket, engines: list[str]) -> None:
    import itertools

    turn = itertools.cycle(engines)
    sessions: list[aiohttp.ClientSession] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if not sessions:
            sessions.append(aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)))
        raw = await whole(receive)
        headers = {"content-type": "application/json"}
        async with sessions[0].post(next(turn) + scope["path"], data=raw, headers=headers) as got:
            await respond(send, got.status, await got.read())

    serve(app, listener)


async def whole(receive: Any) -> bytes:
    raw, more = b"", True
    while more:
        message = await receive()
        raw, more = raw + message.get("body", b""), message.get("more_body", False)
    return raw


async def respond(send: Any, status: int, body: bytes) -> None:
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def serve(app: Any, listener: socket.socket) -> None:
    import uvicorn

    config = uvicorn.Config(
        app, log_level="warning", access_log=False, lifespan="off", backlog=4096, timeout_keep_alive=600
    )
    uvicorn.Server(config).run(sockets=[listener])


# ---- what drives them ---------------------------------------------------------------------------------------------


@contextlib.contextmanager
def forked(work: Any, *args: Any) -> Iterator[tuple[int, str]]:
    """Run `work(listener, *args)` in a separate process. Yields its id and address."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
    pid = os.fork()
    if not pid:
        work(listener, *args)
        os._exit(0)
    try:
        yield pid, f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


@contextlib.contextmanager
def routed(engines: list[str]) -> Iterator[tuple[int, str]]:
    command = [sys.executable, "-m", "agentrl", "router", *engines, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.pid, process.stdout.readline().removeprefix("ready on ").strip()
    finally:
        process.terminate()
        process.wait()


async def talk(
    session: aiohttp.ClientSession, url: str, rng: random.Random, turns: int, ids: list[int] | None
) -> tuple[int, int]:
    """Play one conversation, as text or as `ids`. Returns how many ids could have been reused, and how many were."""
    text, before, could, was = text_of(rng, 400), 0, 0, 0
    for _ in range(turns):
        prompt = {"text": text} if ids is None else {"input_ids": ids}
        body = {**prompt, "sampling_params": PARAMS, "return_logprob": True}
        async with session.post(url + "/generate", json=body) as answer:
            got = await answer.json()
        meta = got["meta_info"]
        could, was = could + before, was + min(before, meta["cached_tokens"])
        before = meta["prompt_tokens"] + SAMPLED
        text += got["text"] + " " + text_of(rng, 40)
        ids = None if ids is None else [*ids, *got["output_ids"], *rng.choices(range(4, 400), k=100)]
    return could, was


async def measure(pid: int, url: str, clients: int, turns: int, form: str, seed: int) -> tuple[float, float]:
    """Return the CPU milliseconds of a request, and the share of ids that were reused."""
    process = psutil.Process(pid)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        rngs = [random.Random(f"{seed} {i}") for i in range(2 * clients)]
        ids = [rng.choices(range(4, 400), k=1000) if form == "ids" else None for rng in rngs]
        await asyncio.gather(*(talk(session, url, rngs[i], 1, ids[i]) for i in range(clients, 2 * clients)))
        began = process.cpu_times()
        sums = await asyncio.gather(*(talk(session, url, rngs[i], turns, ids[i]) for i in range(clients)))
        ended = process.cpu_times()
    spent = ended.user + ended.system - began.user - began.system
    return 1000 * spent / clients / turns, sum(was for _, was in sums) / sum(could for could, _ in sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--clients", type=int, default=512)
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--engines", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3, help="the least CPU of so many measurements counts")
    parser.add_argument("--httpx", action="store_true")
    options = parser.parse_args()
    from agentrl.engine.transport import raise_open_files_limit

    raise_open_files_limit()
    bare = {"bare aiohttp": bare_aiohttp} | ({"bare httpx": bare_httpx} if options.httpx else {})
    with tempfile.TemporaryDirectory() as folder:
        model = str(Path(folder, "model"))
        subprocess.run([sys.executable, "-m", "agentrl", "init", model], check=True, stdout=subprocess.DEVNULL)
        for form in ("text", "ids"):
            print(f"{form:>14} {'ms/request':>11} {'reused':>8}   load {os.getloadavg()[0]:.1f}")
            found = {}
            for name, proxy in (*bare.items(), ("router", None)):
                rows = []
                for repeat in range(options.repeats):
                    with contextlib.ExitStack() as stack:
                        urls = [stack.enter_context(forked(engine, model))[1] for _ in range(options.engines)]
                        pid, url = stack.enter_context(forked(proxy, urls) if proxy else routed(urls))
                        rows.append(asyncio.run(measure(pid, url, options.clients, options.turns, form, repeat)))
                found[name] = min(ms for ms, _ in rows)
                print(f"{name:>14} {found[name]:>11.3f} {min(share for _, share in rows):>8.3f}", flush=True)
            for name in bare:
                print(f"router / {name}: {found['router'] / found[name]:.2f}", flush=True)


if __name__ == "__main__":
    main()
