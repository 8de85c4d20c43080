"""A source under a ledger: what the rollout loop and the driver see."""

from pathlib import Path

import pytest

from agentrl.buffer.ledger import Ledger
from agentrl.buffer.queue import GroupFeed
from agentrl.data.source import RolloutDataSource
from agentrl.errors import LedgerError
from tests.buffer.make import finished, make_args, prompts


def feed_of(
    tmp_path: Path, ledger: Ledger, *, rows: int = 6, checkpoint: int | None = None, **changes: object
) -> GroupFeed:
    args = make_args(prompts(tmp_path / "p.jsonl", rows), **changes)
    return GroupFeed(RolloutDataSource(args), ledger, args, checkpoint)


def test_the_draw_is_the_sources_own(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        feed = feed_of(tmp_path, ledger, rollout_shuffle=True, num_epoch=2)
        leased = feed.lease(5, 0) + feed.lease(100, 1)
        assert leased == RolloutDataSource(feed.args).get_samples(100)
        assert len(leased) == 12
        assert feed.lease(1, 2) == []


def test_a_killed_run_gives_the_same_prompts_first(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        feed = feed_of(tmp_path, ledger, rollout_shuffle=True)
        before = feed.lease(4, 0)
        feed.complete(1, finished(1))
        feed.drop(2, "filtered")
    with Ledger(tmp_path / "l.sqlite") as ledger:
        feed = feed_of(tmp_path, ledger, rollout_shuffle=True)
        assert feed.recovery.released == (0, 3)
        after = feed.lease(3, 0)
        assert after[:2] == [before[0], before[3]]
        assert after[2][0].group_index == 4
        assert feed.batch(1, 0)[0].samples == finished(1)


def test_a_partial_rollout_is_given_back_as_it_was(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        feed = feed_of(tmp_path, ledger)
        feed.lease(1, 0)
        feed.release(0, "weights changed", finished(0))
        assert feed.lease(1, 1) == [finished(0)]


def test_changed_data_is_refused_on_resume(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        feed_of(tmp_path, ledger).lease(1, 0)
    with Ledger(tmp_path / "l.sqlite") as ledger, pytest.raises(LedgerError, match="prompt_rows=6, this run has prompt_rows=7"):  # fmt: skip
        feed_of(tmp_path, ledger, rows=7)
