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

# On a busy machine the first draw can wait seconds for an import or a core. Speed is measured in benchmarks/.
settings.register_profile(
    "nightly", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True, max_examples=100
)
settings.register_profile("agentrl", settings.get_profile("nightly"), max_examples=40)
settings.load_profile("agentrl")  # `make test-nightly` selects the other one

os.environ["PYTHONPATH"] = import_path()

# Several test processes run at once. With more threads each, the threads would compete for cores and busy-wait.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Each HTTP client reads all CA certificates, which takes as long as a small test. The tests' servers have none.
ssl.create_default_context = functools.cache(ssl.create_default_context)  # type: ignore[assignment]

# A shell's background jobs ignore SIGINT. So would every process that the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _loaded_for_good() -> Iterator[None]:
    """Freeze the objects that exist when a test file begins, so that garbage collection in tests skips them. A run in
    this process freezes objects too, also unused process groups, whose threads take CPU: these are unfrozen."""
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
    """Fork the test processes from one that has imported the heavy packages."""
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
    if hasattr(config, "workerinput"):  # a single process runs files in the requested order
        order.longest_first(items)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write one line about the sandbox backends that this machine lacks: their tests were skipped."""
    if not any("/sandbox/" in report.nodeid for report in terminalreporter.stats.get("skipped", [])):
        return
    from agentrl.sandbox import try_backends

    absent = [f"{name} ({said})" for name, (works, said) in try_backends().items() if not works]
    if absent:
        terminalreporter.write_line(f"sandbox backends that this machine lacks, tests skipped: {', '.join(absent)}")
