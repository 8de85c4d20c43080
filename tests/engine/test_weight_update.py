"""The requests to engines during a weight update, their order, and the requests after a failure."""

import pickle
from collections.abc import Mapping
from typing import Any, Self
from urllib.parse import urlsplit

import anyio
import orjson
import pytest

from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.transport import Headers, HttpTransport, Reply, Sink
from agentrl.engine.weights import (
    BroadcastUpdate,
    Bucket,
    DiskUpdate,
    SharedUpdate,
    TensorSpec,
    WeightGroup,
    WeightUpdate,
)
from agentrl.errors import EngineRejected, EngineTimeout, EngineUnreachable

URLS = ["http://one", "http://two"]
SPECS: list[TensorSpec] = [TensorSpec("a", "bfloat16", [2, 3]), TensorSpec("b", "float32", [4])]
BROADCAST = BroadcastUpdate([Bucket("group", SPECS[:1]), Bucket("group", SPECS[1:])])
AROUND = ["/pause_generation", "/flush_cache"], ["/continue_generation"]


class Recorder(HttpTransport):
    """A transport whose engines accept everything except `refuses`, by host and path. Records the requests."""

    def __init__(self, refuses: Mapping[tuple[str, str], list[int]] | None = None) -> None:
        self.refuses = {key: list(statuses) for key, statuses in (refuses or {}).items()}
        self.calls: list[tuple[str, str, Any]] = []
        self.models = 200
        self.versions = dict[str, str]()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        return None

    async def exchange(
        self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
    ) -> Reply:
        host, path = urlsplit(url).netloc, url[url.index("/", 8) :]
        await anyio.lowlevel.checkpoint()
        if path == "/model_info":
            info = orjson.dumps({"weight_version": self.versions[host]} if host in self.versions else {})
            return Reply((self.refuses.get((host, path)) or [self.models]).pop(0), info)
        sent = None if body is None else orjson.loads(body)
        self.calls.append((host, path, sent))
        status = (self.refuses.get((host, path)) or [200]).pop(0)
        if sent and "weight_version" in sent and status == 200:
            self.versions[host] = sent["weight_version"]
        return Reply(status, b"")

    def paths(self, host: str) -> list[str]:
        """Return the paths of the requests to `host`, in order."""
        return [path for at, path, _ in self.calls if at == host]

    def body(self, path: str) -> Any:
        """Return the body of the first request to `path`."""
        return next(body for _, at, body in self.calls if at == path)


def pool_over(recorder: Recorder) -> EnginePool:
    return EnginePool(URLS, vocab_size=8, transport=recorder)


def labels(recorder: Recorder, path: str) -> list[str]:
    """Return the labels of the weights that the first engine got, in order."""
    return [body["weight_version"] for host, at, body in recorder.calls if (host, at) == ("one", path)]


async def joined(pool: EnginePool, recorder: Recorder) -> EnginePool:
    """Return a pool whose members have all joined `group`; joining is not in the record."""
    await pool.join_weight_group(WeightGroup(0, 24, "address", 1, 3, "group", "gloo", 1, await pool.epoch()))
    recorder.calls.clear()
    return pool


@pytest.mark.parametrize(
    ("update", "steps"),
    [
        (DiskUpdate("/weights/7"), ["/update_weights_from_disk"]),
        (
            BROADCAST,
            ["/begin_weight_update", *["/update_weights_from_distributed"] * 2, "/end_weight_update"],
        ),
    ],
)
async def test_pause_flush_update_resume_on_all_engines_in_step(update: WeightUpdate, steps: list[str]) -> None:
    recorder = Recorder()
    pool = await joined(pool_over(recorder), recorder)
    assert pool.version is None
    await pool.receive(update, "7")
    order = [*AROUND[0], *steps, *AROUND[1]]
    # No engine starts a step before all have finished the one before.
    assert [path for _, path, _ in recorder.calls] == [path for path in order for _ in URLS]
    assert recorder.paths("one") == recorder.paths("two") == order
    assert pool.version == "7"


async def test_what_an_update_says() -> None:
    recorder = Recorder()
    pool = await joined(pool_over(recorder), recorder)
    await pool.receive(DiskUpdate("/weights/7"), "7")
    await pool.receive(BROADCAST, "8")
    assert recorder.body("/pause_generation") == {"mode": "abort"}
    disk = {"model_path": "/weights/7", "weight_version": "7", "flush_cache": True}
    assert recorder.body("/update_weights_from_disk") == disk
    assert recorder.body("/update_weights_from_distributed") == {
        "names": ["a"],
        "dtypes": ["bfloat16"],
        "shapes": [[2, 3]],
        "group_name": "group",
        "load_format": "flattened_bucket",
        "flush_cache": True,
        "weight_version": "8-incomplete",
    }
    assert labels(recorder, "/update_weights_from_distributed") == ["8-incomplete", "8"]


async def test_buckets_in_shared_memory_are_taken_one_by_one() -> None:
    """An offer returns when engines have the bucket. A bucket of a failed update is not part of the next update."""
    recorder = Recorder()
    pool = pool_over(recorder)
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(pool.offer, "before", [["stale"]])
        tasks.start_soon(pool.receive, SharedUpdate("key", 2), "7")
        for i in range(2):
            await pool.offer("key", [[f"handle {i}", "rank 1's"], [f"other {i}"], ["of a trainer without an engine"]])
            assert recorder.paths("one").count("/update_weights_from_tensor") == i + 1
    steps = ["/begin_weight_update", *["/update_weights_from_tensor"] * 2, "/end_weight_update"]
    assert recorder.paths("one") == recorder.paths("two") == [*AROUND[0], *steps, *AROUND[1]]
    bodies = {host: body for host, path, body in recorder.calls if path == "/update_weights_from_tensor"}
    assert bodies["two"]["serialized_named_tensors"] == ["other 1"]
    assert recorder.body("/update_weights_from_tensor") == {
        "serialized_named_tensors": ["handle 0", "rank 1's"],
        "load_format": "flattened_bucket",
        "flush_cache": True,
        "weight_version": "7-incomplete",
    }
    assert labels(recorder, "/update_weights_from_tensor") == ["7-incomplete", "7"]
    assert pool.version == "7"


async def test_an_update_by_shared_memory_without_offers_ends() -> None:
    recorder = Recorder()
    pool = EnginePool(URLS, EngineSettings(engine_control_timeout=0.05), vocab_size=8, transport=recorder)
    with pytest.raises(EngineTimeout, match=r"the trainer shared no weights for 0.05 s"):
        await pool.receive(SharedUpdate("key", 1), "7")
    assert recorder.paths("one")[-1] == "/continue_generation"
    assert [member.weights for member in pool.members] == ["stale", "stale"]


PATHS = ["/pause_generation", "/flush_cache", "/update_weights_from_disk", "/continue_generation"]


@pytest.mark.parametrize("path", PATHS)
async def test_who_misses_an_update_is_left_out_and_samples_again(path: str) -> None:
    recorder = Recorder({("two", path): [400], ("two", path + "?timeout=60"): [400]})
    pool = pool_over(recorder)
    await pool.receive(DiskUpdate("/weights/7"), "7")
    assert recorder.paths("one")[-1] == recorder.paths("two")[-1] == "/continue_generation"
    assert pool.version == "7"
    assert pool.members[0].weights == "current"
    assert pool.members[1].weights != "current"


@pytest.mark.parametrize("path", PATHS[:3])
async def test_an_update_that_no_engine_accepts_fails_and_changes_no_engine(path: str) -> None:
    refused = {(host, path + end): [400] for host in ("one", "two") for end in ("", "?timeout=60")}
    recorder = Recorder(refused)
    pool = pool_over(recorder)
    with pytest.raises(EngineRejected, match=f"{path.split('?')[0]}.* at http://.* answered 400"):
        await pool.receive(DiskUpdate("/weights/7"), "7")
    assert recorder.paths("one")[-1] == recorder.paths("two")[-1] == "/continue_generation"
    assert pool.version is None
    assert [member.weights for member in pool.members] == ["current", "current"]
    assert not pool.pause_gate.closed


async def test_only_a_hold_between_two_rollouts_is_told_and_an_update_ends_it() -> None:
    seen: list[str] = []
    pool = pool_over(Recorder())

    async def watch() -> None:
        await pool.pause_gate.wait_between_rollouts()
        seen.append(str(pool.version))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(watch)
        await anyio.wait_all_tasks_blocked()
        for version in ("7", "8"):
            await pool.receive(DiskUpdate(f"/weights/{version}"), version)
        await pool.pause()
        await anyio.wait_all_tasks_blocked()
        assert seen == ["8"]
        await pool.receive(DiskUpdate("/weights/9"), "9")
        assert not pool.pause_gate.closed
        tasks.start_soon(watch)
        await anyio.wait_all_tasks_blocked()
        tasks.cancel_scope.cancel()
    assert seen == ["8"]


async def test_no_engine_at_all_has_a_name() -> None:
    recorder = Recorder()
    recorder.models = 503
    pool = EnginePool(URLS, EngineSettings(engine_absence_timeout=0.0), vocab_size=8, transport=recorder)
    with pytest.raises(EngineUnreachable, match="does not answer"):
        await pool.receive(DiskUpdate("/weights/7"), "7")
    assert recorder.calls == []


async def test_one_late_answer_does_not_lose_an_engine() -> None:
    pool = pool_over(Recorder({(host, "/model_info"): [503] for host in ("one", "two")}))
    await pool.receive(DiskUpdate("/weights/7"), "7")
    assert [member.weights for member in pool.members] == ["current"] * 2


async def test_a_broadcast_that_one_engine_misses_fails_and_all_are_stale() -> None:
    recorder = Recorder({("two", "/update_weights_from_distributed"): [200, 400]})
    pool = await joined(pool_over(recorder), recorder)
    with pytest.raises(EngineRejected, match="/update_weights_from_distributed at http://two"):
        await pool.receive(BROADCAST, "7")
    assert [member.weights for member in pool.members] == ["stale", "stale"]


@pytest.mark.parametrize("to_others", [False, True])
async def test_an_engine_with_a_part_of_a_broadcast_stays_stale(to_others: bool) -> None:
    """Also if the update fails as a whole, and if the other engine gets the same version later."""
    recorder = Recorder({("two", "/update_weights_from_distributed"): [200, 200, 200, 400]})
    pool = await joined(pool_over(recorder), recorder)
    await pool.receive(BROADCAST, "6")
    with pytest.raises(EngineRejected):
        await pool.receive(BROADCAST, "7")
    if to_others:
        pool._registry.sent("7", None, pool.members[:1])
    await pool._registry.regain(pool.members[1])
    assert pool.members[1].weights == "stale"


async def test_a_weight_group_with_a_lost_member_must_be_made_again() -> None:
    recorder = Recorder()
    pool = await joined(pool_over(recorder), recorder)
    before = await pool.epoch()
    pool._registry.lost(pool.members[1])
    assert (await pool.epoch())[0] == before[0]
    assert (await pool.epoch())[1] != before[1]
    with pytest.raises(EngineUnreachable, match="http://two") as caught:
        await pool.receive(BROADCAST, "7")
    assert caught.value.kind == "weight_group_broken"
    await pool.leave_weight_group("group")
    assert recorder.paths("two") == [], "it knows nothing of the group"
    assert recorder.paths("one") == ["/destroy_weights_update_group"]


async def test_an_engine_that_cannot_be_resumed_does_not_hide_why() -> None:
    refuses = {(host, "/update_weights_from_disk"): [400] for host in ("one", "two")}
    refuses["two", "/continue_generation"] = [500]
    with pytest.raises(EngineRejected, match="/update_weights_from_disk") as caught:
        await pool_over(Recorder(refuses)).receive(DiskUpdate("/weights/7"), "7")
    assert ["/continue_generation" in note for note in caught.value.__notes__] == [True]


async def test_engines_sample_again_after_an_update_that_was_cancelled() -> None:
    class Endless(Recorder):
        async def exchange(
            self, method: str, url: str, body: bytes | None = None, headers: Headers = None, sink: Sink = None
        ) -> Reply:
            answer = await super().exchange(method, url, body, headers, sink)
            if url.endswith("/update_weights_from_disk"):
                scope.cancel()
                await anyio.sleep_forever()
            return answer

    recorder = Endless()
    with anyio.CancelScope() as scope:
        await pool_over(recorder).receive(DiskUpdate("/weights/7"), "7")
    assert scope.cancelled_caught
    assert recorder.paths("one")[-1] == recorder.paths("two")[-1] == "/continue_generation"


async def test_a_session_that_a_killed_run_left_open_is_closed_first() -> None:
    recorder = Recorder({("two", "/begin_weight_update"): [400]})
    pool = await joined(pool_over(recorder), recorder)
    await pool.receive(BROADCAST, "7")
    begin, end = "/begin_weight_update", "/end_weight_update"
    sessions = {host: [path for path in recorder.paths(host) if path in (begin, end)] for host in ("one", "two")}
    assert sessions == {"one": [begin, end], "two": [begin, end, begin, end]}


async def test_servers_without_sessions_are_asked_once() -> None:
    recorder = Recorder({("one", "/begin_weight_update"): [404]})
    pool = await joined(pool_over(recorder), recorder)
    for version in ("7", "8"):
        await pool.receive(BROADCAST, version)
    assert recorder.paths("one").count("/begin_weight_update") == 1
    assert "/end_weight_update" not in recorder.paths("one")
    assert recorder.paths("two").count("/end_weight_update") == 2


async def test_ranks_of_a_weight_group_follow_the_trainers() -> None:
    recorder = Recorder()
    pool = pool_over(recorder)
    await pool.join_weight_group(WeightGroup(0, 24, "10.0.0.1", 29500, 5, "group", "nccl", 2, await pool.epoch()))
    await pool.leave_weight_group("group")
    assert [body.get("rank_offset") for _, _, body in recorder.calls] == [1, 3, None, None]
    assert recorder.calls[0][2] == {
        "master_address": "10.0.0.1",
        "master_port": 29500,
        "rank_offset": 1,
        "world_size": 5,
        "group_name": "group",
        "backend": "nccl",
    }
    assert recorder.calls[-1][1:] == ("/destroy_weights_update_group", {"group_name": "group"})


def test_updates_travel_between_processes() -> None:
    for value in (WeightGroup(0, 24, "a", 1, 2, "n", "gloo", 1, ("one",)), DiskUpdate("folder"), BROADCAST):
        assert pickle.loads(pickle.dumps(value)) == value
