"""Small real runs in this process, and their results in a form that can be compared."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
import shlex
import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from agentrl.buffer.reader import StoreReader
from agentrl.config import RunSettings
from agentrl.config.flags import read_flags
from agentrl.errors import AgentRLError
from agentrl.run import local, offline
from agentrl.run.driver import train

_LOAD = re.compile(r"time|perf/|seconds|per_second|tokens_per|throughput|^loop/|in_flight|queued")
"""Names of metrics that measure the clock or the load of the machine: two equal runs differ in these."""
_PLACES = ("run", "elsewhere", "dumps", "details")


def settings_of(*lines: str) -> RunSettings:
    """Return the settings of command lines; later ones override earlier ones. The value `nothing` removes a setting."""
    values: dict[str, Any] = {}
    for line in lines:
        values |= read_flags(shlex.split(line))[0]
    return RunSettings.from_flat({name: v for name, v in values.items() if v not in ("nothing", ["nothing"])})


def produced(*lines: str) -> dict[str, Any]:
    """Run, and return the contents of the folders `_PLACES` in the working folder, without times and load."""
    for place in _PLACES:
        shutil.rmtree(place, ignore_errors=True)
    said, failed = io.StringIO(), ""
    try:
        settings = settings_of(*lines)
        with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
            if settings.cluster.debug_rollout_only:
                offline.rollout(settings)
            else:
                train(settings, local.start)
    except (AgentRLError, RuntimeError, ExceptionGroup) as error:
        failed = f"{type(error).__name__}: {re.sub(r'[0-9.e-]+', 'N', str(error))}"
    lines_of = (line for line in said.getvalue().splitlines() if line.startswith("["))
    return {"failed": failed, "printed": [re.sub(r"[0-9.,]+", "N", line) for line in lines_of], **dict(_left())}


def _left() -> Iterator[tuple[str, Any]]:
    run = Path("run")
    for file in run.rglob("metrics.jsonl"):
        rows = map(json.loads, file.read_text().splitlines())
        yield "metrics", [{name: v for name, v in row.items() if not _LOAD.search(name)} for row in rows]
    for file in run.rglob("trajectories.sqlite"):
        with StoreReader(file) as reader:
            groups = [reader.group(key) for key in {row.key for row in reader.query()}]
        yield (
            "trajectories",
            sorted(
                str([(s.index, s.tokens, s.response, s.reward, s.loss_mask, s.rollout_log_probs) for s in g])
                for g in groups
            ),
        )
    for file in run.rglob("ledger.sqlite"):
        with contextlib.closing(sqlite3.connect(file)) as db:
            yield "ledger", db.execute("SELECT state, (SELECT count(*) FROM payloads) FROM groups").fetchall()
    for file in run.rglob("model/model.safetensors"):
        yield "weights", hashlib.sha256(file.read_bytes()).hexdigest()
    for file in sorted(run.rglob("checkpoints/*/manifest.json")):
        yield "checkpoint", {name: v for name, v in json.loads(file.read_text()).items() if name != "files"}
    files = (path for place in _PLACES for path in Path(place).rglob("*") if path.suffix not in (".lock", ""))
    yield "files", sorted(re.sub(r"tfevents.*", "tfevents", str(path)) for path in files if path.is_file())
