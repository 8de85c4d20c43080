"""Ray that is somebody else's: used, and left as it was found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import import_path
from tests.support.runs import RunKit

pytestmark = pytest.mark.timeout(300)

OWNER = """
import json
import sys
from pathlib import Path

import psutil
import ray

from agentrl.cluster.launch import train
from agentrl.cluster.runtime import ray_runtime
from agentrl.config import RunSettings
from agentrl.errors import SettingsError

ray.init(num_cpus=2, include_dashboard=False, logging_level=40, log_to_driver=False)
nodes = ray.nodes()


@ray.remote(num_cpus=0)
class Mine:
    def ping(self):
        return "mine"


mine = Mine.remote()
settings = RunSettings.from_cli(sys.argv[1:])
assert train(settings) == 0
assert ray.is_initialized() and ray.nodes() == nodes
assert ray.get(mine.ping.remote()) == "mine"
pids = json.loads((Path(settings.observability.output_dir) / "processes.json").read_text())
ours = [psutil.Process(pid) for role in ("trainer", "rollout_worker", "engine") for pid in pids[role] if psutil.pid_exists(pid)]
assert not psutil.wait_procs(ours, 20)[1], "processes of the run are left"
try:
    with ray_runtime(settings.replace(ray_address="10.0.0.1:6379").cluster, cpus=1):
        raise AssertionError("joined another cluster")
except SettingsError as error:
    assert "--ray-address 10.0.0.1:6379: this process has joined the Ray cluster at" in str(error)
assert ray.is_initialized()
print("the owner goes on")
"""


def test_ray_that_is_initialised_is_used_and_stays_up_for_its_owner(tmp_path: Path) -> None:
    kit = RunKit.make(tmp_path)
    script = tmp_path / "owner.py"
    script.write_text(OWNER)
    done = subprocess.run(
        [sys.executable, script, *kit.arguments("run", num_rollout=1)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the owner goes on" in done.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
