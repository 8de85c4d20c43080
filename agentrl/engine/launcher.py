"""Start and stop of engines. Inside the context of `launch`, an engine that ends or hangs is restarted at the same
address, up to `engine_max_restarts` times. A pool finds the engine there and sends the weights that it missed."""

import errno
import shutil
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import anyio
from anyio.from_thread import start_blocking_portal

from agentrl.engine.answers import NO_KEPT_SETS
from agentrl.engine.client import EngineClient
from agentrl.engine.commands import EngineNode, engine_command
from agentrl.engine.hosted import HostedModel
from agentrl.engine.process import EngineProcess, healthy, supervise
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import HttpTransport, beside, normalise_url
from agentrl.errors import EngineFailure, EngineUnreachable, SettingsError, install
from agentrl.tasks import together


@asynccontextmanager
async def launch(
    settings: EngineSettings,
    model_path: str | Path,
    *,
    count: int = 1,
    first: int = 0,
    log_dir: str | Path,
    host: str | None = None,
    gpus_per_engine: int = 1,
    gpu_ids: Sequence[str] | None = None,
    node: EngineNode | None = None,
) -> AsyncIterator[list[EngineProcess]]:
    """Run `count` engines that serve `model_path` until the context ends; yield them once all are healthy. If
    `settings.engine` is `external`, start nothing and wait for the given addresses. A failed launch stops its engines.
    Raises EngineUnreachable: an engine did not start; kinds `port_taken`, `engine_exited`, `engine_start_timeout`.
    SettingsError: external engines have no addresses.

    Args:
        first: number of the first engine, if other engines of the run are launched separately.
        log_dir: folder for `engine_<i>.log`, made if missing.
        host: address to listen on; default the settings'.
        gpu_ids: CUDA devices as numbers or names, `gpus_per_engine` per engine, in order; default: the engine chooses.
        node: start only this machine's part of one engine; `gpu_ids` are devices of this machine."""
    engines = _external(settings) if settings.engine == "external" else []
    if engines:
        await _all_healthy(engines, settings)
        yield engines
        return
    try:
        host = host or settings.engine_host
        reach = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, host)
        for i, port in enumerate(_ports(settings, host, count, first)):
            gpus = None if gpu_ids is None else tuple(gpu_ids[i * gpus_per_engine : (i + 1) * gpus_per_engine])
            command = partial(engine_command, settings, str(model_path), host=host)
            command = partial(command, gpus_per_engine=gpus_per_engine, gpu_ids=gpus, node=node)
            name = f"engine_{first + i}" + (f"_node_{node.rank}" if node else "")
            engines.append(EngineProcess(f"http://{reach}:{port}", command, Path(log_dir) / f"{name}.log"))
            engines[-1].start()
        await _all_healthy(engines, settings)
        async with beside(supervise(engines, settings)):
            yield engines
    finally:
        with anyio.CancelScope(shield=True):
            await together(*(engine.stop for engine in engines))


async def check_launch(
    settings: EngineSettings, count: int, local: bool = True, sampling_support: bool = False
) -> None:
    """Check, without a start, for errors that `launch` of `count` engines would find late. Raises SettingsError:
    external engines have no addresses or report no sampling support, or the interpreter does not exist.
    EngineUnreachable: nothing listens at an external address, or a port is taken. EngineRejected: the server of a
    hosted model rejects the key. `local`: the engines will run on this machine, so their ports are tried.
    `sampling_support`: external engines must report the sampling support of truncated sampling."""
    if settings.engine == "openai":
        async with HostedModel(settings) as hosted:
            await hosted.check()
    elif settings.engine == "external":
        engines = _external(settings)
        async with HttpTransport(settings) as transport:
            for engine in engines:
                with anyio.move_on_after(2 * settings.engine_connect_timeout):
                    await _check_external(EngineClient(engine.url, transport, settings), sampling_support)
    elif local:
        _ports(settings, settings.engine_host, count)
        python, sglang = settings.engine_python, settings.engine == "sglang"
        if sglang and python and shutil.which(python) is None:
            raise SettingsError(f"--engine-python {python}: no such program")
        if sglang and python is None and find_spec("sglang") is None:
            said = f"--engine sglang: SGLang is not installed beside agentrl; {install('sglang')}"
            raise SettingsError(f"{said}, or give the Python of an environment that has it as --engine-python")


async def _check_external(engine: EngineClient, sampling_support: bool) -> None:
    """Check that an external engine answers. An error or a timeout passes: the engine may be loading its model."""
    try:
        options = await engine.server_info()
    except EngineUnreachable as error:
        said = f"no engine answers at {engine.url} (--rollout-external-engine-addrs): {error}"
        remedy = "start the server first, or correct the address"
        raise EngineUnreachable(f"{said}; {remedy}", kind="external_unreachable") from error
    except EngineFailure:
        return
    if sampling_support and "sampling_mask_max_tokens" not in options:
        raise SettingsError(f"{engine.url}: {NO_KEPT_SETS}")


@contextmanager
def launch_blocking(settings: EngineSettings, model_path: str | Path, **options: Any) -> Iterator[list[EngineProcess]]:
    """Run `launch`, with its `options`, for code without an event loop."""
    starting = launch(settings, model_path, **options)
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(starting) as engines:
        yield engines


def _external(settings: EngineSettings) -> list[EngineProcess]:
    if not settings.rollout_external_engine_addrs:
        raise SettingsError("--engine external needs --rollout-external-engine-addrs host:port [host:port ...]")
    return [EngineProcess(normalise_url(address)) for address in settings.rollout_external_engine_addrs]


def _ports(settings: EngineSettings, host: str, count: int, first: int = 0) -> list[int]:
    base = settings.engine_port_base
    wanted = [0] * count if base is None else range(base + first, base + first + count)
    if (last := max(wanted, default=0)) > 65535:
        raise SettingsError(f"--engine-port-base {base}: port {last} of the last engine does not exist; lower it")
    with ExitStack() as held:  # bound at the same time, so that free ports are distinct
        found = [held.enter_context(_bind(host, port)).getsockname()[1] for port in wanted]
    if base is None and settings.engine == "embedded":
        return [0] * count  # the engine binds a free port and logs it: no other process can take the port
    return found


def _bind(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise SettingsError(f"cannot listen: {error.strerror}; choose another --engine-host") from error
        said = f"port {port} on {host} is taken by another process; choose another --engine-port-base or leave it out"
        raise EngineUnreachable(said, kind="port_taken") from error


async def _all_healthy(engines: Sequence[EngineProcess], settings: EngineSettings) -> None:
    async with HttpTransport(settings) as transport:
        await together(*(partial(healthy, engine, transport, settings.engine_start_timeout) for engine in engines))
