"""Which device models run on."""

from agentrl.config import RunSettings
from agentrl.errors import SettingsError


def resolve_device(settings: RunSettings) -> RunSettings:
    """Replace `--device auto` by what this machine, or the joined cluster, has.

    Raises:
        SettingsError: CUDA was asked for and is not there.
    """
    import torch

    wanted = settings.cluster.device
    joined = settings.cluster.ray_address is not None
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available and not joined:
        raise SettingsError("--device cuda: this machine has no usable CUDA device; pass --device cpu")
    if wanted == "auto":
        return settings.replace(device="cuda" if available else "cpu")
    return settings
