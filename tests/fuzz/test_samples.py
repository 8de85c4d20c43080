"""Mutated samples: as a dict, as arrays with the other fields, as stored bytes."""

from __future__ import annotations

import contextlib
import random
import struct
from array import array
from typing import Any

import orjson
import zstandard

from agentrl.buffer.codec import decode_group, encode_group
from agentrl.errors import SampleError
from agentrl.sample import Sample, SpecInfo, Status
from tests.buffer.make import finished
from tests.fuzz.mutate import counts, fuzz, of_bytes, of_tree


def samples() -> list[Sample]:
    whole, chat, pending = finished(3)[0], finished(4)[1], Sample(group_index=1, prompt="x")
    whole.teacher_log_probs = [-0.25] * whole.response_length
    whole.spec_info, whole.status = SpecInfo(1, 2, 3, 4), Status.TRUNCATED
    chat.prompt, chat.reward = [{"role": "user", "content": "x"}], {"score": 1.0, "format": 0}
    chat.append_model([9, 9], [-0.5, -0.25], [("a", 0, 1), ("b", 1, 2)], turn=2)
    chat.metadata = {"messages": [{"role": "tool", "content": "y"}], "counters": {"a": 1}}
    return [whole, chat, pending]


DICTS = [sample.to_dict() for sample in samples()]
STORED = [encode_group([sample]) for sample in samples()]


def sound(found: Sample) -> None:
    found.validate()
    found.multimodal_train_inputs = found.multimodal_train_inputs or None  # no arrays and empty arrays are stored alike
    again = Sample.from_dict(found.to_dict())
    assert again == found
    assert Sample.from_arrays(*found.to_arrays()).tokens == found.tokens
    Sample.from_dict(found.to_dict()).compact().validate()
    try:
        stored = encode_group([found])
    except SampleError:  # values that JSON cannot hold
        return
    (back,) = decode_group(stored)
    for name in ("rollout_log_probs", "teacher_log_probs"):
        floats = getattr(found, name)
        setattr(found, name, None if floats is None else array("f", floats).tolist())
    assert back == found


@counts
def test_mutated_dictionaries(count: int) -> None:
    found = fuzz(count, lambda rng: of_tree(rng, rng.choice(DICTS)), Sample.from_dict, sound)
    assert found["accepted"] > count // 50


def mutated_record(rng: random.Random) -> Sample:
    """Make a sample whose fields user code has changed arbitrarily."""
    sample = rng.choice(samples())
    changed: Any = of_tree(rng, sample.to_dict())
    for name in rng.sample(sorted(changed), 3) if isinstance(changed, dict) and len(changed) > 3 else ():
        if name in DICTS[0]:
            setattr(sample, name, changed[name])
    return sample


@counts
def test_mutated_records(count: int) -> None:
    found = fuzz(count, mutated_record, lambda sample: sample.validate(), sound)
    assert found["accepted"] > count // 50


@counts
def test_mutated_bytes(count: int) -> None:
    def sound_group(group: list[Sample]) -> None:
        for sample in group:
            sound(sample)

    def mutant(rng: random.Random) -> bytes:
        whole = rng.choice(STORED)
        if rng.random() < 0.2:
            return of_bytes(rng, whole)
        plain = zstandard.ZstdDecompressor().decompress(whole)
        (size,) = struct.unpack_from("<I", plain)
        header, raw = plain[4 : 4 + size], plain[4 + size :]
        if rng.random() < 0.5:
            with contextlib.suppress(TypeError):
                header = orjson.dumps(of_tree(rng, orjson.loads(header)))
        else:
            raw = of_bytes(rng, raw)
        return zstandard.compress(struct.pack("<I", len(header)) + header + raw)

    fuzz(count, mutant, decode_group, sound_group)
