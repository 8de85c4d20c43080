"""Rollouts that no engine generates: conversations (`agentrl sft`) and dumps.

1. A row of the prompt data is a conversation. `chat.demonstration` makes its ids and mask. The mask is 0 for tokens
   that a rollout would show the model. Tokens that the model would have sampled are as the template renders them.
2. Data source, ledger, checkpoints and resume are as in any run, so that no conversation is trained twice.
3. A conversation that is longer than the context is dropped: the ledger records it, and a metric counts it."""

import sys
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Self

from anyio import to_thread

from agentrl.buffer.ledger import Ledger
from agentrl.buffer.local import place_ledger
from agentrl.buffer.queue import GroupQueue
from agentrl.chat import Chat
from agentrl.config import RunSettings
from agentrl.config.model_info import read_model_info
from agentrl.data.source import RolloutDataSource
from agentrl.dumps import dump_path, read_groups
from agentrl.errors import DataError
from agentrl.groups import Group
from agentrl.run.conversations import demonstrated
from agentrl.run.preflight import load_chat
from agentrl.run.protocols import Batch, Rollouts, WithoutEngines
from agentrl.run.rollouts import make_batch
from agentrl.runfolder import RunFolder
from agentrl.train.hooks import hooks_of

_TOO_LONG = "too_long"


def without_engines(settings: RunSettings, folder: RunFolder, resume: int | None) -> AbstractContextManager[Rollouts]:
    """Return the rollouts of a run that does not generate: dumped rollouts, or conversations."""
    if (template := settings.cluster.load_debug_rollout_data) is not None:
        return nullcontext(DumpedRollouts(settings, template))
    return Demonstrations.open(settings, folder, resume)


class Demonstrations(WithoutEngines):
    """Batches of conversations; each group is one conversation. Made by `open`."""

    def __init__(self, settings: RunSettings, chat: Chat, source: RolloutDataSource, queue: GroupQueue) -> None:
        self._settings, self._chat, self._source, self._queue = settings, chat, source, queue
        model = read_model_info(settings.train.hf_checkpoint)
        known = [settings.rollout.rollout_max_context_len, model.context_length if model else None]
        self._longest = min(filter(None, known), default=sys.maxsize)
        self._left_out = 0

    @classmethod
    @contextmanager
    def open(cls, settings: RunSettings, folder: RunFolder, resume_step: int | None) -> Iterator[Self]:
        """Open the data and the ledger, and reset the ledger to the loaded checkpoint."""
        place = place_ledger(folder.ledger, settings.buffer.ledger_dir)
        with Ledger(place, keep=settings.buffer.ledger_retention) as ledger:
            source = RolloutDataSource(settings.args)
            batch = settings.rollout.rollout_batch_size
            queue = GroupQueue(source, ledger, resume_step, copy=folder.ledger, batch=batch)
            yield cls(settings, load_chat(settings), source, queue)

    async def next_batch(self, step: int) -> Batch | None:
        return await to_thread.run_sync(self._next_batch, step)

    def _next_batch(self, step: int) -> Batch | None:
        size, too_long = self._settings.rollout.rollout_batch_size, 0
        while len(groups := self._queue.next_batch(size, step)) < size:
            if not (leased := self._queue.lease(size - len(groups), step)):
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
        """Complete a leased row; return false if it is too long. Raises DataError: it is malformed, or no row fits."""
        (row,) = group
        assert row.group_index is not None
        place = self._source.place(row.group_index)
        assert place is not None
        where = self._source.dataset.where(place.prompt_index)
        tools = row.metadata.get("tools")
        sample = demonstrated(self._chat, self._settings, row, tools, where, row.group_index)
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

    async def trained(self, group_ids: Sequence[int], step: int, details: Any = None) -> None:
        await to_thread.run_sync(self._queue.trained, group_ids, step)

    async def saving(self) -> None:
        await to_thread.run_sync(self._queue.saving)

    async def checkpointed(self, step: int) -> None:
        await to_thread.run_sync(self._queue.checkpointed, step)


class DumpedRollouts(WithoutEngines):
    """The rollouts of a dump, without a ledger. `template`: `--load-debug-rollout-data`."""

    def __init__(self, settings: RunSettings, template: str) -> None:
        self._settings, self._template, self._hooks = settings, template, hooks_of(settings.args)

    async def next_batch(self, step: int) -> Batch | None:
        if not (groups := read_groups(dump_path(self._template, step))):
            raise DataError(f"--load-debug-rollout-data {self._template}: rollout {step} holds no groups")
        if (share := self._settings.cluster.load_debug_rollout_data_subsample) is not None:
            groups = groups[: max(1, round(len(groups) * share))]
        return make_batch(self._settings, groups, {}, step, self._hooks)

    async def trained(self, group_ids: Sequence[int], step: int, details: Any = None) -> None:
        pass

    async def saving(self) -> None:
        pass

    async def checkpointed(self, step: int) -> None:
        pass


_implementations: tuple[type[Rollouts], ...] = (Demonstrations, DumpedRollouts)
