"""The end of a sequence, and the text that is shown of it."""

from collections.abc import Sequence
from typing import Any

import pytest

from agentrl.engine.embedded.stopping import StopRules, shown_text
from agentrl.engine.request_sampling import RequestSampling

TEXTS, SPECIAL = ["a", "b", "<|stop|>"], 2


def decode(ids: Sequence[int], skip: bool) -> str:
    return "".join(TEXTS[id_] for id_ in ids if id_ != SPECIAL or not skip)


@pytest.mark.parametrize(
    ("sampling", "text"),
    [
        ({"stop": ["<|stop|>"]}, "ab"),
        ({"stop": ["<|stop|>"], "no_stop_trim": True}, "ab"),
        ({"stop": ["<|stop|>"], "skip_special_tokens": False}, "ab"),
        ({"stop": ["<|stop|>"], "skip_special_tokens": False, "no_stop_trim": True}, "ab<|stop|>"),
        ({"stop_regex": [r"b<\|stop\|>"]}, "ab"),
    ],
)
def test_a_stop_string_may_be_a_special_token(sampling: dict[str, Any], text: str) -> None:
    params = RequestSampling.decode(sampling, vocab_size=3)
    rules = StopRules(params, eos=frozenset(), limit=9, decode=decode)
    assert rules.check([0, 1]) is None
    reason = rules.check([0, 1, SPECIAL])
    assert reason == {"type": "stop", "matched": (sampling.get("stop") or sampling["stop_regex"])[0]}
    assert shown_text([0, 1, SPECIAL], reason, params, decode) == text
