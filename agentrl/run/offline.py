"""Generating without a trainer: `agentrl rollout` and `agentrl eval`. Engines are started here; Ray is not needed."""

from collections.abc import Mapping

import anyio

from agentrl.config import RunSettings
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.progress import Progress
from agentrl.run.driver import open_folder
from agentrl.run.engines import launched
from agentrl.run.epochs import whole_epochs
from agentrl.run.preflight import preflight
from agentrl.run.rollouts import Generation, LedgerRollouts


def evaluate(settings: RunSettings) -> Mapping[str, float]:
    """Evaluate the model of `hf_checkpoint` on all evaluation sets; returns `eval/<set>/<metric>` values.

    The trajectories go to `<output_dir>/evaluation/eval/<set>/0.jsonl`.
    """
    preflight(settings.check_complete("eval"), "eval")
    return anyio.run(_evaluate, settings, backend_options={"use_uvloop": True})


async def _evaluate(settings: RunSettings) -> Mapping[str, float]:
    with open_folder(settings, "eval") as folder, Progress(settings.observability, total=1) as progress:
        async with launched(settings, folder, progress) as urls, Generation.open(settings, folder, urls) as generation:
            progress.begin("evaluating")
            return await generation.evaluate(0)


def rollout(settings: RunSettings) -> int:
    """Generate `num_rollout` rollouts and dump them; returns the number of samples.

    The samples go to `save_debug_rollout_data`, or `<output_dir>/rollouts/<rollout id>.jsonl`.
    """
    settings = whole_epochs(settings.check_complete("rollout"))
    preflight(settings, "rollout")
    return anyio.run(_rollout, settings, backend_options={"use_uvloop": True})


async def _rollout(settings: RunSettings) -> int:
    total, samples = settings.rollout.num_rollout, 0
    with (
        open_folder(settings, "rollout") as folder,
        MetricsLogger(settings.observability, folder.path) as logger,
        Progress(settings.observability, total=total) as progress,
    ):
        if settings.observability.save_debug_rollout_data is None:
            settings = settings.replace(save_debug_rollout_data=str(folder.path))
        folder.forget_ledger()
        async with (
            launched(settings, folder, progress) as urls,
            LedgerRollouts.open(settings, folder, urls, None, kind="rollout") as rollouts,
        ):
            progress.begin("first rollout")
            for step in range(total):
                progress.phase(f"rollout {step + 1}: generating")
                groups, metrics = await rollouts.play(step)
                logger.log(step, metrics)
                progress.step(step, metrics)
                samples += sum(map(len, groups))
                if len(groups) < settings.rollout.rollout_batch_size:
                    break
    return samples
