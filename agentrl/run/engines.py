"""Engines that a run starts on this machine."""

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path
from urllib.parse import urlsplit

from agentrl.config import RunSettings
from agentrl.engine.commands import EngineNode as EngineNode
from agentrl.engine.launcher import launch, launch_blocking
from agentrl.engine.process import EngineProcess
from agentrl.engine.transport import normalise_url
from agentrl.errors import SettingsError
from agentrl.run.protocols import Progress, counted
from agentrl.runfolder import RunFolder


@asynccontextmanager
async def launched(settings: RunSettings, folder: RunFolder, progress: Progress) -> AsyncIterator[list[str]]:
    """Start engines, yield their addresses, and stop them. Raises SettingsError: an engine needs several machines."""
    if settings.engine.engine == "openai":
        yield []  # `RolloutResources` connects to the hosted model itself
        return
    began, external = time.monotonic(), settings.engine.engine == "external"
    each = settings.cluster.rollout_num_gpus_per_engine
    if settings.cluster.nodes_per_engine > 1 and not external:
        said = f"--rollout-num-gpus-per-engine {each}: only `agentrl train` on Ray starts engines over several machines"
        raise SettingsError(f"{said}; start yours, and give --rollout-external-engine-addrs")
    count, model = settings.cluster.num_engines, model_of(settings)
    what = counted(count, "engine")
    progress.begin("connecting to the engines" if external else f"loading the model into {what}")
    async with launch(settings.engine, model, count=count, log_dir=folder.logs, gpus_per_engine=each) as engines:
        progress.ready("connected" if external else f"{what} ready", began)
        yield [engine.url for engine in engines]


@asynccontextmanager
async def launched_groups(settings: RunSettings, folder: RunFolder) -> AsyncIterator[RunSettings]:
    """Start the engines of `--engine-groups` here; yield the settings with addresses in place of engine counts."""
    found, first = dict(settings.engine.engine_groups), settings.cluster.num_engines
    each = settings.cluster.rollout_num_gpus_per_engine
    start = partial(launch, settings.engine, log_dir=folder.logs, gpus_per_engine=each)
    async with AsyncExitStack() as stack:
        for name, count in settings.engine.started_groups.items():
            engines = await stack.enter_async_context(start(model_of(settings), count=count, first=first))
            found[name], first = ",".join(engine.url for engine in engines), first + count
        yield settings.replace(engine_groups=found) if found else settings


@contextmanager
def serve_one(
    settings: RunSettings,
    index: int,
    logs: Path,
    *,
    host: str | None = None,
    gpus: Sequence[str] | None = None,
    node: EngineNode | None = None,
) -> Iterator[EngineProcess]:
    """Run engine `index` of several, for code without an event loop. `host`: address to listen on; default: that of the
    settings. `gpus`: CUDA devices; default: the engine chooses. `node`: run only this machine's part of the engine."""
    each = settings.cluster.rollout_num_gpus_per_engine
    start = partial(launch_blocking, settings.engine, model_of(settings), gpus_per_engine=each)
    with start(first=index, log_dir=logs, host=host, gpu_ids=gpus, node=node) as engines:
        yield engines[0]


def model_of(settings: RunSettings) -> str:
    """Return the folder of the starting weights."""
    assert settings.train.hf_checkpoint is not None
    return settings.train.hf_checkpoint


def on_loopback(url: str) -> bool:
    """Return true if only this machine can reach the address."""
    return urlsplit(normalise_url(url)).hostname in ("127.0.0.1", "localhost", "::1")
