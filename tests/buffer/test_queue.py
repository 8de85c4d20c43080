"""A source with a ledger, as the rollout loop and the driver see it."""

import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.ledger import Ledger
from agentrl.buffer.queue import GroupQueue
from agentrl.data.source import RolloutDataSource, RolloutDataSourceWithBuffer
from agentrl.errors import LedgerError
from agentrl.sample import Sample
from tests.buffer.make import finished, make_args, prompts, source_of


def queue_of(
    tmp_path: Path,
    ledger: Ledger,
    *,
    rows: int = 6,
    checkpoint: int | None = None,
    batch: int | None = None,
    **changes: object,
) -> GroupQueue:
    source = source_of(make_args(prompts(tmp_path / "p.jsonl", rows), **changes))
    return GroupQueue(source, ledger, checkpoint, batch=batch)


def numbers(groups: list[list[Sample]]) -> list[int | None]:
    return [group[0].group_index for group in groups]


def test_the_draw_is_the_sources_own(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, rollout_shuffle=True, num_epoch=2)
        leased = queue.lease(5, 0) + queue.lease(100, 1)
        args = make_args(tmp_path / "p.jsonl", rollout_shuffle=True, num_epoch=2)
        assert leased == RolloutDataSource(args).get_samples(100)
        assert len(leased) == 12
        assert queue.lease(1, 2) == []


def test_a_killed_run_gives_the_same_prompts_first(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, rollout_shuffle=True)
        before = queue.lease(4, 0)
        queue.complete(1, finished(1))
        queue.drop(2, "filtered")
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, rollout_shuffle=True)
        after = queue.lease(3, 0)
        assert after[:2] == [before[0], before[3]]
        assert after[2][0].group_index == 4
        assert queue.next_batch(1, 0) == [compact(1)]


def test_groups_that_are_too_old_are_made_again_or_dropped_with_their_tokens_counted(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger)
        for version, group in enumerate(queue.lease(1, 0) + queue.lease(1, 1) + queue.lease(2, 2)):
            queue.complete(version, [*group, *finished(version)][2:])
        assert queue.kept(0) == (Counter({0: 1, 1: 1, 2: 2}), 4 * 6)
        assert [group[0].group_index for group in queue.next_batch(1, 0)] == [0]
        assert queue.kept(1) == (Counter({1: 1, 2: 2}), 3 * 6)
        assert queue.expire(2, "too old", True) == (Counter({1: 1}), 6)
        assert queue.kept(1) == (Counter({2: 2}), 2 * 6)
        assert [group[0].group_index for group in queue.lease(1, 2)] == [1]
        assert queue.expire(3, "too old", False) == (Counter({2: 2}), 12)
        assert queue.kept(1) == (Counter(), 0)
        assert [group[0].group_index for group in queue.lease(1, 3)] == [4]
        assert [group[0].group_index for group in queue.next_batch(1, 0)] == [0], "what is fixed for a batch stays"


@pytest.mark.parametrize(("batch", "first", "second"), [(2, [0, 1], [2, 3]), (3, [0, 1, 2], [3]), (1, [0], [1])])
def test_a_resume_with_another_batch_size_assigns_the_groups_anew(
    tmp_path: Path, batch: int, first: list[int], second: list[int]
) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, batch=2)
        for group in queue.lease(4, 0):
            number = group[0].group_index or 0
            queue.complete(number, finished(number))
        for step in range(2):
            queue.trained([group[0].group_index or 0 for group in queue.next_batch(2, step)], step)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, batch=batch)
        for step, expected in enumerate((first, second)):
            assert [group[0].group_index for group in queue.next_batch(batch, step)] == expected


def test_a_resume_with_another_batch_size_generates_groups_of_later_versions_again(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, batch=2)
        for step in range(3):
            for group in queue.lease(2, step):
                queue.complete(group[0].group_index or 0, finished(group[0].group_index or 0))
            queue.trained([group[0].group_index or 0 for group in queue.next_batch(2, step)], step)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, batch=3)
        assert numbers(queue.next_batch(3, 0)) == [0, 1]
        assert numbers(queue.lease(4, 0)) == [2, 3, 4, 5]


def test_changed_data_is_refused_on_resume(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue_of(tmp_path, ledger).lease(1, 0)
    with Ledger(tmp_path / "l.sqlite") as ledger, pytest.raises(LedgerError, match="prompt_rows=6, this run has prompt_rows=7"):  # fmt: skip
        queue_of(tmp_path, ledger, rows=7)


@given(earlier=st.lists(st.integers(0, 5), unique=True), order=st.permutations(range(6)), n=st.integers(1, 6))
def test_a_batch_follows_the_ledger_wherever_the_samples_are(
    tmp_path_factory: pytest.TempPathFactory, earlier: list[int], order: list[int], n: int
) -> None:
    """Some groups were completed in an earlier life, the others in this one, in any order."""
    folder = tmp_path_factory.mktemp("queue")
    with Ledger(folder / "l.sqlite") as ledger:
        queue_of(folder, ledger).lease(6, 0)
        for group_id in earlier:
            ledger.complete(group_id, finished(group_id))
    with Ledger(folder / "l.sqlite") as ledger:
        queue = queue_of(folder, ledger)
        assert numbers(queue.next_batch(n, 0)) == earlier[:n]
        queue.lease(6 - len(earlier), 0)
        for group_id in order:
            if group_id not in earlier:
                queue.complete(group_id, finished(group_id))
        wanted = [*earlier, *(group_id for group_id in order if group_id not in earlier)][:n]
        assert queue.next_batch(n, 0) == [compact(group_id) for group_id in wanted]
        assert queue.next_batch(n, 0) == [compact(group_id) for group_id in wanted], "now all from the ledger"


def compact(group_id: int) -> list[Sample]:
    return [sample.compact() for sample in finished(group_id)]


class Watched(Sample):
    """A sample that supports weak references."""


def complete_watched(queue: GroupQueue, group_id: int) -> weakref.ref[Sample]:
    group: list[Sample] = [Watched.from_dict(sample.to_dict()) for sample in finished(group_id)]
    queue.complete(group_id, group)
    return weakref.ref(group[0])


def test_a_full_batch_is_handed_over_and_not_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger)
        queue.lease(2, 0)
        mine = complete_watched(queue, 0)
        assert queue.next_batch(2, 0)[0][0] is mine(), "not full: still in memory"
        queue.complete(1, finished(1))
        batch = queue.next_batch(2, 0)
        assert batch[0][0] is mine()
        del batch
        assert mine() is None


def test_a_dropped_group_is_in_no_batch_and_not_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger)
        queue.lease(2, 0)
        mine = complete_watched(queue, 0)
        queue.complete(1, finished(1))
        queue.drop(0, "too old")
        assert mine() is None
        assert queue.next_batch(2, 0) == [compact(1)]


def test_a_group_that_expires_is_not_kept(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger)
        queue.lease(1, 0)
        mine = complete_watched(queue, 0)
        queue.expire(1, "too old", True)
        assert mine() is None


def last_only(args: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    return buffer[-1:] if args.n_samples_per_prompt == 2 else []


@pytest.mark.parametrize("source", [None, "agentrl.data.source:RolloutDataSource"])
def test_the_filter_decides_what_waits_on(tmp_path: Path, source: str | None) -> None:
    """It is called with the run's flat `args`. Groups that it leaves keep waiting, and new prompts replace them."""
    with Ledger(tmp_path / "l.sqlite") as ledger:
        path = f"{__name__}:last_only"
        queue = queue_of(tmp_path, ledger, buffer_filter_path=path, data_source_path=source)
        queue.lease(2, 0)
        for group_id in (0, 1):
            queue.release(group_id, "stopped")
        assert numbers(queue.lease(3, 1)) == [1, 2, 3]
        assert [lease.group_id for lease in ledger.waiting()] == [0]


def test_groups_that_a_users_buffer_gives_back_finished_are_not_added_to_it_again(tmp_path: Path) -> None:
    class Replay(RolloutDataSource):
        kept: list[list[Sample]] = []

        def get_samples(self, num_groups: int) -> list[list[Sample]]:
            given, self.kept = self.kept[:num_groups], self.kept[num_groups:]
            return given or super().get_samples(num_groups)

        def add_samples(self, groups: Sequence[list[Sample]]) -> None:
            self.kept = [*self.kept, *groups]

    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(source := Replay(make_args(prompts(tmp_path / "p.jsonl", 6))), ledger)
        queue.lease(1, 0)
        queue.complete(0, finished(0))
        assert len(source.kept) == 1
        (again,) = queue.lease(1, 1)
        queue.complete(1, again)
        assert source.kept == []


class Keeps(RolloutDataSourceWithBuffer):
    """Returns each group a second time. Refuses a group once if told to."""

    refused = -1

    def add_samples(self, groups: Sequence[list[Sample]]) -> None:
        if groups[0][0].group_index == self.refused:
            raise ValueError("not now")
        super().add_samples(groups)


def test_after_a_kill_a_source_gets_the_groups_that_its_file_lacks(tmp_path: Path) -> None:
    args = make_args(prompts(tmp_path / "p.jsonl", 6))
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(Keeps(args), ledger)
        queue.lease(3, 0)
        queue.complete(1, finished(1))
        queue.complete(0, finished(0))
    for _ in range(2):  # a kill before the next save changes nothing
        with Ledger(tmp_path / "l.sqlite") as ledger:
            queue = GroupQueue(source := Keeps(args), ledger)
            assert source.buffer == [finished(1), finished(0)]
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(Keeps(args), ledger)
        unplayed, again = queue.lease(2, 0)
        assert numbers([unplayed, again]) == [2, 3]
        queue.complete(3, again)
        queue.complete(2, finished(2))
    with Ledger(tmp_path / "l.sqlite") as ledger:
        GroupQueue(source := Keeps(args), ledger)
        assert source.buffer == [finished(0), finished(2)], "group 3 was its own group 1, which it gave finished"


def test_a_group_that_the_source_did_not_take_comes_again_whatever_was_saved_since(tmp_path: Path) -> None:
    args = make_args(prompts(tmp_path / "p.jsonl", 6))
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(source := Keeps(args), ledger)
        queue.lease(2, 0)
        source.refused = 0
        with pytest.raises(ValueError, match="not now"):
            queue.complete(0, finished(0))
        queue.complete(1, finished(1))
        queue.trained([1], 0)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        GroupQueue(source := Keeps(args), ledger)
        assert source.buffer == [finished(1), finished(0)]


def test_a_source_that_changes_the_samples_that_it_gets_changes_no_batch(tmp_path: Path) -> None:
    class Resets(RolloutDataSource):
        def add_samples(self, groups: Sequence[list[Sample]]) -> None:
            for sample in (sample for group in groups for sample in group):
                sample.reward, sample.status = 100.0, Sample.Status.PENDING
                sample.set_prompt_tokens([])

    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(Resets(make_args(prompts(tmp_path / "p.jsonl", 6))), ledger)
        queue.lease(2, 0)
        queue.complete(0, finished(0))
        assert queue.next_batch(2, 0) == [compact(0)], "not full yet"
        queue.complete(1, finished(1))
        assert queue.next_batch(2, 0) == [compact(0), compact(1)]


def test_a_copy_of_the_ledger_and_of_the_sources_file_are_of_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(Keeps(make_args(prompts(tmp_path / "p.jsonl", 6))), ledger, copy=tmp_path / "copy.sqlite")

        def copies(*paths: Path) -> None:
            drawing = threading.Thread(target=queue.lease, args=(1, 0))
            drawing.start()
            drawing.join(0.1)
            assert drawing.is_alive(), "a draw saves the source, so it waits"
            waiting.append(drawing)

        waiting = list[threading.Thread]()
        monkeypatch.setattr("agentrl.buffer.queue.copy_ledger", copies)
        queue.saving()
        waiting[0].join()
