"""Support for users of slime and retrain: their flags, module names, function forms and configuration files.

The core loads this package by `plugins.compat`, and works without it if the folder is missing."""

from collections.abc import Callable
from pkgutil import resolve_name
from typing import Any

from agentrl.plugins import Compat


def _part(path: str) -> Callable[..., Any]:
    """Return a method that imports the function at `path` and calls it."""
    return lambda _, *args: resolve_name(f"{__package__}.{path}")(*args)


class _Compat:
    """Implements `plugins.Compat`."""

    install, adapt = _part("modules:install"), _part("modules:adapt")
    is_foreign = _part("train_hooks:foreign")
    flags = _part("flags:Flags")
    read = _part("retrain.config:read")
    rollout_hooks = _part("rollout:SlimeRollouts")
    train_hooks = _part("train_hooks:SlimeHooks")
    check_hook = _part("conformance:check_hook")


COMPAT: Compat = _Compat()
