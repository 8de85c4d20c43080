"""The source tree of these tests: their child processes must import it, even if another agentrl is installed."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def import_path() -> str:
    """Return PYTHONPATH for a child: this tree first. The child's own children inherit it, also Ray's workers."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
