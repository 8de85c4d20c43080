"""The arguments of a rank's backend: the settings, and the run's length in optimizer steps."""

from pathlib import Path

from agentrl.config import RunSettings
from agentrl.run.training import RankInfo, start_backend
from tests.support.tiny_models import make_tiny_model


def test_the_decay_ends_with_the_runs_last_optimizer_step(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model")
    settings = RunSettings.from_flat(
        {
            "hf_checkpoint": str(tmp_path / "model"),
            "num_rollout": 7,
            "num_steps_per_rollout": 4,
            "rollout_temperature": 0.5,
            "device": "cpu",
        }
    )
    backend = start_backend(settings, RankInfo(master_port=0))
    try:
        assert backend.total_steps == 28
        assert backend.temperature == 0.5
        assert backend.device_kind == "cpu"
    finally:
        backend.close()
