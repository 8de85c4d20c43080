"""Prompt data, data sources, the durable ledger, and the plug-ins of each.

1. `data`, `order`: rows of a prompt file, and the order in which they are drawn.
2. `source`, `plugin`: groups of samples from rows, or from a user's own class.
3. `ledger`, `audit`: the truth about which group was trained; `feed` joins a source and a ledger for the rollout loop.
4. `dump`: rollouts written to and read from a file for debugging.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from agentrl.buffer.audit import LedgerAudit, audit_ledger
    from agentrl.buffer.data import PromptData, PromptRow
    from agentrl.buffer.dump import dump_path, load_rollout, save_rollout
    from agentrl.buffer.feed import GroupFeed
    from agentrl.buffer.ledger import Ledger
    from agentrl.buffer.order import Place, PromptOrder, permute
    from agentrl.buffer.plugin import check_source, load_source
    from agentrl.buffer.records import CompletedGroup, Lease, Recovery, State
    from agentrl.buffer.settings import BufferSettings
    from agentrl.buffer.source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer

_HOME = {
    "LedgerAudit": "audit",
    "audit_ledger": "audit",
    "PromptData": "data",
    "PromptRow": "data",
    "dump_path": "dump",
    "load_rollout": "dump",
    "save_rollout": "dump",
    "GroupFeed": "feed",
    "CompletedGroup": "records",
    "Lease": "records",
    "Ledger": "ledger",
    "Recovery": "records",
    "State": "records",
    "Place": "order",
    "PromptOrder": "order",
    "permute": "order",
    "check_source": "plugin",
    "load_source": "plugin",
    "BufferSettings": "settings",
    "DataSource": "source",
    "RolloutDataSource": "source",
    "RolloutDataSourceWithBuffer": "source",
}

__all__ = [
    "BufferSettings",
    "CompletedGroup",
    "DataSource",
    "GroupFeed",
    "Lease",
    "Ledger",
    "LedgerAudit",
    "Place",
    "PromptData",
    "PromptOrder",
    "PromptRow",
    "Recovery",
    "RolloutDataSource",
    "RolloutDataSourceWithBuffer",
    "State",
    "audit_ledger",
    "check_source",
    "dump_path",
    "load_rollout",
    "load_source",
    "permute",
    "save_rollout",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
