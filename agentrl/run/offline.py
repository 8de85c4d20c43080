"""Generating without a trainer: `agentrl rollout` and `agentrl eval`. Engines are started here; Ray is not needed."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
from anyio import to_thread

from agentrl.buffer.sqlite import read_meta
from agentrl.config import RunSettings
from agentrl.groups import group_id
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.progress import Progress, counted
from agentrl.run.driver import open_folder
from agentrl.run.engines import launched, launched_groups
from agentrl.run.preflight import prepared
from agentrl.run.recorded import RecordedConversations
from agentrl.run.resuming import evaluations_in
from agentrl.run.rollouts import LedgerRollouts, OpenWorkers, RolloutResources, spare_loaded
from agentrl.runfolder import BELOW, DEMONSTRATIONS, LEDGER


def evaluate(settings: RunSettings, workers: OpenWorkers | None = None) -> Mapping[str, float]:
    """Evaluate the model of `hf_checkpoint` on all evaluation sets; returns `eval/<set>/<metric>` values. Trajectories
    and figures are added to `trajectories.sqlite` and `evaluations.jsonl` in `<output_dir>/evaluation`. `workers`: starts
    workers in other processes; None plays in this one."""
    settings, notes = prepared(settings, "eval")
    return anyio.run(_evaluate, settings, notes, workers, backend_options={"use_uvloop": True})


async def _evaluate(settings: RunSettings, notes: Sequence[str], workers: OpenWorkers | None) -> Mapping[str, float]:
    with open_folder(settings, "eval") as folder, Progress(settings.observability, total=1) as progress:
        for note in notes:
            progress.note(note)
        async with (
            launched(settings, folder, progress) as urls,
            launched_groups(settings, folder) as settings,
            RolloutResources.open(settings, folder, urls, workers=workers) as generation,
        ):
            progress.begin("evaluating")
            whose = settings.engine.hosted_name or settings.train.hf_checkpoint
            return await generation.evaluate(evaluations_in(folder.path), whose)


def rollout(settings: RunSettings, workers: OpenWorkers | None = None) -> int:
    """Generate rollouts until there are `num_rollout`, and dump them; returns the number of samples that were made. The
    samples go to `save_debug_rollout_data`, or `<output_dir>/rollouts/<rollout id>.jsonl`. A second call goes on from
    what is there. Raises SettingsError: what is there was made with other settings."""
    settings, notes = prepared(settings, "rollout")
    folder = Path(settings.observability.output_dir).expanduser() / BELOW["rollout"]
    first = int(read_meta(folder / LEDGER).get("checkpoint", -1)) + 1
    return anyio.run(_rollout, settings, first, notes, workers, backend_options={"use_uvloop": True})


async def _rollout(settings: RunSettings, first: int, notes: Sequence[str], workers: OpenWorkers | None) -> int:
    total, samples = settings.rollout.num_rollout, 0
    with (
        open_folder(settings, "rollout") as folder,
        MetricsLogger(settings.observability, folder.path, resume_step=first) as logger,
        Progress(settings.observability, total=total) as progress,
    ):
        progress.resume(first)
        for note in notes:
            progress.note(note)
        if first >= total:
            said = f"{folder.path} holds {counted(first, 'rollout')}, and --num-rollout is {total}: nothing left to do"
            progress.note(f"{said}; to go on from there give a larger one, to begin anew another --output-dir")
            return 0
        if settings.observability.save_debug_rollout_data is None:
            settings = settings.replace(save_debug_rollout_data=str(folder.path))
        key, least, recorded = settings.rollout.reward_key, settings.rollout.demonstration_min_reward, None
        if settings.hosted:
            recorded = RecordedConversations(folder.path / DEMONSTRATIONS, first, key, least)
        resume = first - 1 if first else None
        async with (
            launched(settings, folder, progress) as urls,
            launched_groups(settings, folder) as settings,
            LedgerRollouts.open(settings, folder, urls, resume, kind="rollout", workers=workers) as rollouts,
        ):
            spare_loaded()
            progress.begin("first rollout")
            for step in range(first, total):
                progress.phase(f"rollout {step + 1}: generating")
                groups, metrics, full = await rollouts.play(step)
                if not groups:
                    progress.note(f"the data has ended after {counted(step, 'rollout')}")
                    break
                logger.log(step, metrics)
                progress.step(step, metrics)
                samples += sum(map(len, groups))
                if recorded is not None:
                    await to_thread.run_sync(recorded.add, step, groups)
                await rollouts.trained([group_id(group) for group in groups], step)
                await rollouts.checkpointed(step)
                await rollouts.saving()  # the ledger is the only record of these rollouts
                if not full:
                    break
    return samples
