"""Learning from conversations (`agentrl sft`) and from dumps: rollouts that no engine generates.

1. A row of the prompt data is a conversation. Its ids and mask are those of `chat.demonstration`: where a rollout would
   show the model something the mask is 0, and what it would have sampled is what the template writes.
2. Data source, ledger, checkpoints and resume are those of any run, so that no conversation is trained twice.
3. A conversation that is longer than the context is left out: the ledger has it as dropped, and a metric counts it."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Self

from anyio import to_thread

from agentrl.buffer.ledger import Ledger
from agentrl.buffer.local import place_ledger
from agentrl.buffer.queue import GroupQueue
from agentrl.chat import Chat
from agentrl.config import RunSettings
from agentrl.data.source import RolloutDataSource
from agentrl.dumps import dump_path, read_groups
from agentrl.errors import DataError
from agentrl.groups import Group
from agentrl.run.conversations import demonstrated, longest
from agentrl.run.preflight import load_chat
from agentrl.run.protocols import Batch, Rollouts, WithoutEngines
from agentrl.run.rollouts import make_batch
from agentrl.runfolder import RunFolder
from agentrl.sample import Sample
from agentrl.train.hooks import hooks_of

_TOO_LONG = "too_long"


@contextmanager
def without_engines(settings: RunSettings, folder: RunFolder, resume_step: int | None) -> Iterator[Rollouts]:
    """The rollouts of a run that does not generate: those of a dump, or conversations."""
    template = settings.cluster.load_debug_rollout_data
    if template is not None:
        yield DumpedRollouts(settings, template)
        return
    with Demonstrations.open(settings, folder, resume_step) as rollouts:
        yield rollouts


class Demonstrations(WithoutEngines):
    """Batches of conversations, one a group; made by `open`."""

    def __init__(self, settings: RunSettings, chat: Chat, source: RolloutDataSource, queue: GroupQueue) -> None:
        self._settings, self._chat, self._source, self._queue = settings, chat, source, queue
        self._longest = longest(settings)
        self._left_out = 0

    @classmethod
    @contextmanager
    def open(cls, settings: RunSettings, folder: RunFolder, resume_step: int | None) -> Iterator[Self]:
        """Open the data and the ledger, which is put back to what the loaded checkpoint proves."""
        place = place_ledger(folder.ledger, settings.buffer.ledger_dir)
        with Ledger(place, keep=settings.buffer.ledger_retention) as ledger:
            source = RolloutDataSource(settings.args)
            queue = GroupQueue(source, ledger, resume_step, copy=folder.ledger)
            yield cls(settings, load_chat(settings), source, queue)

    async def next_batch(self, step: int) -> Batch | None:
        return await to_thread.run_sync(self._next_batch, step)

    def _next_batch(self, step: int) -> Batch | None:
        size, too_long = self._settings.rollout.rollout_batch_size, 0
        while len(groups := self._queue.next_batch(size, step)) < size:
            leased = self._queue.lease(size - len(groups), step)
            if not leased:
                return None
            too_long += sum(not self._completed(group) for group in leased)
        samples = [sample for group in groups for sample in group]
        metrics = {
            "data/conversations": float(len(samples)),
            "data/tokens": float(sum(len(sample.tokens) for sample in samples)),
            "data/trained_tokens": float(sum(sample.trained_tokens for sample in samples)),
            f"dropped/{_TOO_LONG}": float(too_long),
        }
        return make_batch(self._settings, groups, metrics, step)

    def _completed(self, group: Group) -> bool:
        """Turn a leased row into a sample that trains; False if it is too long. Raises DataError: the template cannot
        write it, or none of the data fits."""
        (row,) = group
        assert row.group_index is not None
        sample = self._sample(row, row.group_index)
        if len(sample.tokens) <= self._longest:
            self._queue.complete(row.group_index, [sample])
            self._left_out = 0
            return True
        self._queue.drop(row.group_index, _TOO_LONG)
        self._left_out += 1
        if self._left_out >= len(self._source):
            raise DataError(
                f"{self._settings.data.prompt_data}: none of {self._left_out} conversations in a row fits into "
                f"{self._longest} tokens, the model's context or --rollout-max-context-len; shorten them"
            )
        return False

    def _sample(self, row: Sample, group_id: int) -> Sample:
        place = self._source.place(group_id)
        assert place is not None
        where = self._source.dataset.where(place.prompt_index)
        return demonstrated(self._chat, self._settings, row, row.metadata.get("tools"), where, group_id)

    async def trained(self, group_ids: Sequence[int], step: int, details: Any = None) -> None:
        await to_thread.run_sync(self._queue.trained, group_ids, step)

    async def saving(self) -> None:
        await to_thread.run_sync(self._queue.saving)

    async def checkpointed(self, step: int) -> None:
        await to_thread.run_sync(self._queue.checkpointed, step)


class DumpedRollouts(WithoutEngines):
    """The rollouts of a dump; there is no ledger to write. `template`: `--load-debug-rollout-data`."""

    def __init__(self, settings: RunSettings, template: str) -> None:
        self._settings, self._template, self._hooks = settings, template, hooks_of(settings.args)

    async def next_batch(self, step: int) -> Batch | None:
        groups = read_groups(dump_path(self._template, step))
        if not groups:
            raise DataError(f"--load-debug-rollout-data {self._template}: rollout {step} holds no groups")
        share = self._settings.cluster.load_debug_rollout_data_subsample
        if share is not None:
            groups = groups[: max(1, round(len(groups) * share))]
        return make_batch(self._settings, groups, {}, step, self._hooks)

    async def trained(self, group_ids: Sequence[int], step: int, details: Any = None) -> None:
        pass

    async def saving(self) -> None:
        pass

    async def checkpointed(self, step: int) -> None:
        pass


_implementations: tuple[type[Rollouts], ...] = (Demonstrations, DumpedRollouts)
