"""Output of native libraries goes to a file; our own output goes to the terminal."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import os, sys
from pathlib import Path
from agentrl.cluster.runtime import library_output
print("before", file=sys.stderr)
with library_output(Path("native.log")):
    os.write(2, b"a library's words\\n")
    print("ours", file=sys.stderr)
os.write(2, b"afterwards\\n")
with library_output(Path("native.log")):
    raise RuntimeError("shown")
"""


@pytest.mark.slow
def test_only_the_libraries_words_are_set_apart(tmp_path: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=tmp_path, capture_output=True, text=True, timeout=600, env=env
    )
    assert done.stderr.splitlines()[:3] == ["before", "ours", "afterwards"]
    assert "RuntimeError: shown" in done.stderr
    assert (tmp_path / "native.log").read_text() == "a library's words\n"
