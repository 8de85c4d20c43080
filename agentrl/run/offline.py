"""Generating without a trainer: `agentrl rollout` and `agentrl eval`. Engines are started here; Ray is not needed."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
import orjson
from anyio import to_thread

from agentrl.clock import freeze_loaded_objects
from agentrl.config import RunSettings
from agentrl.engine.hosted import image_or_text
from agentrl.errors import DataError, raised_as
from agentrl.files import write_atomic
from agentrl.groups import Group, group_id
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.progress import Progress, counted
from agentrl.rowfiles import dump_json
from agentrl.run.driver import open_folder
from agentrl.run.engines import launched, launched_groups
from agentrl.run.preflight import prepared
from agentrl.run.protocols import EVALUATES
from agentrl.run.resuming import covered, evaluations_in
from agentrl.run.rollouts import LedgerRollouts, OpenWorkers, RolloutResources
from agentrl.run.signals import stopped_by_sigterm
from agentrl.runfolder import DEMONSTRATIONS
from agentrl.sample import Sample, Status


@stopped_by_sigterm()
def evaluate(settings: RunSettings, workers: OpenWorkers | None = None) -> Mapping[str, float]:
    """Evaluate the model of `hf_checkpoint` on all evaluation sets; returns `eval/<set>/<metric>` values. Trajectories
    and metrics go to `trajectories.sqlite` and `evaluations.jsonl` in `<output_dir>/evaluation`. `workers`: starts
    workers in other processes; None: one worker in this process."""
    settings, notes = prepared(settings, "eval")
    return anyio.run(_evaluate, settings, notes, workers, backend_options={"use_uvloop": True})


def _without_eval_group(settings: RunSettings, notes: Sequence[str]) -> tuple[RunSettings, Sequence[str]]:
    """Return the settings without the engines that evaluate during training, and the notes."""
    if EVALUATES not in (groups := settings.engine.engine_groups):
        return settings, notes
    others = {name: said for name, said in groups.items() if name != EVALUATES}
    note = "--engine-groups eval is left out: those engines are for evaluations during training"
    return settings.replace(engine_groups=others, eval_while_training=False), [*notes, note]


async def _evaluate(settings: RunSettings, notes: Sequence[str], workers: OpenWorkers | None) -> Mapping[str, float]:
    settings, notes = _without_eval_group(settings, notes)
    with open_folder(settings, "eval") as folder, Progress(settings.observability, total=1) as progress:
        progress.note(*notes)
        async with (
            launched(settings, folder, progress) as urls,
            launched_groups(settings, folder) as settings,
            RolloutResources.open(settings, folder, urls, workers=workers) as generation,
        ):
            progress.begin("evaluating")
            whose = settings.engine.hosted_name or settings.train.hf_checkpoint
            return await generation.evaluate(evaluations_in(folder.path), whose)


@stopped_by_sigterm()
def rollout(settings: RunSettings, workers: OpenWorkers | None = None) -> int:
    """Generate rollouts until there are `num_rollout`, and dump them; returns the number of new samples. The samples go
    to `save_debug_rollout_data`, or `<output_dir>/rollouts/<rollout id>.jsonl`. A second call continues after the
    existing rollouts. Raises SettingsError: the existing rollouts were made with other settings."""
    settings, notes = prepared(settings, "rollout")
    first = covered(settings, "rollout")
    return anyio.run(_rollout, settings, first, notes, workers, backend_options={"use_uvloop": True})


async def _rollout(settings: RunSettings, first: int, notes: Sequence[str], workers: OpenWorkers | None) -> int:
    total, samples = settings.rollout.num_rollout, 0
    settings, notes = _without_eval_group(settings, notes)
    with (
        open_folder(settings, "rollout") as folder,
        MetricsLogger(settings.observability, folder.path, resume_step=first) as logger,
        Progress(settings.observability, total=total) as progress,
    ):
        progress.resume(first)
        progress.note(*notes)
        if first >= total:
            said = f"{folder.path} holds {counted(first, 'rollout')}, and --num-rollout is {total}: nothing left to do"
            progress.note(f"{said}; to go on from there give a larger one, to begin anew another --output-dir")
            return 0
        dumps = settings.observability.save_debug_rollout_data or str(folder.path)
        settings = settings.replace(save_debug_rollout_data=dumps, save=str(folder.checkpoints))
        key, least, recorded = settings.rollout.reward_key, settings.rollout.demonstration_min_reward, None
        if settings.hosted:
            recorded = RecordedConversations(folder.path / DEMONSTRATIONS, first, key, least)
        resume = first - 1 if first else None
        async with (
            launched(settings, folder, progress) as urls,
            launched_groups(settings, folder) as settings,
            LedgerRollouts.open(settings, folder, urls, resume, kind="rollout", workers=workers) as rollouts,
        ):
            freeze_loaded_objects()
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


class RecordedConversations:
    """Conversations with a hosted model, as `agentrl sft` reads them. A row has `messages` up to the assistant's last one,
    `tools` if there were any, `reward`, and its origin: `rollout`, `group_index`, `index`. Failed or truncated
    trajectories are left out. Rows of rollout `first` and later are removed from the file at `path`: these rollouts are
    generated again. `reward_key` picks from dict rewards; only rewards of at least `least` are kept."""

    def __init__(self, path: Path, first: int, reward_key: str | None = None, least: float | None = None) -> None:
        self._path, self._key, self._least = path, reward_key, least
        lines = path.read_bytes().splitlines(keepends=True) if path.is_file() else []
        # A killed run may have left a partial last line.
        with raised_as(DataError, f"{path} cannot be read", ValueError, AttributeError, TypeError):
            kept = [line for line in lines if line.endswith(b"\n") and orjson.loads(line).get("rollout", -1) < first]
        write_atomic(path, b"".join(kept))

    def add(self, step: int, groups: Sequence[Group]) -> None:
        """Append the conversations of a rollout."""
        samples = (sample for group in groups for sample in group)
        rows = [{**row, "rollout": step} for sample in samples for row in self._rows(sample)]
        with self._path.open("ab") as file:
            file.write(b"".join(dump_json(row) + b"\n" for row in rows))

    def _rows(self, sample: Sample) -> Iterator[dict[str, Any]]:
        if sample.status is not Status.COMPLETED or sample.remove_sample:
            return
        reward, messages = sample.get_reward_value(self._key), sample.metadata["messages"]
        if self._least is not None and reward < self._least:
            return
        last = max(at for at, message in enumerate(messages) if message["role"] == "assistant")
        tools = {"tools": tools} if (tools := sample.metadata.get("tools")) else {}
        about = {"reward": reward, "group_index": sample.group_index, "index": sample.index}
        shown = [
            {**m, "content": [image_or_text(part, sample.images) for part in content]}
            if isinstance(content := m["content"], list)
            else m
            for m in messages[: last + 1]
        ]
        yield {"messages": shown, **tools, **about}
