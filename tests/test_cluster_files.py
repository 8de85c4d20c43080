"""The files of docs/files: their syntax, and the flags and metrics that they name."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from agentrl.config import RunSettings
from agentrl.config.fields import all_fields
from agentrl.plugins import load_object
from tests.support.checkout import ROOT, import_path

FILES = ROOT / "docs/files"


def commands() -> list[str]:
    job = yaml.safe_load((FILES / "rayjob.yaml").read_text())
    script = re.search(r"exec (agentrl train .*?)\" &", (FILES / "slurm.sh").read_text(), flags=re.S)
    image = re.search(r"agentrl train .*", (FILES / "Containerfile").read_text())
    assert script
    assert image
    page = re.search(r"agentrl train --env .*?```", (ROOT / "docs/one-gpu.md").read_text(), flags=re.S)
    assert page
    plain = [text.replace("\\\n", " ") for text in (script[1], page[0].removesuffix("```"))]
    return [job["spec"]["entrypoint"], image[0], *plain]


@pytest.mark.parametrize("command", commands())
def test_the_commands_have_flags_that_exist(command: str) -> None:
    words = shlex.split(command)
    assert words[:2] == ["agentrl", "train"]
    flags = {word for word in words if word.startswith("--") and not word.startswith("--sglang-")}
    assert flags - {"--config"} <= {field.flag for field in all_fields().values()}


def test_the_checklist_for_gpus_trains_what_exists(tmp_path: Path) -> None:
    """With an interpreter that prints its arguments: data is written, and each run has an environment and a model."""
    shown = tmp_path / "python"
    shown.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exec {sys.executable} "$@"\necho "$@"\n')
    shown.chmod(0o755)
    environment = {**os.environ, "PYTHON": str(shown), "SGLANG": str(shown), "PYTHONPATH": import_path()}
    subprocess.run([ROOT / "scripts/gpu_checklist.sh", tmp_path / "out"], check=True, env=environment)
    for name in ("colocate", "ipc", "colocate_lora"):
        _, _, command, *flags = shlex.split((tmp_path / f"out/{name}.log").read_text())
        given = RunSettings.from_cli(flags)
        assert command == "train"
        assert load_object(str(given.rollout.env), what="--env")
        assert (ROOT / str(given.train.hf_checkpoint)).is_dir()
        assert Path(str(given.data.prompt_data)).stat().st_size


def test_the_slurm_script_is_bash_and_wants_a_file(tmp_path: Path) -> None:
    subprocess.run(["bash", "-n", FILES / "slurm.sh"], check=True)
    done = subprocess.run(["bash", FILES / "slurm.sh"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode != 0
    assert "usage: sbatch slurm.sh run.yaml" in done.stderr


def test_the_ray_job_has_the_form_of_kuberay() -> None:
    job = yaml.safe_load((FILES / "rayjob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    for group in groups:
        assert group["rayStartParams"].keys() <= {"num-gpus"}
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["image"] == "registry.example.com/agentrl:latest"
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}
    (gpus,) = cluster["workerGroupSpecs"]
    assert gpus["minReplicas"] <= gpus["replicas"] <= gpus["maxReplicas"]
    asked = sum(map(int, re.findall(r"num-gpus(?:-per-node)? (\d+)", job["spec"]["entrypoint"])))
    (worker,) = gpus["template"]["spec"]["containers"]
    assert asked == gpus["replicas"] * worker["resources"]["limits"]["nvidia.com/gpu"]


def test_the_container_file_names_what_there_is() -> None:
    lines = re.sub(r"\\\n", " ", (FILES / "Containerfile").read_text()).splitlines()
    instructions = [line.split()[0] for line in lines if line and not line.startswith("#")]
    assert instructions[0] == "FROM"
    assert set(instructions) <= {"FROM", "RUN", "COPY", "ENV"}
    extras = re.search(r"agentrl-source\[([\w,]+)\]", "\n".join(lines))
    assert extras
    project = (ROOT / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", project, flags=re.M) for extra in extras[1].split(","))


def test_the_dashboard_shows_metrics_that_exist() -> None:
    board: dict[str, Any] = json.loads((FILES / "grafana.json").read_text())
    assert {"title", "uid", "schemaVersion", "panels", "templating"} <= board.keys()
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])
    text = (ROOT / "docs/metrics.md").read_text()
    known = {re.sub(r"\W", "_", name) for name in re.findall(r"`([\w@/]+)`", text)}
    known |= {"rollout_reward", "offered_reward", "step"}
    prefixed = {
        f"{group}_{name}" for group in ("rollout", "offered", "engines", "perf", "train", "staleness") for name in known
    }
    for panel in board["panels"]:
        assert {"type", "title", "gridPos", "targets", "datasource"} <= panel.keys()
        for target in panel["targets"]:
            name = re.match(r"agentrl_(\w+)\{", target["expr"])
            assert name
            assert name[1] in known | prefixed, name[1]
