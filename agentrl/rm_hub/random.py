"""A reward that knows nothing: the baseline of "spurious rewards" (Shao et al. 2025, arXiv:2506.10947).

1. The reward is a function of the seed, the response and the label alone: the same answer gets the same reward in any
   process and any order, so a run can be repeated. Answers that differ get independent rewards.
2. Nothing is read of what the answer says, so a run that improves with it learns from something else than the reward.
"""

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.reading.common import bad_metadata, number


def grade_random(response: str, label: Any, metadata: Mapping[str, Any]) -> Grade:
    """1 with a probability of a half, else 0; `metadata` may change that.

    Args:
        response: the answer; only its text matters.
        label: any value or none; only its representation matters.
        metadata: `seed` (default 0): an integer or a text, gives other rewards. `random_rate` (default 0.5): the
            probability of a 1.
    """
    seed = metadata.get("seed", 0)
    if isinstance(seed, bool) or not isinstance(seed, (int, str)):
        raise bad_metadata("random", "seed", "an integer or a text", seed)
    rate = number(metadata, "random_rate", 0.5, "random")
    if not 0 <= rate <= 1:
        raise bad_metadata("random", "random_rate", "a probability", rate)
    lucky = Random(json.dumps([repr(seed), response, repr(label)]).encode()).random() >= 1 - rate
    return Grade(float(lucky), lucky, None, "drawn at random; the answer was not read")
