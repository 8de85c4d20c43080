"""Settings of all tests."""

import functools
import gc
import os
import signal
import ssl
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

from tests.support import order, warm
from tests.support.checkout import import_path

# On a busy machine a first draw can wait seconds for an import or a core; speed is measured in benchmarks/.
settings.register_profile(
    "nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=100
)
settings.register_profile("agentrl", settings.get_profile("nightly"), max_examples=40)
settings.load_profile("agentrl")  # `make test-nightly` asks for the other one

os.environ["PYTHONPATH"] = import_path()

# Several processes test at once: more threads would wait for each other and turn in circles meanwhile.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each HTTP client reads the certificates of all authorities: as long as a small test takes. The tests' servers have none.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]

# A shell's background jobs ignore SIGINT, and so would every process that the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _loaded_for_good() -> Iterator[None]:
    """What is there when a file begins stays: collecting garbage in its tests would look at all of it each time. A run
    in this process freezes what it finds, also process groups that nobody uses any more, whose threads take CPU."""
    gc.collect()
    gc.freeze()
    frozen, threshold = gc.get_freeze_count(), gc.get_threshold()
    yield
    gc.set_threshold(*threshold)
    if gc.get_freeze_count() > frozen:
        gc.unfreeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help="write tests/seconds.tsv")
    parser.addoption("--warm", action="store_true", help="fork processes from one that has imported the heavy packages")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--record-seconds") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(order.Recorder())


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: Any) -> None:
    """Fork the processes that test from one that has imported the heavy packages."""
    if not config.getoption("--warm"):
        return
    server = ExitStack()
    server.enter_context(warm.serving())
    config.add_cleanup(server.close)
    for spec in specs:
        spec.python = warm.python()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return order.make_scheduler(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):  # in one process files stay in the order that they were asked for
        order.longest_first(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line on the sandbox backends that this machine lacks: their tests were skipped."""
    if not any("/sandbox/" in report.nodeid for report in terminalreporter.stats.get("skipped", [])):
        return
    from agentrl.sandbox import try_backends

    absent = [f"{name} ({said})" for name, (works, said) in try_backends().items() if not works]
    if absent:
        terminalreporter.write_line(f"sandbox backends that this machine lacks, tests skipped: {', '.join(absent)}")
