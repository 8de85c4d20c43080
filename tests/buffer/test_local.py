"""A ledger on a local disk: the copy in the run's folder, and the ledger that a resume uses."""

import logging
import shutil
from pathlib import Path

import pytest

from agentrl.buffer.ledger import Ledger, State
from agentrl.buffer.local import copy_ledger, find_ledger, place_ledger
from agentrl.errors import LedgerError
from tests.buffer.make import complete
from tests.support.audit import audit_ledger


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Return the ledger's path in a run's folder."""
    return tmp_path / "run" / "ledger.sqlite"


def completed(path: Path) -> int:
    with Ledger(path) as ledger:
        ledger.recover(None)
        return ledger.counts()[State.COMPLETED]


def test_without_a_folder_the_ledger_is_in_the_run_s(file: Path) -> None:
    assert place_ledger(file, None) == file
    assert not file.exists()


def test_a_resume_takes_the_local_file_else_the_copy(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "agentrl")
    local = str(tmp_path / "local")
    first = place_ledger(file, local)
    assert first.is_relative_to(local)
    with Ledger(first) as ledger:
        complete(ledger, 2, 0)
        copy_ledger(first, file)  # while it is open
        complete(ledger, 1, 0)
    assert not [*file.parent.glob("*-wal")]
    assert audit_ledger(file).ok
    assert place_ledger(file, local) == first
    assert completed(first) == 3
    assert find_ledger(file, local) == first
    assert find_ledger(file, None) == find_ledger(file, str(tmp_path / "other")) == file
    assert f"the run goes on with its ledger {first}" in caplog.text
    elsewhere = place_ledger(file, str(tmp_path / "other"))
    assert completed(elsewhere) == 2
    assert f"has no ledger of this run; it goes on with the copy in {file}" in caplog.text
    # The local file of the first life is not used: the run continued from the copy elsewhere.
    again = place_ledger(file, local)
    assert again not in (first, elsewhere)
    assert completed(again) == 2


def test_a_copied_run_folder_gets_a_ledger_of_its_own_and_a_moved_one_keeps_its_ledger(
    file: Path, tmp_path: Path
) -> None:
    local = str(tmp_path / "local")
    first = place_ledger(file, local)
    shutil.copytree(file.parent, tmp_path / "copy")
    assert place_ledger(tmp_path / "copy" / file.name, local) != first
    assert place_ledger(file, local) == first
    file.parent.rename(tmp_path / "moved")
    assert place_ledger(tmp_path / "moved" / file.name, local) == first
    shutil.copytree(tmp_path / "moved", tmp_path / "again")
    assert find_ledger(tmp_path / "again" / file.name, local) != first


def test_a_ledger_is_found_by_any_path_of_its_run_and_a_stray_file_does_not_matter(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.d").mkdir()
    file.parent.symlink_to("run.d")
    local = str(tmp_path / "local")
    first = place_ledger(file, local)
    assert find_ledger(Path("run.d", file.name), local) == first
    (first.parent / "run").unlink()  # as in an older version
    assert find_ledger(Path("run", file.name), local) == first
    file.parent.unlink()
    Path("run").write_bytes(b"\xff")
    assert find_ledger(Path("other", file.name), None) == Path("other", file.name)


def test_two_runs_share_a_folder(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other" / "ledger.sqlite"
    assert place_ledger(file, str(tmp_path / "local")) != place_ledger(other, str(tmp_path / "local"))


def test_a_run_goes_on_without_the_folder_and_with_it_again(
    file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with Ledger(file) as ledger:
        complete(ledger, 1, 0)
    file.with_name("ledger.sqlite.source").write_text("7")
    local = place_ledger(file, str(tmp_path / "local"))
    assert completed(local) == 1
    assert local.with_name("ledger.sqlite.source").read_text() == "7"
    assert place_ledger(file, None) == file
    assert "it goes on with the copy" in caplog.messages[-1]
    with Ledger(file) as ledger:
        ledger.recover(None)
        complete(ledger, 1, 0)
    assert completed(place_ledger(file, str(tmp_path / "local"))) == 2


def test_a_folder_that_cannot_be_made_is_named(file: Path, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(LedgerError, match="cannot be placed in --ledger-dir .*taken"):
        place_ledger(file, str(tmp_path / "taken"))


def test_a_lost_disk_is_no_loss_of_what_was_copied(file: Path, tmp_path: Path) -> None:
    local = tmp_path / "local"
    place = place_ledger(file, str(local))
    with Ledger(place) as ledger:
        ids = complete(ledger, 3, 0)
        ledger.assign_batch(2, 0)
        ledger.mark_trained(ids[:2], 0)
        copy_ledger(place, file)  # before the checkpoint of step 0
        ledger.checkpointed(0)
    shutil.rmtree(local)
    with Ledger(place_ledger(file, str(local))) as ledger:
        ledger.recover(0)
        assert ledger.counts()[State.TRAINED] == 2
        assert ledger.kept(1).groups == {0: 1}
