"""Ray: joining or starting a cluster, calling actors with deadlines, and turning what Ray reports into our errors.

1. A cluster started here ends with the run, and dies with this process even if it is killed.
2. The driver blocks only in `wait` and `wait_each`: they have a deadline and say what they were waiting for.
"""

import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError

from agentrl.cluster.quiet import EXIT_CODE, heed_sigterm
from agentrl.config.placement import ClusterSettings
from agentrl.errors import AgentRLError, disk_trouble


@contextlib.contextmanager
def ray_runtime(settings: ClusterSettings, *, cpus: int) -> Iterator[None]:
    """Join `ray_address`, or start a cluster on this machine with at least `cpus` CPU slots; shut down at the end."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    options: dict[str, Any] = {
        "namespace": f"agentrl-{uuid.uuid4().hex[:8]}",
        "logging_level": logging.ERROR,
        "log_to_driver": False,
    }
    if settings.ray_address is not None:
        options["address"] = settings.ray_address
    else:
        options.update(num_cpus=max(cpus, os.cpu_count() or 1), include_dashboard=False, address="local")
    try:
        _start(options, attempts=1 if settings.ray_address else 3)
        yield
    finally:
        ray.shutdown()


def _start(options: dict[str, Any], attempts: int) -> None:
    """`ray.init`; a node that came up too slowly is started anew, as on a busy machine it may (Ray allows it 30 s)."""
    for attempt in range(1, attempts + 1):
        try:
            ray.init(**options)
            return
        except SystemExit as error:
            # Ray's handler of SIGTERM, which is in place until `ray.init` is done.
            raise SystemExit(EXIT_CODE) from error
        except ConnectionError as error:
            raise AgentRLError(f"--ray-address {options['address']}: no Ray cluster answers there: {error}") from error
        except Exception as error:
            # Ray has no type of its own for this one.
            if "timed out during startup" not in str(error):
                raise
            ray.shutdown()
            if attempt == attempts:
                raise AgentRLError(
                    f"Ray could not start on this machine in {attempts} attempts: {error} Is the machine overloaded?"
                ) from error
        finally:
            heed_sigterm()


def worker_environment() -> dict[str, str]:
    """Environment variables for our actors: quiet, and free of surprises from the parent's shell."""
    keep = {
        name: os.environ[name] for name in ("HF_HUB_OFFLINE", "AGENTRL_DEBUG", "XDG_CACHE_HOME") if name in os.environ
    }
    return {"TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore", **keep}


def enter_workspace(folder: str) -> None:
    """Make the driver's working folder the actor's, where it exists, so that relative paths mean the same."""
    if os.path.isdir(folder):
        os.chdir(folder)
        if folder not in sys.path:
            sys.path.insert(0, folder)


def wait(references: Any, *, what: str, timeout: float) -> Any:
    """Wait for one Ray reference, or a list of them, and return the values.

    Args:
        references: what actor methods returned.
        what: what is being waited for, for messages ("the training step").
        timeout: seconds.

    Raises:
        AgentRLError: the actor died, the deadline passed, or the remote code raised one.
    """
    pending: Sequence[Any] = references if isinstance(references, list) else [references]
    try:
        # The first failure ends the wait, even while the other calls hang in a collective that cannot finish.
        left = list(pending)
        while left:
            done, left = ray.wait(left, num_returns=1, timeout=timeout, fetch_local=False)
            if not done:
                raise GetTimeoutError
            ray.get(done)
        values = ray.get(list(pending))
    except GetTimeoutError as error:
        raise AgentRLError(f"{what} took longer than {timeout:g} s") from error
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AgentRLError):
            raise cause from None
        raise AgentRLError(f"{what} failed: {disk_trouble(cause) or f'{type(cause).__name__}: {cause}'}") from error
    except RayActorError as error:
        raise AgentRLError(f"{what} failed: {_who_died(error)}") from error
    return values if isinstance(references, list) else values[0]


def wait_each(parts: Mapping[str, Sequence[Any]], *, timeout: float) -> Iterator[str]:
    """Wait for several things side by side; yields the name of each as it is there. One without references is left out.

    Args:
        parts: what is being waited for, as `wait` takes it, and its references.
        timeout: seconds without any news.

    Raises:
        AgentRLError: as `wait` does, at the first failure of any of them.
    """
    owner = {reference: what for what, references in parts.items() for reference in references}
    left = list(owner)
    while left:
        done, left = ray.wait(left, num_returns=1, timeout=timeout, fetch_local=False)
        if not done:
            raise AgentRLError(f"{owner[left[0]]} took longer than {timeout:g} s")
        what = owner[done[0]]
        wait(done, what=what, timeout=timeout)
        if what not in map(owner.get, left):
            yield what


def _who_died(error: RayActorError) -> str:
    lines = str(error).strip().splitlines()
    return f"a process of the run died ({lines[0] if lines else 'no reason given'}); start the same command again to resume"
