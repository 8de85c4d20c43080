"""Settings of placement: processes, their devices, and the transfer of weights between them."""

import re
from typing import Literal

from pydantic import Field, PositiveFloat, PositiveInt, field_validator

from agentrl.settings import HomePath, Settings


class ClusterSettings(Settings):
    """Placement. A "GPU" in a flag's name is one trainer or engine process; on a CPU machine it is a CPU process."""

    backend: Literal["ray", "local"] = Field("ray", description="Processes on Ray, or one process (for small models).")
    device: Literal["auto", "cpu", "cuda"] = Field("auto", description="Device of the models; auto: CUDA if available.")
    ray_address: str | None = Field(None, description="A running Ray cluster to join; default: start one here.")
    actor_num_nodes: PositiveInt = Field(1, description="Nodes of the trainer.")
    actor_num_gpus_per_node: PositiveInt = Field(1, description="Trainer processes per node.")
    critic_num_nodes: PositiveInt | None = None
    """Nodes of a critic with its own processes; default: it uses the trainer's processes."""
    critic_num_gpus_per_node: PositiveInt | None = None
    """Processes per node of a critic that has its own; default: as many as the trainer's."""
    rollout_num_gpus: PositiveInt = 1
    """Number of devices of all engines; default with colocate: as many as the trainer's."""
    rollout_num_gpus_per_engine: PositiveInt = 1
    """Devices one inference engine uses; with more than one machine has, it lies on several machines."""
    train_env_vars: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the trainer's processes."""
    rollout_workers: PositiveInt = 1
    """Processes that play trajectories, on any node of Ray; 1: the coordinator's own process."""
    colocate: bool = Field(False, description="Trainer and engines share the same devices and take turns.")
    offload_train: bool | None = None
    """Move the trainer's state to host memory while engines generate; by default with colocate."""
    offload_rollout: bool | None = None
    """Release the engines' memory while the trainer trains; by default with colocate."""
    num_gpus_per_node: PositiveInt | None = None
    """Devices of one machine that the run may use; by default all that Ray finds."""
    allow_fewer_devices: bool = False
    """Start with fewer replicas of the model and fewer engines if devices are missing."""

    update_weight_mode: Literal["broadcast", "disk", "ipc"] = "broadcast"
    """Transport of new weights to the engines: a process group, or the run's folder. With ipc, trainer processes share
    memory with SGLang on the same devices."""
    update_weight_disk_dir: HomePath | None = None
    """Folder that trainer and engines share, for weights by disk; default: in the run's folder."""
    update_weight_local_checkpoint_dir: HomePath | None = None
    """Folder on each engine's machine for copies of the weights; an update fetches only the blocks that changed."""
    update_weights_interval: PositiveInt = Field(1, description="Send new weights every this many rollouts.")
    update_weight_buffer_size: PositiveInt = Field(512 << 20, description="Maximum bytes of weights in one broadcast.")
    weight_sync_timeout: PositiveFloat = Field(600.0, description="Seconds one weight update may take.")
    train_timeout: PositiveFloat = Field(3600.0, description="Seconds one training step may take.")
    rollout_timeout: PositiveFloat = Field(14_400.0, description="Seconds one rollout or evaluation may take.")
    start_timeout: PositiveFloat = Field(600.0, description="Seconds that starting all processes may take.")

    debug_rollout_only: bool = Field(False, description="Generate and stop: start no trainer.")
    load_debug_rollout_data: str | None = None
    """Train on a dump of rollouts (path with {rollout_id}); nothing is generated, no engine starts."""
    load_debug_rollout_data_subsample: float | None = Field(None, gt=0, le=1)
    """Train only on the first groups of each dump, this share of them."""

    @field_validator("ray_address")
    @classmethod
    def _has_a_port(cls, value: str | None) -> str | None:
        if value not in (None, "auto", "local") and not re.search(r"://|.:\d+$", value):
            raise ValueError(f"{value} is no address; expected HOST:PORT, for example 10.0.0.1:6379, or auto")
        return value

    @property
    def world_size(self) -> int:
        """Number of the actor's trainer processes."""
        return self.actor_num_nodes * self.actor_num_gpus_per_node

    @property
    def critic_world_size(self) -> int:
        """Number of the critic's own processes; 0 if the critic uses the trainer's processes."""
        if self.critic_num_nodes is None and self.critic_num_gpus_per_node is None:
            return 0
        return (self.critic_num_nodes or 1) * (self.critic_num_gpus_per_node or self.actor_num_gpus_per_node)

    @property
    def num_engines(self) -> int:
        return self.rollout_num_gpus // self.rollout_num_gpus_per_engine

    @property
    def nodes_per_engine(self) -> int:
        """Machines of one engine; 1 if `num_gpus_per_node` is unknown."""
        return -(-self.rollout_num_gpus_per_engine // (self.num_gpus_per_node or self.rollout_num_gpus_per_engine))
