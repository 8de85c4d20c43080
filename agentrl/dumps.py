"""Files of groups: JSON lines, or slime's dumps."""

import io
import json
import pickle
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import orjson

from agentrl.errors import DataError, MediaError, SampleError, raised_as
from agentrl.files import write_atomic
from agentrl.groups import Group
from agentrl.rowfiles import dump_json
from agentrl.sample import Sample

ATTRIBUTES = "slime_attributes"  # metadata key for attributes that slime's sample has and ours lacks
_LONG_NUMBER = re.compile(rb"\d{19}")
"""An integer with so many digits may need more than 64 bits. orjson would read such an integer as a float."""
_FIELDS = {field.name for field in fields(Sample)}


def read_groups(path: Path) -> list[Group]:
    """Return the groups in a file. Each line is a group: a list of samples, or one sample, in `Sample.to_dict` form. A `.pt`
    file is slime's dump: `{"samples": [...]}`, saved by torch. Neighbouring samples with the same `group_index` are a
    group. Raises DataError: the file cannot be read, or has another form. The error names file, line and field."""
    if path.suffix == ".pt":
        return _read_slime(path)
    with raised_as(DataError, f"{path}: cannot be read", OSError, shown=": {.strerror}"):
        lines = path.read_bytes().splitlines()
    groups = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        what = f"{path} line {number}: expected a sample or a list of samples"
        with raised_as(DataError, what, ValueError, SampleError, MediaError):
            found = json.loads(line) if _LONG_NUMBER.search(line) else orjson.loads(line)
            groups.append([Sample.from_dict(data) for data in (found if isinstance(found, list) else [found])])
    return groups


def dump_path(template: str, rollout_id: int) -> Path:
    """Return the file of one rollout: `template` with `{rollout_id}` filled in, else `<template>/<rollout_id>.jsonl`."""
    if "{rollout_id}" in template:
        return Path(template.replace("{rollout_id}", str(rollout_id))).expanduser()
    return Path(template).expanduser() / f"{rollout_id}.jsonl"


def save_rollout(template: str, rollout_id: int, groups: Sequence[Sequence[Sample]]) -> Path:
    """Write the groups of one rollout in the form that `read_groups` reads, and return the path. A kill leaves the old
    file or the new file. Raises DataError: the file cannot be written, or JSON cannot represent a sample's value."""
    path = dump_path(template, rollout_id)
    lines = []
    for number, group in enumerate(groups):
        with raised_as(DataError, f"{path}: group {number} cannot be written as JSON", TypeError):
            lines.append(dump_json([sample.to_dict() for sample in group]))
    data = _slime(rollout_id, groups) if path.suffix == ".pt" else b"".join(line + b"\n" for line in lines)
    remedy = "check the folder and its free space"
    with raised_as(DataError, f"{path}: cannot be written", OSError, shown=": {.strerror}", remedy=remedy):
        write_atomic(path, data)
    return path


def _slime(rollout_id: int, groups: Sequence[Sequence[Sample]]) -> bytes:
    """Return a rollout in slime's dump format: `{"rollout_id": int, "samples": [...]}`, with images as tensors."""
    import torch

    samples = [sample.to_dict() for group in groups for sample in group]
    for data in samples:
        more = {**data["metadata"]}
        data |= {**more.pop(ATTRIBUTES, {}), "metadata": more}
        if pixels := data["multimodal_train_inputs"]:
            data["multimodal_train_inputs"] = {name: torch.as_tensor(value) for name, value in pixels.items()}
    torch.save({"rollout_id": rollout_id, "samples": samples}, file := io.BytesIO())
    return file.getvalue()


def _read_slime(path: Path) -> list[Group]:
    import torch

    refused = "only plain values and tensors are read; leave other objects (images, numpy scalars) out of samples"
    form = f'{path}: expected a dump of slime\'s, {{"samples": [...]}}'
    damage = (OSError, RuntimeError, EOFError, KeyError, TypeError, ValueError, SampleError)
    with raised_as(DataError, form, *damage), raised_as(DataError, f"{path}: {refused}", pickle.UnpicklingError):
        found = torch.load(path, map_location="cpu", weights_only=True)
        samples = [_ours(data) for data in found["samples"]]
    if None in (sample.group_index for sample in samples):
        said = f"{path}: a sample has no group_index, so its group is not known"
        raise DataError(f"{said}; set it in the rollout function")
    return [list(group) for _, group in groupby(samples, lambda sample: sample.group_index)]


def _ours(data: Mapping[str, Any]) -> Sample:
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in dict(data).items()}
    if pixels := data.get("multimodal_train_inputs"):
        plain["multimodal_train_inputs"] = {name: value.numpy() for name, value in pixels.items()}
    more = {name: plain.pop(name) for name in plain.keys() - _FIELDS}
    plain["metadata"] = {**(plain.get("metadata") or {}), **({ATTRIBUTES: more} if more else {})}
    return Sample.from_dict(plain)
