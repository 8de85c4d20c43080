"""The command line and environment of each kind of engine: pure functions from settings to `EngineCommand`."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from agentrl.engine.settings import EngineSettings
from agentrl.errors import SettingsError
from agentrl.settings import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE

_CPU_LAUNCHER = Path(__file__).parent / "sglang_cpu" / "launch.py"

_SGLANG_CPU_OPTIONS: Mapping[str, str | int | float | bool | None] = {
    "device": "cpu", "attention-backend": "torch_native", "sampling-backend": "pytorch",
    "disable-overlap-schedule": True, "mem-fraction-static": 0.5, "max-total-tokens": 65536,
}  # fmt: skip

# With TorchDynamo, the first request with penalties or stop strings compiles for half a minute.
_SGLANG_CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "TORCHDYNAMO_DISABLE": "1"}

# No health checks that generate a token: they answer 503 while the engine is paused for a weight update.
_SGLANG_ENVIRONMENT = {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}


class EngineNode(NamedTuple):
    """One machine of an engine."""

    rank: int
    total: int  # number of machines
    address: str  # of the rendezvous on machine 0 (`host:port`)


class EngineCommand(NamedTuple):
    """A command to run."""

    arguments: tuple[str, ...]
    environment: Mapping[str, str]  # the whole environment


def engine_command(
    settings: EngineSettings,
    model_path: str,
    port: int,
    *,
    host: str,
    gpus_per_engine: int = 1,
    gpu_ids: tuple[str, ...] | None = None,
    node: EngineNode | None = None,
) -> EngineCommand:
    """The command that serves `model_path` at `host:port`, or one machine's part of it. Raises SettingsError: the
    engine is `external`, or SGLang on a CPU has a memory saver."""
    where = (model_path, "--host", host, "--port", str(port))
    devices = {} if gpu_ids is None else {"CUDA_VISIBLE_DEVICES": ",".join(gpu_ids)}
    environment = {**os.environ, **devices}
    if settings.engine == "sglang":
        return _sglang(settings, where, environment, gpus_per_engine, node)
    if settings.engine == "external":
        raise SettingsError("--engine external starts no server; there is no command to build")
    options = {"slots": settings.embedded_slots, "threads": settings.embedded_threads, "dtype": settings.embedded_dtype}
    options |= {"context-length": settings.engine_context_length, "batch_invariant": settings.embedded_deterministic}
    # A command line would show the keys to every user of the machine.
    keys = {API_KEY_VARIABLE: settings.api_key, ADMIN_KEY_VARIABLE: settings.admin_api_key}
    environment |= {name: key for name, key in keys.items() if key is not None}
    return EngineCommand((sys.executable, "-m", "agentrl", "serve", *where, *_flags(options)), environment)


def _sglang(
    settings: EngineSettings, where: tuple[str, ...], environment: dict[str, str], gpus: int, node: EngineNode | None
) -> EngineCommand:
    cpu = not has_gpu() if settings.sglang_cpu is None else settings.sglang_cpu
    options: dict[str, object] = {"context-length": settings.engine_context_length}
    environment |= _SGLANG_ENVIRONMENT
    if cpu:
        options |= _SGLANG_CPU_OPTIONS
        environment = {"OMP_NUM_THREADS": "1", **environment, **_SGLANG_CPU_ENVIRONMENT}
    if gpus > 1 and (node or not cpu):
        options["tp-size"] = gpus
    if node:
        options |= {"dist-init-addr": node.address, "nnodes": node.total, "node-rank": node.rank}
    options |= {name.replace("_", "-"): value for name, value in settings.sglang_options.items()}
    options |= {"api-key": settings.api_key, "admin-api-key": settings.admin_api_key}
    start = (str(_CPU_LAUNCHER),) if cpu else ("-m", "sglang.launch_server")
    if cpu and options.get("enable-memory-saver"):
        raise SettingsError("SGLang on a CPU cannot release memory; set --no-offload-rollout, or --engine embedded")
    python = settings.engine_python or sys.executable
    return EngineCommand((python, *start, "--model-path", *where, *_flags(options)), environment)


def _flags(options: Mapping[str, object]) -> tuple[str, ...]:
    """`{"a": 1, "b": True, "c": None, "d": False, "e": [1, 2]}` as `--a 1 --b --e 1 2`."""
    flags: list[str] = []
    for name, value in options.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not None and value is not False:
            flags += [f"--{name}", *map(str, value if isinstance(value, list) else [value])]
    return tuple(flags)


def has_gpu() -> bool:
    """Return true if an NVIDIA device is visible, without importing torch."""
    return Path("/dev/nvidiactl").exists() and os.environ.get("CUDA_VISIBLE_DEVICES", "all") not in ("", "-1")
