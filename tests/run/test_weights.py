"""Weight updates: both sides get the same calls, in the right order, with the right version."""

import itertools
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.placement import ClusterSettings
from agentrl.engine.weights import (
    Bucket,
    DiskUpdate,
    Handles,
    SharedUpdate,
    TensorSpec,
    WeightGroup,
    WeightUpdate,
    buckets,
)
from agentrl.errors import EngineUnreachable, TrainError
from agentrl.run.protocols import Batch, Trainer, WeightSink, WeightSource
from agentrl.run.weights import BroadcastWeights, DiskWeights, SharedWeights
from agentrl.runfolder import RunFolder

SPECS: list[TensorSpec] = [
    TensorSpec("a", "float32", [2, 3]),
    TensorSpec("b", "bfloat16", [4]),
    TensorSpec("c", "float32", [1]),
]


class Source(WeightSource, Trainer):
    """The trainer's side; a collective call returns only when the other side has joined it."""

    def __init__(self, log: list[str]) -> None:
        self.log, self.meeting = log, anyio.Event()

    async def offload(self) -> None:
        raise NotImplementedError

    async def onload(self) -> None:
        raise NotImplementedError

    async def address(self, rank: int) -> tuple[str, int]:
        return f"node{rank}", 7

    async def weight_specs(self) -> dict[int, list[TensorSpec]]:
        return {0: SPECS[:2], 4: SPECS[2:]}

    async def init_weight_group(self, group: WeightGroup) -> None:
        self.log.append(f"open {group.address}:{group.port} of {group.world_size}")
        self.meeting.set()

    async def broadcast_weights(self, buckets: Sequence[Bucket]) -> None:
        self.log.append("broadcast")

    async def close_weight_group(self) -> None:
        self.log.append("close")

    async def share_weights(self, specs: Sequence[TensorSpec], *, first: bool, readers: int) -> list[str]:
        self.log.append(f"share {[spec.name for spec in specs]} {first}")
        return [f"{rank} of {len(specs)}" for rank in range(4)]

    async def train(self, batch: Batch, step: int) -> dict[str, float]:
        raise AssertionError("nothing is trained here")

    async def details(self) -> Any:
        raise AssertionError("nothing is trained here")

    async def save(self, path: Path, step: int) -> None:
        raise AssertionError("nothing is saved here")

    async def saved(self, *, wait: bool) -> bool:
        raise AssertionError("nothing is saved here")

    async def save_hf(self, path: Path, *, served: bool = False) -> None:
        path.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(path / "delta", ignore_errors=True)  # a folder is replaced
        self.log.append(f"write {path.name}")


class Sink(WeightSink):
    """The engines' side."""

    def __init__(self, source: Source, *, failing: bool = False) -> None:
        self.source, self.log, self.failing = source, source.log, failing
        self.groups: list[WeightGroup] = []
        self.offered = anyio.Event()
        self.names: tuple[str, ...] = ("one#0", "two#0")
        self.failures = 0

    async def epoch(self) -> tuple[str, ...]:
        return self.names

    async def join_weight_group(self, group: WeightGroup) -> None:
        await self.source.meeting.wait()
        self.groups.append(group)

    async def leave_weight_group(self, name: str) -> None:
        self.log.append(f"leave {name in [group.name for group in self.groups[-2:]]}")

    async def receive(self, update: WeightUpdate, version: str) -> None:
        if self.failing or self.failures:
            self.failures -= 1
            raise EngineUnreachable("no engine")
        if isinstance(update, DiskUpdate):
            assert Path(update.folder).is_dir()
        elif isinstance(update, SharedUpdate):
            await self.offered.wait()
        else:
            assert [bucket.group for bucket in update.buckets] == [group.name for group in self.groups[-2:]]
            assert [spec for bucket in update.buckets for spec in bucket.tensors] == SPECS
        self.log.append(f"receive {version}")

    async def offer(self, key: str, handles: Handles) -> None:
        self.log.append(f"take {handles}")
        self.offered.set()

    async def lacks_weights(self) -> bool:
        return False


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    return RunFolder(tmp_path, tmp_path / "checkpoints", tmp_path / "checkpoints")


async def test_a_broadcast_joins_once_and_leaves_at_the_end() -> None:
    source = Source([])
    sink = Sink(source)
    settings = ClusterSettings(rollout_num_gpus=4, rollout_num_gpus_per_engine=2)
    async with BroadcastWeights.open(settings, source, sink) as weights:
        await weights.send(3)
        await weights.send(4)
    assert source.log[:2] == ["open node0:7 of 5", "open node4:7 of 5"]
    assert sorted(source.log[2:4]) == ["broadcast", "receive 3"]
    assert sorted(source.log[4:6]) == ["broadcast", "receive 4"]
    assert sorted(source.log[6:]) == ["close", "leave True", "leave True"]
    assert [(g.backend, g.ranks_per_engine, g.sender, g.size) for g in sink.groups] == [
        ("gloo", 2, 0, 32),
        ("gloo", 2, 4, 4),
    ]


async def test_a_side_that_fails_ends_the_wait_for_the_other_and_is_tried_once_more() -> None:
    class Stuck(Source):
        async def broadcast_weights(self, buckets: Sequence[Bucket]) -> None:
            await anyio.sleep_forever()

    source = Stuck([])
    sink = Sink(source, failing=True)
    with pytest.raises(EngineUnreachable, match="no engine") as caught:
        async with BroadcastWeights.open(ClusterSettings(), source, sink) as weights:
            await weights.send(0)
    assert caught.value.__notes__ == ["and before: no engine"]
    assert len(sink.groups) == 4, "two for each sender"


async def test_the_group_is_made_again_when_an_engine_was_away_or_lost() -> None:
    source = Source([])
    sink = Sink(source)
    async with BroadcastWeights.open(ClusterSettings(), source, sink) as weights:
        await weights.send(0)
        sink.names = ("one#1", "two#0")
        await weights.send(1)
        sink.failures = 1
        sink.names = ("two#0",)
        await weights.send(2)
    both, away, left = ("one#0", "two#0"), ("one#1", "two#0"), ("two#0",)
    assert [group.members for group in sink.groups[::2]] == [both, away, left, left]
    assert [group.world_size for group in sink.groups[1::2]] == [3, 3, 2, 2]
    assert [entry for entry in source.log if entry.startswith("receive")] == ["receive 0", "receive 1", "receive 2"]
    assert 2 * source.log.count("close") == source.log.count("leave True") == 8


async def test_only_the_newest_weights_stay_on_the_disk(folder: RunFolder) -> None:
    source = Source([])
    weights = DiskWeights(folder, source, Sink(source))
    for version in (0, 1, 2):
        await weights.send(version)
    assert source.log == ["write 0", "receive 0", "write 1", "receive 1", "write 2", "receive 2"]
    assert [path.name for path in (folder.path / "weights").iterdir()] == ["2"]


async def test_old_weights_that_cannot_be_removed_end_no_run(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def busy(path: Path, ignore_errors: bool = False) -> None:
        if not ignore_errors:
            raise OSError("Directory not empty")

    source = Source([])
    (folder.path / "weights").mkdir()
    (folder.path / "weights" / ".nfs0001").touch()
    weights = DiskWeights(folder, source, Sink(source))
    monkeypatch.setattr(shutil, "rmtree", busy)
    for version in (0, 1):
        await weights.send(version)
    assert source.log == ["write 0", "receive 0", "write 1", "receive 1"]
    assert [record.getMessage().split()[3] for record in caplog.records] == [str(folder.path / "weights" / "0")]


async def test_runs_that_share_a_folder_leave_each_others_weights_alone(folder: RunFolder, tmp_path: Path) -> None:
    source = Source([])
    (tmp_path / "shared" / "other" / "7").mkdir(parents=True)
    weights = DiskWeights(folder, source, Sink(source), root=str(tmp_path / "shared"))
    for version in (0, 1):
        await weights.send(version)
    found = {str(path.relative_to(tmp_path / "shared").parent) for path in (tmp_path / "shared").glob("*/*")}
    (own,) = found - {"other"}
    assert own.startswith(f"{folder.path.name}-")
    assert [path.name for path in (tmp_path / "shared" / own).iterdir()] == ["1"]
    assert (tmp_path / "shared" / "other" / "7").is_dir()


async def test_copies_are_made_before_the_engines_load_them_and_by_differences_where_there_is_a_base(
    folder: RunFolder, tmp_path: Path
) -> None:
    source = Source([])
    loaded: list[Path] = []

    class Copies(Sink):
        async def receive(self, update: WeightUpdate, version: str) -> None:
            assert isinstance(update, DiskUpdate)
            loaded.append(Path(update.folder))
            await super().receive(update, version)

    async def fetch(version: Path, into: Path, name: str, base: str | None) -> None:
        source.log.append(
            f"fetch {version.name}, base {base and base.split('-')[0]}, delta {(version / 'delta').is_dir()}"
        )
        (into / name).mkdir(parents=True)

    weights = DiskWeights(folder, source, Copies(source), fetch, str(tmp_path / "near"))
    for version in (0, 1, 1):
        await weights.send(version)
    assert source.log == [
        *("write 0", "fetch 0, base None, delta False", "receive 0"),
        *("write 1", "fetch 1, base 0, delta True", "receive 1"),
        *("write 1", "fetch 1, base None, delta False", "receive 1"),
    ]
    assert {path.parent.parent for path in loaded} == {tmp_path / "near"}
    assert len(set(loaded)) == 3, "a version that is sent again has a copy of its own"


async def test_weights_that_the_engines_refused_stay(folder: RunFolder) -> None:
    source = Source([])
    await DiskWeights(folder, source, Sink(source)).send(0)
    with pytest.raises(EngineUnreachable):
        await DiskWeights(folder, source, Sink(source, failing=True)).send(1)
    assert sorted(path.name for path in (folder.path / "weights").iterdir()) == ["0", "1"]


async def test_a_trainer_that_fails_sends_nothing(folder: RunFolder) -> None:
    class Failing(Source):
        async def save_hf(self, path: Path, *, served: bool = False) -> None:
            raise TrainError("no")

    source = Failing([])
    with pytest.raises(TrainError):
        await DiskWeights(folder, source, Sink(source)).send(1)
    assert source.log == []


@given(st.lists(st.integers(1, 50), max_size=20), st.integers(1, 400))
def test_buckets_keep_the_order_and_their_limit(sizes: list[int], limit: int) -> None:
    specs: list[TensorSpec] = [TensorSpec(f"t{i}", "float32", [size]) for i, size in enumerate(sizes)]
    found = buckets(specs, limit)
    assert [spec for bucket in found for spec in bucket] == specs
    for bucket in found:
        assert len(bucket) == 1 or sum(4 * spec[2][0] for spec in bucket) <= limit
    odd = [TensorSpec("a", "bfloat16", [3]), TensorSpec("b", "float32", [1]), TensorSpec("c", "bfloat16", [1])]
    assert buckets(odd, 1000) == [odd[:1], odd[1:]], "float32 begins at a multiple of 4 bytes"
    for one, two in itertools.pairwise(found):
        assert sum(4 * spec[2][0] for spec in [*one, two[0]]) > limit, "a bucket is as full as it can be"


async def test_one_bucket_at_a_time_is_shared_and_the_memory_is_given_back() -> None:
    """Each engine gets the handles of the trainer processes on its devices; stages send one after another."""
    source = Source([])
    settings = ClusterSettings(update_weight_buffer_size=32, rollout_num_gpus_per_engine=2)
    await SharedWeights(settings, source, Sink(source)).send(3)
    taken = [f"take {[[f'{rank} of {n}' for rank in pair] for pair in ((0, 1), (2, 3))]}" for n in (2, 1)]
    shared = ["share ['a', 'b'] True", taken[0], "share ['c'] False", taken[1]]
    assert [line for line in source.log if line != "receive 3"] == [*shared, "share [] False"]
    assert "receive 3" in source.log
    with pytest.raises(EngineUnreachable):
        await SharedWeights(ClusterSettings(), source, Sink(source, failing=True)).send(4)
    assert source.log[-1] == "share [] False"
