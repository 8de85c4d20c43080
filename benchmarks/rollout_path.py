"""CPU of a rollout in its process: chat, tools, engine client, grader and ledger, beside bare HTTP traffic.

    python -m benchmarks.rollout_path [--trajectories 64 256 1024] [--turns 6] [--in-flight 10000]

1. The engine is a separate process that answers every `/generate` after a fixed delay with a tool call: tokens of the
   real Qwen3 tokenizer and their log-probs in SGLang's form. It has no model.
2. A trajectory starts with a prompt of about 900 tokens, which its group of eight shares. Its environment has
   two async tools. The built-in grader `gsm8k` runs in separate processes; groups go into a real ledger.
3. The floor is aiohttp and orjson: as many ids in as many request bodies, and the same answers, in the same run.
4. CPU is `time.process_time` of this process, without the graders and the engine. Every row is measured after a
   warm-up of one turn for each trajectory, which opens the connections. For the rollout, loaded objects are excluded from
   garbage collection, as in a run. The floor is a plain client with Python's own settings.
"""

import argparse
import asyncio
import gc
import multiprocessing
import random
import resource
import socket
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import aiohttp
import anyio
import numpy as np
import orjson
import zstandard
from anyio import to_thread

from agentrl import Environment, Sample, tool
from agentrl.buffer.codec import decode_group, encode_group
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.queue import GroupQueue
from agentrl.chat import Chat, ChatSession, Conversation
from agentrl.clock import freeze_loaded_objects
from agentrl.config import Args
from agentrl.data.settings import DataSettings
from agentrl.data.user_source import load_source
from agentrl.engine.answers import RequestExpectations, parse
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport
from agentrl.engine.wire import SamplingParams
from agentrl.envs import Environments
from agentrl.groups import Group, group_id
from agentrl.rm_hub import GraderRunner
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.group import GroupPlayer
from agentrl.rollout.rewards import Grader
from agentrl.rollout.settings import RolloutSettings
from tests.support.chats import make_chat

GROUP = 8
PROMPT_WORDS = 690
"""Words of a prompt that has about 900 tokens with the tools' schemas."""
CALLS = (
    "<think>\nI need the rows first: the table of last year has them, and the value is in its third column.\n</think>\n\n"
    '<tool_call>\n{"name": "look_up", "arguments": {"query": "value of last year", "limit": 3}}\n</tool_call><|im_end|>',
    "<think>\nNow the sum of both: I multiply the price by the number and add what is left over from before.\n</think>\n\n"
    '<tool_call>\n{"name": "calculate", "arguments": {"expression": "12 * (3 + 4)"}}\n</tool_call><|im_end|>',
)
WORDS = ["the", "cat", "naïve", "value", "of", "42", "rows", "3.14", "table", "price,", "number;", "under", "if", "sum",
         "http://a.b/c?d=e", "then", "which", "total"]  # fmt: skip


@tool
async def look_up(query: str, limit: int = 5) -> str:
    """Find rows of the table.

    Args:
        query: what to look for.
        limit: most rows.
    """
    await anyio.sleep(0.01)
    return "\n".join(f"row {i}: {query} is {i * 7} at http://a.b/c?d={i}" for i in range(limit))


@tool
async def calculate(expression: str) -> str:
    """Work out an expression.

    Args:
        expression: numbers, operators and brackets.
    """
    await anyio.sleep(0.01)
    return f"{expression} = 84"


class TwoTools(Environment):
    """Never ends by itself: the row sets the number of turns."""

    tools = (look_up, calculate)


# ---- ours -----------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """The inputs of every measurement: the engine's address, the chat, the graders and a folder."""

    url: str
    chat: Chat
    graders: GraderRunner
    folder: Path
    made: int = 0
    began: float = 0.0
    """CPU seconds at the lease of the first group."""

    def prompts(self, groups: int) -> Path:
        """Write a file of new prompts."""
        self.made += 1
        path = self.folder / f"prompts-{self.made}.jsonl"
        rng = random.Random(self.made)
        rows = [{"input": " ".join(rng.choices(WORDS, k=PROMPT_WORDS)), "label": "84"} for _ in range(groups)]
        path.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in rows))
        return path

    @asynccontextmanager
    async def opened(self, transport: HttpTransport | None = None) -> AsyncIterator[EnginePool]:
        """Open a pool without connections."""
        async with AsyncExitStack() as stack:
            own = await stack.enter_async_context(transport or HttpTransport(EngineSettings()))
            settings = EngineSettings(sglang_server_concurrency=20_000)
            yield EnginePool([self.url], settings, vocab_size=self.chat.vocab_size, transport=own)

    async def play(self, pool: EnginePool, trajectories: int, turns: int) -> list[Group]:
        """Play `count` trajectories at once, and take them out of the ledger as the trainer would."""
        groups = trajectories // GROUP
        data = DataSettings(prompt_data=str(self.prompts(groups)), label_key="label")
        settings = RolloutSettings(
            rm_type="gsm8k",
            max_turns=turns,
            rollout_batch_size=groups,
            n_samples_per_prompt=GROUP,
            rollout_max_concurrency=trajectories,
        )
        args = Args({**settings.model_dump(), **data.model_dump()})
        context = RolloutContext(settings, args, self.chat, pool, 32_768, Environments.alone(TwoTools, args))
        player = GroupPlayer(context, Grader(settings, args, None, self.graders))
        with Ledger(self.folder / f"ledger-{self.made}.sqlite") as ledger:
            queue = GroupQueue(load_source(data, args), ledger)

            async def one(leased: Group) -> None:
                played = await player.group(leased, evaluation=False)
                await to_thread.run_sync(queue.complete, group_id(leased), played)

            self.began = time.process_time()
            async with anyio.create_task_group() as tasks:
                for leased in await to_thread.run_sync(queue.lease, groups, 0):
                    tasks.start_soon(one, leased)
            return await to_thread.run_sync(queue.next_batch, groups, 0)


@contextmanager
def as_in_a_run() -> Iterator[None]:
    """Exclude loaded objects from garbage collection for a while."""
    usual = gc.get_threshold()
    freeze_loaded_objects()
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


async def measure_ours(bench: Bench, trajectories: int, turns: int) -> float:
    """Return the CPU ms of a model turn of the whole path."""
    with as_in_a_run():
        async with bench.opened() as pool:
            await bench.play(pool, trajectories, 1)
            start = time.process_time()
            batch = await bench.play(pool, trajectories, turns)
            spent = time.process_time() - start
    played = sum(len({part.turn for part in sample.segments}) for group in batch for sample in group)
    if played != trajectories * turns:
        raise RuntimeError(f"expected {trajectories * turns} turns, played {played}")
    return 1e3 * spent / played


async def measure_first_request(bench: Bench, trajectories: int) -> float:
    """Return the CPU ms from the lease of the first group to the first written request, with no open connection."""
    written: list[float] = []

    class Watched(HttpTransport):
        async def __aenter__(self) -> "Watched":
            await super().__aenter__()
            self._session.trace_configs.append(trace)
            return self

    async def sent(*_: object) -> None:
        written.append(time.process_time())

    trace = aiohttp.TraceConfig()
    trace.on_request_headers_sent.append(sent)
    trace.freeze()
    async with bench.opened(Watched(EngineSettings())) as pool:
        await bench.play(pool, trajectories, 1)
    return 1e3 * (written[0] - bench.began)


# ---- the floor ------------------------------------------------------------------------------------------------------


async def measure_floor(bench: Bench, trajectories: int, turns: int) -> float:
    """Return the CPU ms of a model turn of the same traffic with only aiohttp and orjson."""
    prompt, observed = [5000 + i for i in range(900)], [6000 + i for i in range(70)]
    params = SamplingParams(temperature=1.0, top_p=1.0, max_new_tokens=1024, skip_special_tokens=True).to_wire()

    async def trajectory(session: aiohttp.ClientSession, index: int, turns: int) -> None:
        tokens, log_probs = list(prompt), []
        for _ in range(turns):
            body = {"input_ids": tokens, "sampling_params": params, "return_logprob": True, "rid": str(index)}
            async with session.post(f"{bench.url}/generate", data=orjson.dumps(body)) as response:
                meta = orjson.loads(await response.read())["meta_info"]
            tokens += [entry[1] for entry in meta["output_token_logprobs"]]
            log_probs += [entry[0] for entry in meta["output_token_logprobs"]]
            tokens += observed

    async def drive(session: aiohttp.ClientSession, turns: int) -> None:
        async with anyio.create_task_group() as group:
            for index in range(trajectories):
                group.start_soon(trajectory, session, index, turns)

    async with aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None), auto_decompress=False
    ) as session:
        await drive(session, 1)
        start = time.process_time()
        await drive(session, turns)
        return 1e3 * (time.process_time() - start) / (trajectories * turns)


# ---- the parts ------------------------------------------------------------------------------------------------------


def cpu_us(function: Callable[[], object], repeat: int = 200) -> float:
    """Return the median CPU microseconds of a call."""
    function()
    times = []
    for _ in range(repeat):
        start = time.process_time()
        function()
        times.append(time.process_time() - start)
    return 1e6 * statistics.median(times)


def parts(bench: Bench, answers: Sequence[bytes]) -> list[tuple[str, float, str, float]]:
    """Return (part, its us, the floor's name, the floor's us). The first three run once for a group or trajectory."""
    chat, schemas = bench.chat, TwoTools().toolbox.schemas
    rng = random.Random(0)
    texts = iter([" ".join(rng.choices(WORDS, k=PROMPT_WORDS)) for _ in range(500)])
    backend, compiled = chat.tokenizer.backend_tokenizer, chat.template

    def messages() -> list[dict[str, Any]]:
        return [{"role": "user", "content": next(texts)}]

    again = messages()
    call, result = (
        chat.encode(CALLS[0]),
        [{"role": "tool", "content": "row 1: the value is 7 at http://a.b/c?d=1\n" * 3}],
    )
    session = ChatSession(chat, again, schemas)
    text = chat.decode(_one_turn(session, call, result))
    asked = RequestExpectations(900, 1024, chat.vocab_size)
    body, prompt = answers[0], list(range(1000, 2400))
    group = [_finished(2400, i) for i in range(GROUP)]
    arrays = b"".join(
        np.asarray(values, kind).tobytes()
        for s in group
        for values, kind in ((s.tokens, np.int32), (s.loss_mask, np.uint8), (s.rollout_log_probs, np.float32))
    )
    stored, packed = encode_group(group), zstandard.compress(arrays, 1)

    def raw_prompt() -> list[int]:
        return list(backend.encode(compiled.render(messages(), schemas), add_special_tokens=False).ids)

    return [
        ("a prompt of 900 tokens", cpu_us(lambda: Conversation(chat, Sample(), messages(), schemas), 150),
         "template and tokenizer", cpu_us(raw_prompt, 150)),
        ("the same in its group", cpu_us(lambda: Conversation(chat, Sample(), again, schemas)),
         "copying its ids", cpu_us(lambda: list(prompt))),
        ("a group into bytes", cpu_us(lambda: encode_group(group), 30),
         "Zstandard 1 of its arrays", cpu_us(lambda: zstandard.compress(arrays, 1), 30)),
        ("a group out of bytes", cpu_us(lambda: decode_group(stored), 30),
         "Zstandard of its arrays", cpu_us(lambda: zstandard.decompress(packed), 30)),
        ("an answer's ids and log-probs", cpu_us(lambda: parse(body, asked)),
         "orjson", cpu_us(lambda: orjson.loads(body))),
        ("a turn and its delta", cpu_us(lambda: _one_turn(session, call, result)),
         "decode, tokenize the delta", cpu_us(lambda: (backend.decode(call), backend.encode(text)))),
    ]  # fmt: skip


def _one_turn(session: ChatSession, ids: list[int], result: list[dict[str, Any]]) -> list[int]:
    session.append_model_turn(ids)
    return session.extend(result).env


def _finished(tokens: int, seed: int) -> Sample:
    """Make a finished sample whose numbers are separate objects, as in parsed answers of an engine."""
    rng = random.Random(seed)
    sample = Sample(group_index=0, index=seed, reward=1.0, status=Sample.Status.COMPLETED)
    sample.set_prompt_tokens([rng.randrange(1000, 150_000) for _ in range(min(900, tokens // 2))])
    turn = 0
    while len(sample.tokens) < tokens:
        turn += 1
        length = min(1000, tokens - len(sample.tokens))
        ids = [rng.randrange(1000, 150_000) for _ in range(length)]
        sample.append_model(ids, [-rng.expovariate(2.0) for _ in ids], "3", turn=turn)
        sample.append_observation(ids[: length // 4], turn=turn)
    return sample


def kept_bytes(bench: Bench) -> float:
    """Return the bytes a token of finished samples that wait in the queue for training."""
    groups, tokens = 8, 8192
    data = DataSettings(prompt_data=str(bench.prompts(groups)), label_key="label")
    args = Args({**RolloutSettings(n_samples_per_prompt=GROUP).model_dump(), **data.model_dump()})
    with Ledger(bench.folder / "kept.sqlite") as ledger:
        queue = GroupQueue(load_source(data, args), ledger)
        leased = queue.lease(groups, 0)
        tracemalloc.start()
        for at, group in enumerate(leased):
            queue.complete(group_id(group), [_finished(tokens, at * GROUP + i) for i in range(GROUP)])
        batch = queue.next_batch(groups, 0)
        held = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        return held / sum(len(sample.tokens) for group in batch for sample in group)


# ---- the engine -----------------------------------------------------------------------------------------------------


def answer_bodies(chat: Chat) -> list[bytes]:
    """Return the answers as a real server writes them, one for each tool."""
    bodies = []
    for text in CALLS:
        ids = chat.encode(text)
        meta = {
            "id": "0" * 32,
            "finish_reason": {"type": "stop", "matched": ids[-1]},
            "weight_version": "1",
            "num_retractions": 0,
            "input_token_logprobs": [],
            "output_token_logprobs": [[-0.2345678901234567 - 0.01 * i, token, None] for i, token in enumerate(ids)],
            "reasoning_tokens": 0,
            "completion_tokens": len(ids),
            "cached_tokens": 800,
            "weight_versions": [{"version": "1", "start": 0, "end": len(ids)}],
            "e2e_latency": 0.5,
        }
        bodies.append(orjson.dumps({"text": text.removesuffix("<|im_end|>"), "output_ids": ids, "meta_info": meta}))
    return bodies


class Connection(asyncio.Protocol):
    """Answers every complete request after the delay; the bodies alternate."""

    def __init__(self, answers: Sequence[bytes], delay: float) -> None:
        self._answers, self._delay = answers, delay
        self._received, self._count = bytearray(), 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = bytes(self._received[:end]).lower()
            at = head.find(b"content-length:")
            size = end + 4 + (int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0)
            if len(self._received) < size:
                return
            del self._received[:size]
            self._count += 1
            answer = self._answers[self._count % len(self._answers)]
            asyncio.get_running_loop().call_later(self._delay, self._answer, answer)

    def _answer(self, body: bytes) -> None:
        if not self._transport.is_closing():
            head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body)
            self._transport.write(head + body)


def serve(listening: socket.socket, answers: Sequence[bytes], delay: float) -> None:
    """Serve until the process is ended."""

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(
            lambda: Connection(answers, delay), sock=listening, backlog=16_384
        )
        await server.serve_forever()

    asyncio.run(run())


def start_server(answers: Sequence[bytes], delay: float) -> tuple[BaseProcess, str]:
    """Start the engine's process. Returns the process and its address."""
    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    process = multiprocessing.get_context("fork").Process(target=serve, args=(listening, answers, delay), daemon=True)
    process.start()
    return process, f"http://127.0.0.1:{listening.getsockname()[1]}"


# ---- the table ------------------------------------------------------------------------------------------------------


async def report(options: argparse.Namespace, url: str, chat: Chat, answers: Sequence[bytes]) -> None:
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        bench = Bench(url, chat, await stack.enter_async_context(GraderRunner(preload=["gsm8k"])), folder)
        if options.in_flight:
            async with bench.opened() as pool:
                await bench.play(pool, options.in_flight, 2)
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            print(f"{options.in_flight} trajectories of 2 turns in flight: {peak / 1e6:.2f} GB at the most")
            return
        print(f"{'trajectories':>12} {'turns':>5} {'agentrl ms/turn':>16} {'floor ms/turn':>14} {'ratio':>6}")
        for n in options.trajectories:
            turns = options.turns if n < 4096 else min(options.turns, 2)
            floors, ours = list[float](), list[float]()
            for _ in range(options.repeats):
                floors.append(await measure_floor(bench, n, turns))
                ours.append(await measure_ours(bench, n, turns))
            print(
                f"{n:>12} {turns:>5} {min(ours):>16.3f} {min(floors):>14.3f} {min(ours) / min(floors):>6.2f}",
                flush=True,
            )
        first = min([await measure_first_request(bench, 1024) for _ in range(options.repeats)])
        print(f"\nfirst request of 1,024 trajectories written after {first:.0f} ms of CPU")
        print(f"finished samples: {kept_bytes(bench):.1f} bytes a token\n")
        print(f"{'part':32} {'us':>8}  {'floor':28} {'us':>8}")
        for name, own, floor, least in parts(bench, answers):
            print(f"{name:32} {own:>8.0f}  {floor:28} {least:>8.0f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[64, 256, 1024, 4096])
    parser.add_argument("--turns", type=int, default=6, help="model turns a trajectory; 2 at most from 4096 on")
    parser.add_argument("--delay", type=float, default=0.5, help="seconds the engine waits before it answers")
    parser.add_argument("--repeats", type=int, default=3, help="the least of so many measurements counts")
    parser.add_argument("--in-flight", type=int, help="play so many at once and print the peak of memory, nothing else")
    options = parser.parse_args()
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    chat = make_chat("qwen3")
    answers = answer_bodies(chat)
    server, url = start_server(answers, options.delay)
    try:
        anyio.run(report, options, url, chat, answers)
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
