"""A shop with a policy, after tau-bench (Yao et al. 2024, arXiv:2406.12045): tools change its records, a user wants something.

1. The policy: look an order up first; cancel it if it is pending, return it if it has shipped. Tools obey any call,
   so the final state of the records counts.
2. The user says what she wants, but names the order only if asked.
"""

import json
import random
from pathlib import Path
from typing import Any

from agentrl import Message, Sample, tool
from agentrl.envs import SimulatedUser, UserEnvironment
from agentrl.sample import Status
from examples.tau_bench.user import user_of

WISHES = ("I do not want my order any more.", "Please take my order back.", "I changed my mind about an order.")
STATES = ("pending", "shipped")
DONE = {"pending": "cancelled", "shipped": "returned"}


class ShopEnv(UserEnvironment):
    """Serve one user; reward 1 if the records are in the end as the policy says, and the user has left content."""

    max_turns = 6

    async def make_user(self, sample: Sample) -> SimulatedUser:
        """Make the user: a script, or a second model."""
        return user_of(sample)

    async def reset(self, sample: Sample) -> list[Message]:
        """Return the user's first words."""
        self.records = dict(sample.metadata["records"])
        return await super().reset(sample)

    @tool
    async def look_up(self, order: str) -> str:
        """State of an order."""
        return str(self.records.get(order, "unknown"))

    @tool
    async def cancel(self, order: str) -> str:
        """Cancel an order."""
        return self._now(order, "cancelled")

    @tool
    async def send_back(self, order: str) -> str:
        """Return an order."""
        return self._now(order, "returned")

    def _now(self, order: str, state: str) -> str:
        if order not in self.records:
            return "unknown"
        self.records[order] = state
        return "done"

    async def reward(self, sample: Sample) -> float:
        """Return 1.0 for the records in the label, 0.0 for others and for a conversation that did not end."""
        return float(sample.status is not Status.TRUNCATED and self.records == json.loads(str(sample.label)))


def make_case(rng: random.Random, split: str = "train", *, wish: str = "", state: str = "") -> dict[str, Any]:
    """Make a prompt row: three orders, one of which the user means. Held-out numbers of orders are 3 modulo 7."""
    numbers = [n for n in range(1000, 10000) if (n % 7 == 3) == (split == "test")]
    records = {str(n): rng.choice(STATES) for n in rng.sample(numbers, 3)}
    order, wish = rng.choice(list(records)), wish or rng.choice(WISHES)
    records[order] = state or records[order]
    label = json.dumps(records | {order: DONE[records[order]]})
    return {"prompt": wish, "label": label, "metadata": {"wish": wish, "order": order, "records": records}}


def write_data(folder: Path, seed: int) -> tuple[Path, Path]:
    """Write 320 training cases, and 200 held-out ones that are the same for every seed."""
    folder.mkdir(parents=True, exist_ok=True)
    train, test = folder / "train.jsonl", folder / "test.jsonl"
    for file, split, count, key in ((train, "train", 320, seed), (test, "test", 200, 0)):
        rng = random.Random(f"{split} cases {key}")
        rows = (make_case(rng, split) for _ in range(count))
        file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return train, test
