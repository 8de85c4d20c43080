"""The trajectory store: another reader finds what is written, also during writing, and the size limits hold."""

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from agentrl.buffer.codec import encode_group
from agentrl.buffer.reader import Filter, StoreReader, StoreSection, find_stores
from agentrl.buffer.store import TrajectoryStore
from agentrl.errors import DataError, SampleError
from agentrl.groups import Group
from agentrl.sample import Status
from tests.buffer.make import finished, until


@pytest.fixture
def store(tmp_path: Path) -> Iterator[TrajectoryStore]:
    with TrajectoryStore(tmp_path / "trajectories.sqlite", keep=1000) as opened:
        yield opened


def called(*tools: str, number: int = 0) -> Group:
    """Make a group whose first sample called these tools."""
    group = finished(number)
    calls = [{"type": "function", "function": {"name": name, "arguments": "{}"}} for name in tools]
    group[0].metadata["messages"] = [{"role": "user", "content": "?"}, {"role": "assistant", "tool_calls": calls}]
    return group


def test_a_group_is_kept_as_the_bytes_that_were_given(store: TrajectoryStore) -> None:
    group = finished(7)
    store.add("train", "", 4, [group], encoded=lambda group: encode_group(group[:1]))
    with StoreReader(store.path) as reader:
        key = reader.query()[0].key
        assert reader.group(key) == group[:1], "not encoded again"


def test_a_row_says_what_a_sample_was(store: TrajectoryStore) -> None:
    group = called("search", "read", "search", number=7)
    group[1].status, group[1].reward = Status.FAILED, None
    group[1].metadata["failure"] = {"blame": "tool", "kind": "timeout", "message": "..."}
    store.add("train", "", 5, [group])
    with StoreReader(store.path) as reader:
        first, second = reader.query()
    assert (first.kind, first.name, first.step, first.group_index, first.sample_index) == ("train", "", 5, 7, 14)
    assert (first.reward, first.status, first.failure, first.dropped) == (0.0, "completed", "", "")
    assert (first.tools, first.turns, first.length, first.response, first.sampled) == (("search", "read"), 1, 7, 4, 3)
    assert (first.oldest, first.newest, first.staleness, first.place) == (3, 3, 2, 0)
    assert (second.reward, second.status, second.failure, second.tools) == (None, "failed", "tool/timeout", ())
    assert (second.key, second.place, second.prompt) == (first.key, 1, first.prompt)


def test_a_store_of_another_layout_is_refused(store: TrajectoryStore) -> None:
    store.add("train", "", 0, [finished(1)])
    with store, sqlite3.connect(store.path) as db:
        db.execute("PRAGMA user_version=3")
    with pytest.raises(DataError, match="layout 4, got 3; move it away"):
        StoreReader(store.path)
    with pytest.raises(DataError, match="layout 4, got 3; move it away"):
        TrajectoryStore(store.path, keep=1000).add("train", "", 1, [finished(2)])


def of_agent(role: object, *reasons: str) -> Group:
    """Make a sample of an agent's session."""
    group = finished(2, n=1)
    group[0].metadata["gateway"] = {"role": role, "reasons": [*reasons]}
    return group


def test_the_columns_of_agents_have_the_role_and_the_reason_of_the_branch(store: TrajectoryStore) -> None:
    store.add("train", "", 1, [of_agent("subagent", "new_agent", "extend", "retry", "extend")])
    with StoreReader(store.path) as reader:
        assert [(row.role, row.branch, bool(row.question)) for row in reader.query()] == [("subagent", "retry", True)]


def test_the_columns_of_agents_stay_empty_for_what_has_another_form(store: TrajectoryStore) -> None:
    odd = [of_agent("main"), finished(3, n=1), finished(4, n=1), of_agent("main", "first")]
    odd[1][0].metadata["gateway"], odd[2][0].metadata["gateway"] = "text", {"session": {}}
    store.add("train", "", 0, odd)
    with StoreReader(store.path) as reader:
        found = [(row.role, row.branch) for row in reader.query()]
    assert found == [("main", ""), ("", ""), ("", ""), ("main", "first")]


def test_the_question_of_an_environment_that_makes_its_own_prompts_is_its_first_message(store: TrajectoryStore) -> None:
    (sample,) = finished(1, n=1)
    said = [
        ("system", "Rules."),
        ("user", "Cross the lake."),
        ("assistant", "1"),
        ("user", "S FFF"),
        ("assistant", "2"),
    ]
    sample.metadata["messages"] = [{"role": role, "content": text} for role, text in said]
    for prompt in ("", [{"role": "system", "content": "Rules."}]):
        sample.prompt = prompt
        store.add("train", "", 0, [[sample]])
        with StoreReader(store.path) as reader:
            assert [(row.question, row.answer) for row in reader.query()] == [("Cross the lake.", "2")]


@pytest.mark.parametrize(
    ("messages", "answer"),
    [
        ([{"role": "assistant", "content": "<think>\nSix?</think>\n It is\n 42."}, {"role": "user"}], "It is 42."),
        ([{"role": "assistant", "content": "First."}, {"role": "assistant", "content": None}, "odd"], "First."),
        ([{"role": "assistant", "content": "<think>42</think>"}], "<think>42</think>"),
        ([{"role": "assistant", "content": "y " * 100}], "y " * 44 + "y…"),
        ([], ""),
        (None, "the response"),
    ],
)
def test_a_row_has_the_first_words_of_question_and_answer(
    store: TrajectoryStore, messages: object, answer: str
) -> None:
    group = finished(1, n=2)
    for sample in group:
        sample.metadata["messages"], sample.response = messages, " the\nresponse"
    picture = {"type": "image_url", "image_url": {"url": "file.png"}}
    last = {"role": "user", "content": [picture, {"type": "text", "text": "What is\nthat?"}]}
    group[0].prompt, group[1].prompt = [{"role": "user", "content": "Hello"}, last, {"role": "assistant"}], "as text"
    store.add("train", "", 0, [group])
    with StoreReader(store.path) as reader:
        assert [(row.question, row.answer) for row in reader.query()] == [
            ("What is that?", answer),
            ("as text", answer),
        ]


def test_filters_orders_and_pages(store: TrajectoryStore) -> None:
    for step in range(4):
        store.add("train", "", step, [called("search", number=10 * step), finished(10 * step + 1, n=3)])
    store.add("eval", "dev", 2, [called("a'b%", number=0)])
    with StoreReader(store.path) as reader:
        assert reader.kinds() == [StoreSection("eval", "dev", 2, 2, 2), StoreSection("train", "", 20, 0, 3)]
        assert reader.steps("train") == [0, 1, 2, 3]
        assert reader.count(Filter(equal={"kind": "train"}, within={"step": (1, 2)})) == 10
        assert reader.count(Filter(within={"reward": (2, None)})) == 4
        assert reader.count(Filter(tool="search")) == 4
        assert reader.count(Filter(tool="a'b%")) == 1
        assert reader.count(Filter(tool="sea")) == 0, "a whole name"
        assert reader.values("tools") == {"search": 4, "a'b%": 1}
        assert reader.values("status") == {"completed": 22}
        rewards = [row.reward for row in reader.query(order="-reward", limit=6)]
        assert rewards == [2.0, 2.0, 2.0, 2.0, 1.0, 1.0]
        pages = [row.id for at in range(0, 22, 5) for row in reader.query(order="length", limit=5, offset=at)]
        assert sorted(pages) == [row.id for row in reader.query()]
        some = [reader.query()[0].key]
        assert {row.key for row in reader.query(Filter(keys=some))} == set(some)
        with pytest.raises(DataError, match="no column 'reward; DROP"):
            reader.query(order="reward; DROP TABLE groups")


def test_rows_without_a_value_come_last_and_are_in_no_range(store: TrajectoryStore) -> None:
    group = finished(0, n=3)
    group[0].reward = None
    store.add("eval", "dev", 0, [group, []], reward_key=None)
    with StoreReader(store.path) as reader:
        for order in ("reward", "-reward"):
            assert reader.query(order=order)[-1].reward is None
        assert reader.count(Filter(within={"reward": (None, None)})) == 2
        assert reader.query()[0].staleness is None, "of an evaluation"


def test_the_reward_that_its_key_picks(tmp_path: Path) -> None:
    group = finished(0)
    group[0].reward, group[1].reward = {"right": 1.0, "short": 0.5}, {"short": True}
    with TrajectoryStore(tmp_path / "t.sqlite", 10, "short") as store:
        store.add("train", "", 0, [group])
        store.add("eval", "dev", 0, [group], reward_key="right")
        with StoreReader(store.path) as reader:
            assert [row.reward for row in reader.query()] == [0.5, 1.0, 1.0, None]


def test_a_step_that_is_trained_again_takes_the_place_of_it_and_of_later_ones(store: TrajectoryStore) -> None:
    for step in range(4):
        store.add("train", "", step, [finished(step)])
        store.add("eval", "dev", step, [finished(step)])
    store.add("train", "", 2, [finished(20)])
    store.add("eval", "dev", 2, [finished(30)])
    with StoreReader(store.path) as reader:
        assert reader.steps("train") == [0, 1, 2]
        assert [row.group_index for row in reader.query(Filter(equal={"kind": "train"}))][::2] == [0, 1, 20]
        assert reader.steps("eval", "dev") == [0, 1, 2, 3], "an evaluation replaces itself alone"
        ids = [row.id for row in reader.query()]
        assert len(ids) == len(set(ids))
        assert min(row.id for row in reader.query(Filter(equal={"group_index": 20}))) > 16, "no number twice"


def test_dropped_groups_come_with_the_next_step_and_their_reason(store: TrajectoryStore) -> None:
    store.drop(finished(8), "zero_std")
    store.drop([], "the samples are not known")
    store.add("eval", "dev", 0, [finished(0)])
    store.add("train", "", 0, [finished(1)])
    with StoreReader(store.path) as reader:
        assert [(row.step, row.group_index) for row in reader.query(Filter(equal={"dropped": "zero_std"}))] == [
            (0, 8)
        ] * 2
        assert reader.values("dropped") == {"": 4, "zero_std": 2}


def test_the_oldest_training_goes_first_and_the_newest_stays(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path / "t.sqlite", keep=6) as store:
        store.add("eval", "dev", 0, [finished(0)])
        for step in range(5):
            store.add("train", "", step, [finished(step)])
            store.add_details(step, {"advantages": np.full(8, step, np.float16)})
        with StoreReader(store.path) as reader:
            assert reader.steps("train") == [3, 4]
            assert reader.steps("eval", "dev") == [0]
            kept = reader.query(Filter(equal={"step": 4}))[0].key
            assert reader.details(kept)[0]["advantages"].tolist() == [4.0] * 4
            with pytest.raises(DataError, match="no group 2 any more"):
                reader.group(2)
        with sqlite3.connect(store.path) as db:
            assert db.execute("SELECT count(*) FROM details").fetchone() == (2,)


def test_a_step_larger_than_the_bound_stays_whole(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path / "t.sqlite", keep=3) as store:
        store.add("eval", "dev", 0, [finished(0)])
        for step in range(2):
            store.add("train", "", step, [finished(0), finished(1)])
            store.add_details(step, {"advantages": np.zeros(16, np.float16)})
        with StoreReader(store.path) as reader:
            assert [(part.kind, part.trajectories, part.first) for part in reader.kinds()] == [("train", 4, 1)]


def test_an_evaluation_beside_training_leaves_the_newest_step_whole(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path / "t.sqlite", keep=8) as store:
        for step in range(2):
            store.add("train", "", step, [finished(0), finished(1)])
            store.add("eval", "dev", step, [finished(at) for at in range(3)])
            store.add_details(step, {"advantages": np.full(16, step, np.float16)})
        with StoreReader(store.path) as reader:
            assert reader.steps("train") == [1]
            assert [len(reader.details(row.key)) for row in reader.query(Filter(equal={"kind": "train"}))] == [2] * 4


def test_nothing_is_kept_where_nothing_is_to_be(tmp_path: Path) -> None:
    with TrajectoryStore(tmp_path / "t.sqlite", keep=0) as store:
        store.drop(finished(0), "zero_std")
        store.add("train", "", 0, [finished(0)])
        store.add_details(0, {"advantages": np.zeros(8, np.float16)})
        assert list(tmp_path.iterdir()) == []


def test_what_the_trainer_said_is_found_by_sample(store: TrajectoryStore) -> None:
    store.drop(finished(9), "zero_std")
    groups = [finished(0), finished(1, n=1)]
    store.add("train", "", 0, groups)
    with StoreReader(store.path) as reader:
        keys = list(dict.fromkeys(row.key for row in reader.query()))
        assert [reader.details(key) for key in keys] == [[], [], []], "not trained yet"
        said = np.arange(12, dtype=np.float16)
        said[3] = np.nan
        store.add_details(0, {"log_probs": said, "advantages": -said})
        first, second, dropped = map(reader.details, keys)
        assert [list(one) for one in first] == [["log_probs", "advantages"]] * 2
        assert np.array_equal(first[0]["log_probs"], [0, 1, 2, np.nan], equal_nan=True)
        assert first[1]["advantages"].tolist() == [-4.0, -5.0, -6.0, -7.0]
        assert second[0]["log_probs"].tolist() == [8.0, 9.0, 10.0, 11.0]
        assert dropped == []
        store.add("eval", "dev", 0, [finished(0)])
        assert reader.details(reader.query(Filter(equal={"kind": "eval"}))[0].key) == [], "of the same step"
    with pytest.raises(DataError, match="step 0 has 12 response tokens"):
        store.add_details(0, {"log_probs": np.zeros(11, np.float16)})


def test_a_reader_sees_each_step_whole_while_it_is_written(store: TrajectoryStore) -> None:
    store.add("train", "", 0, [finished(0)])
    done = threading.Event()

    def write() -> None:
        for step in range(1, 30):
            store.add("train", "", step, [finished(step), finished(100 + step)])
        done.set()

    writer = threading.Thread(target=write)
    counts: list[int] = []
    with StoreReader(store.path) as reader:
        writer.start()
        while not done.is_set() or counts[-1] != 118:
            counts.append(reader.count())
        writer.join()
    assert set(counts) <= {2 + 4 * n for n in range(30)}


def test_a_folder_that_cannot_be_written_is_read(store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.add("train", "", 0, [finished(0)])
    with store:
        pass
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write everywhere
    with StoreReader(store.path) as reader:
        assert reader.count() == 2
        assert [file.name for file in store.path.parent.iterdir()] == ["trajectories.sqlite"], "nothing was made there"


def test_other_files_are_refused(tmp_path: Path) -> None:
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t (x)")
    text = tmp_path / "text.sqlite"
    text.write_text("no database, whatever its name says, and longer than a header of a hundred bytes " * 2)
    for path, what in ((other, "layout 4, got 0"), (text, "not a database"), (tmp_path / "none", "no such file")):
        with pytest.raises(DataError, match=what):
            StoreReader(path)
        if path.exists():
            with pytest.raises(DataError, match="other.sqlite|text.sqlite"), TrajectoryStore(path, 10) as store:
                store.add("train", "", 0, [finished(0)])


def test_a_full_disk_is_told_with_the_remedy(store: TrajectoryStore) -> None:
    store.add("train", "", 0, [finished(0)])
    assert store._db is not None
    store._db.execute("PRAGMA max_page_count=20")
    with pytest.raises(DataError, match=r"full.*--keep-trajectories 0"):
        store.add("train", "", 1, [finished(step, n=50) for step in range(100)])
    with StoreReader(store.path) as reader:
        assert reader.count() == 2, "no half step"


def test_a_prompt_with_an_integer_beyond_64_bits_is_stored(store: TrajectoryStore) -> None:
    group = finished(0)
    group[0].prompt = [{"role": "user", "content": "?", "number": 10**30}]
    store.add("train", "", 0, [group])
    with StoreReader(store.path) as reader:
        assert reader.group(reader.query()[0].key)[0].prompt == group[0].prompt


def test_a_sample_that_cannot_be_stored_names_its_field(store: TrajectoryStore) -> None:
    group = finished(0)
    group[0].metadata["odd"] = float("nan")
    with pytest.raises(SampleError, match="metadata"):
        store.drop(group, "filtered")


def test_the_stores_of_a_run(tmp_path: Path) -> None:
    for below in ("", "rollouts"):
        with TrajectoryStore(tmp_path / below / "trajectories.sqlite", 10) as store:
            store.add("rollout", "", 0, [finished(0)])
    assert list(find_stores(tmp_path)) == ["", "rollouts"]


def test_a_lock_of_another_process_is_waited_for_and_reported(
    store: TrajectoryStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("agentrl.buffer.store.BUSY_SECONDS", 0.05)
    store.add("train", "", 0, [finished(0)])
    with closing(sqlite3.connect(store.path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        writer = threading.Thread(target=store.add, args=("train", "", 1, [finished(1)]))
        writer.start()
        until(lambda: bool(caplog.messages))
        other.execute("ROLLBACK")
        writer.join(60)
    with StoreReader(store.path) as reader:
        assert {row.step for row in reader.query()} == {0, 1}
    assert "another process has locked" in caplog.messages[0]
