"""The process of one engine: start, wait for health, stop and restart. The process runs in its own session under
`parent_watchdog.py`. It ends with the process that started it, even if the latter is killed."""

import logging
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import anyio

from agentrl import parent_watchdog
from agentrl.engine.commands import EngineCommand
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport
from agentrl.errors import EngineUnreachable

_WATCHDOG = Path(parent_watchdog.__file__)
_STOP_GRACE, _POLL_EVERY, _PROBE_TIMEOUT = 10.0, 0.1, 5.0
_LOG_TAIL = 4000
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class EngineProcess:
    """One engine: its address and, unless it is external, its command for a port, log file and process (group)."""

    url: str
    command: Callable[[int], EngineCommand] | None = None
    log_path: Path | None = None
    pid: int | None = None
    _process: subprocess.Popen[bytes] | None = field(default=None, repr=False)

    def start(self) -> None:
        """Start the engine at the port of its address, under the watchdog."""
        assert self.command is not None
        assert self.log_path is not None
        command = self.command(int(self.url.rpartition(":")[2]))
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        guarded = (sys.executable, "-I", "-S", str(_WATCHDOG), str(os.getpid()), *command.arguments)
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stderr": subprocess.STDOUT, "start_new_session": True}
        with self.log_path.open("wb" if self._process is None else "ab") as log:
            self._process = subprocess.Popen(guarded, env=dict(command.environment), stdout=log, **options)
        self.pid = self._process.pid

    def poll(self) -> int | None:
        """Return the exit status if the engine has ended, else None; always None for an external engine."""
        return None if self._process is None else self._process.poll()

    async def wait(self) -> int:
        """Wait for the engine to end and return its exit status. Never returns for an external engine."""
        while (status := self.poll()) is None:  # noqa: ASYNC110 - a process sends no event at its end
            await anyio.sleep(_POLL_EVERY)
        return status

    async def stop(self, grace: float = _STOP_GRACE) -> None:
        """End the engine and all processes that it started: SIGTERM, then SIGKILL after `grace` seconds."""
        if self._process is None:
            return
        with anyio.CancelScope(shield=True):
            self._process.terminate()  # the watchdog forwards SIGTERM to the server alone
            with anyio.move_on_after(grace):
                await self.wait()
            # The server's children may be left in the group, even after a clean exit.
            self.kill()
            await self.wait()

    def kill(self) -> None:
        """Send SIGKILL to the engine's process group, if it still exists."""
        if self.pid is not None:
            with suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self) -> str:
        """Return the end of the engine's log."""
        if self.log_path is None:
            return ""
        with self.log_path.open("rb") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _LOG_TAIL))
            return log.read().decode(errors="replace").strip()


async def healthy(engine: EngineProcess, transport: HttpTransport, timeout: float) -> None:
    """Return when the engine answers its health check. An external engine is resumed first: a killed run may have left it
    paused. Raises EngineUnreachable: the engine ended or took too long."""
    last, resume = "no connection", engine.url + "/continue_generation"
    with anyio.move_on_after(timeout):
        while (status := engine.poll()) is None:
            with anyio.move_on_after(_PROBE_TIMEOUT):  # another program may listen there and never answer
                try:
                    if engine.command is None:
                        await transport.exchange("POST", resume, b"{}", transport.control_headers)
                    code = (await transport.exchange("GET", engine.url + "/health")).status if _listens(engine) else 0
                except EngineUnreachable as error:
                    last = str(error)
                else:
                    if code == 200:
                        return
                    last = f"/health answered {code}" if code else last
            await anyio.sleep(_POLL_EVERY)
        tail = f"its log {engine.log_path} ends:\n{engine.log_tail()}"
        said = f"the engine for {engine.url} ended with status {status} while starting; {tail}"
        raise EngineUnreachable(said, kind="engine_exited")
    tail = f"; its log {engine.log_path} ends:\n{engine.log_tail()}" if engine.log_path else ""
    said = f"the engine at {engine.url} was not healthy within {timeout:g} s (--engine-start-timeout): {last}{tail}"
    raise EngineUnreachable(said, kind="engine_start_timeout")


def _listens(engine: EngineProcess) -> bool:
    """Return true if the port is known. A server that was started with port 0 logs the port that it chose."""
    if engine.url.endswith(":0") and (said := re.search(r"^ready on \S+:(\d+)$", engine.log_tail(), re.MULTILINE)):
        engine.url = engine.url.removesuffix("0") + said[1]
    return not engine.url.endswith(":0")


async def supervise(engines: Sequence[EngineProcess], settings: EngineSettings) -> None:
    """Restart engines that ended or hang, at the same address."""
    async with HttpTransport(settings) as transport, anyio.create_task_group() as group:
        for engine in engines:
            group.start_soon(_supervise, engine, settings, transport)


async def _supervise(engine: EngineProcess, settings: EngineSettings, transport: HttpTransport) -> None:
    for again in count(1):
        why = await _down(engine, settings, transport)
        if again > settings.engine_max_restarts:
            _log.warning("the engine at %s %s; not started again (--engine-max-restarts)", engine.url, why)
            return
        engine.kill()
        await engine.wait()
        _log.warning("the engine at %s %s; starting it again (%d)", engine.url, why, again)
        engine.start()
        try:
            await healthy(engine, transport, settings.engine_start_timeout)
        except EngineUnreachable as error:
            _log.warning("%s", error)
            await anyio.sleep(min(_POLL_EVERY * 2.0 ** min(again, 9), _STOP_GRACE))


async def _down(engine: EngineProcess, settings: EngineSettings, transport: HttpTransport) -> str:
    """Wait until the engine has ended, or has not answered for `engine_hang_timeout`; return the reason."""
    answered = anyio.current_time()
    while anyio.current_time() - answered < settings.engine_hang_timeout:
        with anyio.move_on_after(settings.engine_probe_interval):
            return f"ended with status {await engine.wait()}"
        with anyio.move_on_after(settings.engine_probe_interval), suppress(EngineUnreachable):
            await transport.exchange("GET", engine.url + "/model_info")  # /health may fail while paused
            answered = anyio.current_time()
    return f"did not answer for {settings.engine_hang_timeout:g} s (--engine-hang-timeout)"
