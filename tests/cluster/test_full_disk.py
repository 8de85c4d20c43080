"""A full disk: one message, exit code 2, and no finished work is lost."""

from pathlib import Path

import pytest

from agentrl.cli.main import run
from tests.support.audit import audit_ledger
from tests.support.disks import enlarge, fill, small_disk
from tests.support.runs import RunKit, still_running


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")))


def test_a_full_disk_is_found_before_anything_starts(
    kit: RunKit, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(kit.folder)
    with small_disk(tmp_path / "disk", "64k") as disk:
        fill(disk)
        assert run(["train", *kit.arguments(str(disk / "run"))]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --output-dir {disk}/run cannot be written: No space left on device")


def test_init_on_a_full_disk(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", "64k") as disk:
        assert run(["init", str(disk / "model"), "--layers", "1", "--hidden", "64", "--heads", "2"]) == 2
    said = capsys.readouterr().err
    assert f"error: {disk}/model: " in said
    assert "No space left on device" in said
    assert "free some space" in said


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_disk_that_fills_up_ends_the_run_and_more_room_lets_it_go_on(kit: RunKit, tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", "3m") as disk:
        arguments = kit.arguments("filling", num_rollout=3, save_interval=1, save=disk / "checkpoints")
        first = kit.start(arguments)
        first.until(first.processes)
        processes = first.processes()
        assert first.wait() == 2, first.output
        assert f"error: {disk}/checkpoints/rollout_00000" in first.output
        assert "could not be written, with 0." in first.output
        assert "Make room" in first.output
        assert "Traceback" not in first.output
        assert still_running(processes) == []
        enlarge(disk, "64m")
        again = kit.start(arguments)
        assert again.wait() == 0, again.output
        assert [row["step"] for row in again.metrics()] == [0, 1, 2]
        result = audit_ledger(again.folder / "ledger.sqlite", through_step=2, groups_per_step=4)
        assert result.ok, result.problems
        assert result.trained_by_step == dict.fromkeys(range(3), 4)
