"""Samples as bytes and as files: a round trip changes nothing, damage is named, imports stay light."""

import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from agentrl.buffer.codec import decode_group, encode_group, read_texts, split_group
from agentrl.buffer.ledger import Ledger
from agentrl.buffer.reader import StoreReader
from agentrl.buffer.store import TrajectoryStore
from agentrl.dumps import ATTRIBUTES, dump_path, read_groups, save_rollout
from agentrl.errors import DataError, SampleError
from agentrl.sample import Sample, Status
from tests.buffer.make import finished, lease

numbers = st.floats(allow_nan=False, allow_infinity=False)
singles = st.floats(allow_nan=False, allow_infinity=False, width=32)
plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**99), 2**99) | numbers | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    sample = Sample(
        group_index=draw(st.integers(0, 2**40)),
        prompt=draw(st.text() | st.lists(st.fixed_dictionaries({"role": st.text(), "content": st.text()}), max_size=2)),
        label=draw(plain),
        metadata=draw(st.dictionaries(st.text(), plain, max_size=3)),
        reward=draw(st.none() | numbers | st.dictionaries(st.text(), numbers, max_size=2)),
        status=draw(st.sampled_from(list(Status))),
    )
    ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=9)
    sample.set_prompt_tokens(draw(ids))
    for turn in range(draw(st.integers(0, 3))):
        wrote = draw(ids)
        log_probs = draw(st.lists(singles, min_size=len(wrote), max_size=len(wrote)))
        sample.append_model(wrote, log_probs, str(turn), text=draw(st.text()), turn=turn)
        sample.append_observation(draw(ids), turn=turn)
    return sample


@given(st.lists(samples(), max_size=4))
def test_bytes_round_trip(group: list[Sample]) -> None:
    assert decode_group(encode_group(group)) == group
    compact = [sample.compact() for sample in decode_group(encode_group(group))]
    assert repr(decode_group(encode_group(group), compact=True)) == repr(compact)


def test_log_probs_are_stored_as_what_is_trained_with() -> None:
    sample = Sample()
    sample.set_prompt_tokens([1])
    sample.append_model([2, 3], [-0.1, -1 / 3])
    assert decode_group(encode_group([sample]))[0].rollout_log_probs == [
        float(np.float32(-0.1)),
        float(np.float32(-1 / 3)),
    ]


def test_a_sample_without_tokens_round_trips() -> None:
    assert decode_group(encode_group([Sample(prompt="x")])) == [Sample(prompt="x")]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (object(), "field 'metadata' cannot be stored"),
        ({1: 2}, "field 'metadata' cannot be stored"),
        (float("nan"), "field 'metadata' cannot be stored: Out of range float"),
        ([float("inf")], "field 'metadata' cannot be stored: Out of range float"),
        (np.float32("nan"), "field 'metadata' cannot be stored: Out of range float"),
        (np.array([1.0, np.inf]), "field 'metadata' cannot be stored: Out of range float"),
    ],
)
def test_what_would_not_come_back_is_refused(value: Any, message: str) -> None:
    with pytest.raises(SampleError, match=message):
        encode_group([Sample(metadata={"k": value})])


def test_a_long_integer_beside_a_tuple_and_a_numpy_value_is_stored() -> None:
    sample = Sample(label=2**70, metadata={"move": (1, 2), "score": np.float32(0.5)})
    (stored,) = decode_group(encode_group([sample]))
    assert (stored.label, stored.metadata) == (2**70, {"move": [1, 2], "score": 0.5})


def test_every_depth_is_stored_or_refused() -> None:
    value: Any = 1
    for _ in range(300):
        value = [value]
        try:
            stored = encode_group([Sample(label=value)])
        except SampleError as error:
            refused = str(error)
        else:
            assert decode_group(stored)[0].label == value
    assert "field 'label' cannot be stored: Recursion limit" in refused


@given(st.binary(max_size=40), st.integers(0, 10**6))
def test_damaged_bytes_are_named(noise: bytes, cut: int) -> None:
    whole = encode_group(finished(0))
    for bad in (noise, whole[: cut % len(whole)]):
        with pytest.raises(SampleError, match="is damaged"):
            decode_group(bad)


@given(st.integers(1, 1 << 12), st.booleans())
def test_cut_and_longer_bytes_are_damaged(cut: int, longer: bool) -> None:
    data = encode_group(finished(1))
    with pytest.raises(SampleError, match="stored group is damaged"):
        decode_group(data + data[:cut] if longer else data[: -min(cut, len(data))])


def test_groups_of_agentrl_0_1_are_read() -> None:
    group = finished(1)
    data = zlib.compress(zstandard.decompress(encode_group(group)), 1)
    assert decode_group(data) == group
    assert read_texts(data) == read_texts(encode_group(group))


def test_a_rollout_round_trips_through_a_file(tmp_path: Path) -> None:
    groups = [finished(0), finished(1, n=3)]
    groups[0][0].label = {"whole": 10**30, "longest": 2**64 - 1}
    assert save_rollout(str(tmp_path / "dump"), 4, groups) == tmp_path / "dump" / "4.jsonl"
    assert read_groups(dump_path(str(tmp_path / "dump"), 4)) == groups
    template = str(tmp_path / "r_{rollout_id}.jsonl")
    save_rollout(template, 5, groups)
    assert read_groups(dump_path(template, 5)) == groups
    assert sorted(p.name for p in tmp_path.iterdir()) == ["dump", "r_5.jsonl"]


def test_a_rollout_round_trips_through_slimes_dump(tmp_path: Path) -> None:
    groups = [finished(0), finished(1, n=3)]
    groups[0][0].metadata[ATTRIBUTES] = {"prefix_cache_info": {"cached_tokens": 2, "total_prompt_tokens": 3}}
    groups[0][0].multimodal_train_inputs = {"pixel_values": np.ones((2, 3), np.float32)}
    file = save_rollout(str(tmp_path / "{rollout_id}.pt"), 4, groups)
    written = torch.load(file, weights_only=True)
    assert (written["rollout_id"], len(written["samples"])) == (4, sum(map(len, groups)))
    first = written["samples"][0]
    assert (first["status"], first["prefix_cache_info"]["cached_tokens"]) == (groups[0][0].status.value, 2)
    assert first["multimodal_train_inputs"]["pixel_values"].shape == (2, 3)
    found = read_groups(file)
    pixels = [group[0].multimodal_train_inputs.pop("pixel_values") for group in (groups[0], found[0])]
    assert (pixels[0] == pixels[1]).all()
    assert found == groups


SLIME = {
    "group_index": 3,
    "prompt": "2",
    "tokens": [1, 2, 3],
    "response_length": 2,
    "status": "completed",
    "reward": 1.0,
}


def test_a_dump_as_slime_writes_it_is_read(tmp_path: Path) -> None:
    """Its own fields, tensors, and attributes that a user's function set."""
    more = {
        "prefix_cache_info": {"cached_tokens": 1, "total_prompt_tokens": 1},
        "apply_chat_template_kwargs": {},
        "rollout_top_p_token_ids": torch.tensor([5, 6, 7], dtype=torch.int32),
        "rollout_top_p_token_offsets": torch.tensor([0, 1, 3], dtype=torch.int32),
        "mine": 7,
    }
    samples = [{**SLIME, **more, "index": 0}, {**SLIME, "index": 1}, {**SLIME, "group_index": 4, "index": 2}]
    torch.save({"rollout_id": 0, "samples": samples}, tmp_path / "0.pt")
    groups = read_groups(tmp_path / "0.pt")
    assert [[sample.index for sample in group] for group in groups] == [[0, 1], [2]]
    assert list(groups[0][0].rollout_top_p_token_ids or ()) == [5, 6, 7]
    assert groups[0][0].metadata[ATTRIBUTES]["mine"] == 7


class Foreign:
    """An object whose unpickling would create a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.file,)


def test_slimes_dumps_run_no_code(tmp_path: Path) -> None:
    torch.save({"samples": [{**SLIME, "label": Foreign(tmp_path / "ran")}]}, tmp_path / "0.pt")
    with pytest.raises(DataError, match="0.pt: only plain values and tensors are read"):
        read_groups(tmp_path / "0.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ([1], "expected a dump of slime's"),
        ({"samples": [{**SLIME, "group_index": None}]}, "no group_index"),
        ({"samples": [{**SLIME, "response_length": 9}]}, "response_length is 9"),
        ({"samples": [3]}, "expected a dump of slime's"),
    ],
)
def test_bad_dumps_of_slimes(tmp_path: Path, written: Any, message: str) -> None:
    torch.save(written, tmp_path / "0.pt")
    with pytest.raises(DataError, match=f"0.pt: .*{message}"):
        read_groups(tmp_path / "0.pt")
    (tmp_path / "0.pt").write_bytes((tmp_path / "0.pt").read_bytes()[:60])
    with pytest.raises(DataError, match="0.pt: "):
        read_groups(tmp_path / "0.pt")
    with pytest.raises(DataError, match="1.pt: "):
        read_groups(tmp_path / "1.pt")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "0.jsonl line 2: expected a sample or a list of samples: unexpected end of data"),
        ("[3]", "line 2: .* a sample must be an object with its fields, got 3"),
        ('[{}, {"tokenz": []}]', "line 2: .* unknown sample fields \\['tokenz'\\]"),
        ('[{"status": "odd"}]', "line 2: .* status cannot be read: 'odd' is not a valid Status"),
        ('[{"tokens": [1], "response_length": 2}]', "line 2: .*response_length is 2 but there are 1 tokens"),
    ],
)
def test_bad_dumps(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "0.jsonl").write_text(f"[]\n{line}\n")
    with pytest.raises(DataError, match=message):
        read_groups(dump_path(str(tmp_path), 0))


def test_dumps_that_cannot_be_read_or_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="1.jsonl: cannot be read: No such file"):
        read_groups(dump_path(str(tmp_path), 1))
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="cannot be written"):
        save_rollout(str(tmp_path / "file"), 0, [finished(0)])
    with pytest.raises(DataError, match="group 0 cannot be written as JSON"):
        save_rollout(str(tmp_path), 0, [[Sample(label=object())]])


def test_importing_data_and_buffer_is_light() -> None:
    code = (
        "import sys, importlib; [importlib.import_module('agentrl.' + m) for m in "
        "'data.prompts data.source data.user_source buffer.ledger buffer.queue groups'.split()]; "
        "print(sorted({'torch', 'ray', 'pyarrow', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True)
    assert done.stdout.strip() == "[]"


def routed(tokens: int, experts: int) -> list[Sample]:
    """Make a group of a model with 94 layers, 8 experts a token."""
    group = finished(0)
    for sample in group:
        sample.append_model([5] * tokens, [-1.0] * tokens, "3", turn=2)
        rows = np.random.default_rng(0).integers(0, experts, (len(sample.tokens) - 1, 94 * 8))
        rows[0, 0] = experts - 1
        sample.rollout_routed_experts = rows.astype(np.int16)
    return group


@pytest.mark.parametrize(("experts", "width"), [(256, 1), (257, 2)])
def test_routing_is_stored_as_it_is_in_one_copy(tmp_path: Path, experts: int, width: int) -> None:
    group = routed(300, experts)
    ids = sum(sample.rollout_routed_experts.size for sample in group)
    with Ledger(tmp_path / "l.sqlite") as ledger, TrajectoryStore(tmp_path / "t.sqlite", keep=10) as store:
        lease(ledger, 1, 0)
        ledger.complete(0, group)
        store.add("train", "", 0, [group], encoded=lambda _: ledger.encoded(0))
        store.drop(group, "filtered")
        store.add("train", "", 1, [])
        for sample, stored in zip(group, ledger.samples(0), strict=True):
            assert stored.rollout_routed_experts.dtype.itemsize == width
            np.testing.assert_array_equal(stored.routing(), sample.rollout_routed_experts)
            assert stored.to_dict() == sample.to_dict()
        with StoreReader(store.path) as reader:
            for row in reader.query():
                (shown, _) = reader.group(row.key)
                assert shown.rollout_routed_experts is None
                assert shown.tokens == group[0].tokens
    assert ids * width < (tmp_path / "l.sqlite").stat().st_size < ids * width * 1.15  # with the tables, 60 kB
    assert (tmp_path / "t.sqlite").stat().st_size < ids * width * 0.2
    assert len(encode_group(group)) < ids * width * 1.01


def test_routing_that_is_cut_off_is_named() -> None:
    data = encode_group(routed(3, 256))
    small, routing = split_group(data)
    assert read_texts(data) == read_texts(small)
    assert len(routing) == 2 * 9 * 94 * 8
    for cut in (1, 8, 9, 9 + len(small), len(data) - 1):
        with pytest.raises(SampleError, match="damaged"):
            decode_group(data[:cut])


def test_pixels_that_user_code_made_are_stored_as_arrays() -> None:
    sample = Sample(index=3)
    sample.set_prompt_tokens([1, 2])
    pixels = np.arange(6, dtype=np.float32).reshape(2, 3)
    sample.multimodal_train_inputs = {"pixel_values": pixels, "image_grid_thw": [[1, 1, 2]]}
    (found,) = decode_group(encode_group([sample]))
    np.testing.assert_array_equal(found.multimodal_train_inputs["pixel_values"], pixels)
    assert found.multimodal_train_inputs["image_grid_thw"].tolist() == [[1, 1, 2]]
    for wrong in (pixels, {"pixel_values": ["a"]}):
        sample.multimodal_train_inputs = wrong
        with pytest.raises(SampleError, match="index=3: multimodal_train_inputs must be a dict with arrays of numbers"):
            encode_group([sample])
