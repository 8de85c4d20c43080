"""Starting and stopping engines.

1. `launch` is an async context manager: it yields once every engine answers `/health`, and stops all of them on the
   way out. `launch_blocking` is the same for code without an event loop.
2. Every engine runs in a session of its own under `guard.py` and writes to its own log file. It dies with the
   process that launched it, also when that one is killed.
3. A start that fails says why: the port is taken, the engine ended (with the end of its log), or it was not healthy
   in time. All engines of a failed launch are stopped.
4. An engine that ends or hangs during the context is started again at the same address, up to `engine_max_restarts`
   times: a pool finds it there, and gives it the weights that it missed.
5. Kind `external` starts nothing and only waits for the given addresses to be healthy.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal

from agentrl import guard
from agentrl.engine.background import beside
from agentrl.engine.commands import EngineCommand, engine_command
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport, Transport, normalise_url
from agentrl.errors import EngineUnreachable, SettingsError

_GUARD = Path(guard.__file__)
_STOP_GRACE = 10.0
_POLL_EVERY = 0.1
_PROBE_TIMEOUT = 5.0
_LOG_TAIL = 4000
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineProcess:
    """One engine: its address and, unless it is external, its process (group) and log file."""

    url: str
    pid: int | None = None
    log_path: Path | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self, command: EngineCommand) -> None:
        """Run it, under the guard."""
        assert self.log_path is not None
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        prefix = (sys.executable, "-I", "-S", str(_GUARD), str(os.getpid()))
        with self.log_path.open("wb" if self._process is None else "ab") as log:
            self._process = subprocess.Popen(
                (*prefix, *command.arguments),
                env=dict(command.environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """The exit status if the engine has ended, else None; always None for an external one."""
        return None if self._process is None else self._process.poll()

    async def wait(self) -> int:
        """Return the exit status once the engine has ended; an external one never does."""
        process = self._process
        if process is None:
            await anyio.sleep_forever()
            raise AssertionError("sleep_forever returned")
        while (status := process.poll()) is None:
            try:
                pidfd = os.pidfd_open(process.pid)
            except ProcessLookupError:
                continue
            try:
                await anyio.wait_readable(pidfd)
            finally:
                os.close(pidfd)
        return status

    async def stop(self, grace: float = _STOP_GRACE) -> None:
        """End the engine and everything it started: SIGTERM, then SIGKILL after `grace` seconds."""
        if self._process is None:
            return
        with anyio.CancelScope(shield=True):
            self._process.terminate()  # the guard hands it on to the server alone
            with anyio.move_on_after(grace):
                await self.wait()
            # Also after a clean exit: a server's own children may be left in the group.
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """SIGKILL the engine's whole process group, if there is any of it left."""
        if self.pid is not None:
            try:
                os.killpg(self.pid, signal.SIGKILL)
            except ProcessLookupError:
                return

    def log_tail(self) -> str:
        """The end of the engine's log."""
        if self.log_path is None:
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL))
            return log.read().decode(errors="replace").strip()


@asynccontextmanager
async def launch(
    settings: EngineSettings,
    model_path: str | Path,
    *,
    count: int = 1,
    log_dir: str | Path,
    host: str | None = None,
    ports: Sequence[int] | None = None,
    gpus_per_engine: int = 1,
    gpu_ids: Sequence[int] | None = None,
) -> AsyncIterator[list[EngineProcess]]:
    """Run `count` engines that serve `model_path` for the length of the context.

    Args:
        log_dir: folder for `engine_<i>.log`, made if missing.
        host: address to listen on; default the settings'.
        ports: one an engine; default from `engine_port_base`, else free ones (which the built-in server picks).
        gpu_ids: CUDA devices, `gpus_per_engine` of them an engine in order; default: leave the choice to the engine.

    Raises:
        EngineUnreachable: an engine did not come up; kinds `port_taken`, `engine_exited`, `engine_start_timeout`.
        SettingsError: kind `external` without addresses, or not `count` ports.
    """
    if settings.engine == "external":
        engines = _external(settings)
        await _all_healthy(engines, settings)
        yield engines
        return
    engines = []
    try:
        host = host or settings.engine_host
        commands: list[Callable[[int], EngineCommand]] = []
        for i, port in enumerate(_ports(settings, host, count, ports)):
            gpus = None if gpu_ids is None else tuple(gpu_ids[i * gpus_per_engine : (i + 1) * gpus_per_engine])
            given = {"host": host, "gpus_per_engine": gpus_per_engine, "gpu_ids": gpus}
            commands.append(partial(_command, settings, str(model_path), given))
            reach = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
            engines.append(EngineProcess(f"http://{reach}:{port}", log_path=Path(log_dir) / f"engine_{i}.log"))
            engines[-1].start(commands[-1](port))
        await _all_healthy(engines, settings)
        async with beside(_supervise_all(engines, commands, settings)):
            yield engines
    finally:
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for engine in engines:
                    group.start_soon(engine.stop)


def _command(settings: EngineSettings, model_path: str, given: Mapping[str, Any], port: int) -> EngineCommand:
    return engine_command(settings, model_path, port=port, **given)


async def check_launch(settings: EngineSettings, count: int, local: bool = True) -> None:
    """Look, without starting anything, for what `launch` would only find out late.

    Args:
        count: number of engines.
        local: the engines will run on this machine, so that the ports they are to have can be tried.

    Raises:
        SettingsError: kind `external` without addresses, or an interpreter that is not there.
        EngineUnreachable: nothing listens at an external address, or a port is taken.
    """
    if settings.engine == "external":
        engines = _external(settings)
        async with HttpTransport(connect_timeout=settings.engine_connect_timeout) as transport:
            for engine in engines:
                await _answers(engine, transport, settings.engine_connect_timeout)
    elif local:
        _ports(settings, settings.engine_host, count, None)
        if settings.engine == "sglang" and settings.engine_python and shutil.which(settings.engine_python) is None:
            raise SettingsError(f"--engine-python {settings.engine_python}: no such program")


async def _answers(engine: EngineProcess, transport: Transport, timeout: float) -> None:
    """Any answer will do, and so does a server that takes its time: it may still be loading its model."""
    with anyio.move_on_after(2 * timeout):
        try:
            await transport.exchange("GET", engine.url + "/health")
        except EngineUnreachable as error:
            raise EngineUnreachable(
                f"no engine answers at {engine.url} (--rollout-external-engine-addrs): {error}; "
                "start the server first, or correct the address",
                kind="external_unreachable",
            ) from error


@contextmanager
def launch_blocking(
    settings: EngineSettings,
    model_path: str | Path,
    *,
    count: int = 1,
    log_dir: str | Path,
    host: str | None = None,
    ports: Sequence[int] | None = None,
    gpus_per_engine: int = 1,
    gpu_ids: Sequence[int] | None = None,
) -> Iterator[list[EngineProcess]]:
    """`launch` for code without an event loop."""
    context = launch(
        settings,
        model_path,
        count=count,
        log_dir=log_dir,
        host=host,
        ports=ports,
        gpus_per_engine=gpus_per_engine,
        gpu_ids=gpu_ids,
    )
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(context) as engines:
        yield engines


def _external(settings: EngineSettings) -> list[EngineProcess]:
    if not settings.rollout_external_engine_addrs:
        raise SettingsError("--engine external needs --rollout-external-engine-addrs host:port [host:port ...]")
    return [EngineProcess(normalise_url(address)) for address in settings.rollout_external_engine_addrs]


def _ports(settings: EngineSettings, host: str, count: int, ports: Sequence[int] | None) -> list[int]:
    if ports is not None and len(ports) != count:
        raise SettingsError(f"expected {count} ports for {count} engines, got {len(ports)}")
    base = settings.engine_port_base
    wanted = list(ports or ([0] * count if base is None else range(base, base + count)))
    # Held open together until all are known, so that free ports are distinct.
    held: list[socket.socket] = []
    try:
        for port in wanted:
            held.append(_bind(host, port))
        if ports is None and base is None and settings.engine == "embedded":
            return [0] * count  # it takes a free one itself and says which, so that nobody can take it in between
        return [int(held_socket.getsockname()[1]) for held_socket in held]
    finally:
        for held_socket in held:
            held_socket.close()


def _bind(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    probe = socket.socket(family, socket.SOCK_STREAM)
    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        probe.bind((host, port))
    except OSError as error:
        probe.close()
        if error.errno != errno.EADDRINUSE:
            raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
        raise EngineUnreachable(
            f"port {port} on {host} is taken by another process; choose another --engine-port-base or leave it out",
            kind="port_taken",
        ) from error
    return probe


async def _all_healthy(engines: Sequence[EngineProcess], settings: EngineSettings) -> None:
    failures: list[EngineUnreachable] = []
    async with (
        HttpTransport(connect_timeout=settings.engine_connect_timeout) as transport,
        anyio.create_task_group() as group,
    ):

        async def one(engine: EngineProcess) -> None:
            try:
                await _healthy(engine, transport, settings.engine_start_timeout)
            except EngineUnreachable as error:
                failures.append(error)
                group.cancel_scope.cancel()

        for engine in engines:
            group.start_soon(one, engine)
    if failures:
        raise failures[0]


async def _supervise_all(
    engines: Sequence[EngineProcess], commands: Sequence[Callable[[int], EngineCommand]], settings: EngineSettings
) -> None:
    async with (
        HttpTransport(connect_timeout=settings.engine_connect_timeout) as transport,
        anyio.create_task_group() as group,
    ):
        for engine, command in zip(engines, commands, strict=True):
            group.start_soon(_supervise, engine, command, settings, transport)


async def _supervise(
    engine: EngineProcess, command: Callable[[int], EngineCommand], settings: EngineSettings, transport: Transport
) -> None:
    """Start the engine again whenever it is down, a bounded number of times."""
    port = int(engine.url.rpartition(":")[2])
    for again in range(1, settings.engine_max_restarts + 1):
        why = await _down(engine, settings, transport)
        engine.kill()
        await engine.wait()
        _log.warning("the engine at %s %s; starting it again (%d)", engine.url, why, again)
        engine.start(command(port))
        try:
            await _healthy(engine, transport, settings.engine_start_timeout)
        except EngineUnreachable as error:
            _log.warning("%s", error)
            await anyio.sleep(min(_POLL_EVERY * 2.0**again, _STOP_GRACE))


async def _down(engine: EngineProcess, settings: EngineSettings, transport: Transport) -> str:
    """Return, with the reason, when the engine has ended or not answered for `engine_hang_timeout`."""
    hung = f"did not answer for {settings.engine_hang_timeout:g} s (--engine-hang-timeout)"

    async def ended(scope: anyio.CancelScope) -> None:
        await engine.wait()
        scope.cancel()

    async with anyio.create_task_group() as group:
        group.start_soon(ended, group.cancel_scope)
        answered = anyio.current_time()
        while anyio.current_time() - answered < settings.engine_hang_timeout:
            await anyio.sleep(settings.engine_probe_interval)
            with anyio.move_on_after(settings.engine_probe_interval), suppress(EngineUnreachable):
                await transport.exchange("GET", engine.url + "/health")
                answered = anyio.current_time()
        group.cancel_scope.cancel()
    return hung if (status := engine.poll()) is None else f"ended with status {status}"


def _listens(engine: EngineProcess) -> bool:
    """Whether the address is known; a server that was given port 0 writes the one that it took into its log."""
    if not engine.url.endswith(":0"):
        return True
    said = re.search(r"^ready on \S+:(\d+)$", engine.log_tail(), re.MULTILINE)
    if said:
        engine.url = engine.url.removesuffix("0") + said[1]
    return said is not None


async def _healthy(engine: EngineProcess, transport: Transport, timeout: float) -> None:
    last = "no connection"
    with anyio.move_on_after(timeout):
        while (status := engine.poll()) is None:
            with anyio.move_on_after(_PROBE_TIMEOUT):  # whoever listens there may be somebody else who never answers
                try:
                    code = (await transport.exchange("GET", engine.url + "/health")).status if _listens(engine) else 0
                except EngineUnreachable as error:
                    last = str(error)
                else:
                    if code == 200:
                        return
                    last = f"/health answered {code}" if code else last
            await anyio.sleep(_POLL_EVERY)
        raise EngineUnreachable(
            f"the engine for {engine.url} ended with status {status} while starting; its log {engine.log_path} ends:\n"
            f"{engine.log_tail()}",
            kind="engine_exited",
        )
    tail = f"; its log {engine.log_path} ends:\n{engine.log_tail()}" if engine.log_path else ""
    raise EngineUnreachable(
        f"the engine at {engine.url} was not healthy within {timeout:g} s (--engine-start-timeout): {last}{tail}",
        kind="engine_start_timeout",
    )
