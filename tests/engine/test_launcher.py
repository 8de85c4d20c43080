"""Starting, failing to start, stopping, and ending with the parent. The built-in server is real; processes that only
misbehave (end at once, never answer) are small stand-ins reached through `engine_python`."""

import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import anyio
import pytest

from agentrl.engine import launcher, process
from agentrl.engine.commands import EngineNode, engine_command
from agentrl.engine.launcher import check_launch, launch, launch_blocking
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.weights import DiskUpdate
from agentrl.engine.wire import SamplingParams
from agentrl.errors import EngineUnreachable, SettingsError
from tests.engine.faults import ok, serving
from tests.support.warm import python

EMBEDDED = EngineSettings(embedded_threads=1, embedded_slots=2, engine_start_timeout=100.0)


class StandIn(Protocol):
    def __call__(self, script: str, timeout: float = 60.0) -> EngineSettings: ...


@pytest.fixture
def stand_in(tmp_path: Path) -> StandIn:
    """Make an `engine_python` that runs a shell script instead of a server, to inject faults."""

    def make(script: str, timeout: float = 60.0) -> EngineSettings:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        return EngineSettings(engine="sglang", sglang_cpu=True, engine_python=str(path), engine_start_timeout=timeout)

    return make


def gone(pid: int, timeout: float) -> bool:
    """Return true if the process ends within `timeout` seconds, or has ended already."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([pidfd], [], [], timeout)[0])
    finally:
        os.close(pidfd)


async def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for first in (0, 2):
            settings = EMBEDDED.model_copy(update={"engine_port_base": port - first})
            with pytest.raises(EngineUnreachable, match=f"port {port} on 127.0.0.1 is taken") as caught:
                async with launch(settings, "nowhere", first=first, log_dir=tmp_path):
                    pass
            assert caught.value.kind == "port_taken"


async def test_an_engine_that_ends_at_start_shows_its_log(stand_in: StandIn, tmp_path: Path) -> None:
    settings = stand_in("echo the disk is full; exit 7")
    with pytest.raises(EngineUnreachable, match=r"(?s)status 7.*engine_3\.log.*the disk is full") as caught:
        async with launch(settings, "nowhere", first=3, log_dir=tmp_path):
            pass
    assert caught.value.kind == "engine_exited"


async def test_a_missing_interpreter_shows_in_the_log(tmp_path: Path) -> None:
    settings = EngineSettings(engine="sglang", sglang_cpu=True, engine_python="/nowhere/python")
    with pytest.raises(EngineUnreachable, match="/nowhere/python"):
        async with launch(settings, "nowhere", log_dir=tmp_path):
            pass


async def test_an_engine_that_never_answers_times_out_and_is_killed(stand_in: StandIn, tmp_path: Path) -> None:
    settings = stand_in(f"echo $$ > {tmp_path}/pid; exec sleep 1000", timeout=1.0)
    with pytest.raises(EngineUnreachable, match="not healthy within 1 s") as caught:
        async with launch(settings, "nowhere", log_dir=tmp_path):
            pass
    assert caught.value.kind == "engine_start_timeout"
    assert gone(int((tmp_path / "pid").read_text()), 10.0)


@pytest.mark.slow
async def test_a_bad_model_path_is_an_error_with_the_log(tmp_path: Path) -> None:
    with pytest.raises(EngineUnreachable, match="no-such-model"):
        async with launch(EMBEDDED, tmp_path / "no-such-model", log_dir=tmp_path):
            pass


@pytest.mark.slow
async def test_built_in_servers_pick_their_ports_and_the_death_of_one_is_noticed(
    tiny_model: Path, tmp_path: Path
) -> None:
    async with launch(EMBEDDED, tiny_model, log_dir=tmp_path, count=2) as engines:
        ports = [int(engine.url.rsplit(":", 1)[1]) for engine in engines]
        assert len({0, *ports}) == 3
        engine, other = engines
        assert engine.poll() is None
        engine.kill()
        with anyio.fail_after(120):
            assert await engine.wait() == -signal.SIGKILL
        await engine.stop()
        assert other.poll() is None


@pytest.mark.slow
def test_blocking_launch_serves_external_users_and_stops(tiny_model: Path, tmp_path: Path) -> None:
    with launch_blocking(EMBEDDED, tiny_model, log_dir=tmp_path) as (engine,):
        address = engine.url.removeprefix("http://")
        external = EngineSettings(engine="external", rollout_external_engine_addrs=(address,))
        with launch_blocking(external, "", log_dir=tmp_path) as (same,):
            assert same.url == engine.url
            assert same.poll() is None
        assert engine.poll() is None
        pid = engine.pid
    assert pid is not None
    assert gone(pid, 120.0)


async def test_external_needs_addresses(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="--rollout-external-engine-addrs"):
        async with launch(EngineSettings(engine="external"), "", log_dir=tmp_path):
            pass


async def test_an_external_engine_that_a_killed_run_left_paused_is_resumed(tmp_path: Path) -> None:
    async with serving(ok([5])) as server:
        server.paused = True
        settings = EngineSettings(
            engine="external", rollout_external_engine_addrs=(server.url,), engine_start_timeout=60
        )
        async with (
            launch(settings, "", log_dir=tmp_path) as engines,
            EnginePool([engines[0].url], settings, vocab_size=512) as pool,
        ):
            await pool.check()
        assert server.paths == ["POST /continue_generation"] * 2
        server.deaf = True
        impatient = settings.model_copy(update={"engine_start_timeout": 0.1})
        with pytest.raises(EngineUnreachable, match="was not healthy"):
            async with launch(impatient, "", log_dir=tmp_path):
                pass


async def test_checking_a_launch_starts_nothing() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        nobody = EngineSettings(engine="external", rollout_external_engine_addrs=(f"127.0.0.1:{port}",))
        with pytest.raises(EngineUnreachable, match=f"no engine answers at http://127.0.0.1:{port} .*start the server"):
            await check_launch(nobody, 1)
        held.listen()
        with pytest.raises(EngineUnreachable, match=f"port {port} on 127.0.0.1 is taken"):
            await check_launch(EngineSettings(engine_port_base=port), 1)
        await check_launch(EngineSettings(engine_port_base=port), 1, local=False)
        with pytest.raises(SettingsError, match="--engine-port-base 65535: port 65536 of the last engine"):
            await check_launch(EngineSettings(engine_port_base=65535), 2)
        # A process that accepts connections and answers slowly may be an engine that is still loading.
        await check_launch(nobody.model_copy(update={"engine_connect_timeout": 0.05}), 1)
    with pytest.raises(SettingsError, match="--rollout-external-engine-addrs"):
        await check_launch(EngineSettings(engine="external"), 1)
    with pytest.raises(SettingsError, match="--engine-python nowhere/python: no such program"):
        await check_launch(EngineSettings(engine="sglang", engine_python="nowhere/python"), 1)


async def test_an_external_engine_that_does_not_report_kept_sets_is_refused_where_they_are_needed() -> None:
    async with serving() as server:
        old = EngineSettings(
            engine="external", rollout_external_engine_addrs=(server.url,), engine_connect_timeout=30.0
        )
        await check_launch(old, 1)
        with pytest.raises(SettingsError, match=f"{server.url}: .*SGLang from 0.5.23.*--allow-truncated-sampling"):
            await check_launch(old, 1, sampling_support=True)
        server.info = {"sampling_mask_max_tokens": 4096}
        await check_launch(old, 1, sampling_support=True)
        server.deaf = True  # a server that is still loading is not waited for
        await check_launch(old.model_copy(update={"engine_connect_timeout": 0.05}), 1, sampling_support=True)


async def test_somebody_else_at_the_port_who_never_answers_is_not_waited_for(
    tmp_path: Path, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(launcher, "_ports", lambda *_: [port])  # taken after it was found free
        monkeypatch.setattr(process, "_PROBE_TIMEOUT", 0.2)
        with pytest.raises(EngineUnreachable, match="address already in use") as caught:
            async with launch(stand_in("echo address already in use; exit 1"), "nowhere", log_dir=tmp_path):
                raise AssertionError("it came up")
    assert caught.value.kind == "engine_exited"


PARENT = """
import sys, anyio
from agentrl.engine.launcher import launch
from agentrl.engine.settings import EngineSettings
async def main() -> None:
    settings = EngineSettings(engine="sglang", sglang_cpu=True, engine_python=sys.argv[1], engine_start_timeout=100)
    async with launch(settings, "nowhere", log_dir=sys.argv[2]):
        pass
anyio.run(main)
"""


def test_an_engine_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    # The stand-in server writes its pid into a pipe and sleeps.
    fifo = tmp_path / "pid"
    os.mkfifo(fifo)
    server = tmp_path / "python"
    server.write_text(f"#!/bin/sh\necho $$ > {fifo}\nexec sleep 1000\n")
    server.chmod(0o755)
    parent = subprocess.Popen([python(), "-c", PARENT, str(server), str(tmp_path)])
    try:
        child = int(fifo.read_text())
        assert not gone(child, 0.0)
        parent.kill()
        assert gone(child, 10.0)
    finally:
        parent.kill()
        parent.wait()


def test_sglang_options_become_flags_and_win_over_defaults() -> None:
    settings = EngineSettings(
        engine="sglang",
        engine_python="/venv/python",
        sglang_cpu=True,
        engine_context_length=4096,
        sglang_options={
            "mem_fraction_static": 0.7,
            "enable_metrics": True,
            "disable_overlap_schedule": False,
            "x": None,
            "cuda_graph_bs": [1, 2, 4],
        },
    )
    command = engine_command(settings, "model", host="127.0.0.1", port=1234)
    line = " ".join(command.arguments)
    assert line.startswith("/venv/python ")
    assert "--model-path model --host 127.0.0.1 --port 1234 --context-length 4096" in line
    assert "--mem-fraction-static 0.7" in line
    assert "--cuda-graph-bs 1 2 4" in line
    assert "--enable-metrics" in command.arguments
    assert "--disable-overlap-schedule" not in command.arguments
    assert "--x" not in command.arguments
    assert command.environment["SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"] == "0"


def test_sglang_on_gpus_uses_its_own_launcher_and_the_given_devices() -> None:
    settings = EngineSettings(engine="sglang", sglang_cpu=False)
    command = engine_command(settings, "model", host="127.0.0.1", port=1, gpus_per_engine=2, gpu_ids=("2", "GPU-3"))
    assert command.arguments[:3] == (sys.executable, "-m", "sglang.launch_server")
    assert command.arguments[-2:] == ("--tp-size", "2")
    assert command.environment["CUDA_VISIBLE_DEVICES"] == "2,GPU-3"


def test_an_engine_over_two_machines_has_the_command_lines_of_sglangs_documentation() -> None:
    """`python3 -m sglang.launch_server ... --tp 16 --dist-init-addr 172.16.4.52:20000 --nnodes 2 --node-rank 0`."""
    settings, devices = EngineSettings(engine="sglang", sglang_cpu=False), tuple("01234567")
    for rank in (0, 1):
        node = EngineNode(rank, 2, "172.16.4.52:20000")
        command = engine_command(settings, "model", host="h", port=1, gpus_per_engine=16, gpu_ids=devices, node=node)
        said = "--tp-size 16 --dist-init-addr 172.16.4.52:20000 --nnodes 2 --node-rank"
        assert command.arguments[-8:] == (*said.split(), str(rank))
        assert command.environment["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_an_engine_that_died_or_hangs_is_started_again_and_given_the_weights(
    tiny_model: Path, other_model: Path, tmp_path: Path, number: signal.Signals
) -> None:
    settings = EMBEDDED.model_copy(update={"engine_probe_interval": 0.3, "engine_hang_timeout": 1.0})
    params = SamplingParams(temperature=0.0, max_new_tokens=4, ignore_eos=True)
    async with launch(settings, tiny_model, log_dir=tmp_path) as (engine,):
        first = engine.pid
        assert first is not None
        async with EnginePool([engine.url], settings, vocab_size=512) as pool:
            await pool.receive(DiskUpdate(str(other_model)), "7")
            before = await pool.generate([1, 2, 3], params)
            os.killpg(first, number)
            after = await pool.generate([1, 2, 3], params)
            assert (after.weight_version, after.ids) == ("7", before.ids)
        assert engine.pid != first
        last = engine.pid
    assert last is not None
    assert gone(first, 1.0)
    assert gone(last, 1.0)
