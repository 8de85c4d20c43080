"""Selection of trajectories for a report: pairs before and after training, and the run's own: best, worst, failed."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from agentrl.buffer.reader import Filter, StoreReader, StoreSection, find_stores
from agentrl.buffer.store import TrajectoryRow
from agentrl.groups import Group
from agentrl.observability.trajectories import Token, TokenSpan, TokenTexts, Trajectory, describe_sample

_WHAT = {"train": "training, rollout {}", "rollout": "agentrl rollout, rollout {}", "eval": "evaluation {} of {}"}
_EACH = 2  # maximum of trajectories of one kind
_LONGEST = 1500  # maximum of tokens of a part: a longer part's middle is left out, to keep the page small


class ShownTrajectory(NamedTuple):
    """A trajectory, and why it is shown."""

    why: str
    row: TrajectoryRow
    trajectory: Trajectory


class StepSelection(NamedTuple):
    """Trajectories of one step; `what` names the step."""

    what: str
    picked: tuple[ShownTrajectory, ...]


def first_and_last(run: Path, texts: TokenTexts, most: int) -> list[tuple[Trajectory, Trajectory]]:
    """Return first samples of at most `most` prompts, in the first and in the last evaluation of the first set with two."""
    for store in find_stores(run).values():
        with StoreReader(store) as reader:
            for part in reader.kinds():
                if part.kind == "eval" and part.first < part.last:
                    before, after = (_heads(reader, part, step) for step in (part.first, part.last))
                    common = [(head, after[prompt]) for prompt, head in before.items() if prompt in after][:most]
                    shown = [[read_trajectory(reader, row, texts)[1] for row in pair] for pair in common]
                    return [(one, two) for one, two in shown]
    return []


def _heads(reader: StoreReader, part: StoreSection, step: int) -> dict[tuple[str, int | None], TrajectoryRow]:
    where = Filter(equal={"kind": "eval", "name": part.name, "step": step, "place": 0})
    return {(row.prompt, row.group_index): row for row in reader.query(where, "group_index")}


def own_trajectories(run: Path, texts: TokenTexts) -> list[StepSelection]:
    """Return best and worst trajectories of each store's newest step, and the newest failures; of training, if any."""
    found = []
    for store in find_stores(run).values():
        with StoreReader(store) as reader:
            for part in sorted(reader.kinds(), key=lambda part: ("train", "rollout", "eval").index(part.kind))[:1]:
                number = part.last if part.kind == "eval" else part.last + 1
                picked = tuple(_picked(reader, part, texts))
                found.append(StepSelection(_WHAT[part.kind].format(number, part.name), picked))
    return found


def _picked(reader: StoreReader, part: StoreSection, texts: TokenTexts) -> Iterator[ShownTrajectory]:
    of: dict[str, str | int] = {"kind": part.kind, "name": part.name}
    newest, seen = of | {"step": part.last}, set[int]()
    for why, where, order in (
        ("failed", of | {"status": "failed"}, "-step"),
        ("best", newest | {"dropped": ""}, "-reward"),
        ("worst", newest | {"dropped": ""}, "reward"),
        ("dropped", newest, "-dropped"),
    ):
        rows = reader.query(Filter(equal=where), order, _EACH + len(seen))
        for row in [row for row in rows if row.id not in seen and bool(row.dropped) >= (why == "dropped")][:_EACH]:
            seen.add(row.id)
            _, whole = read_trajectory(reader, row, texts)
            shown = replace(whole, parts=tuple(map(_shortened, whole.parts)))
            yield ShownTrajectory(f"{why}: {row.failure or row.dropped}".rstrip(": "), row, shown)


def read_trajectory(reader: StoreReader, row: TrajectoryRow, texts: TokenTexts) -> tuple[Group, Trajectory]:
    """Return a row's group, and the row's sample as a page shows it."""
    group, said = reader.group(row.key), reader.details(row.key)
    trained = {name: figures.tolist() for name, figures in said[row.place].items()} if said else None
    return group, replace(describe_sample(group[row.place], texts, trained), reward=row.reward)


def _shortened(part: TokenSpan) -> TokenSpan:
    if (gone := len(part.tokens) - _LONGEST) <= 0:
        return part
    half = _LONGEST // 2
    note = Token(f"\n… {gone} tokens are left out here; `agentrl view` shows them …\n", "close", "left out")
    return replace(part, tokens=(*part.tokens[:half], note, *part.tokens[half + gone :]))
