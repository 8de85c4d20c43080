"""The release workflow: GitHub's schema accepts it, and its first check compares the tag with the version."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.nightly import nightly

ROOT = Path(__file__).parents[1]
WORKFLOW = ROOT / ".github/workflows/release.yml"
SCHEMAS = {
    ".github/workflows/release.yml": "github-workflows",
    ".github/ISSUE_TEMPLATE/bug.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/idea.yml": "github-issue-forms",
    ".github/ISSUE_TEMPLATE/config.yml": "github-issue-config",
}


@pytest.mark.parametrize("path", nightly(SCHEMAS, 2))
def test_files_for_github_are_valid(path: str) -> None:
    pytest.importorskip("check_jsonschema", reason="the extra dev has check-jsonschema: pip install -e '.[dev]'")
    command = [
        sys.executable,
        "-m",
        "check_jsonschema",
        "--builtin-schema",
        f"vendor.{SCHEMAS[path]}",
        str(ROOT / path),
    ]
    found = subprocess.run(command, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


def steps(job: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = yaml.safe_load(WORKFLOW.read_text())["jobs"][job]["steps"]
    return found


def version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


@pytest.mark.parametrize(
    ("tag", "heading", "passes"),
    [("{}", "## {}", True), ("9.9.9", "## {}", False), ("{}", "## Unreleased", False)],
)
def test_the_tag_is_compared_with_version_and_changes(tmp_path: Path, tag: str, heading: str, passes: bool) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "agentrl").mkdir()
    shutil.copy(ROOT / "agentrl/__init__.py", tmp_path / "agentrl")
    (tmp_path / "CHANGELOG.md").write_text(f"# Changes\n\n{heading.format(version())}\n")
    (check,) = [step["run"] for step in steps("build") if "GITHUB_REF_NAME" in step.get("run", "")]
    environment = {**os.environ, "GITHUB_REF_NAME": f"v{tag.format(version())}"}
    # GitHub runs a step with `bash -e`.
    ended = subprocess.run(["bash", "-e", "-c", check], cwd=tmp_path, env=environment, capture_output=True)
    assert (ended.returncode == 0) == passes


def test_the_wheel_is_tried_before_it_is_published() -> None:
    jobs = yaml.safe_load(WORKFLOW.read_text())["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    runs = " ".join(step.get("run", "") for step in steps("build"))
    names = re.findall(r"python -m build|install dist/\*\.whl|bin/agentrl --help", runs)
    assert names == ["python -m build", "install dist/*.whl", "bin/agentrl --help"]
