"""Weights from the trainer to the engines, under a new version.

1. `broadcast`: trainer rank 0 and all engines share a process group; tensors go in buckets of bounded size.
2. `disk`: the trainer writes a Hugging Face folder, the engines load it.
3. The version is the number of rollouts that the weights were trained on.
"""

import shutil
import uuid
from collections.abc import Sequence
from typing import Any

from agentrl.cluster.runtime import wait
from agentrl.cluster.trainers import TrainGroup
from agentrl.config import RunSettings
from agentrl.engine import BroadcastUpdate, DiskUpdate, TensorSpec, WeightGroup
from agentrl.runfolder import RunFolder

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class WeightSync:
    """Sends the trainer's weights to the engines."""

    def __init__(
        self, settings: RunSettings, trainers: TrainGroup, worker: Any, num_engines: int, folder: RunFolder
    ) -> None:
        self._settings, self._trainers, self._worker, self._folder = settings, trainers, worker, folder
        self._ranks = 1 + num_engines * settings.cluster.rollout_num_gpus_per_engine
        self._buckets: list[list[TensorSpec]] | None = None
        # External engines outlive a run, and would refuse a group name that an earlier life has used.
        self._group = f"agentrl_weights_{uuid.uuid4().hex[:8]}"
        self._timeout = settings.cluster.weight_sync_timeout

    def send(self, version: int) -> None:
        """Bring all engines to the trainer's current weights."""
        if self._settings.cluster.update_weight_mode == "disk":
            self._by_disk(str(version))
        else:
            self._by_broadcast(str(version))

    def close(self) -> None:
        """Leave the process group, if there is one."""
        if self._buckets is not None:
            leaving = self._trainers.begin("close_weight_group")
            self._wait([self._worker.leave_weight_group.remote(self._group), *leaving])
            self._buckets = None

    def _by_broadcast(self, version: str) -> None:
        if self._buckets is None:
            self._buckets = self._join()
        sending = self._trainers.begin("broadcast_weights", [[spec[0] for spec in bucket] for bucket in self._buckets])
        update = BroadcastUpdate(self._group, self._buckets)
        self._wait([self._worker.receive_weights.remote(update, version), *sending])

    def _join(self) -> list[list[TensorSpec]]:
        address = self._trainers.address()
        backend = "nccl" if self._settings.cluster.device == "cuda" else "gloo"
        joining = self._trainers.begin("init_weight_group", *address, self._ranks, self._group, backend)
        per_engine = self._settings.cluster.rollout_num_gpus_per_engine
        group = WeightGroup(*address, self._ranks, self._group, backend, per_engine)
        self._wait([self._worker.join_weight_group.remote(group), *joining])
        specs = self._trainers.call("weight_specs", what="asking the trainer for its weights")
        return buckets(specs, self._settings.cluster.update_weight_buffer_size)

    def _by_disk(self, version: str) -> None:
        target = self._folder.weights / version
        self._trainers.call("save_hf", str(target), what="writing the weights")
        self._wait(self._worker.receive_weights.remote(DiskUpdate(str(target)), version))
        for old in self._folder.weights.iterdir():
            if old != target:
                shutil.rmtree(old)

    def _wait(self, references: Any) -> None:
        wait(references, what="the weight update", timeout=self._timeout)


def buckets(specs: Sequence[TensorSpec], limit: int) -> list[list[TensorSpec]]:
    """Split tensors, in order, into buckets of at most `limit` bytes (a larger tensor gets its own)."""
    out: list[list[TensorSpec]] = []
    room = 0
    for spec in specs:
        size = _BYTES[spec[1]]
        for extent in spec[2]:
            size *= extent
        if size > room or not out:
            out.append([])
            room = limit
        out[-1].append(spec)
        room -= size
    return out
