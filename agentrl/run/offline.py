"""Generating without a trainer: `agentrl rollout` and `agentrl eval`. Engines are started here; Ray is not needed."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import anyio

from agentrl.config import RunSettings
from agentrl.engine import launch
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.progress import Progress, counted
from agentrl.run.metrics import rollout_metrics
from agentrl.run.preflight import preflight
from agentrl.run.rollouts import RolloutSession
from agentrl.runfolder import RunFolder


def evaluate(settings: RunSettings) -> dict[str, float]:
    """Evaluate the model of `hf_checkpoint` on all evaluation sets; returns `eval/<set>/<metric>` values.

    The trajectories go to `<output_dir>/evaluation/eval/<set>/0.jsonl`.
    """
    preflight(settings.check_complete("eval"), "eval")
    return anyio.run(_evaluate, settings, backend_options={"use_uvloop": True})


async def _evaluate(settings: RunSettings) -> dict[str, float]:
    with RunFolder.open(settings, "eval") as folder, Progress(settings.observability, total=1) as progress:
        async with _session(settings, folder, progress) as session:
            progress.begin("evaluating")
            return await session.evaluate(0)


def rollout(settings: RunSettings) -> int:
    """Generate `num_rollout` rollouts and dump them; returns the number of samples.

    The samples go to `save_debug_rollout_data`, or `<output_dir>/rollouts/<rollout id>.jsonl`.
    """
    preflight(settings.check_complete("rollout"), "rollout")
    return anyio.run(_rollout, settings, backend_options={"use_uvloop": True})


async def _rollout(settings: RunSettings) -> int:
    total, samples = settings.rollout.num_rollout, 0
    with (
        RunFolder.open(settings, "rollout") as folder,
        MetricsLogger(settings.observability, folder.path) as logger,
        Progress(settings.observability, total=total) as progress,
    ):
        if settings.observability.save_debug_rollout_data is None:
            settings = settings.replace(save_debug_rollout_data=str(folder.path))
        folder.forget_ledger()
        async with _session(settings, folder, progress) as session:
            session.open_feed(None)
            progress.begin("first rollout")
            for rollout_id in range(total):
                progress.phase(f"rollout {rollout_id + 1}: generating")
                result = await session.rollout(rollout_id)
                metrics = rollout_metrics(result.groups, result.stats, settings.rollout.reward_key)
                logger.log(rollout_id, metrics)
                progress.step(rollout_id, metrics)
                samples += sum(map(len, result.groups))
                if len(result.groups) < settings.rollout.rollout_batch_size:
                    break
    return samples


@asynccontextmanager
async def _session(settings: RunSettings, folder: RunFolder, progress: Progress) -> AsyncIterator[RolloutSession]:
    model = settings.train.hf_checkpoint
    assert model is not None
    count, external = settings.cluster.num_engines, settings.engine.engine == "external"
    what, began = counted(count, "engine"), time.monotonic()
    progress.begin("connecting to the engines" if external else f"loading the model into {what}")
    launched = launch(
        settings.engine,
        model,
        count=count,
        log_dir=folder.logs,
        gpus_per_engine=settings.cluster.rollout_num_gpus_per_engine,
    )
    async with launched as engines:
        session = RolloutSession(settings, folder.path, [engine.url for engine in engines])
        try:
            await session.open()
            progress.ready("connected" if external else f"{what} ready", began)
            yield session
        finally:
            await session.close()
