"""The viewer's library: runs, their trajectory stores and their metrics. `refresh` adds new runs and stores."""

import threading
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from pathlib import Path
from typing import Any

from agentrl.buffer.reader import StoreReader, find_stores
from agentrl.errors import DataError, SettingsError
from agentrl.files import stamp
from agentrl.observability.metrics import read_metrics
from agentrl.observability.report import read_settings
from agentrl.observability.trajectories import TokenTexts, run_texts
from agentrl.runfolder import BELOW, METRICS, SETTINGS
from agentrl.viewer.search import TextIndex


@dataclass(frozen=True)
class Run:
    """A run's folder; `name` is unique among the runs."""

    name: str
    folder: Path

    @property
    def stamp(self) -> tuple[int, ...]:
        return stamp(*self._metrics)

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of the training metrics; without them, the metrics of `rollout` or `eval` in the folder."""
        return next((list(read_metrics(file)) for file in self._metrics if file.is_file()), [])

    @property
    def _metrics(self) -> list[Path]:
        return [self.folder / below / METRICS for below in BELOW.values()]


class Source:
    """One trajectory store of a run."""

    def __init__(self, number: int, name: str, path: Path) -> None:
        self.number, self.name, self.path = number, name, path
        self._opened: dict[int, StoreReader] = {}

    @property
    def reader(self) -> StoreReader:
        """The store's reader, opened on first use and if the file was replaced. Raises DataError: it cannot be read."""
        if not self.path.is_file():
            raise DataError(f"{self.path} is not there any more")
        if (identity := self.path.stat().st_ino) not in self._opened:
            self._opened = {identity: StoreReader(self.path)}
        return self._opened[identity]

    @property
    def opens(self) -> bool:
        """True if the store exists and can be read."""
        with suppress(DataError):
            return self.reader.count() >= 0
        return False

    @cached_property
    def index(self) -> TextIndex:
        """Text index of this store; the first search starts to build it."""
        return TextIndex(self.path)

    @property
    def stamp(self) -> tuple[int, ...]:
        return stamp(self.path, self.path.with_name(f"{self.path.name}-wal"))

    @cached_property
    def texts(self) -> TokenTexts:
        """Token texts by the tokenizer of the run's model; ids if the tokenizer is not found."""
        settings: dict[str, Any] = {}
        with suppress(DataError, OSError):  # without settings, ids are shown and the page says why
            settings = read_settings(self.path.parent)
        return run_texts(self.path.parent, settings)


class Library:
    """The runs in some folders. The number of a source is the same in each viewer of the same folders."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Look for runs in `folders` and below them. Raises SettingsError: one of them has none."""
        self._folders = [folder.expanduser().resolve() for folder in folders]
        self.runs, self.sources, self._lock = list[Run](), list[Source](), threading.Lock()
        for folder in self._folders:
            if not folder.is_dir() or not _runs_in(folder):
                remedy = "give the --output-dir of a run, or a folder that has such folders in it"
                raise SettingsError(f"{folder}: no run here; {remedy}")
        self.refresh()

    def refresh(self) -> None:
        found = dict.fromkeys(run for folder in self._folders for run in _runs_in(folder))
        names = [folder.name for folder in found]
        with self._lock:  # pages are made in threads
            self.runs = [Run(f.name if names.count(f.name) == 1 else str(f), f) for f in found]
            known = {source.path for source in self.sources}
            for run in self.runs:
                for below, path in find_stores(run.folder).items():
                    if path not in known:
                        self.sources.append(Source(self._number(path), f"{run.name}/{below}".rstrip("/"), path))

    def source(self, number: int) -> Source:
        """Return a source by its number; for 0, the first one that opens. Raises DataError: there is none."""
        found = [source for source in self.sources if number in (0, source.number)]
        if not found:
            commands = "`agentrl train`, `rollout` and `eval`"
            raise DataError(f"no trajectories here yet: {commands} store them unless --keep-trajectories is 0")
        return next((source for source in found if number or source.opens), found[0])

    def _number(self, path: Path) -> int:
        """Return a number that depends on the path below the given folder only."""
        folder = next(folder for folder in self._folders if folder in path.parents)
        number = 1 + zlib.crc32(str(path.relative_to(folder)).encode()) % 10**8
        known = {source.number for source in self.sources}  # each given folder may be one run
        return next(n for n in count(number) if n not in known)

    def chosen(self, number: int | None) -> Sequence[Source]:
        """Return the source with this number; for None, all sources that open. Raises DataError: none exists."""
        opening = [] if number is not None else [source for source in self.sources if source.opens]
        return opening or [self.source(number or 0)]


def _runs_in(folder: Path, depth: int = 2) -> list[Path]:
    """Return the folder if it is a run, else the runs up to `depth` levels below it."""
    try:
        if (folder / METRICS).is_file() or (folder / SETTINGS).is_file() or find_stores(folder):
            return [folder]
        below = sorted(one for one in folder.iterdir() if one.is_dir()) if depth else []
    except OSError as error:
        if depth < 2:  # a folder of another user
            return []
        raise SettingsError(f"{folder}: cannot be read: {error.strerror}") from error
    return [run for one in below for run in _runs_in(one, depth - 1)]
