"""Prompt checks find every bad id, also in turns that build on checked ones."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.engine.prompts import PromptEncoder
from agentrl.errors import EngineRejected

turns = st.lists(st.lists(st.integers(-2, 40), min_size=1, max_size=6), min_size=1, max_size=5)


@given(turns, st.booleans())
def test_a_session_is_checked_like_single_prompts(new: list[list[int]], grow: bool) -> None:
    encoder = PromptEncoder(vocab_size=32)
    ids: list[int] = []
    for part in new:
        ids = ids + part if grow else part
        if all(0 <= i < 32 for i in ids):
            assert json.loads(encoder.encode(ids, "s")) == ids
        else:
            with pytest.raises(EngineRejected):
                encoder.encode(ids, "s")


def test_a_known_id_that_goes_on_with_more_digits_is_checked() -> None:
    encoder = PromptEncoder(vocab_size=32)
    encoder.encode([1, 3], "s")
    with pytest.raises(EngineRejected, match="prompt token 1 is 33"):
        encoder.encode([1, 33], "s")


def test_the_error_names_the_position_in_the_whole_prompt() -> None:
    encoder = PromptEncoder(vocab_size=32)
    encoder.encode([1, 2, 3], "s")
    with pytest.raises(EngineRejected, match="prompt token 4 is 99; expected whole numbers from 0 to 31"):
        encoder.encode([1, 2, 3, 4, 99], "s")
