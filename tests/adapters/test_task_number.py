"""The number of a task, for all adapters."""

import math

import pytest

from agentrl.adapters import task_number
from agentrl.errors import EnvFailure
from agentrl.sample import Sample


def test_the_number_is_the_rows_or_the_groups() -> None:
    assert task_number(Sample(group_index=3)) == 3
    assert task_number(Sample(group_index=3, metadata={"task": 0})) == 0
    assert task_number(Sample()) is None
    assert task_number(Sample(metadata={"task": -1}), least=-math.inf) == -1


@pytest.mark.parametrize("given", ["5", 2.0, -1, True, [1]])
def test_another_value_is_named(given: object) -> None:
    with pytest.raises(EnvFailure, match=r"metadata\['task'\] must be a whole number from 0, got "):
        task_number(Sample(group_index=3, metadata={"task": given}))
