"""Runs whose engines die or hang end as planned, with nothing lost and no process left running."""

import json
import os
import signal
import sys
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from tests.support.audit import audit_ledger
from tests.support.nightly import weekly
from tests.support.runs import RunKit, node_processes, still_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("mode", weekly(["broadcast", "disk"], 1))
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_one_of_two_engines_dies_or_hangs(tmp_path: Path, mode: str, number: signal.Signals) -> None:
    kit = RunKit.make(tmp_path)
    limits = {"engine_probe_interval": 1, "engine_hang_timeout": 5}
    run = kit.start(
        kit.arguments("run", rollout_num_gpus=2, num_rollout=12, update_weight_mode=mode, max_staleness=1, **limits)
    )
    run.until(lambda: "rollout 3/" in run.output)
    processes = run.processes()
    os.killpg(processes["engine"][0], number)
    assert run.wait() == 0, run.output
    assert [row["step"] for row in run.metrics()] == list(range(12))
    assert all(row["train/train_rollout_logprob_abs_diff"] <= 0.05 for row in run.metrics())
    result = audit_ledger(run.folder / "ledger.sqlite", through_step=11, groups_per_step=4)
    assert result.ok, result.problems
    assert still_running(processes) == []


LAUNCHER = """#!{python}
import json
import os
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

given = sys.argv[3:]
value = lambda flag: given[given.index(flag) + 1]
Path({folder!r}, f"node_{{value('--node-rank')}}.json").write_text(json.dumps(given))
if value("--node-rank") == "0":
    where = [value("--model-path"), "--host", value("--host"), "--port", value("--port")]
    os.execv(sys.executable, [sys.executable, "-m", "agentrl", "serve", *where, "--slots", "16", "--threads", "1"])


class Health(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()


HTTPServer((value("--host"), int(value("--port"))), Health).serve_forever()
"""
"""Replaces SGLang: writes its command line. Machine 0 is a built-in engine, the others answer health checks."""


def test_an_engine_over_two_nodes(tmp_path: Path) -> None:
    """Each of two simulated Ray nodes has a part of the engine; a whole run generates there and trains."""
    kit, fake = RunKit.make(tmp_path), tmp_path / "sglang"
    fake.write_text(LAUNCHER.format(python=sys.executable, folder=str(tmp_path)))
    fake.chmod(0o755)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    try:
        nodes = [cluster.add_node(num_cpus=cpus) for cpus in (2, 1)]
        form = {"engine": "sglang", "engine_python": fake, "rollout_num_gpus": 16, "rollout_num_gpus_per_engine": 16}
        form |= {"num_gpus_per_node": 8, "ray_address": cluster.address, "update_weight_mode": "disk", "num_rollout": 2}
        arguments = kit.arguments("run", embedded_slots=None, embedded_threads=None, **form)
        run = kit.start([*arguments, "--no-sglang-cpu"])
        run.until(run.processes)
        parts = run.processes()["engine"]
        assert [bool({*parts} & node_processes(node)) for node in nodes] == [True, True]
        assert run.wait() == 0, run.output
    finally:
        cluster.shutdown()
    first, second = (json.loads((tmp_path / f"node_{rank}.json").read_text()) for rank in (0, 1))
    assert (
        first[-8:-1]
        == second[-8:-1]
        == ["--tp-size", "16", "--dist-init-addr", first[-5], "--nnodes", "2", "--node-rank"]
    )
    assert (first[-1], second[-1]) == ("0", "1")
    assert len(parts) == 2
    assert still_running({"engine": parts}) == []
