"""Small real file systems, for tests of full disks."""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of `size` ("64k") at `folder`. Skips the test if mounting is not allowed."""
    folder.mkdir()
    try:
        _mount("-t", "tmpfs", "-o", f"size={size}", "none", folder)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small file system cannot be mounted here: {error}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True, capture_output=True, timeout=600)


def enlarge(folder: Path, size: str) -> None:
    """Enlarge a `small_disk`."""
    _mount("-o", f"remount,size={size}", folder)


def fill(folder: Path) -> Path:
    """Write a file until the disk is full. Returns the file; remove it to free space."""
    file = folder / "filling"
    with file.open("wb", buffering=0) as sink, contextlib.suppress(OSError):
        while sink.write(bytes(4096)) == 4096:
            continue
    assert os.statvfs(folder).f_bavail == 0
    return file


def _mount(*arguments: str | Path) -> None:
    subprocess.run(["mount", *arguments], check=True, capture_output=True, timeout=600)
