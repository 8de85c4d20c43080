"""Settings of a run's own records: metrics, progress, dumps."""

from typing import Literal

from pydantic import Field

from agentrl.settings import HomePath, Settings


class ObservabilitySettings(Settings):
    """Metrics, progress, dumps and the folder that holds them."""

    output_dir: str = Field("runs/latest", min_length=1, description="Folder for everything this run writes.")
    progress: Literal["auto", "live", "plain", "off"] = "auto"
    """Progress on the terminal: live display, one line per step, or none; auto looks at the terminal."""
    log_interval: int = Field(1, ge=1, description="Write metrics to the sinks every this many steps.")
    use_tensorboard: bool = Field(True, description="Write TensorBoard event files.")
    tensorboard_dir: HomePath | None = Field(
        None, description="Folder for event files; default: <output-dir>/tensorboard."
    )
    use_wandb: bool = Field(False, description="Send metrics to Weights & Biases (needs the wandb extra).")
    wandb_project: str = Field("agentrl", description="Weights & Biases project.")
    wandb_group: str | None = Field(None, description="Weights & Biases group of runs.")
    wandb_name: str | None = Field(None, description="Weights & Biases name of this run.")
    wandb_random_suffix: bool = Field(False, description="Add six random letters to the run's name and group.")
    wandb_team: str | None = Field(None, description="Weights & Biases team or user; default: the key's own.")
    wandb_mode: Literal["online", "offline", "disabled"] | None = None
    """Send metrics (online), keep them in a folder, or neither; default: WANDB_MODE, else online."""
    wandb_dir: HomePath | None = Field(
        None, description="Folder for the files of Weights & Biases; default: --output-dir."
    )
    wandb_host: str | None = None
    """Address of a Weights & Biases server of your own. The key is read from WANDB_API_KEY."""
    metrics_sinks: tuple[str, ...] = Field(())
    """More receivers of metrics: module:function, for example agentrl.observability.sinks:mlflow (docs/metrics.md)."""
    prometheus_port: int | None = Field(None, ge=1, le=65535)
    """Serve the newest metrics for Prometheus on this port (needs the metrics extra)."""
    prometheus_host: str = Field("127.0.0.1", description="Address that --prometheus-port listens on.")
    save_debug_rollout_data: str | None = Field(None, description="File for each rollout's samples, with {rollout_id}.")
    dump_details: str | None = None
    """Folder for details: samples go to rollout_data/ in it, or to save_debug_rollout_data if given."""
