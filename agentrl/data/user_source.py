"""A user's own data source (`--data-source-path my.mod:MySource`), adapted to the full contract.

1. It is built as `(dataset, args)`, `(args)` or `()`, or is a ready object. It needs `get_samples(n)` and
   `add_samples(groups)`; `save`, `load`, `commit` and `__len__` are optional.
2. `get_samples` may return groups or single samples; a single sample becomes a group of independent copies."""

import copy
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from agentrl.data.prompts import Look, PromptRow, open_prompts
from agentrl.data.settings import DataSettings
from agentrl.data.source import (
    Choice,
    DataSource,
    RolloutDataSource,
    RolloutDataSourceWithBuffer,
    drawn_by_position,
    load_buffer_filter,
    take_from_buffer,
)
from agentrl.errors import PluginError, raised_as
from agentrl.groups import Group
from agentrl.plugins import load_object, positional, user_code
from agentrl.sample import Sample


def load_source(settings: DataSettings, args: Any) -> DataSource:
    """Return the data source that the settings name, the user's or the built-in one. A class gets the flat `args`."""
    if (path := settings.data_source_path) is None:
        return (RolloutDataSourceWithBuffer if settings.buffer_filter_path else RolloutDataSource)(args)
    if inspect.isclass(source := _find(path)):
        with user_code(f"--data-source-path {path!r}: {source.__name__}()"):
            source = _construct(source, settings, args)
    return source if drawn_by_position(source) else SourceAdapter(source, settings, args)


def check_source(settings: DataSettings, look: Look = lambda row: None) -> PromptRow | None:
    """Check what `load_source` will use, without building a user's source, whose constructor may do anything. `look`
    returns what is wrong with a row; it gets all rows if `prompt_data_check` is `full`. So does a source's static method
    `check_prompt_row`. Returns the first row of the prompt data; None without prompt data. Raises DataError: the prompt
    data is missing, empty or malformed. PluginError: a plug-in is not found or lacks a method."""
    load_buffer_filter(settings.buffer_filter_path)
    found = None if settings.data_source_path is None else _find(settings.data_source_path)
    if found is not None:
        _check_methods(found, found.__name__ if inspect.isclass(found) else type(found).__name__)
    own: Look = getattr(found, "check_prompt_row", lambda row: None)
    dataset = open_prompts(settings, lambda row: own(row) or look(row))
    return None if dataset is None else dataset[0]


def _find(path: str) -> Any:
    return load_object(path, what="--data-source-path", default_names=("DataSource", "RolloutDataSource"))


def _check_methods(source: Any, name: str) -> None:
    for method in ("get_samples", "add_samples"):
        if not callable(getattr(source, method, None)):
            raise PluginError(f"data source {name} has no method {method!r}; it needs get_samples and add_samples")


def _construct(kind: type, settings: DataSettings, args: Any) -> Any:
    path = settings.data_source_path
    with raised_as(PluginError, f"--data-source-path {path!r}: cannot see how to build {kind.__name__}", ValueError):
        parameters = positional(kind)
    needed = [p for p in parameters if p.default is p.empty]
    if issubclass(kind, RolloutDataSource) and not parameters:
        return kind(args)
    if len(needed) > 2:
        takes = f"needs {', '.join(p.name for p in needed)}; a data source is built as (dataset, args), (args) or ()"
        raise PluginError(f"--data-source-path {path!r}: {kind.__name__} {takes}")
    if len(needed) == 2 or [p.name for p in parameters[:2]] == ["dataset", "args"]:
        return kind(open_prompts(settings), args)
    return kind(args) if parameters else kind()


class SourceAdapter:
    """Adapter of a user's source to the whole `DataSource` contract. See the module's docstring."""

    def __init__(self, source: Any, settings: DataSettings, args: Any) -> None:
        self.source = source
        self.n_samples_per_prompt: int = args.n_samples_per_prompt
        chosen = load_buffer_filter(settings.buffer_filter_path)
        self.choice: Choice | None = None if chosen is None else partial(take_from_buffer, chosen, args)
        if isinstance(source, RolloutDataSource):
            self.choice = source.choice
        self._name, self._calls = type(source).__name__, SimpleQueue[tuple[Future[Any], Callable[[], Any]]]()
        self._thread: threading.Thread | None = None
        self._limit, self._later = ("--start-timeout", args.start_timeout), ("--env-timeout", args.env_timeout)
        _check_methods(source, self._name)

    def get_samples(self, num_groups: int) -> list[Group]:
        """Return the user's next groups. Raises PluginError: the result is not a list of groups or samples, or has an
        empty group or too many groups. SampleError: a sample's fields have wrong types or disagree."""
        given = self._call("get_samples", num_groups)
        if not isinstance(given, (list, tuple)):
            got = type(given).__name__ + "; it must be a plain function, not async" * inspect.isawaitable(given)
            raise PluginError(f"{self._name}.get_samples must return a list of groups, got {got}")
        if len(groups := [self._group(item) for item in given]) > num_groups:
            raise PluginError(f"{self._name}.get_samples({num_groups}) returned {len(groups)} groups; return no more")
        return groups

    def _group(self, item: Any) -> Group:
        if isinstance(item, Sample):
            return [copy.deepcopy(item.validate()) for _ in range(self.n_samples_per_prompt)]
        if isinstance(item, (list, tuple)) and item and all(isinstance(sample, Sample) for sample in item):
            if len(item) > self.n_samples_per_prompt:
                said = f"a group of {len(item)} samples, more than --n-samples-per-prompt {self.n_samples_per_prompt}"
                raise PluginError(f"{self._name}.get_samples returned {said}")
            return [sample.validate() for sample in item]
        expected = "groups (non-empty lists of Sample) or samples"
        raise PluginError(f"{self._name}.get_samples must return {expected}, got {item!r:.120}")

    def add_samples(self, groups: Sequence[Group]) -> None:
        self._call("add_samples", list(groups))

    def save(self, path: str | Path) -> None:
        self._optional("save", path)

    def load(self, path: str | Path) -> None:
        self._optional("load", path)

    def commit(self, group_ids: Iterable[int], step: int) -> None:
        self._optional("commit", list(group_ids), step)

    def _optional(self, method: str, *values: Any) -> None:
        if callable(getattr(self.source, method, None)):
            self._call(method, *values)

    def _call(self, method: str, *values: Any) -> Any:
        """Call a method in the source's daemon thread, so that a call that hangs does not keep the run from ending. Raises
        PluginError: the method raised, or took longer than `env_timeout` (the first call: `start_timeout`)."""
        done, what = Future[Any](), f"{self._name}.{method}"
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="agentrl-data-source", daemon=True)
            self._thread.start()
        self._calls.put((done, partial(getattr(self.source, method), *values)))
        flag, seconds = self._limit
        if not wait((done,), seconds).done:
            raise PluginError(f"{what} did not return within {flag}, {seconds:g} s")
        self._limit = self._later
        with user_code(what):
            return done.result()

    def _work(self) -> None:
        while True:
            done, call = self._calls.get()
            try:
                done.set_result(call())
            except BaseException as error:  # noqa: BLE001 - raised again by the caller
                done.set_exception(error)

    def __len__(self) -> int:
        return len(self.source) if hasattr(self.source, "__len__") else 0
