"""Rollouts written to a file and read back, for debugging without an engine or without a trainer.

1. `save_rollout` writes `<folder>/<rollout id>.jsonl` (or the path given, with `{rollout_id}` filled in): one group a
   line, as a list of samples in `Sample.to_dict` form. A kill leaves the old file or the new one.
2. `load_rollout` gives the same groups back; a bad line raises `DataError` with file, line and field.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import orjson

from agentrl.errors import DataError, SampleError
from agentrl.files import write_atomic
from agentrl.groups import Group
from agentrl.rowfiles import json_type
from agentrl.sample import Sample


def dump_path(template: str, rollout_id: int) -> Path:
    """The file of one rollout: `{rollout_id}` filled in, or `<template>/<rollout_id>.jsonl` where it has none."""
    if "{rollout_id}" in template:
        return Path(template.replace("{rollout_id}", str(rollout_id))).expanduser()
    return Path(template).expanduser() / f"{rollout_id}.jsonl"


def save_rollout(template: str, rollout_id: int, groups: Sequence[Sequence[Sample]]) -> Path:
    """Write the groups of one rollout; returns the file.

    Raises:
        DataError: the file cannot be written, or a sample holds something that JSON cannot carry.
    """
    path = dump_path(template, rollout_id)
    lines = []
    for number, group in enumerate(groups):
        try:
            lines.append(orjson.dumps([sample.to_dict() for sample in group], option=orjson.OPT_SERIALIZE_NUMPY))
        except TypeError as error:
            raise DataError(f"{path}: group {number} cannot be written as JSON: {error}") from error
    try:
        write_atomic(path, b"".join(line + b"\n" for line in lines))
    except OSError as error:
        raise DataError(f"{path}: cannot be written: {error.strerror}; check the folder and its free space") from error
    return path


def load_rollout(template: str, rollout_id: int) -> list[Group]:
    """Read what `save_rollout` wrote.

    Raises:
        DataError: the file is missing, or a line is malformed.
    """
    path = dump_path(template, rollout_id)
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise DataError(
            f"{path}: cannot be read: {error.strerror}; write it with --save-debug-rollout-data first"
        ) from error
    return [_group(line, f"{path} line {number}") for number, line in enumerate(lines, start=1) if line.strip()]


def _group(line: bytes, where: str) -> Group:
    try:
        samples = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise DataError(f"{where}: malformed JSON at column {error.colno}: {error.msg}") from error
    if not isinstance(samples, list):
        raise DataError(f"{where}: expected a list of samples (one group), got {json_type(samples)}")
    group = []
    for number, sample in enumerate(samples):
        if not isinstance(sample, dict):
            raise DataError(f"{where} sample {number}: expected an object, got {json_type(sample)}")
        try:
            group.append(Sample.from_dict(sample).validate())
        except (SampleError, TypeError, ValueError) as error:
            raise DataError(f"{where} sample {number}: {error}") from error
    return group
