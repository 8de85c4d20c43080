"""The built-in data sources: numbering, independence, order, position, and the buffer."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.data.prompts import PromptData
from agentrl.data.source import DataSource, RolloutDataSource, RolloutDataSourceWithBuffer
from agentrl.errors import DataError, PluginError
from agentrl.sample import Sample
from tests.buffer.make import make_args, prompts, write_jsonl


def test_groups_are_numbered_and_carry_the_row(tmp_path: Path) -> None:
    row = {"input": [{"role": "user", "content": "hi"}], "y": 4, "metadata": {"k": []}, "tools": [{"name": "look"}]}
    source = RolloutDataSource(make_args(write_jsonl(tmp_path / "p.jsonl", [row]), label_key="y"))
    assert isinstance(source, DataSource)
    first, second = source.get_samples(2)
    assert [(s.group_index, s.index) for s in first + second] == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assert all(s.label == 4 and s.prompt == row["input"] for s in first)
    assert first[0].metadata == {"k": [], "tools": row["tools"]}


def test_samples_share_nothing(tmp_path: Path) -> None:
    row = {"input": [{"role": "user", "content": "hi"}], "metadata": {"k": []}}
    source = RolloutDataSource(make_args(write_jsonl(tmp_path / "p.jsonl", [row])))
    a, b = source.get_samples(1)[0]
    assert isinstance(a.prompt, list)
    a.prompt.append({"role": "assistant", "content": "x"})
    a.metadata["k"].append(1)
    assert (len(b.prompt), b.metadata) == (1, {"k": []})


@pytest.mark.parametrize("shuffle", [False, True])
def test_a_saved_position_goes_on_where_it_was(tmp_path: Path, shuffle: bool) -> None:
    args = make_args(prompts(tmp_path / "p.jsonl", 7), rollout_shuffle=shuffle, num_epoch=3)
    whole = [group[0].prompt for group in RolloutDataSource(args).get_samples(100)]
    assert len(whole) == 21
    for cut in (0, 5, 7, 13, 21):
        source, resumed = RolloutDataSource(args), RolloutDataSource(args)
        head = source.get_samples(cut)
        source.save(tmp_path / "state" / "source.json")
        resumed.load(tmp_path / "state" / "source.json")
        assert [g[0].prompt for g in itertools.chain(head, resumed.get_samples(100))] == whole
    assert sorted(whole[:7]) == sorted(whole[7:14])
    assert (whole[:7] != whole[7:14]) is shuffle


@pytest.mark.parametrize("shuffle", [False, True])
def test_another_seed_is_refused_if_it_changes_the_order(tmp_path: Path, shuffle: bool) -> None:
    path = prompts(tmp_path / "p.jsonl", 7)
    first, other = (RolloutDataSource(make_args(path, rollout_shuffle=shuffle, rollout_seed=seed)) for seed in (1, 2))
    first.save(tmp_path / "s.json")
    if shuffle:
        with pytest.raises(DataError, match="rollout_seed=1, this run 2; use the old value"):
            other.load(tmp_path / "s.json")
    else:
        other.load(tmp_path / "s.json")


def test_bad_saved_states(tmp_path: Path) -> None:
    source = RolloutDataSource(make_args(prompts(tmp_path / "p.jsonl", 7)))
    source.save(tmp_path / "s.json")
    other = RolloutDataSource(make_args(prompts(tmp_path / "p.jsonl", 8)))
    with pytest.raises(DataError, match="the saved source has prompt_rows=7, this run 8"):
        other.load(tmp_path / "s.json")
    (tmp_path / "s.json").write_text("[]")
    with pytest.raises(DataError, match="not a data source's state"):
        source.load(tmp_path / "s.json")
    with pytest.raises(DataError, match="cannot be read"):
        source.load(tmp_path / "absent.json")


def test_no_prompt_data_leaves_the_prompt_to_the_environment() -> None:
    source = RolloutDataSource(make_args(None))
    assert [(g[0].prompt, g[0].group_index) for g in source.get_samples(2)] == [("", 0), ("", 1)]
    assert len(source) == 0


def test_a_bad_row_stops_the_run_at_once_unless_told_otherwise(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "p.jsonl", [{"input": "a"}, {"inptu": "b"}])
    with pytest.raises(DataError, match="line 2"):
        RolloutDataSource(make_args(file))
    lazy = RolloutDataSource(make_args(file, prompt_data_check="lazy"))
    lazy.get_samples(1)
    with pytest.raises(DataError, match="line 2"):
        lazy.get_samples(1)


def test_both_constructor_forms(tmp_path: Path) -> None:
    args = make_args(prompts(tmp_path / "p.jsonl", 4))
    data = PromptData(str(tmp_path / "p.jsonl"))
    for kind in (RolloutDataSource, RolloutDataSourceWithBuffer):
        assert len(kind(args)) == len(kind(data, args)) == 4
    with pytest.raises(PluginError, match=r"takes \(args\) or \(dataset, args\)"):
        RolloutDataSource()


def buffered(tmp_path: Path, **changes: Any) -> RolloutDataSourceWithBuffer:
    return RolloutDataSourceWithBuffer(make_args(prompts(tmp_path / "p.jsonl", 9), **changes))


def test_the_buffer_comes_first_and_oldest_first(tmp_path: Path) -> None:
    source = buffered(tmp_path)
    a, b, c = source.get_samples(3)
    source.add_samples([c, a, b])
    assert source.get_samples(2) == [c, a]
    assert [g[0].group_index for g in source.get_samples(2)] == [1, 3]


def test_the_buffer_is_saved(tmp_path: Path) -> None:
    source, resumed = buffered(tmp_path), buffered(tmp_path)
    source.add_samples(source.get_samples(2))
    source.save(tmp_path / "s.json")
    resumed.load(tmp_path / "s.json")
    assert resumed.get_samples(3) == source.get_samples(3)


def best_first(args: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """A filter that leaves the buffer unchanged, as slime's example does."""
    return sorted(buffer, key=lambda group: -(group[0].index or 0))[:num_samples]


def too_many(args: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    return list(buffer)


def copies(args: Any, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    return [list(buffer[0])]


def test_a_saved_buffer_keeps_numpy_values_and_long_integers(tmp_path: Path) -> None:
    source = buffered(tmp_path)
    (group,) = source.get_samples(1)
    group[0].metadata = {"long": 2**70, "number": np.float32(0.5)}
    source.add_samples([group])
    source.save(tmp_path / "state")
    again = buffered(tmp_path)
    again.load(tmp_path / "state")
    assert again.buffer[0][0].metadata == {"long": 2**70, "number": 0.5}


def test_a_filter_by_path(tmp_path: Path) -> None:
    source = buffered(tmp_path, buffer_filter_path=f"{__name__}:best_first")
    source.add_samples(source.get_samples(3))
    assert [g[0].group_index for g in source.get_samples(2)] == [2, 1]
    assert [g[0].group_index for g in source.buffer] == [0]


@pytest.mark.parametrize(("name", "message"), [("too_many", "returned 3 groups, at most 1"), ("copies", "groups of the buffer")])  # fmt: skip
def test_filters_that_misbehave(tmp_path: Path, name: str, message: str) -> None:
    source = buffered(tmp_path, buffer_filter_path=f"{__name__}:{name}")
    source.add_samples(source.get_samples(3))
    with pytest.raises(PluginError, match=message):
        source.get_samples(1)


def test_only_whole_groups_enter_the_buffer(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="groups of n_samples_per_prompt=2 samples, got 1"):
        buffered(tmp_path).add_samples([[Sample()]])
