"""The ledger's messages, its lock, its resumes and its audit, one case each."""

import os
import sqlite3
import subprocess
import threading
from contextlib import closing
from pathlib import Path

import pytest

from agentrl.buffer.ledger import Ledger, LedgerLease, State
from agentrl.data.order import DataPosition
from agentrl.errors import LedgerError, SampleError
from agentrl.sample import Sample
from tests.buffer.make import complete, finished, lease, recovered, until
from tests.support.audit import audit_ledger
from tests.support.ledgers import reading
from tests.support.warm import python


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "ledger.sqlite"


def train_step(ledger: Ledger, step: int, n: int = 2) -> list[int]:
    """Run one whole step: lease, generate, train."""
    complete(ledger, n - len(ledger.assign_batch(n, step)), step)
    ids = ledger.assign_batch(n, step)
    ledger.mark_trained(ids, step)
    return ids


def test_samples_come_back_equal(path: Path) -> None:
    with Ledger(path) as ledger:
        assert complete(ledger, 1, 4) == [0]
        assert ledger.samples(0) == finished(0)
        lease(ledger, 1, 4)
        with pytest.raises(LedgerError, match="keeps no samples of group 1"):
            ledger.samples(1)


def test_a_batch_is_fixed_once(path: Path) -> None:
    with Ledger(path) as ledger:
        complete(ledger, 3, 0)
        assert ledger.assign_batch(2, 0) == [0, 1]
        assert ledger.assign_batch(2, 0) == [0, 1]
        assert ledger.assign_batch(2, 1) == [2]
        assert ledger.assign_batch(3, 0) == [0, 1]
        with pytest.raises(LedgerError, match="group 2 is assigned to training step 1, not 0"):
            ledger.mark_trained([0, 1, 2], 0)
        assert ledger.counts()[State.TRAINED] == 0, "all or none"


def test_a_batch_is_of_the_oldest_steps_in_the_order_of_completion(path: Path) -> None:
    with Ledger(path) as ledger:
        lease(ledger, 3, 0)
        lease(ledger, 2, 1)
        for group_id in (4, 2, 3, 0):
            ledger.complete(group_id, finished(group_id))
        assert ledger.assign_batch(3, 1) == [2, 0, 4], (
            "step 0 before step 1, and in each the first to be completed first"
        )
        ledger.complete(1, finished(1))
        assert ledger.assign_batch(5, 1) == [2, 0, 1, 4, 3], (
            "a late group of an old step comes before those of newer steps"
        )


def test_illegal_moves_say_what_is_allowed(path: Path) -> None:
    with Ledger(path) as ledger:
        ids = train_step(ledger, 0)
        with pytest.raises(LedgerError, match="group 0 is trained and cannot become trained"):
            ledger.mark_trained(ids, 0)
        lease(ledger, 1, 1)
        ledger.drop(2, "all rewards equal")
        with pytest.raises(LedgerError, match=r"group 2 is dropped \(all rewards equal\) and cannot become trained"):
            ledger.mark_trained([2], 1)
        with pytest.raises(LedgerError, match="group 9 does not exist"):
            ledger.drop(9, "unknown")
        lease(ledger, 1, 1)
        with pytest.raises(LedgerError, match="group 3 is leased and cannot become trained; it may become completed"):
            ledger.mark_trained([3], 1)
        with pytest.raises(LedgerError, match="completed with no samples"):
            ledger.complete(3, [])
        with pytest.raises(LedgerError, match="group 3 is leased and cannot become leased"):
            ledger.lease_waiting(1, 1, choose=[3])
        ledger.complete(3, finished(3))
        with pytest.raises(LedgerError, match="cannot become trained"):
            ledger.mark_trained([3, 3], 1)
        assert ledger.counts()[State.COMPLETED] == 1


def test_a_step_under_a_checkpoint_is_not_trained_again(path: Path) -> None:
    with Ledger(path) as ledger:
        train_step(ledger, 0)
        ledger.checkpointed(0)
        lease(ledger, 1, 0)
        ledger.complete(2, finished(2))
        with pytest.raises(LedgerError, match="the checkpoint of step 0 already covers it"):
            ledger.mark_trained([2], 0)


def test_a_dropped_group_is_replaced_by_the_next_prompt(path: Path) -> None:
    with Ledger(path) as ledger:
        lease(ledger, 2, 0)
        ledger.drop(0, "no reward spread")
        assert lease(ledger, 1, 0) == [2]
        assert ledger.counts() == {**dict.fromkeys(State, 0), State.LEASED: 2, State.DROPPED: 1}
        assert audit_ledger(path).dropped_for == {"no reward spread": 1}


def stored(path: Path) -> tuple[int, int]:
    """Return the groups with stored samples, and the groups with stored samples to start from."""
    with sqlite3.connect(path) as db:
        (samples, starts) = db.execute(
            "SELECT (SELECT count(*) FROM payloads), (SELECT count(*) FROM starts)"
        ).fetchone()
    return samples, starts


def test_what_is_dropped_leaves_nothing_stored(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.lease_given([finished(0), finished(1)], 0)
        ledger.complete(0, finished(0))
        assert stored(path) == (1, 2)
        ledger.drop(0, "too old")
        assert stored(path) == (0, 1)
        ledger.drop(1, "failed")
        assert stored(path) == (0, 0)


def test_a_dropped_group_is_of_no_training_step(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.lease_given([finished(0)], 0)
        ledger.complete(0, finished(0))
        assert ledger.assign_batch(1, 5) == [0]
        ledger.drop(0, "failed")
    with Ledger(path) as again, pytest.raises(LedgerError, match="knows steps up to -1"):
        again.recover(5)


def test_released_groups_come_first(path: Path) -> None:
    with Ledger(path) as ledger:
        lease(ledger, 2, 0)
        ledger.release(1, "weights changed")
        ledger.release(0, "engine lost")
        kept = [LedgerLease(0, DataPosition(0, 0), None), LedgerLease(1, DataPosition(0, 1), None)]
        assert ledger.waiting() == kept
        assert ledger.lease_waiting(3, 1) == kept
        assert lease(ledger, 3, 1) == [2, 3, 4]


def test_given_groups_are_kept_to_start_from(path: Path) -> None:
    with Ledger(path) as ledger:
        given = ledger.lease_given([finished(0)], 0)
        assert given == [LedgerLease(0, None, finished(0))]
    with Ledger(path) as ledger:
        ledger.recover(None)
        assert ledger.lease_waiting(1, 0) == given


def test_the_data_comes_to_an_end(path: Path) -> None:
    with Ledger(path) as ledger:
        leases = ledger.lease_new(5, 0, lambda position: DataPosition(0, 9 - position) if position < 3 else None)
        assert [leased.place for leased in leases] == [(0, 9), (0, 8), (0, 7)]


def test_resume_trains_the_same_samples_at_the_same_steps(path: Path) -> None:
    with Ledger(path) as ledger:
        batches = [train_step(ledger, step) for step in range(4)]
        lease(ledger, 2, 4)
        ledger.checkpointed(1)
    with Ledger(path) as ledger:
        assert recovered(ledger, 1) == {"after the checkpoint": [4, 5, 6, 7], "the run stopped": [8, 9]}
        assert [ledger.assign_batch(2, step) for step in (2, 3)] == batches[2:]
        assert [train_step(ledger, step) for step in (2, 3, 4)] == [*batches[2:], [8, 9]]
        report = audit_ledger(path, through_step=4, groups_per_step=2)
        assert report.ok, report.problems
        assert (report.undone, report.recoveries) == (4, 1)


def test_a_late_group_does_not_change_a_batch_that_is_trained_again(path: Path) -> None:
    with Ledger(path) as ledger:
        lease(ledger, 1, 0)
        assert train_step(ledger, 0) == [1, 2]
        assert train_step(ledger, 1) == [3, 4]
        ledger.complete(0, finished(0))
        ledger.checkpointed(0)
    with Ledger(path) as ledger:
        assert recovered(ledger, 0) == {"after the checkpoint": [3, 4]}, "only what the checkpoint covers was pruned"
        assert train_step(ledger, 1) == [3, 4]
        assert train_step(ledger, 2) == [0, 5]


def test_resume_from_an_older_checkpoint_makes_pruned_groups_again(path: Path) -> None:
    with Ledger(path) as ledger:
        for step in range(3):
            train_step(ledger, step)
        ledger.checkpointed(1)
    with Ledger(path) as ledger:
        ledger.recover(0)
        assert [leased.group_id for leased in ledger.waiting()] == [2, 3, 4, 5]
        assert train_step(ledger, 1) == [2, 3], "the same prompts, made anew"
        assert train_step(ledger, 2) == [4, 5]
        assert audit_ledger(path, through_step=2, groups_per_step=2).ok


def test_finished_groups_that_the_remade_steps_did_not_change_are_kept(path: Path) -> None:
    """Step 1 is trained again: the weights before it equal those of the first life, the weights after it do not."""
    with Ledger(path) as ledger:
        for step in range(2):
            train_step(ledger, step)
        assert [*complete(ledger, 1, 1), *complete(ledger, 1, 2)] == [4, 5]
        ledger.checkpointed(1)
    with Ledger(path) as ledger:
        assert recovered(ledger, 0) == {"samples pruned": [2, 3], "weights of an earlier process": [5]}
        assert ledger.samples(4) == finished(4)
        assert train_step(ledger, 1) == [4, 2], "the finished group first, and one of the two prompts made anew"


@pytest.mark.parametrize(("reason", "sound"), [("too old", True), ("not needed", False)])
def test_a_finished_group_is_made_again_only_for_its_age(path: Path, reason: str, sound: bool) -> None:
    with Ledger(path) as ledger:
        complete(ledger, 1, 0)
        ledger.expire(1, reason, again=True)
    report = audit_ledger(path)
    assert (report.ok, report.too_old) == (sound, int(sound)), report.problems


@pytest.mark.parametrize(("allowed", "sound"), [(2, True), (1, False), (None, True)])
def test_the_audit_sees_a_group_trained_too_late(path: Path, allowed: int | None, sound: bool) -> None:
    with Ledger(path) as ledger:
        complete(ledger, 1, 0)
        for step in range(2):
            ledger.mark_trained(complete(ledger, 1, step)[-1:], step)
        ledger.mark_trained([0], 2)
    assert audit_ledger(path, max_staleness=allowed).ok is sound


def test_a_group_made_again_is_trained_when_it_is_wanted(path: Path) -> None:
    with Ledger(path) as ledger:
        for step in range(3):
            train_step(ledger, step)
        ledger.checkpointed(2)
    with Ledger(path) as ledger:
        ledger.recover(0)
        assert [leased.group_id for leased in ledger.waiting()] == [2, 3, 4, 5]
        lease(ledger, 2, 1)
        ledger.drop(2, "filtered this time")
        ledger.complete(3, finished(3))
        assert complete(ledger, 1, 1) == [4], "of step 2 in the life before"
        assert train_step(ledger, 1) == [3, 4]
        assert train_step(ledger, 2) == [5, 6]


def test_a_checkpoint_proves_a_step_that_the_ledger_could_not_record(path: Path) -> None:
    with Ledger(path) as ledger:
        train_step(ledger, 0)
        complete(ledger, 2, 1)
        ledger.assign_batch(2, 1)  # trained, checkpoint of step 1 written, killed before mark_trained
    with Ledger(path) as ledger:
        assert recovered(ledger, 1) == {"the checkpoint": [2, 3]}
        assert audit_ledger(path, through_step=1, groups_per_step=2).ok


def test_another_runs_checkpoint_is_refused(path: Path) -> None:
    with Ledger(path) as ledger:
        train_step(ledger, 0)
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="checkpoint is of step 7 but .* knows steps up to 0"):
        ledger.recover(7)


def test_a_branch_that_was_killed_before_its_first_batch_goes_on(path: Path) -> None:
    """Its checkpoint is another run's; its own ledger has no step yet."""
    for reason in ({}, {"the run stopped": [0, 1]}):
        with Ledger(path) as ledger:
            assert recovered(ledger, 4) == reason
            assert lease(ledger, 2, 5) == [0, 1]
    with Ledger(path) as ledger, pytest.raises(LedgerError, match="checkpoint is of step 5 but .* up to 4 only"):
        ledger.recover(5)


def test_other_data_is_refused(path: Path) -> None:
    with Ledger(path) as ledger:
        ledger.bind({"prompt_rows": 10, "rollout_seed": 1})
        ledger.bind({"prompt_rows": 10, "rollout_seed": 1})
        with pytest.raises(LedgerError, match="made with prompt_rows=10, this run has prompt_rows=11"):
            ledger.bind({"prompt_rows": 11})


def test_pruned_samples_free_their_space_and_keep_always_does_not(tmp_path: Path) -> None:
    for keep, left in (("until_checkpoint", 0), ("always", 2)):
        file = tmp_path / keep / "ledger.sqlite"
        with Ledger(file, keep=keep) as ledger:  # type: ignore[arg-type]
            train_step(ledger, 0)
            ledger.checkpointed(0)
        assert stored(file) == (left, 0)


def test_a_second_writer_is_refused_and_a_reader_is_not(path: Path) -> None:
    with Ledger(path) as ledger:
        lease(ledger, 1, 0)
        with pytest.raises(LedgerError, match=rf"in use by another writer \(process {os.getpid()}\)"):
            Ledger(path)
        code = "import sys; from agentrl.buffer.ledger import Ledger; Ledger(sys.argv[1])"
        other = subprocess.run([python(), "-c", code, str(path)], capture_output=True, text=True, timeout=600)
        assert "in use by another writer" in other.stderr
        assert audit_ledger(path).groups == 1
    Ledger(path).close()


def test_a_closed_ledger_says_so(path: Path) -> None:
    ledger = Ledger(path)
    ledger.close()
    ledger.close()
    with pytest.raises(LedgerError, match="it was closed"):
        lease(ledger, 1, 0)


def test_files_that_are_no_ledger(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("not a database, only text" * 100)
    with pytest.raises(LedgerError, match="not a ledger or is damaged"):
        Ledger(tmp_path / "text")
    with sqlite3.connect(tmp_path / "other") as db:
        db.execute("CREATE TABLE t (x)")
    with pytest.raises(LedgerError, match="is a database but not a ledger"):
        Ledger(tmp_path / "other")
    (tmp_path / "file").write_text("")
    with pytest.raises(LedgerError, match="cannot be opened"):
        Ledger(tmp_path / "file" / "ledger.sqlite")


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("DELETE FROM groups WHERE group_id=1", "group 1 is lost"),
        ("DELETE FROM groups WHERE group_id=3", "group 3 is lost"),
        ("DELETE FROM groups; DELETE FROM events WHERE group_id>0", "group 0 is lost"),
        ("DELETE FROM groups WHERE group_id=1; DELETE FROM events WHERE group_id=1", "a group is lost"),
        ("DELETE FROM payloads WHERE group_id=2", "the samples of group 2 are lost"),
        ("DELETE FROM starts", "the samples of group 3 are lost"),
        ("UPDATE groups SET state='zzz' WHERE group_id=0", "group 0 is lost, or not in the state"),
        ("UPDATE groups SET state='dropped' WHERE group_id=2", "group 2 is lost, or not in the state"),
        ("UPDATE groups SET state='zzz'; UPDATE events SET to_state='zzz'", "group 0 has a value of a wrong type"),
        ("UPDATE groups SET version='soon' WHERE group_id=1", "group 1 has a value of a wrong type|TEXT value"),
        ("UPDATE groups SET train_step=x'00' WHERE group_id=1", "group 1 has a value of a wrong type"),
        ("UPDATE meta SET value='x' WHERE key='checkpoint'", "the step of its checkpoint is x"),
        ("DELETE FROM meta WHERE key='schema'", "has layout None; this program reads layout"),
        (
            "PRAGMA writable_schema=ON; UPDATE sqlite_master SET rootpage=(SELECT sum(rootpage) FROM sqlite_master WHERE "
            "name LIKE 'groups_by_%') - rootpage WHERE name LIKE 'groups_by_%'",  # an index with another index's name
            "is damaged: .*index",
        ),
        ("DROP TABLE payloads", "is a database but not a ledger"),
        ("DROP INDEX groups_by_version; ALTER TABLE groups DROP COLUMN version", "no such column: version"),
    ],
)
def test_rows_changed_behind_its_back_are_noticed_when_it_is_opened(path: Path, statement: str, said: str) -> None:
    with Ledger(path) as ledger:
        complete(ledger, 3, 0)
        ledger.mark_trained(ledger.assign_batch(2, 0), 0)
        ledger.checkpointed(0)
        ledger.lease_given([[Sample(prompt="x")]], 1)
    Ledger(path).close()
    with sqlite3.connect(path) as db:
        db.executescript(statement)
    with pytest.raises(LedgerError, match=said):
        Ledger(path)


def test_samples_changed_behind_its_back_are_noticed_when_they_are_read(path: Path) -> None:
    with Ledger(path) as ledger:
        complete(ledger, 2, 0)
        ledger.lease_given([[Sample(prompt="x")]], 0)
    with sqlite3.connect(path) as db:
        db.execute("UPDATE payloads SET data='text' WHERE group_id=0")
        db.execute("UPDATE payloads SET data=substr(data, 1, 20) WHERE group_id=1")
        db.execute("UPDATE starts SET data=x'00'")
    with Ledger(path) as ledger:
        ledger.recover(None)
        for group_id in (0, 1):
            with pytest.raises(SampleError, match=f"group {group_id} in ledger {path} is damaged"):
                ledger.samples(group_id)
        with pytest.raises(SampleError, match="the start of group 2 in the ledger is damaged"):
            ledger.lease_waiting(1, 0)
        assert ledger.counts()[State.WAITING] == 1


def test_a_damaged_page_an_emptied_file_and_a_read_only_one_are_named(path: Path) -> None:
    with Ledger(path) as ledger:
        complete(ledger, 300, 0)
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2] + bytes(4096) + whole[len(whole) // 2 + 4096 :])
    with pytest.raises(LedgerError, match="is damaged|malformed"):
        Ledger(path)
    path.write_bytes(b"")
    with pytest.raises(LedgerError, match="is a database but not a ledger"):
        Ledger(path)
    path.write_bytes(whole)
    folder = path.parent
    try:
        subprocess.run(["mount", "--bind", folder, folder], check=True, capture_output=True, timeout=600)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("mounting is not allowed here")
    try:
        subprocess.run(["mount", "-o", "remount,ro,bind", folder], check=True, capture_output=True, timeout=600)
        with pytest.raises(LedgerError, match="[Rr]ead-?only"):
            Ledger(path)
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True, timeout=600)
    assert len(Ledger(path)) == 300


def test_a_full_disk_loses_nothing_that_was_committed(path: Path) -> None:
    # The limit on this child's file sizes stands in for a full disk: SQLite meets a failing write either way.
    code = """
import resource, signal, sys
from agentrl.buffer.ledger import Ledger
from agentrl.errors import LedgerError
from tests.buffer.make import lease
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
ledger = Ledger(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, 300_000))
done = 0
try:
    while done < 5000:
        lease(ledger, 1, 0)
        done += 1
except LedgerError as error:
    print(done, error)
"""
    child = subprocess.run([python(), "-c", code, str(path)], capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    done, _, message = child.stdout.partition(" ")
    assert "resume" in message, message
    with Ledger(path) as ledger:
        ledger.recover(None)
        assert len(ledger) == int(done) > 0
        assert audit_ledger(path).ok


def test_what_cannot_be_stored_is_refused_and_leaves_the_group_as_it_was(path: Path) -> None:
    with Ledger(path) as ledger:
        lease(ledger, 1, 0)
        group = finished(0)
        group[0].metadata["handle"] = object()
        with pytest.raises(SampleError, match="field 'metadata' cannot be stored"):
            ledger.complete(0, group)
        assert ledger.counts()[State.LEASED] == 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("UPDATE groups SET state='trained', train_step=1 WHERE group_id=2", "group 2 is trained but its events end at"),
        ("UPDATE groups SET train_step=5 WHERE group_id=0", "its surviving events train it at"),
        ("DELETE FROM events WHERE seq=2", "the history has a gap before event 3"),
        ("DELETE FROM payloads", "completed but its samples are gone"),
        ("DELETE FROM groups WHERE group_id=1", "a row was removed"),
        ("INSERT INTO events SELECT max(seq)+1, 0, 'trained', 'trained', 0, 'x', 0, '', 0 FROM events",
         "group 0 may not go from trained to trained"),
    ],
)  # fmt: skip
def test_the_audit_finds_damage(path: Path, damage: str, message: str) -> None:
    with Ledger(path) as ledger:
        train_step(ledger, 0)
        lease(ledger, 1, 1)
        ledger.complete(2, finished(2))
        assert audit_ledger(path).ok
    with sqlite3.connect(path) as db:
        db.execute(damage)
    assert any(message in problem for problem in audit_ledger(path).problems), audit_ledger(path).problems


def test_the_audit_counts_the_groups_of_each_step(path: Path) -> None:
    with Ledger(path) as ledger:
        train_step(ledger, 0)
        train_step(ledger, 2)
        assert audit_ledger(path, through_step=2, groups_per_step=3).problems == (
            "step 0 trained 2 groups, expected 3",
            "step 1 trained no group",
            "step 2 trained 2 groups, expected 3",
        )


def test_a_ledger_of_layout_2_is_migrated_when_it_is_opened(path: Path) -> None:
    """Groups 0 and 1 are trained at step 0; 2 and 4 were trained at step 1 and undone. 3 waits again; 5 is dropped."""
    path.parent.mkdir()
    with closing(sqlite3.connect(path)) as db:
        db.executescript(Path(__file__).with_name("ledger_layout_2.sql").read_text())
    with Ledger(path) as ledger:
        ledger.recover(0)
        assert ledger.kept(1).groups == {0: 1, 1: 1}
        assert ledger.assign_batch(2, 1) == [2, 4]
        ledger.mark_trained([2, 4], 1)
        assert [lease.group_id for lease in ledger.lease_waiting(5, 2)] == [3]
        assert ledger.expire(1, "too old", again=True) == {}
    found = audit_ledger(path, through_step=1, groups_per_step=2, max_staleness=1)
    assert found.ok, found.problems
    with reading(path) as db:
        rows = db.execute("SELECT to_state, step, version FROM events WHERE seq IN (11, 15, 17, 18, 20)").fetchall()
        assert rows == [
            ("leased", None, 1),
            ("leased", None, 1),
            ("trained", 1, None),
            ("recover", 0, None),
            ("completed", 1, None),
        ]
        assert db.execute("SELECT to_state, step, version FROM events ORDER BY seq DESC").fetchone() == (
            "leased",
            None,
            2,
        )


def test_a_lock_of_another_process_is_waited_for_and_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentrl.buffer.sqlite.BUSY_SECONDS", 0.05)
    with (
        Ledger(tmp_path / "l.sqlite") as ledger,
        closing(sqlite3.connect(tmp_path / "l.sqlite", isolation_level=None)) as other,
    ):
        other.execute("BEGIN IMMEDIATE")
        ids: list[int] = []
        writer = threading.Thread(target=lambda: ids.extend(lease(ledger, 1, 0)))
        writer.start()
        until(lambda: bool(caplog.messages))
        other.execute("ROLLBACK")
        writer.join(60)
        assert ids == [0]
        monkeypatch.setattr("agentrl.buffer.sqlite.LOCKED_SECONDS", 0.0)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(LedgerError, match="locked"):
            lease(ledger, 1, 0)
    assert "another process has locked" in caplog.messages[0]
