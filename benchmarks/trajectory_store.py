"""The trajectory store at its maximum size: bytes a token, writing, opening, filtering and memory.

    python -m benchmarks.trajectory_store --trajectories 100000 --tokens 2000

Samples resemble those of a run: ids of an English text with a 150,000-token vocabulary (Zipf), float32 log-probs, a
prompt, eight turns with tool calls between them. A step is 32 groups of 8. `share of a turn` is the CPU time of storing
a trajectory over that of the rollout path for its eight turns (`benchmarks.rollout_path`: 1.54 ms each).
Reading is CPU time too, of a separate process with the file in the page cache.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.buffer.codec import encode_group
from agentrl.buffer.reader import Filter, StoreReader
from agentrl.buffer.store import TrajectoryStore
from agentrl.groups import Group
from agentrl.sample import Sample, Status

GROUPS, SIZE, TURNS = 32, 8, 8
TURN_SECONDS = 1.54e-3
"""CPU of the rollout path for one turn."""


def made(draw: np.random.Generator, number: int, tokens: int) -> Group:
    """Make a group of trajectories of about `tokens` tokens; a fifth are observations."""
    group = []
    for place in range(SIZE):
        sample = Sample(group_index=number, index=number * SIZE + place, prompt=f"question {number}", label=str(number))
        sample.set_prompt_tokens(_ids(draw, tokens // 10))
        for turn in range(1, TURNS + 1):
            n = tokens * 7 // 10 // TURNS
            log_probs = -draw.exponential(0.4, n).astype(np.float32)
            sample.append_model(_ids(draw, n), log_probs.tolist(), str(number // GROUPS), text="x " * n, turn=turn)
            sample.append_observation(_ids(draw, tokens // 5 // TURNS), text="seen", turn=turn)
        call = {"type": "function", "function": {"name": f"tool{draw.integers(5)}", "arguments": "{}"}}
        sample.metadata["messages"] = [{"role": "assistant", "content": "", "tool_calls": [call]}] * TURNS
        sample.reward, sample.status = float(draw.random() < 0.4), Status.COMPLETED
        group.append(sample)
    return group


def _ids(draw: np.random.Generator, n: int) -> list[int]:
    found: list[int] = np.minimum(draw.zipf(1.3, n), 150_000).tolist()
    return found


def said(draw: np.random.Generator, samples: list[Sample]) -> dict[str, NDArray[np.float16]]:
    """Make the trainer's details: log-probs near the engine's, an advantage for each sample, NaN at masked tokens."""
    masks = [np.asarray(sample.loss_mask) == 1 for sample in samples]
    engine = np.concatenate([np.asarray(sample.rollout_log_probs) for sample in samples])
    each = np.concatenate([np.full(len(mask), draw.normal()) for mask in masks])
    near = engine + draw.normal(0, 1e-3, len(engine))
    arrays = {"log_probs": near, "advantages": each}
    return {name: np.where(np.concatenate(masks), a, np.nan).astype(np.float16) for name, a in arrays.items()}


def write(path: Path, trajectories: int, tokens: int) -> dict[str, float]:
    """Fill a store and return CPU seconds. Groups repeat, which changes neither the bytes nor the columns."""
    draw = np.random.default_rng(0)
    groups = [made(draw, number, tokens) for number in range(GROUPS)]
    began = time.process_time()
    encoded = {id(group): encode_group(group) for group in groups}
    encoding, step, seconds = time.process_time() - began, 0, []
    details = said(draw, [sample for group in groups for sample in group])
    with TrajectoryStore(path, trajectories) as store:
        for step in range(trajectories // (GROUPS * SIZE)):
            began = time.process_time()
            store.add("train", "", step, groups, encoded=lambda group: encoded[id(group)])
            store.add_details(step, details)
            seconds.append(time.process_time() - began)
    return {
        "storing, CPU ms a trajectory": 1e3 * float(np.median(seconds)) / (GROUPS * SIZE),
        "encoding for the ledger, CPU ms a trajectory": 1e3 * encoding / (GROUPS * SIZE),
        "bytes a token, ids and log-probs": float(np.mean([len(data) for data in encoded.values()])) / SIZE / tokens,
    }


def read(path: Path) -> dict[str, float]:
    """Open and query the store, in a separate process."""
    found: dict[str, float] = {}

    def timed(what: str, call: Callable[[], object]) -> None:
        began = time.process_time()
        call()
        found[f"{what}, ms"] = 1e3 * (time.process_time() - began)

    began = time.process_time()
    with StoreReader(path) as reader:
        rows = reader.query(limit=50)
        found["open and the first page, ms"] = 1e3 * (time.process_time() - began)
        chosen = Filter(equal={"kind": "train", "dropped": ""}, within={"reward": (1, None), "step": (100, 300)})
        timed("filter by reward and steps, sorted", lambda: reader.query(chosen, "-length", 50))
        timed("filter by tool, counted", lambda: reader.count(Filter(tool="tool3")))
        timed("sort all by reward, page 1000", lambda: reader.query(order="-reward", limit=50, offset=50_000))
        timed("the tools there are", lambda: reader.values("tools"))
        timed("one group", lambda: reader.group(rows[0].key))
        timed("its details", lambda: reader.details(rows[0].key))
    found["memory of the reader, MiB"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=100_000)
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.read:
        print(json.dumps(read(given.read)))
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trajectories.sqlite"
        figures = write(path, given.trajectories, given.tokens)
        size = path.stat().st_size
        figures["file, GiB"] = size / 2**30
        figures["bytes a token, all of the file"] = size / given.trajectories / given.tokens
        figures["storing as a share of eight turns"] = (
            figures["storing, CPU ms a trajectory"] / 1e3 / TURNS / TURN_SECONDS
        )
        command = [sys.executable, "-m", "benchmarks.trajectory_store", "--read", str(path)]
        figures |= json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        for name, value in figures.items():
            print(f"{name:50s} {value:10.4g}")


if __name__ == "__main__":
    main()
