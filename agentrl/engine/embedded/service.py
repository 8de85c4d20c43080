"""State shared by all endpoints: the engine with its worker, the vocabulary, the chat templates, the live requests.

1. `EngineService.start(request)` makes a `RequestInFlight`: the jobs of one HTTP request, already queued.
2. `RequestInFlight` is used on the event loop only; jobs wake it through `call_soon_threadsafe`.
3. `abort(rid)` follows SGLang: if the rid is live, all live rids that begin with it are aborted too."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import orjson
from anyio import CapacityLimiter, to_thread

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.grammar import Grammars
from agentrl.engine.embedded.images import ImageReader
from agentrl.engine.embedded.model import Vocabulary, context_length, load_model, named, read_config, slots_that_fit
from agentrl.engine.embedded.request import GenerateRequest
from agentrl.engine.embedded.results import answer
from agentrl.engine.embedded.sequence import SequenceState
from agentrl.engine.embedded.weights import WeightUpdater
from agentrl.engine.embedded.worker import Worker
from agentrl.errors import SettingsError, TemplateError
from agentrl.numerics.vision import Vision
from agentrl.serving.http import openai_error

if TYPE_CHECKING:
    from agentrl.chat import Chat

T = TypeVar("T")
MAX_CHATS = 8  # maximum number of cached chats, one for each set of `chat_template_kwargs`


@dataclass(frozen=True)
class Options:
    """The command line, see `agentrl serve --help`."""

    model_path: str
    host: str = "127.0.0.1"
    port: int = 30000
    served_model_name: str | None = None
    context_length: int | None = None
    slots: int | None = None
    chunk: int = 1024
    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    seed: int = 0
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    chat_template: str | None = None
    trust_remote_code: bool = False
    batch_invariant: bool = False
    api_key: str | None = field(default=None, repr=False)
    admin_api_key: str | None = field(default=None, repr=False)


class EngineService:
    """One server's state. Weight updates change `model_path` and `adapter` (the LoRA adapter's name)."""

    def __init__(self, options: Options, *, on_crash: Callable[[], None]) -> None:
        """Load everything. The engine's thread calls `on_crash` if it crashes. Raises AgentRLError: a bad folder."""
        self.options, self.model_path = options, options.model_path
        self.adapter: str | None = None
        self.config = read_config(self.model_path)
        self.context = context_length(self.config, options.context_length)
        auto = "bfloat16" if options.device.startswith("cuda") else "float32"
        dtype, device = auto if options.dtype == "auto" else options.dtype, options.device
        model = load_model(self.model_path, dtype=dtype, device=device, trust_remote_code=options.trust_remote_code)
        slots, context = options.slots or slots_that_fit(model, self.context), self.context
        sizes: dict[str, Any] = {"slots": slots, "context_length": context, "chunk": options.chunk}
        with named(f"{slots} sequences of {context} tokens do not fit; give smaller --slots or --context-length"):
            # Endpoints read only counters from the engine; all other access goes through the worker.
            self.engine = Engine(model, **sizes, batch_invariant=options.batch_invariant)
        self.worker = Worker(self.engine, on_crash=on_crash)
        self.weights = WeightUpdater(model)
        self.vocab = Vocabulary(self.model_path, self.config)
        vision = Vision.load(Path(self.model_path))
        self.reader = None if vision is None else ImageReader(model, vision)
        self.grammars = Grammars(self.vocab)
        self.seeds = np.random.default_rng(options.seed)
        self.started, self.live = time.time(), Counter[str]()
        self._lane = CapacityLimiter(1)
        self._chat, self._loading = lru_cache(MAX_CHATS)(partial(_load_chat, options)), threading.Lock()

    def chat(self, kwargs: dict[str, Any]) -> "Chat":
        """Return the chat template with these `chat_template_kwargs`, and its parsers. Blocks while loading: call it
        from a worker thread. Raises RequestError: there is no usable template."""
        with self._loading:
            return self._chat(orjson.dumps(kwargs, option=orjson.OPT_SORT_KEYS))

    async def aside(self, work: Callable[[], T]) -> T:
        """Run `work()` in a thread and return its result; one call at a time."""
        return await to_thread.run_sync(work, limiter=self._lane)

    def start(self, request: GenerateRequest) -> "RequestInFlight":
        call = RequestInFlight(self, request)
        for job in call.jobs:
            self.worker.post(partial(Engine.add, job=job))
        return call

    async def abort(self, rid: str, *, everything: bool = False) -> None:
        if everything:
            await self.worker.call(lambda engine: engine.abort(lambda _: True))
        elif rid in self.live:
            await self.worker.call(lambda engine: engine.abort(lambda job: job.rid.startswith(rid)))


def _load_chat(options: Options, kwargs: bytes) -> "Chat":
    from agentrl.chat import Chat

    try:
        names = ("chat_template", "tool_call_parser", "reasoning_parser", "trust_remote_code")
        given = {name: getattr(options, name) for name in names}
        return Chat.load(options.model_path, template_kwargs=orjson.loads(kwargs), **given)
    except (TemplateError, SettingsError) as error:
        raise openai_error(str(error)) from error


class RequestInFlight:
    """The jobs of one HTTP request, with methods to wait for them."""

    def __init__(self, service: EngineService, request: GenerateRequest) -> None:
        self.request, self.jobs = request, request.jobs
        self._service, self._loop, self._wake = service, asyncio.get_running_loop(), asyncio.Event()
        self._moved, self._ended, self._left = set[int](), set[int](), len(self.jobs)
        service.live.update(request.rids)
        for index, job in enumerate(self.jobs):
            if job.seed is None:
                job.seed = int(service.seeds.integers(2**63))
            job.on_finish = self._callback(index, finished=True)
            if request.body.stream:
                job.on_token = self._callback(index, finished=False)

    def _callback(self, index: int, *, finished: bool) -> Callable[[SequenceState], object]:
        """Return a job's callback, which notes on the event loop that the job has new output."""

        def note() -> None:
            self._left -= int(finished)
            self._moved.add(index)
            self._wake.set()

        return lambda _: self._loop.call_soon_threadsafe(note)

    async def progress(self) -> AsyncIterator[int]:
        """Yield the index of each job with new output, until all jobs have finished. A job's end also yields it."""
        while self._left or self._moved:
            while not self._moved:
                self._wake.clear()
                await self._wake.wait()
            moved, self._moved = sorted(self._moved - self._ended), set()
            for index in moved:
                yield index

    async def done(self) -> None:
        """Wait until every job has finished."""
        async for _ in self.progress():
            continue

    def answer(self, index: int) -> dict[str, Any]:
        """Return the output of job `index` so far, in the form of POST /generate; final once it has finished."""
        found = answer(self.jobs[index], self.request, self._service.vocab, self._service.engine.version)
        if found["meta_info"]["finish_reason"] is not None:
            self._ended.add(index)
        return found

    def close(self) -> None:
        """Remove the request. Jobs that still run are aborted, because the client has disconnected."""
        self._service.live -= Counter(self.request.rids)
        if mine := {id(job) for job in self.jobs if job.finish is None}:
            self._service.worker.post(lambda engine: engine.abort(lambda job: id(job) in mine))
