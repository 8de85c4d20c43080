"""A run that is killed (SIGKILL) at chosen points and resumed, repeatedly, trains every group exactly once, with the
group's own images."""

import json
import random
import subprocess
from pathlib import Path

import pytest

from tests.support.audit import audit_ledger
from tests.support.nightly import nightly
from tests.support.warm import python

STEPS, BATCH, EVERY = 8, 3, 2

RUN = """
import json, os, signal, sys
from pathlib import Path
from agentrl.buffer.ledger import Ledger
from tests.buffer.make import finished, lease, with_images

folder, kill_at = Path(sys.argv[1]), int(sys.argv[2])
steps, batch, every = map(int, sys.argv[3:6])
writes = 0

# Fault injection: the process kills itself in its kill_at-th transaction, before or after the commit.
from agentrl.buffer.sqlite import LedgerFile
from contextlib import contextmanager
whole = LedgerFile.transaction

@contextmanager
def transaction(self):
    global writes
    with whole(self) as db:
        yield db
        writes += 1
        if writes == kill_at and kill_at % 2:
            os.kill(os.getpid(), signal.SIGKILL)
    if writes == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)

LedgerFile.transaction = transaction
saved = folder / "checkpoint"
checkpoint = int(saved.read_text()) if saved.exists() else None
log = (folder / "trained.log").open("a")
with Ledger(folder / "ledger.sqlite") as ledger:
    ledger.recover(checkpoint)
    for step in range(0 if checkpoint is None else checkpoint + 1, steps):
        while len(ids := ledger.assign_batch(batch, step)) < batch:
            for group_id in lease(ledger, batch - len(ids), step):
                if group_id % 5 == 4:
                    ledger.drop(group_id, "every fifth")
                else:
                    ledger.complete(group_id, with_images(finished(group_id, tag=str(os.getpid()))))
        for group_id in ids:
            held = [(list(s.tokens), s.images, s.image_spans) for s in ledger.samples(group_id)]
            assert held == [(s.tokens, s.images, s.image_spans) for s in with_images(finished(group_id))]
        print(json.dumps([step, ids, [ledger.samples(i)[0].response for i in ids]]), file=log, flush=True)
        ledger.mark_trained(ids, step)
        if step % every == every - 1:
            draft = folder / "draft"
            draft.write_text(str(step))
            draft.replace(saved)
            ledger.checkpointed(step)
print("finished")
"""


@pytest.mark.parametrize("seed", nightly([1, 2], 1))
def test_killed_again_and_again(tmp_path: Path, seed: int) -> None:
    points = random.Random(seed)
    lives = 0
    while True:
        lives += 1
        kill_at = points.randrange(3, 40) if lives <= 6 else 0
        child = subprocess.run(
            [python(), "-c", RUN, str(tmp_path), str(kill_at), str(STEPS), str(BATCH), str(EVERY)],
            capture_output=True,
            text=True,
            timeout=600,
        )
        report = audit_ledger(tmp_path / "ledger.sqlite")
        assert report.ok, report.problems
        if child.returncode == 0:
            break
        assert child.returncode == -9, child.stderr
    assert lives > 3
    report = audit_ledger(tmp_path / "ledger.sqlite", through_step=STEPS - 1, groups_per_step=BATCH)
    assert report.ok, report.problems
    assert report.trained_by_step == dict.fromkeys(range(STEPS), BATCH)
    check_batches(tmp_path / "trained.log")


def check_batches(log: Path) -> None:
    """Check that a step that was trained again used the same samples."""
    seen: dict[int, object] = {}
    for line in log.read_text().splitlines():
        step, *batch = json.loads(line)
        assert seen.setdefault(step, batch) == batch
