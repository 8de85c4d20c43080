"""The addresses and environment variables that the run's processes on Ray get."""

import os
import socket
from pathlib import Path

import pytest

from agentrl.cluster.runtime import _reach, node_address, ray_runtime, worker_environment
from agentrl.config import RunSettings
from agentrl.errors import AgentRLError
from agentrl.run.engines import on_loopback


def given(**settings: object) -> RunSettings:
    return RunSettings.from_flat({"hf_checkpoint": "model", **settings})


@pytest.mark.parametrize(
    ("nodes", "settings", "address"),
    [
        (1, {}, "127.0.0.1"),
        (1, {"rollout_external_engine_addrs": ("127.0.0.1:30000", "http://localhost:30001")}, "127.0.0.1"),
        (1, {"rollout_external_engine_addrs": ("localhost:30000", "192.0.2.9:30000")}, "192.0.2.7"),
        (1, {"ray_address": "auto"}, "192.0.2.7"),
        (2, {}, "192.0.2.7"),
    ],
)
def test_a_node_is_known_by_an_address_that_all_who_need_it_reach(
    monkeypatch: pytest.MonkeyPatch, nodes: int, settings: dict[str, object], address: str
) -> None:
    monkeypatch.setattr("ray.nodes", lambda: [{"Alive": True}] * nodes + [{"Alive": False}])
    monkeypatch.setattr("ray.util.get_node_ip_address", lambda: "192.0.2.7")
    engine = {"engine": "external"} if "rollout_external_engine_addrs" in settings else {}
    assert node_address(given(**engine, **settings)) == address


def test_a_cluster_that_does_not_listen_is_named_without_waiting_for_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentrl.cluster.runtime._PATIENCE", 0.0)
    monkeypatch.setattr("ray.init", lambda **options: pytest.fail("nothing listens there"))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        _reach(address, 0.0)
    joined = ray_runtime(given(ray_address=address).cluster, cpus=1)
    with pytest.raises(AgentRLError, match=f"--ray-address {address}: no Ray cluster answers there"), joined:
        pass


def test_only_loopback_is_on_loopback() -> None:
    assert all(map(on_loopback, ("127.0.0.1:1", "http://localhost:1", "http://[::1]:1")))
    assert not any(map(on_loopback, ("192.0.2.7:1", "http://localhost.example:1", "https://engine")))


def test_processes_get_the_keys_and_the_path_of_the_drivers_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(("src", "/else", "")))
    for name in ("NCCL_DEBUG", "JUDGE_API_KEY", "OUR_JUDGE", "OTHER"):
        monkeypatch.setenv(name, name.lower())
    found = worker_environment(given(judge_api_key_env="OUR_JUDGE", rm_type="llm_judge", judge_url="http://judge"))
    assert found["PYTHONPATH"] == os.pathsep.join((str(tmp_path / "src"), "/else", "${PYTHONPATH}"))
    assert (found["NCCL_DEBUG"], found["OUR_JUDGE"]) == ("nccl_debug", "our_judge")
    assert not {"OTHER", "JUDGE_API_KEY"} & found.keys()
