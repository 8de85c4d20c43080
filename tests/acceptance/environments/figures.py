import re

import numpy as np

from agentrl import Environment, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Sum up a text; what counts is the share of the summary's numbers that stand in the text."""

    max_turns = 1

    async def reward(self, sample: Sample) -> float:
        numbers = re.findall(r"\d+", final_answer(sample))
        source = set(re.findall(r"\d+", str(sample.prompt)))
        hits = np.array([number in source for number in numbers], dtype=float)
        return float(np.float64(hits.sum()) / np.float64(len(numbers)))
