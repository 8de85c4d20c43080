"""`agentrl fetch` from a mirror of the Hub on loopback."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.hub import COMMIT, Mirror
from tests.support.nightly import nightly
from tests.support.tiny_models import make_tiny_model
from tests.support.warm import python


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture
def mirror() -> Iterator[Mirror]:
    with Mirror().serving() as serving:
        yield serving


def agentrl(url: str, *args: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env = {**clean, "HF_ENDPOINT": url, "HF_HOME": str(cwd / "home"), **environment}
    # A module that reads the Hub's address at import needs a separate interpreter.
    command = [python() if args[0] == "check" else sys.executable, "-m", "agentrl", *args]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=env, cwd=cwd)


def names(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}


def write(folder: Path, **files: bytes) -> Path:
    for name, data in files.items():
        (folder / name.replace("__", "/")).parent.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("__", "/")).with_suffix(".jsonl").write_bytes(data)
    return folder


def test_a_model_is_fetched_whole_and_is_one_that_works(mirror: Mirror, model: Path, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for file in model.iterdir():
        (source / file.name).write_bytes(file.read_bytes())
    (source / "pytorch_model.bin").write_bytes(b"the weights once more")
    (source / "original").mkdir()
    (source / "original/consolidated.safetensors").write_bytes(b"the weights once more")
    mirror.repositories["models/own/tiny"] = source
    done = agentrl(mirror.url, "fetch", "own/tiny", "models/tiny", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert COMMIT in done.stdout
    fetched = tmp_path / "models/tiny"
    assert names(fetched) == names(model) | {".fetched.json"}
    assert all((fetched / name).read_bytes() == (model / name).read_bytes() for name in names(model))
    assert [path.name for path in fetched.parent.iterdir()] == ["tiny"]
    checked = agentrl(mirror.url, "check", "models/tiny", cwd=tmp_path)
    assert checked.returncode == 0, checked.stderr
    asked = len(mirror.ranges)
    again = agentrl("http://127.0.0.1:9", "fetch", "own/tiny", "models/tiny", cwd=tmp_path)  # without a network
    assert (again.returncode, len(mirror.ranges)) == (0, asked), again.stderr
    other = agentrl(mirror.url, "fetch", "own/tiny", "models/tiny", "--revision", COMMIT, cwd=tmp_path)
    assert other.returncode == 2
    assert "is there already, and not empty" in other.stderr


@pytest.mark.slow
def test_a_data_set_is_fetched_with_the_files_that_a_run_reads(mirror: Mirror, tmp_path: Path) -> None:
    source = write(tmp_path / "source", train=b'{"input": "q"}\n', main__test=b'{"input": "p"}\n')
    (source / "loader.py").write_text("raise SystemExit\n")
    mirror.repositories["datasets/own/sums"] = source
    done = agentrl(mirror.url, "fetch", "--data", "own/sums", "sums", "--revision", "main", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert names(tmp_path / "sums") == {"train.jsonl", "main/test.jsonl", ".fetched.json"}
    assert "--prompt-data" in done.stdout
    assert "sums/train.jsonl" in done.stdout
    done = agentrl(mirror.url, "fetch", "--data", "own/sums", "some", "--exclude", "main/*", cwd=tmp_path)
    assert names(tmp_path / "some") == {"train.jsonl", ".fetched.json"}, done.stderr
    done = agentrl(mirror.url, "fetch", "--data", "own/sums", "code", "--include", "*.py", cwd=tmp_path)
    assert names(tmp_path / "code") == {"loader.py", ".fetched.json"}, done.stderr
    done = agentrl(mirror.url, "fetch", "--data", "own/sums", "none", "--exclude", "*.jsonl", cwd=tmp_path)
    assert done.returncode == 2
    assert "no file *.jsonl or *.parquet; it has loader.py, main/test.jsonl, train.jsonl" in done.stderr
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_a_download_that_broke_off_goes_on(mirror: Mirror, tmp_path: Path) -> None:
    whole = os.urandom(1 << 20) * 25
    mirror.repositories["datasets/own/large"] = write(tmp_path / "source", small=b"{}\n", train=whole)
    command = ("fetch", "--data", "own/large", "large")
    mirror.break_at = 100
    done = agentrl(mirror.url, *command, cwd=tmp_path)
    assert done.returncode == 2
    assert "the same command again: it continues the download" in done.stderr
    assert not (tmp_path / "large").exists()
    mirror.break_at = 11 << 20  # more than huggingface_hub fetches at once
    mirror.ranges.clear()
    done = agentrl(mirror.url, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert mirror.ranges == [("train.jsonl", at << 20) for at in (0, 10, 20)]  # small.jsonl existed already
    assert (tmp_path / "large/train.jsonl").read_bytes() == whole
    assert {path.name for path in tmp_path.iterdir()} - {"home"} == {"large", "source"}


@pytest.mark.slow
def test_what_cannot_be_fetched_is_one_message(mirror: Mirror, model: Path, tmp_path: Path) -> None:
    mirror.repositories.update({f"models/own/{name}": model for name in ("tiny", "gated", "evil")})
    mirror.gated.add("models/own/gated")
    (tmp_path / "full").mkdir()
    (tmp_path / "full/file").write_text("mine")
    nowhere = "http://127.0.0.1:9"
    cases: list[tuple[str, list[str], list[str]]] = [
        (nowhere, ["own/tiny", "d"], ["own/tiny could not be fetched from http://127.0.0.1:9", "same command again"]),
        (mirror.url, ["own/none", "d"], ["no model own/none", "--data", "HF_TOKEN"]),
        (mirror.url, ["own/gated", "d"], ["own/gated is gated", "HF_TOKEN"]),
        (mirror.url, ["own/tiny", "d", "--revision", "v9"], ["own/tiny has no revision v9"]),
        (mirror.url, ["a b/c", "d"], ["'a b/c' names no model or data set; expected owner/name"]),
        (mirror.url, ["own/tiny", "full"], ["full is there already, and not empty"]),
    ]
    for url, args, parts in cases:
        done = agentrl(url, "fetch", *args, cwd=tmp_path)
        assert done.returncode == 2, (args, done.stderr)
        assert [part for part in parts if part not in done.stderr] == [], done.stderr
        assert "Traceback" not in done.stderr
    done = agentrl(mirror.url, "fetch", "own/tiny", "d", cwd=tmp_path, HF_HUB_OFFLINE="1")
    assert (done.returncode, "HF_HUB_OFFLINE is set; unset it" in done.stderr) == (2, True), done.stderr
    mirror.extra_names = ["../../evil.json"]
    done = agentrl(mirror.url, "fetch", "own/evil", "d", cwd=tmp_path)
    assert (done.returncode, "would be written outside" in done.stderr) == (2, True), done.stderr
    assert {path.name for path in tmp_path.iterdir()} <= {"full", "home"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "names", nightly([{"own/tiny": True, "nomodel": False}, {"runs/nomodel": False, "./own/tiny": False}], 1)
)
def test_a_run_downloads_nothing_and_names_the_command_for_names_of_the_hub_alone(
    mirror: Mirror, model: Path, tmp_path: Path, names: dict[str, bool]
) -> None:
    mirror.repositories["models/own/tiny"] = model
    (tmp_path / "runs").mkdir()
    (tmp_path / "train.jsonl").write_text(json.dumps({"input": "q", "label": "1"}) + "\n")
    for name, fetch in names.items():
        train = ("train", "--hf-checkpoint", name, "--prompt-data", "train.jsonl", "--rm-type", "math")
        done = agentrl(mirror.url, *train, cwd=tmp_path)
        assert done.returncode == 2
        assert f"--hf-checkpoint {name}: no such folder" in done.stderr
        assert (f"`agentrl fetch {name} DIR`" in done.stderr) is fetch, done.stderr
    done = agentrl(mirror.url, "train", "--hf-checkpoint", str(model), "--prompt-data", "own/sums", cwd=tmp_path)
    assert "`agentrl fetch own/sums DIR --data`" in done.stderr
    assert mirror.ranges == []
