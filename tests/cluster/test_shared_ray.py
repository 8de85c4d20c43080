"""A Ray cluster that the run did not start: the run uses it, and leaves it unchanged."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import anyio
import psutil
import pytest
from ray.cluster_utils import Cluster

from agentrl.cluster.engines import stop_engines
from agentrl.cluster.runtime import ray_runtime
from agentrl.config import RunSettings
from agentrl.run.protocols import ComponentLost
from tests.support.audit import audit_ledger
from tests.support.checkout import import_path
from tests.support.runs import RunKit, node_processes

pytestmark = pytest.mark.timeout(900)

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


@pytest.mark.slow
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
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the owner goes on" in done.stdout
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


def test_an_actor_may_know_its_cluster_by_another_address(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = SimpleNamespace(gcs_address="192.0.2.7:6379", get_actor_id=lambda: "01")
    monkeypatch.setattr("ray.is_initialized", lambda: True)
    monkeypatch.setattr("ray.get_runtime_context", lambda: actor)
    given = RunSettings.from_flat({"ray_address": "127.0.0.1:6379", "hf_checkpoint": "model"})
    with ray_runtime(given.cluster, cpus=1):
        pass


async def test_an_engine_that_is_dead_does_not_end_the_wait_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    stopped: list[str] = []

    async def value(name: str) -> None:
        if name == "dead":
            raise ComponentLost("it died")
        await anyio.sleep(0.01)
        stopped.append(name)

    monkeypatch.setattr("agentrl.cluster.engines.value", value)
    monkeypatch.setattr("agentrl.cluster.runtime.value", value)
    names = ("one", "dead", "other")
    await stop_engines([SimpleNamespace(stop=SimpleNamespace(remote=lambda name=name: name)) for name in names])
    assert stopped == ["one", "other"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """Start a head without room for the run's processes; tests add nodes with room."""
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    yield made
    made.shutdown()


@pytest.mark.slow
def test_several_runs_on_one_cluster_do_not_meet(tmp_path: Path, cluster: Cluster) -> None:
    """Two runs get places at once; the third waits until one of them ends."""
    cluster.add_node(num_cpus=4)
    kit = RunKit.make(tmp_path)
    runs = [kit.start(kit.arguments(f"run-{i}", ray_address=cluster.address, num_rollout=4)) for i in range(3)]
    for run in runs:
        assert run.wait() == 0, run.output
    first, *others = ([row["train/grad_norm"] for row in run.metrics()] for run in runs)
    assert others == [first, first]


@pytest.mark.slow
def test_a_cluster_without_room_says_what_it_lacks_or_the_run_is_reduced(tmp_path: Path, cluster: Cluster) -> None:
    cluster.add_node(num_cpus=3)
    kit, form = RunKit.make(tmp_path), {"ray_address": cluster.address, "rollout_num_gpus": 4, "num_rollout": 1}
    refused = kit.start(kit.arguments("refused", start_timeout=1, **form))
    assert refused.wait() == 2
    assert "the cluster has no room for 5 processes" in refused.output
    reduced = kit.start(kit.arguments("reduced", allow_fewer_devices=True, **form))
    assert reduced.wait() == 0, reduced.output
    assert "--rollout-num-gpus 2 instead of 4" in reduced.output


ON_THE_DRIVER = """
import os

if "ON_THE_DRIVER" not in os.environ:
    raise ImportError("only the driver's machine has it")
from env import AddEnv
"""


@pytest.mark.slow
def test_a_cluster_gets_the_drivers_python_path_and_what_it_lacks_is_told_before_engines_are_up(
    tmp_path: Path, cluster: Cluster
) -> None:
    cluster.add_node(num_cpus=4)
    kit, modules = RunKit.make(tmp_path), tmp_path / "modules"
    modules.mkdir()
    (modules / "on_the_driver.py").write_text(ON_THE_DRIVER)
    arguments = kit.arguments("run", ray_address=cluster.address, env="on_the_driver:AddEnv")
    path = f"{import_path()}{os.pathsep}{modules}"
    run = kit.start(arguments, PYTHONPATH=path, ON_THE_DRIVER="1")
    assert run.wait() == 2, run.output
    assert "on_the_driver failed to import: ImportError: only the driver's machine has it" in run.output
    assert "engine ready" not in run.output


@pytest.mark.slow
def test_a_lost_node_costs_its_engines_or_the_run_is_resumed_on_what_is_left(tmp_path: Path, cluster: Cluster) -> None:
    """First the node of an engine is lost, then that of the trainer."""
    nodes = [cluster.add_node(num_cpus=2), cluster.add_node(num_cpus=2)]
    kit = RunKit.make(tmp_path)
    form = {"ray_address": cluster.address, "rollout_num_gpus": 3, "num_rollout": 40, "save_interval": 1}
    arguments = kit.arguments("run", **form, update_weight_mode="disk", max_staleness=1, engine_probe_interval=1)
    run = kit.start(arguments)
    run.until(lambda: "rollout 3/" in run.output)
    rollouts, trainer = run.processes()["rollout_worker"][0], run.processes()["trainer"][0]
    assert rollouts in node_processes(cluster.head_node), "the ledger is not beside the driver"
    other, theirs = sorted(nodes, key=lambda node: trainer in node_processes(node))
    cluster.remove_node(other)
    at = len(run.metrics())
    run.until(lambda: len(run.metrics()) > at + 4)
    cluster.remove_node(theirs)
    assert run.wait() == 2, run.output
    assert "start the same command again to resume" in run.output
    cluster.add_node(num_cpus=2)
    again = kit.start([*arguments, "--num-rollout", "30", "--allow-fewer-devices"])
    assert again.wait() == 0, again.output
    result = audit_ledger(again.folder / "ledger.sqlite", through_step=29, groups_per_step=4)
    assert result.ok, result.problems


@pytest.mark.slow
def test_a_lost_node_of_rollout_workers_changes_nothing(tmp_path: Path, cluster: Cluster) -> None:
    """One of three nodes is lost, and it has neither the trainer nor the engine."""
    nodes = [cluster.add_node(num_cpus=2) for _ in range(3)]
    kit = RunKit.make(tmp_path)
    address = f"127.0.0.1:{cluster.address.rpartition(':')[2]}"  # actors know another one
    form = {"ray_address": address, "rollout_workers": 2, "num_rollout": 12, "max_staleness": 1}
    run = kit.start(kit.arguments("run", **form))
    run.until(lambda: "rollout 3/" in run.output)
    others = {*run.processes()["trainer"], *run.processes()["engine"]}
    spare = [node for node in nodes if _has_workers(node) and not others & node_processes(node)]
    assert spare, "no node has workers alone"
    cluster.remove_node(spare[0])
    assert run.wait() == 0, run.output
    result = audit_ledger(run.folder / "ledger.sqlite", through_step=11, groups_per_step=4)
    assert result.ok, result.problems


NOTED = """
from pathlib import Path

import ray
from env import AddEnv


def note(what):
    with Path("noted.txt").open("a") as file:
        file.write(f"{what} {ray.get_runtime_context().get_node_id()}\\n")


class NotedEnv(AddEnv):
    @classmethod
    async def setup(cls, args):
        note("setup")

    @classmethod
    async def teardown(cls):
        note("teardown")
"""


@pytest.mark.slow
def test_workers_are_beside_engines_that_no_other_machine_reaches_and_tear_down(
    tmp_path: Path, cluster: Cluster
) -> None:
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    kit = RunKit.make(tmp_path)
    (tmp_path / "noted.py").write_text(NOTED)
    form = {"ray_address": cluster.address, "rollout_workers": 2, "lr": None, "train_threads": None}
    run = kit.start(kit.arguments("out", env="noted.py:NotedEnv", **form), "rollout")
    assert run.wait() == 0, run.output
    here = cluster.head_node.node_id
    assert sorted((tmp_path / "noted.txt").read_text().splitlines()) == [f"setup {here}"] * 2 + [f"teardown {here}"] * 2


def _has_workers(node: Any) -> bool:
    return any(psutil.Process(pid).name().startswith("ray::WorkerActo") for pid in node_processes(node))
