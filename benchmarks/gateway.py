"""CPU of the gateway beside a plain proxy, and memory of the gateway.

    python -m benchmarks.gateway [--turns 20] [--rounds 4] [--words 3000] [--loop uvloop] [--profile FILE]

1. A client sends chat completions with 20 tools, appends the answer and a result of 300 words, and sends all again. The
   engine is a process that answers at once, always with the same tool call.
2. `plain` reads the body as JSON, replaces the model's name, and forwards the body with aiohttp, in the same process
   and behind the same server. Only the CPU time of this process counts, not client and engine. Rounds alternate.
3. `--loop` is the event loop of the server's process: uvloop, which `agentrl gateway` uses, or asyncio's own.
4. Memory is the growth of the process while it keeps `--sessions` sessions, divided by the tokens in their trees.
"""

import argparse
import asyncio
import cProfile
import gc
import json
import random
import signal
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from typing import Any

import aiohttp
import orjson
import psutil
import uvloop
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from agentrl.clock import freeze_loaded_objects
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import SamplingParams
from agentrl.gateway.server import Gateway
from agentrl.sample import Sample
from agentrl.serving.server import listen, served
from tests.support.chats import make_chat

COMMAND = {"command": "ls -la /tmp; cat file.txt | head -20"}
CALL = {"name": "bash", "arguments": COMMAND}
SAID = f"I look at it.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
WORDS = [
    "the",
    "cat",
    "value",
    "of",
    "rows",
    "under",
    "if",
    "sum",
    "http://a.b/c?d=e",
    "3.14",
    "naïve",
    "total",
    "{",
    "}",
    "\n",
]
PROPERTIES = {f"p{at}": {"type": "string", "description": "words " * 12} for at in range(5)}
PARAMETERS = {"type": "object", "properties": PROPERTIES}
TOOLS = [
    {"type": "function", "function": {"name": name, "description": "does " * 60, "parameters": PARAMETERS}}
    for name in ("bash", *(f"t{at}" for at in range(19)))
]
MESSAGE = {
    "role": "assistant",
    "content": "I look at it.",
    "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "bash", "arguments": json.dumps(COMMAND)}}
    ],
}


async def forever(app: Starlette) -> None:
    async with served(app, listen("127.0.0.1", 0), "127.0.0.1") as url:
        print(url, flush=True)
        await asyncio.Event().wait()


async def engine() -> None:
    chat = make_chat("qwen3")
    ids = [*chat.encode(SAID), chat.stop_token_ids[0]]

    async def generate(request: Request) -> Response:
        prompt = orjson.loads(await request.body())["input_ids"]
        meta: dict[str, Any] = {"id": "x", "finish_reason": {"type": "stop", "matched": ids[-1]}, "cached_tokens": 0}
        meta |= {"prompt_tokens": len(prompt), "completion_tokens": len(ids), "weight_version": "1", "e2e_latency": 0.1}
        meta["output_token_logprobs"] = [[-0.1, token, None] for token in ids]
        return Response(
            orjson.dumps({"text": SAID, "output_ids": ids, "meta_info": meta}), media_type="application/json"
        )

    async def completions(request: Request) -> Response:
        await request.body()
        choice = {"index": 0, "finish_reason": "tool_calls", "message": MESSAGE}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return JSONResponse({"id": "x", "object": "chat.completion", "created": 1, "choices": [choice], "usage": usage})

    async def info(_: Request) -> Response:
        return JSONResponse({"model_path": "m", "weight_version": "1"})

    posts = {"/generate": generate, "/v1/chat/completions": completions}
    gets = [Route(path, info) for path in ("/model_info", "/health", "/server_info")]
    await forever(Starlette(routes=[*(Route(path, end, methods=["POST"]) for path, end in posts.items()), *gets]))


async def server(engine_url: str, profile: str) -> None:
    chat, profiler = make_chat("qwen3"), cProfile.Profile()
    settings = EngineSettings(engine_probe_interval=300)
    async with EnginePool([engine_url], settings, vocab_size=None) as pool, aiohttp.ClientSession() as http:
        gateway = Gateway(chat, pool, context_length=400_000)
        freeze_loaded_objects()  # as `agentrl gateway` does
        sessions = []

        async def plain(request: Request) -> Response:
            body = orjson.loads(await request.body())
            body["model"] = "other"
            headers = {"content-type": "application/json"}
            async with http.post(
                f"{engine_url}/v1/chat/completions", data=orjson.dumps(body), headers=headers
            ) as reply:
                return Response(await reply.read(), media_type="application/json")

        async def opened(_: Request) -> Response:
            sessions.append(gateway.open(Sample(), SamplingParams()))
            return JSONResponse({"path": f"/s/{sessions[-1].token}"})

        async def used(request: Request) -> Response:
            if request.query_params.get("collect"):
                gc.collect()
            nodes = [node for session in sessions for node in session.tree.nodes.values()]
            tokens = sum(len(node.close) + len(node.env) + len(node.ids) for node in nodes)
            return JSONResponse(
                {"cpu": time.process_time(), "bytes": psutil.Process().memory_info().rss, "tokens": tokens}
            )

        more = {"/plain/v1/chat/completions": plain, "/open": opened}
        gateway.agent_app.router.routes += [Route(path, end, methods=["POST"]) for path, end in more.items()]
        gateway.agent_app.router.routes.append(Route("/used", used))
        if profile:
            profiler.enable()
        try:
            async with gateway.serving() as url:
                print(url, flush=True)
                await asyncio.Event().wait()
        finally:
            if profile:
                profiler.dump_stats(profile)


async def drive(http: aiohttp.ClientSession, url: str, turns: int, words: int) -> float:
    """Play one conversation; returns the mean size of its bodies."""
    rng, size = random.Random(1), 0
    system = " ".join(rng.choices(WORDS, k=words))
    history: list[Any] = [{"role": "system", "content": system}, {"role": "user", "content": "go"}]
    for _ in range(turns):
        data = orjson.dumps({"model": "m", "messages": history, "tools": TOOLS})
        size += len(data)
        async with http.post(url, data=data, headers={"content-type": "application/json"}) as reply:
            assert reply.status == 200, await reply.text()
            message = (await reply.json())["choices"][0]["message"]
        shown = " ".join(rng.choices(WORDS, k=300))
        history += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": shown}]
    return size / turns


async def measure(base: str, options: argparse.Namespace) -> None:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=300)) as http:

        async def used(collect: str = "") -> dict[str, float]:
            async with http.get(f"{base}/used?collect={collect}") as reply:
                found: dict[str, float] = await reply.json()
                return found

        async def gateway() -> float:
            async with http.post(f"{base}/open") as reply:
                path = (await reply.json())["path"]
            return await drive(http, f"{base}{path}/v1/chat/completions", options.turns, options.words)

        async def plain() -> float:
            return await drive(http, f"{base}/plain/v1/chat/completions", options.turns, options.words)

        costs: dict[str, list[float]] = {"gateway": [], "plain": []}
        size = 0.0
        for warm in (True, *[False] * options.rounds):
            for kind, play in (("gateway", gateway), ("plain", plain)):
                before = await used()
                size = await play()
                if not warm:
                    costs[kind].append(1e3 * ((await used())["cpu"] - before["cpu"]) / options.turns)
        ratios = [ours / theirs for ours, theirs in zip(*costs.values(), strict=True)]
        print(f"{options.turns} turns, bodies of {size / 1e3:.0f} kB; CPU ms a request, median (all rounds):")
        for kind, found in costs.items():
            print(f"  {kind:8} {statistics.median(found):.2f}  ({' '.join(f'{each:.2f}' for each in found)})")
        print(f"  ratio    {statistics.median(ratios):.2f}")
        before = await used("yes")
        for _ in range(options.sessions):
            await gateway()
        after = await used("yes")
        grown, tokens = (after[name] - before[name] for name in ("bytes", "tokens"))
        print(f"memory: {grown / tokens:.1f} bytes a token ({options.sessions} sessions, {tokens:.0f} tokens)")


def start(*role: str) -> tuple[subprocess.Popen[str], str]:
    process = subprocess.Popen([sys.executable, "-m", "benchmarks.gateway", *role], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("turns", 20), ("rounds", 4), ("words", 3000), ("sessions", 30)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--loop", choices=["uvloop", "asyncio"], default="uvloop")
    parser.add_argument("--profile", default="", help="write the server's profile here; its times then are too long")
    parser.add_argument("--role", choices=["engine", "server"], help=argparse.SUPPRESS)
    parser.add_argument("--engine", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.role:
        work = engine() if options.role == "engine" else server(options.engine, options.profile)
        fast = options.role == "engine" or options.loop == "uvloop"
        with (
            suppress(KeyboardInterrupt),
            asyncio.Runner(loop_factory=uvloop.new_event_loop if fast else None) as runner,
        ):
            runner.run(work)
        return
    processes = []
    try:
        process, url = start("--role", "engine")
        processes.append(process)
        process, base = start("--role", "server", "--engine", url, "--loop", options.loop, "--profile", options.profile)
        processes.append(process)
        asyncio.run(measure(base, options))
    finally:
        for process in processes:
            process.send_signal(signal.SIGINT)
            process.wait(20)


if __name__ == "__main__":
    main()
