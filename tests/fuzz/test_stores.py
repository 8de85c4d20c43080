"""Mutated trajectory stores: a reader gets what was stored, or an error that names the file."""

import random
from pathlib import Path

import numpy as np

from agentrl.buffer.reader import Filter, StoreReader
from agentrl.buffer.store import TrajectoryStore
from agentrl.groups import Group
from tests.buffer.make import finished
from tests.fuzz.mutate import counts, fuzz, of_bytes


def damaged(rng: random.Random, data: bytes) -> bytes:
    if rng.random() < 0.3:
        return of_bytes(rng, data)
    raw = bytearray(data)
    for _ in range(rng.randint(1, 8)):
        raw[rng.randrange(len(raw))] = rng.randrange(256)
    return bytes(raw)


@counts
def test_mutated_stores(tmp_path: Path, count: int) -> None:
    path, mutant = tmp_path / "original.sqlite", tmp_path / "mutant.sqlite"
    with TrajectoryStore(path, 1000) as store:
        for step in range(3):
            store.add("train", "", step, [finished(n) for n in range(10 * step, 10 * step + 8)])
            store.add_details(step, {"advantages": np.arange(64, dtype=np.float16)})
        store.add("eval", "dev", 0, [finished(n) for n in range(40, 48)])
    data, kept = path.read_bytes(), {n: finished(n) for n in range(48)}

    def read(changed: bytes) -> list[Group]:
        mutant.write_bytes(changed)
        with StoreReader(mutant) as reader:
            reader.kinds()
            reader.values("tools")
            reader.count(Filter(within={"reward": (0, None)}))
            rows = reader.query(order="-reward", limit=5)
            for row in rows:
                reader.details(row.key)
            return [reader.group(row.key) for row in rows]

    def sound(groups: list[Group]) -> None:
        assert all(group == kept[group[0].group_index or 0] for group in groups), "other samples than were stored"

    assert fuzz(count, lambda rng: damaged(rng, data), read, sound)["accepted"]
