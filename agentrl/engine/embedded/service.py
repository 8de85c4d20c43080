"""What all endpoints share: the worker, the vocabulary, the options, and the live requests.

1. `Service.start(request)` makes a `Call`: the jobs of one HTTP request, already queued.
2. `Call` is used on the event loop only; jobs wake it through `call_soon_threadsafe`.
3. `abort(rid)` follows SGLang: the rid must be live, then every live rid that begins with it is aborted too.
"""

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np

from agentrl.engine.embedded.core import Engine
from agentrl.engine.embedded.grammar import Grammars
from agentrl.engine.embedded.job import Job
from agentrl.engine.embedded.model import Vocabulary
from agentrl.engine.embedded.request import GenerateRequest
from agentrl.engine.embedded.results import answer
from agentrl.engine.embedded.stopping import StopRules
from agentrl.engine.embedded.worker import Worker


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
    health_while_paused: str = "ok"
    trust_remote_code: bool = False
    exact: bool = False


@dataclass
class Service:
    """One server's state. `model_path` and `version` follow weight updates."""

    options: Options
    worker: Worker
    engine: Engine
    """For reading counters only; everything else goes through the worker."""
    vocab: Vocabulary
    config: dict[str, Any]
    context: int
    model_path: str
    adapter: str | None = None
    """What the adapter that the model has is called."""
    started: float = field(default_factory=time.time)
    live: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        self.grammars = Grammars(self.vocab)
        self.seeds = np.random.default_rng(self.options.seed)

    @property
    def version(self) -> str:
        return self.engine.version

    def start(self, request: GenerateRequest) -> "Call":
        call = Call(self, request)
        for job in call.jobs:
            self.worker.post(partial(Engine.add, job=job))
        return call

    async def abort(self, rid: str, *, everything: bool = False) -> None:
        if everything:
            await self.worker.call(lambda engine: engine.abort(lambda _: True))
        elif rid in self.live:
            await self.worker.call(lambda engine: engine.abort(lambda job: job.rid.startswith(rid)))


class Call:
    """The jobs of one HTTP request, and waiting for them."""

    def __init__(self, service: Service, request: GenerateRequest) -> None:
        self.request = request
        self._service = service
        self._loop = asyncio.get_running_loop()
        self._wake = asyncio.Event()
        self._left = len(request.sequences)
        self._moved: set[int] = set()
        self.jobs = [self._job(i) for i in range(self._left)]
        self._fronts = {sequence.front_rid for sequence in request.sequences}
        service.live.update(self._fronts)

    def _job(self, index: int) -> Job:
        sequence = self.request.sequences[index]
        vocab, params = self._service.vocab, sequence.params
        rules = StopRules(params, eos=vocab.eos, limit=sequence.limit, decode=vocab.decode if vocab.has_text else None)
        seed = params.sampling_seed if params.sampling_seed is not None else int(self._service.seeds.integers(2**63))
        job = Job(sequence.rid, sequence.prompt, params, rules, seed, sequence.want, sequence.grammar)
        job.on_finish = self._from_engine(self._finished, index)
        if self.request.stream:
            job.on_token = self._from_engine(self._progressed, index)
        return job

    def _from_engine(self, action: Callable[[int], None], index: int) -> Callable[[Job], None]:
        """A job's callback that runs `action(index)` on the event loop."""

        def hand_over(_: Job) -> None:
            self._loop.call_soon_threadsafe(action, index)

        return hand_over

    def _progressed(self, index: int) -> None:
        self._moved.add(index)
        self._wake.set()

    def _finished(self, index: int) -> None:
        self._left -= 1
        self._progressed(index)

    async def done(self) -> None:
        """Wait until every job has finished."""
        while self._left:
            self._wake.clear()
            await self._wake.wait()

    async def progress(self) -> AsyncIterator[int]:
        """The indices of jobs that have something new, until all have finished (each gives one last time then)."""
        while self._left or self._moved:
            while not self._moved:
                self._wake.clear()
                await self._wake.wait()
            moved, self._moved = sorted(self._moved), set()
            for index in moved:
                yield index

    def answer(self, index: int) -> dict[str, Any]:
        """What job `index` has so far, in the form of POST /generate; final when it has finished."""
        sequence, service = self.request.sequences[index], self._service
        return answer(self.jobs[index], self.request, sequence, service.vocab, service.version)

    def close(self) -> None:
        """Forget the call; jobs that still run are aborted (the client has gone)."""
        self._service.live -= Counter(self._fronts)
        mine = {id(job) for job in self.jobs if job.finish is None}
        if mine:
            self._service.worker.post(lambda engine: engine.abort(lambda job: id(job) in mine))
