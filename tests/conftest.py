"""Settings of all tests."""

import gc
import os
import signal

import pytest
from hypothesis import HealthCheck, settings

from tests.support.checkout import import_path

# On a busy machine a first draw can wait seconds for an import or a core; speed is measured in benchmarks/.
settings.register_profile("agentrl", deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
settings.load_profile("agentrl")

os.environ["PYTHONPATH"] = import_path()

# A shell's background jobs ignore SIGINT, and so would every process that the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="module", autouse=True)
def _loaded_for_good() -> None:
    """What is there when a file begins stays: collecting garbage in its tests would look at all of it each time."""
    gc.collect()
    gc.freeze()
