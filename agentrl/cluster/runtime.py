"""Ray: join a cluster, start one that ends with the run or with this process, or use the caller's."""

import contextlib
import logging
import os
import socket
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import ray
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.config import RunSettings
from agentrl.config.placement import ClusterSettings
from agentrl.errors import AgentRLError, SettingsError, disk_trouble
from agentrl.run.engines import on_loopback
from agentrl.run.protocols import ComponentLost
from agentrl.run.signals import EXIT_CODE, handle_sigterm, interrupted_at_once
from agentrl.settings import ADMIN_KEY_VARIABLE, API_KEY_VARIABLE
from agentrl.tasks import alongside, together

T = TypeVar("T")
_PATIENCE = 30.0  # seconds in which a cluster that is starting has to listen


@contextlib.contextmanager
def ray_runtime(settings: ClusterSettings, *, cpus: int) -> Iterator[None]:
    """Join `ray_address`, or start a cluster on this machine with at least `cpus` CPU slots; shut down at the end. If
    this process has initialised Ray before, use that Ray unchanged, and leave it running. Raises SettingsError: this
    process is in another cluster than `ray_address`. AgentRLError: nothing answers at `ray_address`, or Ray could not
    start."""
    if ray.is_initialized():
        context, wanted = ray.get_runtime_context(), settings.ray_address
        # An actor is in the run's cluster, which it may know by another address (127.0.0.1).
        if wanted not in (None, "auto", here := context.gcs_address) and context.get_actor_id() is None:
            said = f"--ray-address {wanted}: this process has joined the Ray cluster at {here} already"
            raise SettingsError(f"{said}; leave the flag out to use that one, or call ray.shutdown() first")
        yield
        return
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    namespace = f"agentrl-{uuid.uuid4().hex[:8]}"
    options: dict[str, Any] = {"namespace": namespace, "logging_level": logging.ERROR, "log_to_driver": False}
    if settings.ray_address is not None:
        options["address"] = settings.ray_address
        _reach(settings.ray_address, min(settings.start_timeout, _PATIENCE))
    else:
        options.update(num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, address="local")
        if settings.device == "cuda" and settings.num_gpus_per_node:
            options["num_gpus"] = settings.num_gpus_per_node
    try:
        with interrupted_at_once():
            _start(options, attempts=1 if settings.ray_address else 3)
        yield
    finally:
        ray.shutdown()


def _reach(address: str, seconds: float) -> None:
    """Wait until something listens at HOST:PORT. Ray itself would wait for a quarter of an hour. Raises AgentRLError."""
    host, _, port = address.rpartition(":")
    end = time.monotonic() + seconds
    while port.isdigit() and "//" not in address:
        try:
            socket.create_connection((host.strip("[]"), int(port)), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > end:
                raise AgentRLError(f"--ray-address {address}: no Ray cluster answers there: {error}") from error
        time.sleep(1)


def _start(options: dict[str, Any], attempts: int) -> None:
    """Call `ray.init`; retry if the node started too slowly, as on a busy machine (Ray's limit is 30 s)."""
    for attempt in range(1, attempts + 1):
        try:
            ray.init(**options)
            return
        except SystemExit as error:  # from Ray's SIGTERM handler, which is installed during `ray.init`
            raise SystemExit(EXIT_CODE) from error
        except ConnectionError as error:
            said = "no Ray cluster answers there; if it requires a token, set RAY_AUTH_MODE=token"
            raise AgentRLError(f"--ray-address {options['address']}: {said}: {error}") from error
        except Exception as error:
            if "timed out during startup" not in str(error):  # Ray has no error type for this
                raise
            ray.shutdown()
            if attempt == attempts:
                said = f"in {attempts} attempts: {error} Is the machine overloaded?"
                raise AgentRLError(f"Ray could not start on this machine {said}") from error
        finally:
            handle_sigterm()


@contextlib.contextmanager
def library_output(file: Path) -> Iterator[None]:
    """Redirect file descriptor 2 to `file`. Native libraries write to it, for example Ray's stack trace at SIGTERM.
    `sys.stderr`, which has our progress, messages and tracebacks, keeps its target."""
    ours = sys.stderr
    ours.flush()
    with contextlib.ExitStack() as stack:
        apart = stack.enter_context(file.open("ab"))
        terminal = os.dup(2)
        sys.stderr = stack.enter_context(open(terminal, "w", buffering=1, errors="backslashreplace"))
        os.dup2(apart.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(terminal, 2)
            sys.stderr = ours


_PASSED = ("HF_HUB_OFFLINE", "AGENTRL_DEBUG", "XDG_CACHE_HOME", "CUDA_DEVICE_MAX_CONNECTIONS", API_KEY_VARIABLE)
# Variables of communication libraries and frameworks, which users set in the shell that starts the run.
_PASSED_PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "UCX_", "FI_", "NVTE_")


def worker_environment(settings: RunSettings) -> dict[str, str]:
    """Return the environment variables of our actors: less output, the driver's variables of communication libraries,
    and the keys of engines and judge."""
    passed, admin_key = (*_PASSED, settings.rm_hub.judge_api_key_env), settings.engine.admin_api_key
    keep = {name: text for name, text in os.environ.items() if name in passed or name.startswith(_PASSED_PREFIXES)}
    if path := os.environ.get("PYTHONPATH"):
        whole = os.pathsep.join(os.path.abspath(folder) for folder in path.split(os.pathsep) if folder)
        keep["PYTHONPATH"] = f"{whole}{os.pathsep}${{PYTHONPATH}}"  # Ray inserts the node's own path
    keep |= {ADMIN_KEY_VARIABLE: admin_key} if admin_key else {}
    return {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", **keep}


def enter_workspace(folder: str) -> None:
    """Make the driver's working folder the actor's, if it exists, so that relative paths mean the same."""
    if os.path.isdir(folder):
        os.chdir(folder)
        if folder not in sys.path:
            sys.path.insert(0, folder)


def log_output(file: Path) -> None:
    """Append what this process and its libraries write to `file`, if its folder is on this machine."""
    if file.parent.is_dir():
        with file.open("ab") as opened:
            os.dup2(opened.fileno(), 1)
            os.dup2(opened.fileno(), 2)


def node_address(settings: RunSettings) -> str:
    """Return this node's address for the run's other processes and engines: loopback if all are on this machine. In a
    cluster that the run joined, which may grow, it is the node's address in Ray."""
    ours = settings.cluster.ray_address is None and sum(node["Alive"] for node in ray.nodes()) == 1
    alone = ours and all(map(on_loopback, settings.engine.rollout_external_engine_addrs))
    return "127.0.0.1" if alone else str(ray.util.get_node_ip_address())


def this_node() -> NodeAffinitySchedulingStrategy:
    """Place an actor on this process's node. With `soft`, Ray puts an actor without resources on a random node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


async def value(reference: "ObjectRef[T]") -> T:
    """Return the value of one reference. Raises AgentRLError: the remote code raised it. ComponentLost: the actor died,
    or the remote code raised another error."""
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AgentRLError):
            raise cause from None
        raise ComponentLost(disk_trouble(cause) or f"{type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        lines = str(error).strip().splitlines()
        why = lines[0] if lines else "no reason given"
        raise ComponentLost(f"a process of the run died ({why}); start the same command again to resume") from error
    except RayError as error:
        raise ComponentLost(f"Ray could not deliver an answer: {error}") from error


async def values(references: "Sequence[ObjectRef[Any]]") -> list[Any]:
    """Return the values of several references, in order. The first failure ends the wait, even if other calls hang."""
    return await together(*(partial(value, reference) for reference in references))


async def unless(serving: "ObjectRef[Any]", reference: "ObjectRef[T]") -> T:
    """Return the value of `reference`; raise the error of `serving` if that fails first."""
    async with alongside(partial(value, serving)):
        return await value(reference)
