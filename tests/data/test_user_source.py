"""Users' data sources by path: every constructor form, every shape of result, every mistake."""

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from agentrl.buffer.ledger import Ledger, LedgerLease
from agentrl.buffer.queue import GroupQueue
from agentrl.data.prompts import PromptRow
from agentrl.data.settings import DataSettings
from agentrl.data.source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from agentrl.data.user_source import check_source
from agentrl.errors import DataError, LedgerError, PluginError, SampleError
from agentrl.groups import Group
from agentrl.sample import Sample
from tests.buffer.make import finished, make_args, prompts, source_of


class FromDataset:
    """Written from slime's example: `(dataset, args)`, single samples."""

    def __init__(self, dataset: Any, args: Any) -> None:
        self.dataset, self.args, self.seen = dataset, args, 0

    def get_samples(self, num_samples: int) -> list[Sample]:
        return [Sample(prompt=p) for p in self.dataset.sample(num_samples)]

    def add_samples(self, samples: list[list[Sample]]) -> None:
        self.seen += len(samples)


class FromArgs:
    def __init__(self, args: Any) -> None:
        self.args = args
        self.committed: list[tuple[list[int], int]] = []

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return [[Sample(prompt=f"made {i}") for _ in range(2)] for i in range(num_samples)]

    def add_samples(self, samples: list[list[Sample]]) -> None: ...

    def commit(self, group_ids: list[int], step: int) -> None:
        self.committed.append((group_ids, step))

    def __len__(self) -> int:
        return 12


class FromNothing(FromArgs):
    def __init__(self) -> None:
        super().__init__(None)


class Reversed(RolloutDataSourceWithBuffer):
    """A subclass that changes only the filter."""

    def buffer_filter(self, args: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
        return buffer[::-1][:num_samples]


class OwnDraw(RolloutDataSource):
    def __init__(self, dataset: Any, args: Any) -> None:
        super().__init__(dataset, args)

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        return super().get_samples(1) * min(num_samples, 1)


class Replaying(RolloutDataSourceWithBuffer):
    """Written from slime's example: every finished group is stored for reuse."""

    def add_samples(self, groups: Sequence[list[Sample]]) -> None:
        self.buffer.extend(groups)


class NeedsMore:
    def __init__(self, dataset: Any, args: Any, extra: Any) -> None: ...


class NoAdd:
    def get_samples(self, num_samples: int) -> list[Sample]:
        return []


class Raising(FromNothing):
    def get_samples(self, num_samples: int) -> Any:
        nothing: dict[str, Any] = {}
        return nothing["prompts"]


class RaisingInit(FromNothing):
    def __init__(self) -> None:
        raise ValueError("no index")


class Bad(FromNothing):
    answer: Any = None

    def get_samples(self, num_samples: int) -> Any:
        return type(self).answer


class Hangs(FromNothing):
    def get_samples(self, num_samples: int) -> Any:
        threading.Event().wait()


class TooMany(RolloutDataSource):
    def get_samples(self, num_groups: int) -> Any:
        return super().get_samples(num_groups + 1)


class Singles(RolloutDataSource):
    def get_samples(self, num_groups: int) -> Any:
        return [group[0] for group in super().get_samples(num_groups)]

    def add_samples(self, groups: Any) -> None:
        raise KeyError("lost")


READY = FromNothing()


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return prompts(tmp_path / "p.jsonl", 5)


def named(data: Path, name: str, **changes: Any) -> DataSource:
    return source_of(make_args(data, data_source_path=f"{__name__}:{name}", **changes))


@pytest.mark.parametrize("name", ["FromDataset", "FromArgs", "FromNothing", "READY", "Reversed", "OwnDraw"])
def test_every_form_fits_the_contract(data: Path, tmp_path: Path, name: str) -> None:
    source = named(data, name)
    assert isinstance(source, DataSource)
    groups = source.get_samples(1)
    assert [len(group) for group in groups] == [2]
    assert groups[0][0] is not groups[0][1]
    source.add_samples(groups)
    source.commit([0], 0)
    source.save(tmp_path / "s.json")
    assert len(source) in (0, 5, 12)


def test_the_built_in_source_is_the_default(data: Path) -> None:
    assert type(source_of(make_args(data))) is RolloutDataSource
    filtered = source_of(make_args(data, buffer_filter_path="agentrl.data.source:pop_first"))
    assert type(filtered) is RolloutDataSourceWithBuffer


def test_classes_that_do_not_fit(data: Path) -> None:
    with pytest.raises(PluginError, match="needs dataset, args, extra; a data source is built as"):
        named(data, "NeedsMore")
    with pytest.raises(PluginError, match="NoAdd has no method 'add_samples'"):
        named(data, "NoAdd")
    with pytest.raises(PluginError, match="did you mean 'FromArgs'"):
        named(data, "FromArg")


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "must return a list of groups, got NoneType"),
        ([[]], "must return groups"),
        (["text"], "got 'text'"),
        ([Sample(), Sample()], "returned 2 groups; return no more"),
        ([[Sample()] * 99], "returned a group of 99 samples, more than --n-samples-per-prompt "),
    ],
)
def test_answers_that_do_not_fit(data: Path, monkeypatch: pytest.MonkeyPatch, answer: Any, message: str) -> None:
    monkeypatch.setattr(Bad, "answer", answer)
    with pytest.raises(PluginError, match=message):
        named(data, "Bad").get_samples(1)


@pytest.mark.parametrize("single", [True, False])
def test_samples_of_wrong_types_are_refused_at_once(data: Path, monkeypatch: pytest.MonkeyPatch, single: bool) -> None:
    wrong: Any = Sample(prompt="x", metadata=None)  # type: ignore[arg-type]
    monkeypatch.setattr(FromArgs, "get_samples", lambda self, n: [wrong if single else [wrong, wrong]])
    source = source_of(make_args(data, data_source_path=f"{__name__}:FromArgs"))
    with pytest.raises(SampleError, match="metadata: .* valid dictionary, got None"):
        source.get_samples(1)


def test_a_source_that_raises_is_named_with_the_line(data: Path) -> None:
    with pytest.raises(
        PluginError, match=r"Raising.get_samples raised KeyError: 'prompts' at .*test_user_source.py:\d+"
    ):
        named(data, "Raising").get_samples(1)
    with pytest.raises(PluginError, match=r"RaisingInit\(\) raised ValueError: no index at .*test_user_source.py:\d+"):
        named(data, "RaisingInit")


def test_a_source_that_hangs_is_named(data: Path) -> None:
    with pytest.raises(PluginError, match=r"Hangs.get_samples did not return within --start-timeout, 0\.05 s"):
        named(data, "Hangs", start_timeout=0.05).get_samples(1)


def test_a_subclass_with_its_own_draw_is_checked_like_any_other(data: Path) -> None:
    with pytest.raises(PluginError, match=r"TooMany.get_samples\(1\) returned 2 groups"):
        named(data, "TooMany").get_samples(1)
    assert [len(group) for group in named(data, "Singles").get_samples(2)] == [2, 2]
    with pytest.raises(PluginError, match=r"Singles.add_samples raised KeyError: 'lost' at .*test_user_source.py:\d+"):
        named(data, "Singles").add_samples([])


def test_checking_a_source_builds_nothing(data: Path) -> None:
    def check(name: str, **settings: Any) -> Any:
        return check_source(DataSettings(prompt_data=str(data), data_source_path=f"{__name__}:{name}", **settings))

    row = check("RaisingInit")
    assert row.index == 0
    with pytest.raises(PluginError, match="NoAdd has no method 'add_samples'"):
        check("NoAdd")
    with pytest.raises(PluginError, match="--buffer-filter-path"):
        check("FromArgs", buffer_filter_path="agentrl.data.source:nothing_here")


class OnlyLong(RolloutDataSource):
    @staticmethod
    def check_prompt_row(row: PromptRow) -> str | None:
        return None if len(row.prompt) > 5 else f"{row.prompt!r} is too short"


def test_a_source_may_check_rows_before_a_run_builds_it(tmp_path: Path) -> None:
    rows, asked = tmp_path / "rows.jsonl", list[int]()
    rows.write_text('{"input": "a long one"}\n{"input": "short"}\n')
    settings = DataSettings(prompt_data=str(rows), data_source_path=f"{__name__}:OnlyLong")
    with pytest.raises(DataError, match="rows.jsonl line 2: 'short' is too short"):
        check_source(settings, lambda row: asked.append(row.index))
    assert asked == [0], "other checks of a row are made too"


def test_under_a_ledger_a_users_prompts_survive_a_kill(data: Path, tmp_path: Path) -> None:
    args = make_args(data, data_source_path=f"{__name__}:FromDataset")
    with Ledger(tmp_path / "l.sqlite") as ledger:
        before = GroupQueue(source_of(args), ledger).lease(2, 0)
        assert [(s.group_index, s.index) for g in before for s in g] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert GroupQueue(source_of(args), ledger).lease(2, 0) == before


def test_under_a_ledger_a_users_source_sees_what_happens(data: Path, tmp_path: Path) -> None:
    args = make_args(data, data_source_path=f"{__name__}:FromArgs")
    source: Any = source_of(args)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(source, ledger)
        queue.lease(1, 0)
        queue.complete(0, finished(0))
        assert queue.next_batch(1, 0) == [[sample.compact() for sample in finished(0)]]
        queue.trained([0], 0)
        queue.checkpointed(0)
    assert source.source.committed == [([0], 0)]


def test_under_a_ledger_a_subclass_keeps_its_filter(data: Path, tmp_path: Path) -> None:
    args = make_args(data, data_source_path=f"{__name__}:Reversed")
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(source_of(args), ledger)
        queue.lease(3, 0)
        for group_id in range(3):
            queue.release(group_id, "stopped")
        assert [g[0].group_index for g in queue.lease(4, 1)] == [2, 1, 0, 3]


def test_groups_of_the_built_in_source_need_it_again(data: Path, tmp_path: Path) -> None:
    args = make_args(data)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        GroupQueue(source_of(args), ledger).lease(1, 0)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(named(data, "FromArgs"), ledger)
        with pytest.raises(PluginError, match="resume with the same --data-source-path"):
            queue.lease(1, 0)


def prompts_of(groups: list[list[Sample]]) -> list[Any]:
    return [group[0].prompt for group in groups]


def test_a_bare_dataset_goes_through_all_its_prompts(data: Path) -> None:
    source = named(data, "FromDataset")
    drawn = prompts_of(source.get_samples(3) + source.get_samples(3))
    assert drawn == [f"question {i}" for i in (0, 1, 2, 3, 4, 0)]


@pytest.mark.parametrize("name", ["OwnDraw", "Replaying"])
def test_on_resume_a_users_source_goes_on_where_it_was(data: Path, tmp_path: Path, name: str) -> None:
    drawn = []
    for _ in range(3):
        with Ledger(tmp_path / "l.sqlite") as ledger:
            queue = GroupQueue(named(data, name), ledger)
            [group] = queue.lease(1, 0)
            queue.drop(group[0].group_index or 0, "not wanted")
            drawn += prompts_of([group])
    assert drawn == ["question 0", "question 1", "question 2"]


class Full(Ledger):
    """A ledger whose disk is full from the second draw on."""

    def lease_given(self, groups: Sequence[Group], version: int) -> list[LedgerLease]:
        if len(self):
            raise LedgerError("the disk is full")
        return super().lease_given(groups, version)


def test_prompts_that_the_ledger_could_not_take_are_drawn_again(data: Path, tmp_path: Path) -> None:
    with Full(tmp_path / "l.sqlite") as ledger:
        queue = GroupQueue(named(data, "OwnDraw"), ledger)
        queue.lease(1, 0)
        with pytest.raises(LedgerError, match="full"):
            queue.lease(1, 0)
    with Ledger(tmp_path / "l.sqlite") as ledger:
        assert prompts_of(GroupQueue(named(data, "OwnDraw"), ledger).lease(2, 0)) == ["question 0", "question 1"]


def test_replayed_groups_come_as_they_were_and_are_not_added_again(data: Path, tmp_path: Path) -> None:
    with Ledger(tmp_path / "l.sqlite") as ledger:
        source = named(data, "Replaying")
        queue = GroupQueue(source, ledger)
        queue.lease(1, 0)
        queue.complete(0, finished(0))
        [again] = queue.lease(1, 1)
        assert [s.tokens for s in again] == [s.tokens for s in finished(0)]
        assert {s.group_index for s in again} == {1}
        queue.complete(1, again)
        assert prompts_of(queue.lease(1, 2)) == ["question 1"]
