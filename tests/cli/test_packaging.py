"""The distribution: its name, its extras, its files, and the commands of a base installation."""

import ast
import json
import os
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from importlib import metadata
from pathlib import Path

import pytest

from agentrl import __version__
from agentrl.buffer.store import TrajectoryStore
from agentrl.cli.main import COMMANDS, NEEDS, extra_for
from agentrl.errors import DISTRIBUTION, install
from agentrl.sample import Sample

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
FOR_DEVELOPERS = {"docs", "dev"}
FILES = {
    "answers.jsonl": '{"response": "4", "label": "4", "metadata": {"instruction_id_list": ["x"]}}\n',
    "corpus.jsonl": '{"id": "1", "text": "Oslo has fjords"}\n',
    "train.jsonl": '{"input": "2 + 2?", "label": "4"}\n',
    "runs/one/metrics.jsonl": '{"step": 0, "time": 1.0, "rollout/reward": 0.5}\n',
    "runs/one/settings.json": "{}",
    "model/config.json": '{"model_type": "qwen3"}',
}
RUN = "--hf-checkpoint model --prompt-data train.jsonl --label-key label --rm-type math --num-rollout 1"
LINES = {
    "new other": "",
    "doctor": "",
    "grade --rm-type math answers.jsonl": "",
    "grade --rm-type ifbench answers.jsonl": "graders",
    "grade --rm-type math answers.jsonl --out graded.parquet": "graders",
    "grade --rm-type llm_judge --judge-url http://127.0.0.1:9 answers.jsonl": "graders",
    "check my_env/my_env.py:MyEnv": "rollout",
    "check model": "rollout",
    "replay runs/one": "rollout",
    "fetch own/model elsewhere": "rollout",
    "init tiny": "engine",
    f"rollout {RUN}": "engine",
    "eval --hf-checkpoint model --eval-prompt-data dev train.jsonl --label-key label --rm-type math": "engine",
    "serve model --port 0": "engine",
    "router http://127.0.0.1:9 --port 0": "engine",
    "gateway http://127.0.0.1:9 --port 0 --owner-port 0": "engine",
    f"train {RUN}": "train",
    f"train {RUN} --dry-run": "train",
    f"train {RUN} --backend local --train-backend fsdp": "train",
    "sft --hf-checkpoint model --prompt-data train.jsonl": "train",
    "convert model other-model --to torch_dist": "train",
    "retrieval --corpus corpus.jsonl --port 0": "search",
    "retrieval --corpus corpus.jsonl --encoder model --port 0": "dense",
    "view runs --port 0": "view",
    "report runs/one": "",
}
"""Command lines, and the extra that each of them lacks in the base; none if the base is enough."""


def resolved(extra: str) -> set[str]:
    """Return the requirements of an extra, with other extras of ours resolved."""
    lines: set[str] = set()
    for line in EXTRAS[extra]:
        nested = re.fullmatch(rf"{DISTRIBUTION}\[(.*)\]", line)
        lines |= set().union(*map(resolved, nested[1].split(","))) if nested else {line}
    return lines


def closure(lines: list[str]) -> set[str]:
    """Return the installed distributions that these requirements need."""
    found: set[str] = set()
    while lines:
        name = re.split(r"[^\w.-]", lines.pop())[0]
        if name in found:
            continue
        try:
            lines += [line for line in metadata.requires(name) or () if "extra ==" not in line]
        except metadata.PackageNotFoundError:  # for another system or Python
            continue
        found.add(name)
    return found


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with only the packages of the base, by links, and with our own metadata."""
    folder = tmp_path_factory.mktemp("bare")
    for name in closure(list(PROJECT["dependencies"])):
        for file in metadata.distribution(name).files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__") and not (folder / top).exists():
                (folder / top).symlink_to(Path(str(metadata.distribution(name).locate_file(top))))
    (folder / "agentrl").symlink_to(ROOT / "agentrl")
    lines = [f'{line} ; extra == "{extra}"' for extra in EXTRAS for line in resolved(extra)]
    required = "".join(f"Requires-Dist: {line}\n" for line in [*PROJECT["dependencies"], *lines])
    info = folder / f"{DISTRIBUTION.replace('-', '_')}-{__version__}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {DISTRIBUTION}\nVersion: {__version__}\n{required}")
    return folder


def write_files(folder: Path) -> None:
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    with TrajectoryStore(folder / "runs/one/trajectories.sqlite", keep=10) as store:
        store.add("train", "", 0, [[Sample(group_index=0, index=0, prompt="2 + 2?", tokens=[1], reward=0.0)]])


FORKS = """
import json, os, sys
sys.path.append(sys.argv[1])
from agentrl.cli.main import main
ended, own = [], os.dup(1)
for line in json.load(sys.stdin):
    files = [open(f"../{name}", "w+b") for name in ("output", "errors")]
    for fd, file in enumerate(files, 1):
        os.dup2(file.fileno(), fd)
    if not (pid := os.fork()):
        os.close(own)
        sys.argv = ["agentrl", *line.split()]
        main()
    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    for file in files:
        file.seek(0)
    ended.append([sys.argv, status, *(file.read().decode() for file in files)])
os.write(own, json.dumps(ended).encode())
"""
"""Runs command lines one after another, in forks of a process that has imported the command."""

Run = Callable[[list[str], Path], list[subprocess.CompletedProcess[str]]]
"""Runs lines of `agentrl` in a folder."""
CLEAN = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def in_forks(bare: Path, lines: list[str], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    command = [sys.executable, "-I", "-S", "-c", FORKS, str(bare)]
    ended = subprocess.run(
        command, input=json.dumps(lines), stdout=-1, text=True, timeout=600, cwd=folder, env=CLEAN, check=True
    )
    return [subprocess.CompletedProcess(*each) for each in json.loads(ended.stdout)]


def in_processes(program: Path, lines: list[str], folder: Path) -> list[subprocess.CompletedProcess[str]]:
    def run(line: str) -> subprocess.CompletedProcess[str]:
        command = [str(program), *line.split()]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder, env=CLEAN)

    with ThreadPoolExecutor(2) as threads:
        return list(threads.map(run, lines))


def answers(run: Run, folder: Path) -> None:
    """Run every line in `folder`, and check exit code and message of each."""
    write_files(folder)
    (version,) = run(["--version"], folder)
    assert version.stdout == f"agentrl {__version__}\n"
    (new,) = run(["new my_env"], folder)
    assert new.returncode == 0
    ended = dict(zip(LINES, run(list(LINES), folder), strict=True))
    wrong = []
    for line, extra in LINES.items():
        said = re.findall(r"pip install .*", ended[line].stderr)
        if (extra and (ended[line].returncode, said) != (2, [install(extra)])) or (
            not extra and (ended[line].returncode != 0 or said)
        ):
            wrong.append((line, ended[line].returncode, ended[line].stderr[-500:]))
        elif "Traceback" in ended[line].stderr:
            wrong.append((line, -1, ended[line].stderr[-500:]))
    assert wrong == []


@pytest.mark.slow
def test_in_the_base_each_command_names_the_one_extra_that_it_needs(bare: Path, tmp_path: Path) -> None:
    (folder := tmp_path / "work").mkdir()
    answers(partial(in_forks, bare), folder)


def test_every_command_is_tried_and_has_its_extra() -> None:
    tried = {line.split()[0]: extra for line, extra in LINES.items()}
    assert set(COMMANDS) - set(tried) == {"demo"}
    assert {name: extra for name, extra in tried.items() if extra and name != "retrieval"}.items() <= NEEDS.items()
    assert set(NEEDS) <= set(COMMANDS)


def test_a_package_beyond_a_commands_extra_names_the_smallest_one(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(bare))
    assert extra_for("httpx", ["grade", "a.jsonl"]) == "graders"
    assert extra_for("httptools", ["--debug", "retrieval", "--encoder=m"]) == "dense"
    assert extra_for("torch", ["train"]) == "train"
    assert extra_for("mcp", ["check"]) == "mcp"
    assert extra_for("wandb", ["train"]) == "wandb"
    assert extra_for("torch", ["new", "train"]) == "dense"
    assert extra_for("no_such_package", ["doctor"]) is None


def test_every_message_and_page_names_an_extra_that_exists() -> None:
    named = set(NEEDS.values()) | {"dense"}
    for file in sorted(ROOT.glob("agentrl/**/*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "install":
                named |= {str(arg.value) for arg in node.args if isinstance(arg, ast.Constant)}
    from agentrl.cli.doctor import _EXTRAS

    named |= {extra for extra, _ in _EXTRAS.values()}
    assert named <= set(EXTRAS)
    section = (ROOT / "README.md").read_text(encoding="utf-8").partition("\n## Installing\n")[2].partition("\n## ")[0]
    listed = set(re.findall(r"^\| `([\w-]+)` \|", section, re.MULTILINE))
    assert listed == set(EXTRAS) - FOR_DEVELOPERS
    assert named <= listed


def test_nothing_says_to_install_by_another_name() -> None:
    wrong = []
    kinds = ("*.py", "*.md", "*.tsv", "*.yaml", "*.yml", "*.toml", "*.sh", "*.jinja")
    texts = [
        file
        for part in ("agentrl", "docs", "examples", "scripts", ".github")
        for kind in kinds
        for file in ROOT.glob(f"{part}/**/{kind}")
    ]
    for file in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "pyproject.toml", *texts]:
        text = file.read_text(encoding="utf-8")
        wrong += [
            (file.name, found)
            for found in re.findall(r"(?<![\w-])agentrl\[[^\]]*\]|pip install '?agentrl(?!-sdk)\b.*", text)
        ]
        for group in re.findall(rf"(?:{DISTRIBUTION}|pip install (?:-e )?'\.)\[([a-z,]+)\]", text):
            wrong += [(file.name, extra) for extra in group.split(",") if extra not in EXTRAS]
    assert wrong == []
    in_code = [f for f in ROOT.glob("agentrl/**/*.py") if re.search(DISTRIBUTION, f.read_text(encoding="utf-8"))]
    assert [file.name for file in in_code] == ["errors.py"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the sdist, and from it the wheel, as a release does."""
    folder = tmp_path_factory.mktemp("dist")
    venv = folder / "venv"
    for command in (
        [sys.executable, "-m", "venv", str(venv)],
        [str(venv / "bin/python"), "-m", "pip", "install", "--quiet", "build"],
        [str(venv / "bin/python"), "-m", "build", "--outdir", str(folder), str(ROOT)],
    ):
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": ""}
        )
        if done.returncode and "pip" in command:
            pytest.skip(f"pip finds no packages here: {done.stderr[-300:]}")
        assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_sdist_and_wheel_hold_every_file_of_the_package(built: Path) -> None:
    tracked = subprocess.run(["git", "ls-files", "agentrl"], cwd=ROOT, capture_output=True, text=True, check=True)
    files = {name for name in tracked.stdout.split() if (ROOT / name).exists()}
    assert {Path(name).suffix for name in files} >= {".py", ".tsv", ".yaml", ".html", ".typed", ".toml"}
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.name == f"agentrl_sdk-{__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        assert {name for name in archive.namelist() if not name.startswith("agentrl_sdk-")} == files
    with tarfile.open(sdist) as source:
        held = {name.partition("/")[2] for name in source.getnames()}
    assert files | {"README.md", "LICENSE", "pyproject.toml", "CHANGELOG.md"} <= held
    assert wheel.stat().st_size < 8_000_000
    assert sdist.stat().st_size < 16_000_000


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_wheel_alone_answers_every_command(built: Path, tmp_path: Path) -> None:
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=120)
    pip = [str(venv / "bin/python"), "-m", "pip", "--quiet", "install"]
    subprocess.run(
        [*pip, str(next(built.glob("*.whl")))], check=True, timeout=600, env={**os.environ, "PYTHONPATH": ""}
    )
    work = tmp_path / "work"
    work.mkdir()
    answers(partial(in_processes, venv / "bin/agentrl"), work)
    remedy = install("mcp").removeprefix("pip install ").strip("'")  # of no index: what is installed satisfies it
    added = subprocess.run(
        [*pip, remedy], capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONPATH": ""}
    )
    assert added.returncode == 0, added.stderr
    mcp = subprocess.run([str(venv / "bin/python"), "-c", "import mcp"], capture_output=True, text=True, timeout=60)
    assert mcp.returncode == 0, mcp.stderr
