"""slime's data sources: for users' classes to build on, and users' own classes under our ledger. The ledger is the
buffer: groups that were broken off, or given back by a rollout function, wait in it and are chosen by
`--buffer-filter-path`. So a slime source is asked for new groups only, and nothing is added to it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from agentrl.compat.calls import adapted, namespace, rendered
from agentrl.compat.sample import SlimeSample
from agentrl.config.args import Args
from agentrl.data import source as ours
from agentrl.groups import Group
from agentrl.sample import Sample


def pop_first(args: Any, rollout_id: int | None, buffer: list[Any], num_samples: int) -> list[Any]:
    """slime's buffer filter: the oldest groups."""
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
        folder = getattr(self.args, "load", None) or getattr(self.args, "save", None)
        if folder and (file := self._file(folder, rollout_id)).is_file():
            super().load(file)

    def _file(self, folder: str, rollout_id: Any) -> Path:
        return Path(folder) / "rollout" / f"{type(self).__name__}_{rollout_id}.json"


class SlimeDataSourceWithBuffer(SlimeDataSource, ours.RolloutDataSourceWithBuffer):
    """The same with a buffer, for functions that keep groups in it themselves."""

    def get_buffer_length(self) -> int:
        return len(self.buffer)

    def state(self) -> dict[str, Any]:
        plain = [[sample.plain().to_dict() for sample in group] for group in self.buffer]  # type: ignore[attr-defined]
        return {**ours.RolloutDataSource.state(self), "buffer": plain}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.buffer = [[SlimeSample.of(sample) for sample in group] for group in self.buffer]


def as_slime(args: Any, sample: Sample) -> SlimeSample:
    """A pending sample as slime's data sources give it."""
    made = SlimeSample.of(sample)
    if isinstance(made.prompt, list) and getattr(args, "apply_chat_template", False):
        made.prompt = rendered(args, sample)
    return made


def adapted_source(kind: type) -> type:
    """A user's data source class as our code builds and uses one."""
    adapted(kind)
    return type(kind.__name__, (SlimeSource,), {"kind": kind})


class SlimeSource:
    """A user's slime data source as our code uses one; a subclass for each names its class in `kind`."""

    kind: ClassVar[Any]

    def __init__(self, args: Args) -> None:
        self._args = namespace(args)
        self._source = self.kind(self._args)

    def get_samples(self, num_groups: int) -> list[Group]:
        """The source's next groups."""
        return [[sample.plain() for sample in group] for group in self._source.get_samples(num_groups)]

    def add_samples(self, groups: Sequence[Group]) -> None:
        """Nothing: see the module."""

    def save(self, path: str | Path) -> None:
        """Let the source save under the number of this rollout, and note the number."""
        number = getattr(self._args, "rollout_id", None)
        self._source.save(number)
        Path(path).write_text(json.dumps(number))

    def load(self, path: str | Path) -> None:
        """Let the source load what it saved last."""
        self._source.load(json.loads(Path(path).read_text()))

    def __len__(self) -> int:
        return len(self._source) if hasattr(self._source, "__len__") else 0
