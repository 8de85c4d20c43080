"""Run each part of the nightly tests to its end, even if another part fails, and list the failures.

    python scripts/nightly.py [PART ...]

The parts are targets of the Makefile. Their outputs are in build/nightly/.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOGS = ROOT / "build" / "nightly"
PARTS = ("test-all", "test-without-compat", "test-agents", "test-adapters", "test-slime", "soak")
FAILED = re.compile(r"^(?:FAILED|ERROR) (tests/\S+)", re.MULTILINE)
COUNTS = re.compile(r"^=* ?(\d+ (?:passed|failed|skipped).* in .*?) ?=*$", re.MULTILINE)


def run_part(part: str) -> tuple[int, str]:
    """Run one target. Returns its exit code and its output."""
    log = LOGS / f"{part}.log"
    options = f"{os.environ.get('PYTEST_ADDOPTS', '')} --durations=0 --durations-min=1"
    with log.open("w", encoding="utf-8") as out:
        code = subprocess.run(
            ["make", "--no-print-directory", part],
            cwd=ROOT,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTEST_ADDOPTS": options},
        ).returncode
    return code, log.read_text(encoding="utf-8", errors="replace")


def main(parts: list[str]) -> int:
    LOGS.mkdir(parents=True, exist_ok=True)
    failures: list[str] = []
    for part in parts or PARTS:
        print(f"{part} ...", flush=True)
        begun = time.monotonic()
        code, text = run_part(part)
        counts = "; ".join(COUNTS.findall(text)) or "no tests counted"
        print(f"{part}: exit code {code} after {(time.monotonic() - begun) / 60:.1f} minutes, {counts}", flush=True)
        if code:
            failures += [f"{part}: {name}" for name in FAILED.findall(text)] or [
                f"{part}: see build/nightly/{part}.log"
            ]
    print("\n".join(["Failed:", *failures]) if failures else "Nothing failed.")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
