"""The order of the tests on several processes: the longest files first, by their recorded seconds.

`tests/seconds.tsv` has a line for each file that takes a second or longer. A file runs in one process, except the tests
that have lines of their own (`FILE::TEST`): each of them may run beside the others of its file. A file without a line comes
last. `pytest -n 2 --record-seconds` (on an idle machine, all tests) writes the file again; lines of tests are kept.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_FILE = Path(__file__).parents[1] / "seconds.tsv"
_LEAST = 1.0
"""Seconds; a shorter file has no line."""


def read_seconds() -> dict[str, float]:
    """Seconds by file or test."""
    rows = (line.split("\t") for line in _FILE.read_text(encoding="utf-8").splitlines())
    return {name: float(seconds) for seconds, name in rows}


def unit_of(nodeid: str, seconds: dict[str, float]) -> str:
    """The line of the table that a test belongs to: its own, or its file's."""
    return nodeid if nodeid in seconds else nodeid.partition("::")[0]


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """xdist's scheduler for `--dist loadfile`; None leaves other distributions to xdist."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
        """Deals files in the order of their first tests, and some tests alone."""

        seconds = read_seconds()

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid, self.seconds)

    config.option.loadscopereorder = False
    return LongestFirst(config, log)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the seconds of what they belong to; the order within a file stays."""
    seconds = read_seconds()
    items.sort(key=lambda item: -seconds.get(unit_of(item.nodeid, seconds), 0.0))


class Recorder:
    """Adds up how long each file took, and writes the table."""

    def __init__(self) -> None:
        self._known, self._found = read_seconds(), defaultdict[str, float](float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._found[unit_of(report.nodeid, self._known)] += report.duration

    def pytest_sessionfinish(self) -> None:
        rows = sorted(((seconds, name) for name, seconds in self._found.items()), reverse=True)
        text = "".join(f"{seconds:.0f}\t{name}\n" for seconds, name in rows if seconds >= _LEAST)
        _FILE.write_text(text, encoding="utf-8")
