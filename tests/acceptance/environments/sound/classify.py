"""One turn; what all instances share is opened once and only read."""

from typing import Any, ClassVar

from agentrl import Environment, Sample
from agentrl.rm_hub import final_answer


class Env(Environment):
    """Name the topic of a headline; a parent topic is worth half."""

    max_turns = 1
    parents: ClassVar[dict[str, str]] = {}

    @classmethod
    async def setup(cls, args: Any) -> None:
        cls.parents = {"football": "sports", "chess": "sports", "shares": "economy"}

    @classmethod
    async def teardown(cls) -> None:
        cls.parents = {}

    async def reward(self, sample: Sample) -> dict[str, Any] | float:
        answer, label = final_answer(sample).lower(), str(sample.label)
        if label in answer:
            return 1.0
        parent = self.parents.get(label)
        return 0.5 if parent is not None and parent in answer else 0.0
