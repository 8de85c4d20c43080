"""Data sources: groups of samples. `get_samples(n)` returns n groups of `n_samples_per_prompt` deep copies, fewer at the
end of the data. `add_samples(groups)` takes groups back. `save` and `load` keep a position; a ledger keeps its own."""

import copy
import json
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

from agentrl.data.order import DataPosition, PromptOrder
from agentrl.data.prompts import PromptRow, open_prompts
from agentrl.data.settings import DataSettings
from agentrl.errors import DataError, PluginError, raised_as
from agentrl.files import write_atomic
from agentrl.groups import Group
from agentrl.plugins import load_object
from agentrl.rowfiles import dump_json
from agentrl.sample import Sample

BufferFilter = Callable[[Any, list[Group], int], Sequence[Group]]
"""`fn(args, buffer, num_samples)` -> the groups to use; it may take them out of `buffer` or leave that to the caller."""

Choice = Callable[[list[Group], int], list[Group]]
"""A buffer filter as the data source uses it: removes at most that many groups from the buffer and returns them."""


@runtime_checkable
class DataSource(Protocol):
    """The full contract; a plug-in needs `get_samples` and `add_samples` only (see `agentrl.data.user_source`)."""

    n_samples_per_prompt: int

    @property
    def choice(self) -> Choice | None:
        """The choice among groups that were returned to the source; None: the lowest number is first."""

    def get_samples(self, num_groups: int) -> list[Group]: ...
    def add_samples(self, groups: Sequence[Group]) -> None: ...
    def save(self, path: str | Path) -> None: ...
    def load(self, path: str | Path) -> None: ...
    def __len__(self) -> int: ...
    def commit(self, group_ids: Iterable[int], step: int) -> None: ...


class RolloutDataSource:
    """Prompts of a dataset, in file order or shuffled anew in every epoch, endless or for `num_epoch` passes.
    `dataset`: rows by index (`__len__`, and `__getitem__` that returns a `PromptRow`). If it is left out, the source
    opens `args.prompt_data`. Without data, groups have an empty prompt, which the environment fills. `args`: the flat
    settings: those of `DataSettings`, `n_samples_per_prompt` and `rollout_seed`."""

    def __init__(self, *arguments: Any) -> None:
        if len(arguments) not in (1, 2):
            raise PluginError(f"{type(self).__name__} takes (args) or (dataset, args), got {len(arguments)} arguments")
        self.args = args = arguments[-1]
        settings = DataSettings.of_args(args)
        self.dataset: Any = arguments[0] if len(arguments) == 2 else open_prompts(settings)
        self.n_samples_per_prompt: int = args.n_samples_per_prompt
        self.position = 0
        self.order: PromptOrder | None = None
        if self.dataset is not None:
            self.order = PromptOrder(len(self.dataset), args.rollout_seed, settings.rollout_shuffle, settings.num_epoch)
        self.prompt_order = settings.prompt_order
        self._filter = load_buffer_filter(settings.buffer_filter_path)

    @property
    def choice(self) -> Choice | None:
        """The function that `--buffer-filter-path` names, which chooses from the buffer; None if it is not set."""
        return None if self._filter is None else partial(take_from_buffer, self._filter, self.args)

    def identity(self) -> dict[str, object]:
        """Return the values that determine the meaning of a group number, for a comparison on resume."""
        if self.order is None:
            return {"prompt_rows": None}
        return {
            "prompt_rows": self.order.rows,
            "prompt_digest": getattr(self.dataset, "digest", None),
            "rollout_shuffle": self.order.shuffle,
            "prompt_order": self.prompt_order,
            "rollout_seed": self.order.seed if self.order.shuffle or self.prompt_order == "difficulty" else None,
        }

    def place(self, position: int) -> DataPosition | None:
        """Return the epoch and row of the group at `position`; None after the last epoch."""
        return DataPosition(0, position) if self.order is None else self.order.at(position)

    def build(self, group_id: int, place: DataPosition) -> Group:
        """Return new samples for the prompt at `place`; `group_id` determines their running numbers."""
        row = PromptRow(place.prompt_index, "") if self.dataset is None else self.dataset[place.prompt_index]
        return pending_group(row, group_id, self.n_samples_per_prompt)

    def get_samples(self, num_groups: int) -> list[Group]:
        """Return the next groups in order; fewer at the end of the data."""
        groups = list[Group]()
        while len(groups) < num_groups and (place := self.place(self.position)) is not None:
            groups.append(self.build(self.position, place))
            self.position += 1
        return groups

    def add_samples(self, groups: Sequence[Group]) -> None:
        """Does nothing: this source keeps no generated samples."""

    def commit(self, group_ids: Iterable[int], step: int) -> None:
        """Called after each training step with the groups of the step; does nothing here."""

    def state(self) -> dict[str, Any]:
        """Return the values that `save` writes."""
        return {"position": self.position, **self.identity()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the values that `load` read. Raises DataError: they belong to other data."""
        for key, value in self.identity().items():
            if state.get(key, value) != value:
                raise DataError(f"the saved source has {key}={state[key]!r}, this run {value!r}; use the old value")
        self.position = int(state["position"])

    def save(self, path: str | Path) -> None:
        """Write the position to a file; a kill leaves the old file or the new one."""
        write_atomic(Path(path), dump_json(self.state()))

    def load(self, path: str | Path) -> None:
        """Restore the state that `save` wrote. Raises DataError: the file is missing, malformed, or of other data."""
        with raised_as(DataError, f"data source state {path} cannot be read", OSError, ValueError):
            state = json.loads(Path(path).read_bytes())
        if not isinstance(state, dict) or not isinstance(state.get("position"), int):
            raise DataError(f"{path} is not a data source's state: it has no whole-numbered 'position'")
        self.set_state(state)

    def __len__(self) -> int:
        return 0 if self.dataset is None else len(self.dataset)


class RolloutDataSourceWithBuffer(RolloutDataSource):
    """Source that returns groups from its buffer before new prompts; `buffer_filter` chooses the groups."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.buffer: list[Group] = []

    @property
    def choice(self) -> Choice:
        """The function that chooses from the buffer: `buffer_filter`."""
        return partial(take_from_buffer, self.buffer_filter, self.args)

    def buffer_filter(self, args: Any, buffer: list[Group], num_samples: int) -> Sequence[Group]:
        """Return the groups to use next: the plug-in's choice, or the oldest. A subclass may override this method."""
        return (self._filter or pop_first)(args, buffer, num_samples)

    def get_samples(self, num_groups: int) -> list[Group]:
        """Return groups from the buffer, then new groups."""
        chosen = self.choice(self.buffer, num_groups) if self.buffer else []
        return chosen + super().get_samples(num_groups - len(chosen))

    def add_samples(self, groups: Sequence[Group]) -> None:
        """Keep groups for a later `get_samples`."""
        for group in groups:
            if not isinstance(group, list) or len(group) != self.n_samples_per_prompt:
                got = len(group) if isinstance(group, list) else type(group).__name__
                expected = f"groups of n_samples_per_prompt={self.n_samples_per_prompt} samples"
                raise DataError(f"add_samples expects {expected}, got {got}")
        self.buffer.extend(groups)

    def state(self) -> dict[str, Any]:
        return {**super().state(), "buffer": [[sample.to_dict() for sample in group] for group in self.buffer]}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.buffer = [[Sample.from_dict(sample) for sample in group] for group in state.get("buffer", [])]


def drawn_by_position(source: Any) -> bool:
    """Return true for a built-in source, also a subclass that overrides neither `get_samples` nor `add_samples`. The prompt
    of a group follows from its position."""
    kind, bases = type(source), (RolloutDataSource, RolloutDataSourceWithBuffer)
    alike = [base for base in bases if issubclass(kind, base)]
    return any(kind.get_samples is b.get_samples and kind.add_samples is b.add_samples for b in alike)


def pop_first(args: Any, buffer: list[Group], num_samples: int) -> list[Group]:
    """Remove and return the oldest groups: the default buffer filter."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def load_buffer_filter(path: str | None) -> BufferFilter | None:
    if path is None:
        return None
    if not callable(found := load_object(path, what="--buffer-filter-path", default_names=("buffer_filter",))):
        raise PluginError(f"--buffer-filter-path {path!r}: expected a function, got {type(found).__name__}")
    return cast(BufferFilter, found)


def take_from_buffer(choose: BufferFilter, args: Any, buffer: list[Group], num_groups: int) -> list[Group]:
    """Let `choose` pick at most `num_groups` groups and remove them from `buffer`. Raises PluginError: `choose`
    returned too many groups, an object that was not in the buffer, or a group twice."""
    before = {id(group) for group in buffer}
    if len(chosen := list(choose(args, buffer, num_groups))) > num_groups:
        raise PluginError(f"--buffer-filter-path returned {len(chosen)} groups, at most {num_groups} were asked")
    taken = {id(group) for group in chosen}
    if len(taken) != len(chosen) or not taken <= before:
        raise PluginError("--buffer-filter-path: the filter must return groups of the buffer, each at most once")
    buffer[:] = [group for group in buffer if id(group) not in taken]
    return chosen


def pending_group(row: PromptRow, group_id: int, n: int, **recorded: Any) -> Group:
    """Return `n` new samples of one prompt, numbered by `group_id`; `recorded` goes into their metadata."""
    own = {key: value for key, value in (("tools", row.tools), ("env", row.env)) if value is not None}
    given: dict[str, Any] = {"prompt": row.prompt, "label": row.label, "metadata": {**row.metadata, **own, **recorded}}
    return number_group([Sample(**copy.deepcopy(given), images=dict(row.images)) for _ in range(n)], group_id, n)


def number_group(group: Group, group_id: int, n_samples_per_prompt: int) -> Group:
    """Give a group's samples their `group_index` and running `index`."""
    for offset, sample in enumerate(group):
        sample.group_index, sample.index = group_id, group_id * n_samples_per_prompt + offset
    return group
