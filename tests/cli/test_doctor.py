"""`agentrl doctor` as people use it."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def doctor(**environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "COLUMNS": "160", **environment}
    command = [sys.executable, "-m", "agentrl", "doctor"]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env, cwd=ROOT)


def rows(text: str) -> dict[str, str]:
    """Return the state and the finding of each row, by the row's name."""
    names = (
        "Python tool",
        "machine bubblewrap",
        "machine container",
        "sandbox bubblewrap",
        "sandbox landlock",
        "command bwrap",
        "torch",
    )
    return {n: line[len(n) :].strip() for n in names for line in text.splitlines() if line.startswith(n)}


def test_it_says_which_sandbox_and_why() -> None:
    done = doctor()
    found = rows(done.stdout)
    sandboxes = {"sandbox bubblewrap", "sandbox landlock", "machine bubblewrap", "machine container"}
    assert set(found) == {"Python tool", *sandboxes, "command bwrap", "torch"}
    assert found["machine bubblewrap"][:2] == found["sandbox bubblewrap"][:2]
    works = [name for name in ("bubblewrap", "landlock") if found[f"sandbox {name}"].startswith("ok")]
    assert done.returncode == (0 if works else 1)
    if works:
        assert f"gets sandbox {works[0]}" in found["Python tool"]
    assert done.stderr == ""


def test_without_bubblewrap_it_says_how_to_get_it(tmp_path: Path) -> None:
    done = doctor(PATH=str(tmp_path))
    found = rows(done.stdout)
    assert found["command bwrap"].startswith("note")
    assert found["sandbox bubblewrap"].startswith("note")
    assert found["machine bubblewrap"].startswith("note")
    assert found["machine container"].startswith("note")
    assert "apt install bubblewrap" in done.stdout
    if done.returncode == 0:
        assert "landlock" in found["Python tool"]


def test_without_any_sandbox_it_fails(tmp_path: Path) -> None:
    """The kernel's refusal is injected: no landlock call works."""
    code = (
        "import sys\nfrom agentrl.sandbox import bootstrap\nwhole = bootstrap.modules\n"
        "def broken():\n    texts = whole()\n"
        "    texts['kernel'] = texts['kernel'].replace('= 444, 445, 446', '= 9444, 9445, 9446')\n    return texts\n"
        "bootstrap.modules = broken\nfrom agentrl.cli.main import main\nmain(['doctor'])\n"
    )
    env = {**os.environ, "COLUMNS": "200", "PATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, env=env, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    assert rows(done.stdout)["Python tool"].startswith("problem")
    assert "unsafe_subprocess" in done.stdout
    assert "a process could not be confined: landlock" in done.stdout


def test_a_gpu_tool_that_fails_is_a_note(tmp_path: Path) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA-SMI has failed'\nexit 9\n")
    tool.chmod(0o755)
    done = doctor(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    assert "NVIDIA-SMI has failed" in done.stdout
    assert "GPU 0" not in done.stdout
    tool.write_text("#!/bin/sh\necho 'NVIDIA H100, 81559 MiB, 570.1'\n")
    assert "GPU 0" in doctor(PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}").stdout


def test_it_loads_nothing_heavy() -> None:
    heavy = {"torch", "ray", "numpy", "transformers", "sympy", "rich"}
    code = f"import sys, agentrl.cli.doctor, agentrl.sandbox, agentrl.tools.python\nprint({heavy!r} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert done.stdout == "set()\n"
