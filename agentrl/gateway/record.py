"""The record of a session's tree, of limited size. The first Sample of the session has it.

The record includes turns that no Sample has: each dropped turn has its reason and the beginning of its text."""

from collections.abc import Container, Iterable
from itertools import islice, pairwise
from typing import Final, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from agentrl.gateway.tree import SessionTree

MAX_TURNS: Final = 500
MAX_TEXT: Final = 200
"""Characters of a dropped turn's text, of an agent's name, and of the reason for a refusal."""


class TurnRecord(BaseModel):
    """One turn.

    Attributes:
        dropped, text: the reason not to train the turn, and its text; both are empty for a trained turn.
        role, agent: role and agent of the conversation if the turn is a root; empty for other turns."""

    model_config = ConfigDict(frozen=True, strict=True)

    number: int
    parent: int | None = None
    reason: str
    prompt_tokens: int
    sampled_tokens: int
    finish: str = ""
    dropped: str = ""
    text: str = ""
    role: str = ""
    agent: str = ""


class SessionRecord(BaseModel):
    """A session as it was closed; `left_out` is the number of turns beyond the first `MAX_TURNS`."""

    model_config = ConfigDict(frozen=True, strict=True)

    turns: list[TurnRecord] = Field(max_length=MAX_TURNS)
    left_out: int = 0
    refused: list[str] = []

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        """Check that numbers rise and that each turn comes after its parent: the tree then has no cycle."""
        if any(one.number >= other.number for one, other in pairwise(self.turns)):
            raise ValueError("turns must be in the order of their numbers")
        if any(turn.parent is not None and turn.parent >= turn.number for turn in self.turns):
            raise ValueError("a turn must come after its parent")
        return self

    @classmethod
    def of(cls, tree: SessionTree, rewarded: Container[int], refused: Iterable[str]) -> Self:
        """Record a tree.

        Args:
            rewarded: numbers of the roots that got a reward.
            refused: the last messages of refused requests."""
        roles = tree.roots()
        turns = [
            TurnRecord(
                **node.shown(),
                dropped=dropped,
                text=_short(node.text) if dropped else "",
                role=roles.get(node, ""),
                agent=_short(node.agent) if node in roles else "",
            )
            for node, dropped in islice(tree.dropped(rewarded).items(), MAX_TURNS)
        ]
        return cls(turns=turns, left_out=len(tree.nodes) - len(turns), refused=[*map(_short, refused)])


def _short(text: str) -> str:
    """Return the beginning of a text, in characters that can be stored."""
    return text[:MAX_TEXT].encode("utf-8", "replace").decode()
