"""The session of an agent program: the tree of its turns, and the Samples that contain them."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from agentrl.gateway.record import SessionRecord, TurnRecord
from agentrl.groups import Group, trajectories

_DEPTH = 6  # maximum indentation of a branch


class SessionTurn(NamedTuple):
    """A turn as the page shows it. `here`: the shown trajectory has it. `samples`: indices of samples with it."""

    record: TurnRecord
    depth: int
    here: bool
    samples: Sequence[int]


class ShownSession(NamedTuple):
    """A session as the page shows it: the side branches of a turn come before its main continuation."""

    record: SessionRecord
    turns: Sequence[SessionTurn]
    samples: int  # number of samples of the session

    @property
    def dropped(self) -> Counter[str]:
        found = Counter[str]()
        for turn in self.record.turns:
            found[turn.dropped] += turn.sampled_tokens
        del found[""]
        return found

    @property
    def summary(self) -> str:
        """The numbers of turns, roots, samples and refused requests, and the dropped tokens by reason."""
        turns, refused = self.record.turns, len(self.record.refused)
        roots = sum(turn.parent is None for turn in turns)
        counts = {"turn": len(turns) + self.record.left_out, "root": roots, "sample": self.samples}
        counts |= {"refused request": refused} if refused else {}
        parts = [f"{n} {name}{'s' * (n != 1)}" for name, n in counts.items()]
        return ", ".join([*parts, *(f"{n} tokens dropped: {reason}" for reason, n in self.dropped.items())])

    @property
    def plain(self) -> bool:
        """True for one conversation without a branch."""
        return self.samples == 1 and not self.dropped and not self.record.refused


def session_of(group: Group, place: int) -> ShownSession | str:
    """Return the session of a group's sample; "" if none was stored; an error message if it cannot be read."""
    own = next(set(map(id, path)) for path in trajectories(group) if any(one is group[place] for one in path))
    abouts = {at: sample.metadata.get("gateway") for at, sample in enumerate(group) if id(sample) in own}
    found = {at: about if isinstance(about, Mapping) else {} for at, about in abouts.items()}
    given = [about["session"] for about in found.values() if "session" in about]
    try:
        record = SessionRecord.model_validate(given[0]) if given else None
    except ValidationError:
        return "The record of this agent's session cannot be read."
    holders: dict[str, list[int]] = {}
    for at, about in found.items():
        for number in nodes if isinstance(nodes := about.get("nodes"), list) else ():
            holders.setdefault(str(number), []).append(at)
    if record is None:
        return ""
    ordered = [(turn, depth, holders.get(str(turn.number), [])) for turn, depth in _in_order(record.turns)]
    turns = [SessionTurn(turn, depth, place in samples, samples) for turn, depth, samples in ordered]
    return ShownSession(record, turns, sum("nodes" in about for about in found.values()))


def _in_order(turns: Sequence[TurnRecord]) -> Iterator[tuple[TurnRecord, int]]:
    """Yield turns and depths. The child with most descendants keeps its parent's depth. Others come first, one deeper."""
    children: dict[int | None, list[TurnRecord]] = {}
    for turn in turns:
        children.setdefault(turn.parent, []).append(turn)
    below = Counter[int | None]()
    for turn in reversed(turns):  # parents have lower numbers
        below[turn.parent] += 1 + below[turn.number]
    waiting = [(root, 0) for root in reversed(children.get(None, []))]
    while waiting:
        turn, depth = waiting.pop()
        yield turn, depth
        if own := children.get(turn.number):
            trunk = max(own, key=lambda child: below[child.number])
            waiting.append((trunk, depth))
            waiting += [(child, min(depth + 1, _DEPTH)) for child in reversed(own) if child is not trunk]
