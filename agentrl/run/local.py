"""A run's parts in one process, without Ray: for laptops, for debuggers, and for the driver's tests.

1. Environment, tools and reward run on the event loop of this process, so a breakpoint in them works.
2. The built-in engine runs in this process too if trainer and engine take turns. If it generates during training, it
   has its own process: one interpreter runs only one of them at a time. Other engines always have their own process.
3. The trainer is one rank in its own thread: its calls block, and some of torch's settings are per thread. A call
   cannot be interrupted, so deadlines and Ctrl-C take effect when the call returns.
4. Weights travel by disk: a process cannot broadcast to itself."""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import anyio

from agentrl.config import RunSettings
from agentrl.engine.local import in_process
from agentrl.run.demonstrations import without_engines
from agentrl.run.engines import launched, launched_groups, model_of
from agentrl.run.protocols import Batch, Components, Found, Progress, Trainer, within
from agentrl.run.rollouts import LedgerRollouts
from agentrl.run.training import RankInfo, free_port, start_backend
from agentrl.run.weights import DiskWeights, eval_weights
from agentrl.runfolder import RunFolder
from agentrl.train.backends import backend_class

if TYPE_CHECKING:
    from agentrl.train.trainer import TrainBackend

T = TypeVar("T")


@asynccontextmanager
async def start(
    settings: RunSettings, folder: RunFolder, resume: Found | None, progress: Progress
) -> AsyncIterator[Components]:
    """Start all parts of the run, and stop them at the end."""
    step = None if resume is None else resume.step
    async with AsyncExitStack() as stack:
        if settings.generates:
            urls = await stack.enter_async_context(_engines(settings, folder, progress))
            settings = await stack.enter_async_context(launched_groups(settings, folder))
        trainer = await stack.enter_async_context(LocalTrainer.open(settings, resume, progress))
        folder.write_processes({"driver": [os.getpid()]})
        progress.phase("opening the data")
        if not settings.generates:
            yield Components(stack.enter_context(without_engines(settings, folder, step)), trainer, None)
            return
        rollouts = await stack.enter_async_context(LedgerRollouts.open(settings, folder, urls, step))
        weights = DiskWeights(folder, trainer, rollouts.engines, root=settings.cluster.update_weight_disk_dir)
        own = eval_weights(settings, folder, trainer, lambda: rollouts.eval_engines)
        yield Components(rollouts, trainer, weights, own)


@asynccontextmanager
async def _engines(settings: RunSettings, folder: RunFolder, progress: Progress) -> AsyncIterator[list[str]]:
    if settings.engine.engine != "embedded" or settings.rollout.max_staleness:
        with ThreadPoolExecutor(1) as meanwhile:
            # In parallel: the import takes as long as an engine's start.
            meanwhile.submit(backend_class, settings.train.train_backend)
            async with launched(settings, folder, progress) as urls:
                yield urls
        return
    from transformers.utils import logging

    from agentrl.gateway.served.openai import ROUTES

    began = time.monotonic()
    logging.disable_progress_bar()
    progress.begin("loading the model into an engine in this process")
    async with in_process(settings.engine, model_of(settings), ROUTES) as url:
        progress.ready("engine ready", began)
        yield [url]


class LocalTrainer(Trainer):
    """The only rank of a local run; made by `open`."""

    def __init__(self, backend: "TrainBackend", thread: ThreadPoolExecutor) -> None:
        self._backend, self._thread = backend, thread

    @classmethod
    @asynccontextmanager
    async def open(cls, settings: RunSettings, resume: Found | None, progress: Progress) -> AsyncIterator[Self]:
        """Build the model and load the checkpoint. At the end, wait for a running call, then close the backend."""
        began = time.monotonic()
        progress.begin("starting the trainer in this process")
        with ThreadPoolExecutor(1, thread_name_prefix="trainer") as thread:
            with within(settings.cluster.start_timeout, "starting the trainer"):
                backend = await _call(thread, partial(start_backend, settings, RankInfo(master_port=free_port())))
            try:
                if resume is not None:
                    with within(settings.cluster.train_timeout, "loading the checkpoint"):
                        await _call(thread, partial(backend.load, resume.path))
                progress.ready("trainer ready", began)
                yield cls(backend, thread)
            finally:
                with anyio.CancelScope(shield=True):
                    await _call(thread, backend.close)

    async def train(self, batch: Batch, step: int) -> Mapping[str, float]:
        return await _call(self._thread, partial(self._backend.train, batch.payload, step))

    async def details(self) -> Any:
        return self._backend.details()

    async def offload(self) -> None:
        await _call(self._thread, self._backend.offload)

    async def onload(self) -> None:
        await _call(self._thread, self._backend.onload)

    async def save(self, path: Path, step: int) -> None:
        await _call(self._thread, partial(self._backend.save, path, step))

    async def saved(self, *, wait: bool) -> bool:
        return await _call(self._thread, partial(self._backend.saved, wait=wait))

    async def save_hf(self, path: Path, *, served: bool = False) -> None:
        await _call(self._thread, partial(self._backend.save_hf, path, served=served))


async def _call(thread: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(thread, work)


_trainer: type[Trainer] = LocalTrainer
