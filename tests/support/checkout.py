"""The tree that these tests belong to: what a process that they start must import, whatever is installed beside it."""

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]


def import_path() -> str:
    """PYTHONPATH for a child: this tree first. Its own children, Ray's workers among them, inherit it."""
    return os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
