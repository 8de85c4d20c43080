"""The order of the tests on several processes: the longest files first, by their recorded seconds.

`tests/seconds.tsv` has a line for each file whose tests of `make test` take a second or longer. `seconds_slow.tsv` has
one for each file with slow tests. A file runs in one process, except for tests with their own lines (`FILE::TEST`),
which may run beside the others of their file. A file without a line comes last. `pytest -n 2 --record-seconds` (on an
idle machine, all tests) writes the tables again and keeps the lines of tests.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

_TESTS = Path(__file__).parents[1]
TABLES = (_TESTS / "seconds.tsv", _TESTS / "seconds_slow.tsv")
"""The table of `make test`; the table of the slow tests."""
_LEAST = 1.0
"""In seconds; a shorter file has no line."""


def read_seconds(slow: bool = False) -> dict[str, float]:
    """Return seconds by file or test, with `slow` including those of the slow tests."""
    found = defaultdict[str, float](float)
    for table in TABLES[: 1 + slow]:
        for line in table.read_text(encoding="utf-8").splitlines():
            seconds, name = line.split("\t")
            found[name] += float(seconds)
    return dict(found)


def unit_of(nodeid: str, seconds: dict[str, float]) -> str:
    """Return the table's line for a test: its own, or its file's."""
    return nodeid if nodeid in seconds else nodeid.partition("::")[0]


def make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Make xdist's scheduler for `--dist loadfile`; None leaves other distributions to xdist."""
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class LongestFirst(LoadScopeScheduling):  # type: ignore[misc]
        """Schedules files in the order of their first tests, and tests with their own lines separately."""

        seconds = read_seconds(slow=True)

        def _split_scope(self, nodeid: str) -> str:
            return unit_of(nodeid, self.seconds)

    config.option.loadscopereorder = False
    return LongestFirst(config, log)


def longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the seconds of their line; the order within a file stays."""
    seconds = read_seconds(any(item.get_closest_marker("slow") for item in items))
    items.sort(key=lambda item: -seconds.get(unit_of(item.nodeid, seconds), 0.0))


class Recorder:
    """Sums the seconds of each file, and writes the tables of the tests that ran."""

    def __init__(self) -> None:
        self._known = read_seconds(slow=True)
        self._found = {table: defaultdict[str, float](float) for table in TABLES}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        table = TABLES["slow" in report.keywords]
        self._found[table][unit_of(report.nodeid, self._known)] += report.duration

    def pytest_sessionfinish(self) -> None:
        for table, found in self._found.items():
            rows = sorted(((seconds, name) for name, seconds in found.items()), reverse=True)
            if rows:
                text = "".join(f"{seconds:.0f}\t{name}\n" for seconds, name in rows if seconds >= _LEAST)
                table.write_text(text, encoding="utf-8")
