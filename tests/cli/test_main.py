"""The `agentrl` command in a separate process, by its output and exit code."""

import ast
import os
import re
import signal
import socket
import subprocess
import sys
import time
import tomllib
from itertools import chain
from pathlib import Path

import pytest

import agentrl as rooms
from agentrl.cli.main import _DISTRIBUTED_AS, COMMANDS, run
from agentrl.errors import install
from tests.support.commands import in_this_process, processor_seconds
from tests.support.nightly import nightly
from tests.support.runs import RunKit
from tests.support.warm import python

HEAVY = ("torch", "nicegui", "ray", "transformers", "megatron", "numpy", "pydantic", "matplotlib", "tensorboard")


def agentrl(*args: str, cwd: Path | None = None, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "100", **environment}
    return subprocess.run([python(), "-m", "agentrl", *args], capture_output=True, text=True, env=env, cwd=cwd)


def loaded_after(line: str) -> set[str]:
    """Names of heavy packages in sys.modules after running `line` in a fresh interpreter."""
    code = (
        f"import sys\nfrom agentrl.cli.main import run\nsys.stdout = open('/dev/null', 'w')\nrun({line.split()!r})\n"
        f"sys.stdout = sys.__stdout__\nprint(*[m for m in {HEAVY!r} if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_help_lists_every_command_and_loads_nothing_heavy() -> None:
    text = agentrl("--help").stdout
    assert [c for c in ("init", "check", "rollout", "train", "eval", "serve", "report") if c not in text] == []
    assert loaded_after("--help") == set()


@pytest.mark.parametrize(
    "line",
    nightly(
        ["train --help", "train --help-all", "train --dry-run", "check --help", "init --help"],
        ("train --help", "check --help"),
    ),
)
def test_commands_answer_without_torch_or_ray(line: str) -> None:
    assert loaded_after(line) <= {"pydantic"}


def test_help_is_fast() -> None:
    """CPU time is little more than that of importing the CLI library, on any processor and under any load."""
    assert processor_seconds("-m", "agentrl", "--help") < 3 * processor_seconds("-c", "import click")


def test_train_help_shows_essentials_first_and_every_flag() -> None:
    text = in_this_process("train", "--help").stdout
    assert text.index("--env ") < text.index("--hf-checkpoint") < text.index("--kl-loss-type")
    assert text.index("Essentials") < text.index("Trainer")
    from agentrl.config.fields import all_fields

    assert [f.flag for f in all_fields().values() if f.flag[2:] not in text] == []
    assert max(map(len, text.splitlines())) <= 100


@pytest.mark.parametrize("command", ["", *(name for name in COMMANDS if name != "demo")])
def test_help_fits_a_terminal_of_80_columns(command: str) -> None:
    done = in_this_process(*command.split(), "--help", COLUMNS="80")
    assert done.returncode == 0
    assert [line for line in done.stdout.splitlines() if len(line) > 80] == []


@pytest.mark.parametrize(
    ("command", "its_own", "of_training"),
    [
        ("rollout", ["--prompt-data", "--n-samples-per-prompt"], ["--lr", "--save-interval", "--eval-interval"]),
        ("eval", ["--eval-prompt-data", "--eval-temperature"], ["--lr", "--save-interval", "--num-rollout"]),
    ],
)
def test_essentials_are_the_commands_own(command: str, its_own: list[str], of_training: list[str]) -> None:
    essentials = agentrl(command, "--help").stdout.partition("Essentials:")[2].partition("All other settings")[0]
    flags = {line.split()[0] for line in essentials.splitlines() if line.strip().startswith("--")}
    assert flags >= {"--hf-checkpoint", "--env", "--label-key", *its_own}
    assert flags.isdisjoint(of_training)


@pytest.mark.parametrize("flag", ["--help", "--help-all"])
def test_help_tells_a_commands_own_defaults(flag: str) -> None:
    text = " ".join(in_this_process("sft", flag).stdout.split())
    assert "Peak learning rate. [default: 1e-05]" in text
    assert "holds the prompt. [default: messages]" in text


def test_help_all_explains_every_setting() -> None:
    from agentrl.config.fields import all_fields

    text = " ".join(in_this_process("train", "--help-all").stdout.split())
    missing = [f.name for f in all_fields().values() if (f.info.description or "").split()[0] not in text]
    assert missing == []
    assert "--no-grpo-std-normalization" in text


def test_version() -> None:
    assert agentrl("--version").stdout.startswith("agentrl 0.")


@pytest.mark.parametrize(
    ("args", "parts"),
    [
        (("trian",), ["did you mean train?"]),
        (("train", "--rollout-bach-size", "3"), ["unknown flag --rollout-bach-size", "--rollout-batch-size"]),
        (("train", "--lr", "fast"), ["--lr", "a number", "'fast'"]),
        (("train", "stray"), ["stray"]),
        (("train",), ["--hf-checkpoint is missing"]),
        (("train", "--tensor-model-parallel-size", "4"), ["cannot hold", "use 4 processes"]),
        (("train", "--config", "nowhere.yaml"), ["no file nowhere.yaml"]),
        (("eval", "--hf-checkpoint", "."), ["--eval-prompt-data NAME PATH"]),
        (("check", "nowhere"), ["neither a folder nor an environment"]),
        (("check", "."), ["no tokenizer.json"]),
        (("check", "nowhere:Env"), ["no module 'nowhere'"]),
        (("report", "."), ["holds no metrics yet", "--output-dir"]),
        (("init",), ["PATH"]),
        (("init", "m", "--layers", "0"), ["--layers"]),
        (("init", "m", "--heads", "3"), ["heads=3", "multiple"]),
        (("init", "file.txt/m"), ["file.txt/m cannot be made: Not a directory"]),
        (("init", "--skilled", "file.txt/m"), ["file.txt/m: Not a directory; choose another path"]),
        (("new", "file.txt/m"), ["file.txt/m: Not a directory; choose another path"]),
        (("report", "x" * 300), ["File name too long; choose another path"]),
        (("check", "--agent", ""), ["--agent", "text, length at least 1"]),
        (("train", "--env", ""), ["--env", "length at least 1"]),
        (("train", "--custom-rm-path", ""), ["--custom-rm-path: it is empty"]),
        (("train", "--data-source-path", ""), ["--data-source-path: it is empty"]),
        (("check",), ["nothing to check: name an environment"]),
        (("check", "adding.py"), ["'adding.py': expected", "path/file.py:Name"]),
        (("check", "syntax.py:Env"), ["syntax.py failed to import: SyntaxError", "line 1"]),
        (("check", "function.py:Env"), ["expected a class that subclasses agentrl.Environment, got function Env"]),
        (("report",), ["RUN"]),
        (("report", "nowhere"), ["nowhere: holds no metrics yet"]),
        (("report", ".", "--tittle", "x"), ["--tittle", "--title"]),
        (("rollout", "--promt-data", "x"), ["unknown flag --promt-data", "--prompt-data"]),
        (("rollout", "--hf-checkpoint", "."), ["no prompts", "--prompt-data", "--env"]),
        (("train", "--model", "m"), ["unknown flag --model"]),
        (("eval",), ["--hf-checkpoint is missing", "--eval-prompt-data"]),
        (("train", "--config", "unknown.yaml"), ["unknown.yaml line 2", "learning_rat"]),
        (("serve", "nowhere"), ["config.json", "nowhere"]),
    ],
)
def test_bad_input_is_one_message_and_exit_code_2(args: tuple[str, ...], parts: list[str], tmp_path: Path) -> None:
    (tmp_path / "file.txt").write_text("not a folder")
    (tmp_path / "syntax.py").write_text("class Env(Environment)\n    pass\n")
    (tmp_path / "function.py").write_text("def Env(args, samples): ...\n")
    (tmp_path / "unknown.yaml").write_text("seed: 1\nlearning_rat: 1e-5\n")
    done = in_this_process(*args, cwd=tmp_path)
    assert done.returncode == 2, done.stderr
    assert [part for part in parts if part not in done.stderr] == [], done.stderr
    assert "error: " in done.stderr
    assert "Traceback" not in done.stderr


def test_a_process_of_its_own_says_and_returns_the_same(tmp_path: Path) -> None:
    for args in (("trian",), ("train", "--lr", "fast")):
        there, here = agentrl(*args, cwd=tmp_path), in_this_process(*args, cwd=tmp_path)
        assert (there.returncode, there.stdout, there.stderr) == (here.returncode, here.stdout, here.stderr)


def test_a_port_that_is_taken_is_said_before_the_model_is_loaded(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = in_this_process("serve", "no-model-here", "--port", str(port), cwd=tmp_path)
    assert done.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use; choose another --port" in done.stderr


BLOCKED = """
import sys
for name in {missing!r}.split():
    sys.modules[name] = None  # an import of it fails as if it were not installed
from agentrl.cli.main import main
main({argv!r})
"""


@pytest.mark.parametrize(
    ("line", "missing", "extra"),
    nightly(
        [
            ("grade --rm-type llm_judge --judge-url http://127.0.0.1:9 a.jsonl", "httpx", "graders"),
            ("retrieval --corpus a.jsonl --port 0", "starlette", "search"),
            ("retrieval --corpus a.jsonl --encoder e --port 0", "transformers torch", "dense"),
            ("train --hf-checkpoint . --env e.py:E --prompt-data a.jsonl", "ray", "train"),
            ("init m", "transformers", "engine"),
        ],
        2,
    ),
)
def test_a_missing_package_names_the_extra_for_the_command(line: str, missing: str, extra: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"prompt": "q", "text": "Oslo has fjords", "response": "r", "label": "l"}\n')
    code = BLOCKED.format(missing=missing, argv=line.split())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert install(extra) in done.stderr, done.stderr
    assert done.returncode == 2


def test_every_package_that_agentrl_imports_is_required_or_brought_by_an_extra() -> None:
    imported: set[str] = set()
    for file in Path(rooms.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                imported |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                imported.add((node.module or "").partition(".")[0])
    project = tomllib.loads((Path(rooms.__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    required = {re.split(r"[^\w.-]", line)[0] for line in declared} | {"yaml", "agentrl", *sys.stdlib_module_names}
    others = {"llvmlite", "pydantic_core", "httpx2", "latex2sympy2_extended", "yarl", "huggingface_hub"}
    others |= {"trackio"}  # only for its users: its own dependencies are large
    missing = {name for name in imported if not {name, _DISTRIBUTED_AS.get(name, name).replace("_", "-")} & required}
    assert missing == others, "these come with numba, pydantic, mcp, math-verify, aiohttp, transformers"


def test_a_full_disk_is_one_message_also_if_a_library_has_its_own_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = iter([RuntimeError("I/O error: No space left on device (os error 28)"), RuntimeError("a bug")])

    def main(**_: object) -> None:
        raise next(errors)

    monkeypatch.setattr("agentrl.cli.main.agentrl.main", main)
    assert run(["report"]) == 2
    assert "error: I/O error: No space left on device (os error 28); free some space" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="a bug"):
        run(["report"])


def test_debug_shows_the_traceback(tmp_path: Path) -> None:
    for done in (
        in_this_process("train", "--lr", "fast", "--debug", cwd=tmp_path),
        in_this_process("--debug", "train", "--lr", "fast", cwd=tmp_path),
        in_this_process("train", "--lr", "fast", cwd=tmp_path, AGENTRL_DEBUG="1"),
    ):
        assert done.returncode == 2
        assert "Traceback" in done.stderr
        assert "--lr: expected a number" in done.stderr


def test_dry_run_prints_the_plan_or_what_is_wrong(tmp_path: Path) -> None:
    done = in_this_process("train", "--dry-run", "--lr", "1e-4", cwd=tmp_path)
    assert (done.returncode, "lr = 0.0001" in done.stdout) == (2, True)
    assert "--hf-checkpoint is missing" in done.stderr
    kit = RunKit.make(tmp_path)
    full = in_this_process("train", "--dry-run", *kit.arguments(), "--lr", "1e-4", cwd=tmp_path)
    assert full.returncode == 0, full.stderr
    assert "lr = 0.0001" in full.stdout
    assert "[placement]" in full.stdout
    assert "rollout_top_k" not in full.stdout, "as by default"
    unknown = in_this_process("train", "--dry-run", *kit.arguments(env="env.py:AddEnf"), cwd=tmp_path)
    assert (unknown.returncode, "did you mean 'AddEnv'" in unknown.stderr) == (2, True)
    (tmp_path / "model" / "model.safetensors").write_bytes(b"\x08" * 100)
    torn = in_this_process("train", "--dry-run", *kit.arguments(), cwd=tmp_path)
    assert torn.returncode == 2
    assert "model.safetensors: not a readable safetensors file" in torn.stderr
    assert "Traceback" not in torn.stderr


def test_a_config_file_and_flags(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("train:\n  lr: 1e-5\n  seed: 7\n")
    kit = RunKit.make(tmp_path)
    line = [*kit.arguments(lr=None), "--config", "run.yaml", "--lr", "2e-5", "--dry-run"]
    out = in_this_process("train", *line, cwd=tmp_path).stdout
    assert "lr = 2e-05\n" in out
    assert "seed = 7\n" in out


ENV = '''
from agentrl import Environment, tool

@tool
def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: the first.
        b: the second.
    """
    return str(a + b)

class Adding(Environment):
    tools = [add]
    max_turns = 3

    async def reward(self, sample):
        return float("42" in sample.response)
'''


def test_check_shows_an_environment(tmp_path: Path) -> None:
    (tmp_path / "adding.py").write_text(ENV)
    done = in_this_process("check", "adding.py:Adding", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "max_turns 3; when_interrupted keep; tools: add" in done.stdout
    assert "methods of its own: reward" in done.stdout
    assert '"Add two numbers.' in done.stdout, "the prompt shows the schema"


def test_check_names_the_nearest_environment(tmp_path: Path) -> None:
    (tmp_path / "adding.py").write_text(ENV)
    done = in_this_process("check", "adding.py:Addin", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean 'Adding'?" in done.stderr


@pytest.mark.slow
def test_init_makes_a_model_that_check_reports_on(tmp_path: Path) -> None:
    made = agentrl("init", "m", "--layers", "1", "--hidden", "32", "--heads", "2", "--kv-heads", "1", cwd=tmp_path)
    assert made.returncode == 0, made.stderr
    assert (tmp_path / "m" / "config.json").is_file()
    assert "Writing" not in made.stderr, "no progress bars of libraries"
    again = agentrl("init", "m", cwd=tmp_path)
    assert again.returncode == 2
    assert "--force" in again.stderr
    report = agentrl("check", "m", cwd=tmp_path)
    assert report.returncode == 0, report.stderr
    assert "generation prompt" in report.stdout


def test_ctrl_c_is_exit_code_130(tmp_path: Path) -> None:
    """An environment that raises KeyboardInterrupt while it loads simulates a Ctrl-C at that moment."""
    (tmp_path / "slow.py").write_text("raise KeyboardInterrupt\n")
    done = agentrl("check", "slow.py:Env", cwd=tmp_path)
    assert done.returncode == 130
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("line", "number", "code"),
    nightly(
        [
            ("check slow.py:Env", signal.SIGINT, 130),
            ("rollout --env slow.py:Env --hf-checkpoint .", signal.SIGTERM, 143),
            ("eval --env slow.py:Env --hf-checkpoint .", signal.SIGTERM, 143),
        ],
        1,
    ),
)
def test_a_signal_ends_the_command_with_its_exit_code(
    tmp_path: Path, line: str, number: signal.Signals, code: int
) -> None:
    (tmp_path / "slow.py").write_text("import sys, signal\nprint('ready', flush=True)\nsignal.pause()\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "agentrl", *line.split()],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    _, errors = process.communicate()
    assert process.returncode == code
    assert "Traceback" not in errors


def test_output_into_a_closed_pipe_is_quiet() -> None:
    started = time.monotonic()
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m agentrl train --help-all | head -1"],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.startswith("Usage: agentrl train")
    assert done.stderr == ""
    assert time.monotonic() - started < 60
