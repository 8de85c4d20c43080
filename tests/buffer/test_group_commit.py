"""Completions that wait for the ledger at the same time share a transaction, and so its one fsync."""

import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from agentrl.buffer.ledger import Ledger, State
from agentrl.errors import LedgerError
from tests.buffer.make import finished, lease, until
from tests.support.audit import audit_ledger

COMPLETE = """
import os, random, sys, threading, time
from agentrl.buffer.codec import encode_group
from agentrl.buffer.ledger import Ledger
from tests.buffer.make import finished, lease

path, count, at_once = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
samples = finished(0, n=8)
for sample in samples:
    sample.append_model(random.choices(range(150_000), k=80), [-random.random() for _ in range(80)], "3", turn=2)
data = encode_group(samples)
with Ledger(path) as ledger:
    ids = iter(lease(ledger, count, 0))
    taking, before = threading.Lock(), os.path.getsize(os.environ["FSYNCS"])

    def work():
        while True:
            with taking:
                group_id = next(ids, None)
            if group_id is None:
                return
            ledger.complete(group_id, samples, data)
            os.write(1, b"%d\\n" % group_id)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(at_once)]
    began = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print("done", time.monotonic() - began, os.path.getsize(os.environ["FSYNCS"]) - before)
"""


@pytest.fixture
def slow_disk(tmp_path: Path) -> dict[str, str]:
    """Make the environment of a process whose fsync takes 10 ms."""
    if (compiler := shutil.which("cc")) is None:
        pytest.skip("there is no C compiler (cc) to make a slow fsync with")
    library = tmp_path / "slow_fsync.so"
    source = Path(__file__).with_name("slow_fsync.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source], check=True, timeout=600)
    return {**os.environ, "LD_PRELOAD": str(library), "FSYNCS": str(tmp_path / "fsyncs")}


def test_those_that_wait_share_a_transaction_and_one_that_fails_fails_alone(tmp_path: Path) -> None:
    refused: list[LedgerError] = []
    commits: list[str] = []
    with Ledger(tmp_path / "l.sqlite") as ledger:
        ids = [*lease(ledger, 8, 0), 99]

        def complete(group_id: int) -> None:
            try:
                ledger.complete(group_id, finished(group_id))
            except LedgerError as error:
                refused.append(error)

        threads = [threading.Thread(target=complete, args=(group_id,)) for group_id in ids]
        with ledger.transaction():
            for thread in threads:
                thread.start()
            until(lambda: len(ledger._queued) == 9)
            ledger._db.set_trace_callback(lambda text: commits.append(text) if text == "COMMIT" else None)
        for thread in threads:
            thread.join(60)
        ledger._db.set_trace_callback(None)
        assert len(commits) == 2  # the commit of this thread, and one for all nine
        assert ledger.counts()[State.COMPLETED] == 8
        assert [str(error) for error in refused] == [
            "group 99 does not exist, so it cannot become completed; lease it first"
        ]
        assert all(ledger.samples(group_id) for group_id in ids[:-1])
    assert audit_ledger(tmp_path / "l.sqlite").ok
    with pytest.raises(LedgerError, match="was closed; open it again"):
        ledger.complete(0, finished(0))


def test_an_fsync_of_10_ms_allows_1000_completions_a_second(tmp_path: Path, slow_disk: dict[str, str]) -> None:
    command = [sys.executable, "-c", COMPLETE, str(tmp_path / "l.sqlite"), "1000", "64"]
    child = subprocess.run(command, env=slow_disk, capture_output=True, text=True, timeout=600)
    assert child.returncode == 0, child.stderr
    _, seconds, fsyncs = child.stdout.splitlines()[-1].split()
    sys.stdout.write(f"{1000 / float(seconds):.0f} completions a second, {fsyncs} fsyncs")
    # The fsyncs are counted, not timed: a loaded machine is slower, but needs no more of them.
    assert 0 < int(fsyncs) <= 100


def test_what_was_acknowledged_before_a_kill_is_in_the_file(tmp_path: Path, slow_disk: dict[str, str]) -> None:
    path = tmp_path / "l.sqlite"
    command = [sys.executable, "-c", COMPLETE, str(path), "2000", "64"]
    with subprocess.Popen(command, env=slow_disk, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        said = [child.stdout.readline() for _ in range(300)]
        child.send_signal(signal.SIGKILL)
        said += child.stdout.read().splitlines(keepends=True)
    acknowledged = [int(line) for line in said if line.endswith(b"\n")]
    assert child.returncode == -9
    assert 300 <= len(acknowledged) == len(set(acknowledged)) < 2000
    found = audit_ledger(path)
    assert found.ok, found.problems
    with Ledger(path) as ledger:
        ledger.recover(None)
        with ledger.transaction() as db:
            stored = {number for (number,) in db.execute("SELECT group_id FROM groups WHERE state='completed'")}
        assert set(acknowledged) <= stored
        assert all(len(ledger.samples(group_id)) == 8 for group_id in acknowledged)
