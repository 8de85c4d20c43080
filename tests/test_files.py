"""Files that are replaced as a whole: either the old one or the new one exists, and no leftover."""

import errno
import shutil
from pathlib import Path

import pytest

from agentrl.files import remove_folder, replacing, write_atomic


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_the_new_file_takes_the_place_of_the_old(tmp_path: Path) -> None:
    file = tmp_path / "made" / "state.json"
    write_atomic(file, b"old")
    write_atomic(file, "né")
    assert file.read_text(encoding="utf-8") == "né"
    assert names(file.parent) == ["state.json"]


def test_until_the_end_the_old_file_stays(tmp_path: Path) -> None:
    file = tmp_path / "state"
    write_atomic(file, b"old")
    with replacing(file) as draft:
        draft.write_bytes(b"new")
        assert file.read_bytes() == b"old"
    assert file.read_bytes() == b"new"


def test_what_breaks_off_leaves_the_old_file_and_no_draft(tmp_path: Path) -> None:
    file = tmp_path / "state"
    write_atomic(file, b"old")
    with pytest.raises(TypeError), replacing(file) as draft, draft.open("wb") as out:
        out.writelines([b"half of the n", None])  # type: ignore[list-item]
    assert (file.read_bytes(), names(tmp_path)) == (b"old", ["state"])


def test_nothing_written_is_nothing_replaced(tmp_path: Path) -> None:
    file = tmp_path / "state"
    write_atomic(file, b"old")
    with replacing(file):
        pass
    assert (file.read_bytes(), names(tmp_path)) == (b"old", ["state"])


def test_an_old_folder_goes_and_a_file_or_nothing_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "old" / "deep").mkdir(parents=True)
    (tmp_path / ".nfs0001").touch()
    for name in ("old", ".nfs0001", "missing"):
        remove_folder(tmp_path / name)
    assert names(tmp_path) == [".nfs0001"]


def test_a_folder_that_cannot_be_removed_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(path: Path) -> None:
        raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    (tmp_path / "old").mkdir()
    monkeypatch.setattr(shutil, "rmtree", busy)
    remove_folder(tmp_path / "old")
    assert f"the old folder {tmp_path / 'old'} cannot be removed ([Errno 39] Directory not empty" in caplog.text
