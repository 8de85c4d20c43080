"""Engines as Ray actors, one an engine, so that they land on the cluster's nodes and end with the run."""

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import ray

from agentrl.cluster.runtime import enter_workspace, node_address
from agentrl.config import RunSettings
from agentrl.run.engines import serve_one


@ray.remote
class EngineActor:
    """Starts one inference server on its node and stops it when the actor ends."""

    def __init__(self, settings: RunSettings, workspace: str) -> None:
        enter_workspace(workspace)
        self._settings, self._stack = settings, ExitStack()

    def start(self, index: int, logs: Path, gpus: Sequence[int] | None = None) -> tuple[str, int | None]:
        """Start the server, on the GPUs of others if they are given; returns its URL and process id."""
        own, address = self._settings.engine.engine_host, node_address()
        host = own if address == "127.0.0.1" else address
        process = self._stack.enter_context(serve_one(self._settings, index, logs, host=host, gpus=gpus))
        return process.url, process.pid

    def stop(self) -> None:
        """Stop the server."""
        self._stack.close()
