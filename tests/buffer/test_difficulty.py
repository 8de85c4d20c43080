"""The draw by difficulty with a real ledger: its gain, its inputs, and that it leaves out no prompt."""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from agentrl.buffer.difficulty import HALF_LIFE, IN_TURN, PROPOSALS, expected_variance
from agentrl.buffer.ledger import Ledger, State
from agentrl.buffer.queue import GroupQueue
from agentrl.errors import LedgerError
from agentrl.groups import Group, group_id
from tests.buffer.make import finished, make_args, prompts, source_of
from tests.support.nightly import nightly

Rate = Callable[[int], float]


def queue_of(folder: Path, ledger: Ledger, rows: int, checkpoint: int | None = None, **changes: object) -> GroupQueue:
    args = make_args(prompts(folder / "p.jsonl", rows), **{"prompt_order": "difficulty", **changes})
    return GroupQueue(source_of(args), ledger, checkpoint)


def drawn(ledger: Ledger) -> list[int]:
    """Return the prompt row of each group, in the order of the draws."""
    with ledger.transaction() as db:
        return [row for (row,) in db.execute("SELECT prompt_index FROM groups ORDER BY group_id")]


def row_of(group: Group) -> int:
    row: int = group[0].metadata["number"]
    return row


def rewards_of(group: Group, rate: Rate) -> list[float]:
    """Return rewards of a group of 8, which do not depend on the run or the time."""
    chance = random.Random(group_id(group))
    return [float(chance.random() < rate(row_of(group))) for _ in range(8)]


def play(queue: GroupQueue, version: int, groups: int, rate: Rate) -> list[int]:
    """Draw groups under `version`, play and drop them (dropping writes less than keeping). Returns their rows."""
    leased = queue.lease(groups, version)
    for group in leased:
        queue.drop(group_id(group), "played", rewards=rewards_of(group, rate))
    return [row_of(group) for group in leased]


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def drawn_with_known_rates(variances: Sequence[float], draws: int, batch: int) -> list[int]:
    """Draw by the true p(1 - p), with the same turns and without the prompts already drawn under a version."""
    chance, n, rows = random.Random(0), len(variances), list[int]()
    while len(rows) < draws:
        taken = set(rows[len(rows) // batch * batch :])
        proposed = [row for _ in range(PROPOSALS) if (row := chance.randrange(n)) not in taken]
        in_turn = len(rows) % IN_TURN == 0
        rows.append(len(rows) // IN_TURN % n if in_turn else max(proposed, key=variances.__getitem__))
    return rows


@pytest.mark.parametrize("seed", nightly(range(3), 1))
def test_it_gains_four_fifths_of_what_known_rates_gain(tmp_path: Path, seed: int) -> None:
    """Success rates are from Beta(.3, .3), groups of 8, five draws a prompt, exploration included. The gain is that of
    the mean p(1 - p) of the drawn prompts over uniform sampling."""
    n, batch, chance = 200, 8, random.Random(seed)
    rates = [chance.betavariate(0.3, 0.3) for _ in range(n)]
    variances = [rate * (1 - rate) for rate in rates]
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, n, rollout_seed=seed)
        rows = [row for v in range(5 * n // batch) for row in play(queue, v, batch, rates.__getitem__)]
        assert queue.figures()["prompts/seen"] == 1
    uniform = mean(variances)
    known = mean([variances[row] for row in drawn_with_known_rates(variances, len(rows), batch)])
    proportional = sum(v * v for v in variances) / sum(variances)
    gain = mean([variances[row] for row in rows]) - uniform
    assert gain >= 0.8 * (known - uniform)
    assert gain >= 0.8 * (proportional - uniform), "a sampler in proportion to p(1 - p), without turns"


@pytest.mark.parametrize("shuffle", [False, True])
def test_each_prompt_is_drawn_within_the_bound_whatever_its_results(tmp_path: Path, shuffle: bool) -> None:
    n = 12
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, n, rollout_shuffle=shuffle)
        rows = [row for v in range(9 * IN_TURN) for row in play(queue, v, 4, lambda row: 0.5 * (row < 4))]
    bound = IN_TURN * n
    for first in range(0, len(rows), bound):
        assert set(rows[first : first + bound]) == set(range(n))
    counts = Counter(rows)
    assert min(counts[row] for row in range(4)) > max(counts[row] for row in range(4, n))


def test_an_epoch_is_as_many_draws_as_there_are_prompts(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, 7, num_epoch=2)
        assert [len(play(queue, version, 5, lambda row: 0.5)) for version in range(4)] == [5, 5, 4, 0]
        with ledger.transaction() as db:
            assert [epoch for (epoch,) in db.execute("SELECT epoch FROM groups")] == [0] * 7 + [1] * 7


def test_a_prompt_is_not_drawn_again_before_its_group_is_trained(tmp_path: Path) -> None:
    """Groups in flight or finished and not yet trained, of this version or of an earlier one (staleness)."""
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, 400)
        rows: list[int] = []
        for version in range(4):
            for group in queue.lease(8, version):
                if group_id(group) % 2:
                    queue.complete(group_id(group), finished(group_id(group)), rewards=(0.0, 1.0))
                if group_id(group) % IN_TURN:
                    assert row_of(group) not in rows
                rows.append(row_of(group))


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_draw_depends_on_no_result_of_its_own_version_and_on_no_order_of_results(
    tmp_path: Path, one_by_one: bool
) -> None:
    """A rollout draws the same prompts, in whatever order its groups end."""
    with Ledger(tmp_path / "a.sqlite") as first, Ledger(tmp_path / "b.sqlite") as second:
        queues = [queue_of(tmp_path, ledger, 60) for ledger in (first, second)]
        for version in range(6):
            play(queues[0], version, 10, lambda row: row / 60)
            if one_by_one:
                for _ in range(10):
                    play(queues[1], version, 1, lambda row: row / 60)
            else:
                for group in reversed(queues[1].lease(10, version)):
                    queues[1].drop(group_id(group), "played", rewards=rewards_of(group, lambda row: row / 60))
        assert drawn(first) == drawn(second)


def life(folder: Path, steps: int, end: int | None = None) -> None:
    """Resume a run with a checkpoint at every second step, until `end` results are recorded (a kill)."""
    saved = folder / "checkpoint"
    checkpoint = int(saved.read_text()) if saved.exists() else None
    with Ledger(folder / "l.sqlite") as ledger:
        queue, recorded = queue_of(folder, ledger, 40, checkpoint), 0
        for step in range(0 if checkpoint is None else checkpoint + 1, steps):
            while len(groups := queue.next_batch(4, step)) < 4:
                for group in queue.lease(4 - len(groups), step):
                    if recorded == end:
                        return
                    recorded += 1
                    rewards, number = rewards_of(group, lambda row: row / 40), group_id(group)
                    if len(set(rewards)) == 1:
                        queue.drop(number, "equal rewards", rewards=rewards)
                    else:
                        queue.complete(number, finished(number), rewards=rewards)
            queue.trained(map(group_id, groups), step)
            if step % 2:
                saved.write_text(str(step))
                queue.checkpointed(step)


@pytest.mark.parametrize("kills", [(1,), (7, 2), (10, 9, 9), (25,)])
def test_a_killed_run_draws_what_an_unbroken_run_draws_and_trains_each_group_once(
    tmp_path: Path, kills: tuple[int, ...]
) -> None:
    for name in ("unbroken", "killed"):
        (tmp_path / name).mkdir()
    for end in kills:
        life(tmp_path / "killed", 8, end)
    found = []
    for name in ("unbroken", "killed"):
        life(tmp_path / name, 8)
        with Ledger(tmp_path / name / "l.sqlite") as ledger, ledger.transaction() as db:
            trained = "SELECT group_id, prompt_index, train_step FROM groups WHERE state='trained' ORDER BY group_id"
            rows = db.execute("SELECT group_id, prompt_index, state FROM groups ORDER BY group_id").fetchall()
            found.append((rows, db.execute(trained).fetchall()))
    assert found[0] == found[1]
    assert len(found[0][1]) == 8 * 4


def share_of(queue: GroupQueue, version: int, wanted: Callable[[int], bool]) -> float:
    """Return the share of `wanted` rows among groups that are drawn by difficulty, not in turn."""
    leased = [group for group in queue.lease(30, version) if group_id(group) % IN_TURN]
    return mean([wanted(row_of(group)) for group in leased])


def test_new_prompts_come_before_solved_ones_and_after_those_of_middle_difficulty(tmp_path: Path) -> None:
    """Rows below 300 have results: those below 100 have middle difficulty, the others are solved."""
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, 600)
        record(ledger, version=0, results={row: (4 if row < 100 else 8) for row in range(300)})
        assert share_of(queue, 1, lambda row: row < 100) > 0.9
        record(ledger, version=0, results={row: 0 for row in range(100)})
        assert share_of(queue, 2, lambda row: row >= 300) == 1


def test_old_results_count_less(tmp_path: Path) -> None:
    """All prompts are solved; the odd rows have old results and are tried again."""
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue, now = queue_of(tmp_path, ledger, 200), 5 * HALF_LIFE
        record(ledger, version=0, results={row: 8 for row in range(1, 200, 2)})
        record(ledger, version=now - 1, results={row: 8 for row in range(0, 200, 2)})
        assert share_of(queue, now, lambda row: row % 2 == 1) == 1


def record(ledger: Ledger, version: int, results: dict[int, int]) -> None:
    """Write results of one group of 8 for each row, with this many successes."""
    with ledger.transaction() as db:
        values = [(row, 10_000 + row, version, successes) for row, successes in results.items()]
        db.executemany("INSERT OR REPLACE INTO results VALUES (?, ?, ?, ?, 8)", values)


@pytest.mark.parametrize(("a", "b", "want"), [(1, 1, 1 / 6), (5, 5, 5 * 5 / (10 * 11)), (9, 1, 9 / 110)])
def test_the_expected_variance_is_that_of_a_beta_distribution(a: float, b: float, want: float) -> None:
    assert expected_variance(a, b) == pytest.approx(want)
    chance = random.Random(0)
    sampled = [p * (1 - p) for p in (chance.betavariate(a, b) for _ in range(4000))]
    assert expected_variance(a, b) == pytest.approx(mean(sampled), abs=0.01)


def test_the_metrics_are_of_draws_and_groups_since_the_last_call(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, 20)
        assert queue.figures() == {"prompts/seen": 0}
        first, second, third, fourth = queue.lease(4, 0)
        assert queue.figures() == {"prompts/seen": 0, "prompts/estimated_success": 0.5}
        queue.complete(group_id(first), finished(0), rewards=(0.0, 1.0))
        queue.complete(group_id(second), finished(1), rewards=(0.25, 0.25))
        queue.drop(group_id(third), "failed")  # its rewards are not known
        queue.release(group_id(fourth), "stopped")
        assert queue.figures() == {"prompts/seen": 0.1, "prompts/equal_rewards": 0.5}
        assert ledger.results([row_of(first), row_of(second)]) == sorted(
            [(row_of(first), 0, 1, 2), (row_of(second), 0, 0, 2)]
        )
        (fifth, *_) = queue.lease(16, 1)
        queue.drop(group_id(fifth), "filtered", rewards=(1.0, 1.0))
        found = queue.figures()
        assert "prompts/estimated_success" in found
        assert found["prompts/equal_rewards"] == 1
    with Ledger(tmp_path / "l.sqlite") as ledger, pytest.raises(LedgerError, match="prompt_order"):
        queue_of(tmp_path, ledger, 20, prompt_order="passes", rollout_shuffle=False)


def test_a_group_that_is_generated_again_has_its_last_result(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, 20)
        (group,) = queue.lease(1, 0)
        queue.complete(0, finished(0), rewards=(0.0, 0.0))
        queue.expire(3, "too old", True)
        assert ledger.counts()[State.WAITING] == 1
        (again,) = queue.lease(1, 3)
        assert row_of(again) == row_of(group)
        queue.complete(0, finished(0), rewards=(1.0, 0.0))
        assert ledger.results([row_of(group)]) == [(row_of(group), 3, 1, 2)]


def test_a_ledger_of_an_earlier_program_goes_on_without_results(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue_of(tmp_path, ledger, 20, prompt_order="passes").lease(4, 0)
        with ledger.transaction() as db:
            db.execute("DROP TABLE results")
            db.execute("DELETE FROM meta WHERE key='identity.prompt_order'")
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, 20, prompt_order="passes")
        assert [group_id(group) for group in queue.lease(5, 0)] == [0, 1, 2, 3, 4]
        assert queue.figures() == {}


def test_small_data_gives_every_group_that_is_asked_for(tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = queue_of(tmp_path, ledger, 3)
        assert set(map(row_of, queue.lease(8, 0))) == {0, 1, 2}
