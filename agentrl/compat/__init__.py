"""Support for users of slime and retrain: their flags, module names, function forms and configuration files.

The core asks for it by `plugins.compat`, and goes on without it if the folder is not there. Tables of names are data files
beside the code that reads them.
"""

from collections.abc import Mapping
from typing import Any

from agentrl.plugins import Compat


class _Compat:
    """`plugins.Compat`; imports each part when it is asked for."""

    def install(self) -> None:
        from agentrl.compat.modules import install

        install()

    def adapt(self, found: Any, what: str) -> Any:
        from agentrl.compat.modules import adapt

        return adapt(found, what)

    def is_foreign(self, path: str, flag: str) -> bool:
        from agentrl.compat.train_hooks import foreign

        return foreign(path, flag)

    def flags(self) -> Any:
        from agentrl.compat.flags import FLAGS

        return FLAGS

    def read(self, document: Mapping[str, Any]) -> Any:
        from agentrl.compat.retrain.config import read

        return read(document)

    def rollout_hooks(self, args: Any) -> Any:
        from agentrl.compat.rollout import SlimeRollouts

        return SlimeRollouts(args)

    def train_hooks(self, args: Any) -> Any:
        from agentrl.compat.train_hooks import SlimeHooks

        return SlimeHooks(args)

    def check_hook(self, name: str, path: str | None, settings: Any) -> str:
        from agentrl.compat.conformance import check_hook

        return check_hook(name, path, settings)


COMPAT: Compat = _Compat()
