"""CPU of the rollout client: milliseconds of the client process for a model turn, beside bare aiohttp + orjson.

    python benchmarks/rollout_client.py [--trajectories 64 256 1024] [--turns 6] [--delay 0.5]

1. The server is a separate process that answers every `/generate` after a fixed delay with 64 tokens and their
   log-probs in SGLang's form. It has no model: only the client's cost is measured.
2. A trajectory starts with 4096 prompt ids; every turn adds 64 sampled and 64 observed ones and sends the whole
   conversation again. All trajectories of a row run at once.
3. Every row is measured after a warm-up of one turn a trajectory, which opens the connections. CPU is
   `time.process_time` of this process.
"""

import argparse
import multiprocessing
import resource
import socket
import time
from collections.abc import Awaitable, Callable
from multiprocessing.process import BaseProcess

import aiohttp
import anyio
import orjson

from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import SamplingParams
from agentrl.sample import Sample

PROMPT = list(range(100, 4196))
OBSERVED = list(range(200, 264))
NEW_TOKENS = 64
PARAMS = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=NEW_TOKENS, skip_special_tokens=False)

Drive = Callable[[str, int, int], Awaitable[None]]


async def drive(pool: EnginePool, n_trajectories: int, turns: int) -> None:
    """Run all trajectories at once through agentrl's pool and sample record."""

    async def trajectory(index: int) -> None:
        sample = Sample(index=index, session_id=f"bench-{index}")
        sample.set_prompt_tokens(PROMPT)
        for turn in range(1, turns + 1):
            answer = await pool.generate(sample.tokens, PARAMS, session_id=sample.session_id)
            sample.append_model(answer.ids, answer.log_probs, answer.weight_version, text=answer.text, turn=turn)
            sample.append_observation(OBSERVED, turn=turn)
        sample.validate()

    async with anyio.create_task_group() as group:
        for index in range(n_trajectories):
            group.start_soon(trajectory, index)


async def drive_floor(session: aiohttp.ClientSession, url: str, n_trajectories: int, turns: int) -> None:
    """Run the same traffic with only aiohttp and orjson."""

    async def trajectory(index: int) -> None:
        tokens, log_probs = list(PROMPT), []
        for _ in range(turns):
            body = orjson.dumps(
                {"input_ids": tokens, "sampling_params": PARAMS.to_wire(), "return_logprob": True, "rid": str(index)}
            )
            async with session.post(f"{url}/generate", data=body) as response:
                meta = orjson.loads(await response.read())["meta_info"]
            tokens += [entry[1] for entry in meta["output_token_logprobs"]]
            log_probs += [entry[0] for entry in meta["output_token_logprobs"]]
            tokens += OBSERVED

    async with anyio.create_task_group() as group:
        for index in range(n_trajectories):
            group.start_soon(trajectory, index)


async def measure_client(url: str, n_trajectories: int, turns: int) -> float:
    """Return the CPU ms of a turn of `drive`."""
    settings = EngineSettings(sglang_server_concurrency=4096)
    async with EnginePool([url], settings, vocab_size=200_000) as pool:
        await drive(pool, n_trajectories, 1)
        start = time.process_time()
        await drive(pool, n_trajectories, turns)
        return 1e3 * (time.process_time() - start) / (n_trajectories * turns)


async def measure_floor(url: str, n_trajectories: int, turns: int) -> float:
    """Return the CPU ms of a turn of `drive_floor`."""
    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
    ) as session:
        await drive_floor(session, url, n_trajectories, 1)
        start = time.process_time()
        await drive_floor(session, url, n_trajectories, turns)
        return 1e3 * (time.process_time() - start) / (n_trajectories * turns)


# ---- the server -------------------------------------------------------------------------------------------------


def answer_body() -> bytes:
    """Return one answer as a real server writes it."""
    ids = [1000 + i for i in range(NEW_TOKENS)]
    meta = {
        "id": "0" * 32,
        "finish_reason": {"type": "length", "length": NEW_TOKENS},
        "prompt_tokens": len(PROMPT),
        "weight_version": "1",
        "num_retractions": 0,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-1.2345678901234567 - 0.01 * i, token, None] for i, token in enumerate(ids)],
        "output_token_logprobs_length": NEW_TOKENS,
        "reasoning_tokens": 0,
        "completion_tokens": NEW_TOKENS,
        "cached_tokens": 4000,
        "weight_versions": [{"version": "1", "start": 0, "end": NEW_TOKENS}],
        "cached_tokens_details": None,
        "dp_rank": None,
        "e2e_latency": 0.5,
        "response_sent_to_client_ts": 1795247427.9833894,
    }
    return orjson.dumps({"text": "some text " * 20, "output_ids": ids, "meta_info": meta})


def serve(listening: socket.socket, delay: float) -> None:
    """Answer every POST after `delay` seconds until the process is ended."""
    import uvicorn
    from starlette.types import Receive, Scope, Send

    body = answer_body()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        while (await receive()).get("more_body"):
            pass
        await anyio.sleep(delay)
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", backlog=4096)
    uvicorn.Server(config).run(sockets=[listening])


def start_server(delay: float) -> tuple[BaseProcess, str]:
    """Start the server process. Returns the process and its address."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen(4096)
    process = multiprocessing.get_context("fork").Process(target=serve, args=(listening, delay), daemon=True)
    process.start()
    return process, f"http://127.0.0.1:{listening.getsockname()[1]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--turns", type=int, default=6)
    parser.add_argument("--delay", type=float, default=0.5, help="seconds the server waits before it answers")
    parser.add_argument("--repeats", type=int, default=3, help="the least of so many measurements counts")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    server, url = start_server(options.delay)
    print(f"{'trajectories':>12} {'agentrl ms/turn':>16} {'floor ms/turn':>14} {'ratio':>6}")
    try:
        for n in options.trajectories:
            ours, floor = (
                min(anyio.run(measure, url, n, options.turns) for _ in range(options.repeats))
                for measure in (measure_client, measure_floor)
            )
            print(f"{n:>12} {ours:>16.3f} {floor:>14.3f} {ours / floor:>6.2f}", flush=True)
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
