"""slime's data sources: base classes for users, and the adapter of users' classes to our ledger. The ledger is the
buffer: groups that were aborted, or added back by a rollout function, wait there until `--buffer-filter-path` chooses
them. So a slime source is asked for new groups only, and no group is added to it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentrl.compat.calls import adapted, as_slime, namespace
from agentrl.config.args import Args
from agentrl.data import source as ours
from agentrl.groups import Group


def pop_first(args: Any, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]:
    """Return the oldest groups, as slime's buffer filter does."""
    return ours.pop_first(args, buffer, num_samples)


class SlimeDataSource(ours.RolloutDataSource):
    """Prompts of a file as slime samples; its position is saved under `args.save`."""

    def get_samples(self, num_samples: int) -> list[Any]:
        return [[as_slime(self.args, sample) for sample in group] for group in super().get_samples(num_samples)]

    def save(self, rollout_id: Any) -> None:
        if getattr(self.args, "save", None):
            self._file(self.args.save, rollout_id).parent.mkdir(parents=True, exist_ok=True)
            super().save(self._file(self.args.save, rollout_id))

    def load(self, rollout_id: Any = None) -> None:
        folders = [folder for name in ("save", "load") if (folder := getattr(self.args, name, None))]
        if found := [file for folder in folders if (file := self._file(folder, rollout_id)).is_file()]:
            super().load(found[0])

    def _file(self, folder: str, rollout_id: Any) -> Path:
        return Path(folder) / "rollout" / f"{type(self).__name__}_{rollout_id}.json"


class SlimeDataSourceWithBuffer(SlimeDataSource, ours.RolloutDataSourceWithBuffer):
    """`SlimeDataSource` with a buffer, for functions that store groups there."""

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def state(self) -> dict[str, Any]:
        plain = [[sample.plain().to_dict() for sample in group] for group in self.buffer]  # type: ignore[attr-defined]
        return {**ours.RolloutDataSource.state(self), "buffer": plain}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.buffer = [[as_slime(self.args, sample) for sample in group] for group in self.buffer]


def adapted_source(kind: type) -> type:
    """Return an adapter class for a user's data source class."""
    adapted(kind)
    return type(kind.__name__, (SlimeSource,), {"kind": kind})


class SlimeSource:
    """Adapter of a user's slime data source. Each subclass has the user's class in `kind`."""

    kind: ClassVar[Any]

    def __init__(self, args: Args) -> None:
        self._args = namespace(args)
        self._source = self.kind(self._args)

    def get_samples(self, num_groups: int) -> list[Group]:
        """Return the source's next groups."""
        return [[sample.plain() for sample in group] for group in self._source.get_samples(num_groups)]

    def add_samples(self, groups: Sequence[Group]) -> None:
        """Ignore the groups; see the module."""

    def save(self, path: str | Path) -> None:
        """Let the source save under the number of this rollout, and write the number to `path`."""
        number = getattr(self._args, "rollout_id", None)
        self._source.save(number)
        Path(path).write_text(json.dumps(number))

    def load(self, path: str | Path) -> None:
        """Let the source load what it saved under the number in `path`."""
        self._source.load(json.loads(Path(path).read_text()))

    def __len__(self) -> int:
        return len(self._source) if hasattr(self._source, "__len__") else 0
