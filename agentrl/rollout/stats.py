"""Statistics of rollouts: numbers per trajectory, counts of failures, and counts of tokens by their fate."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import variance
from typing import Any

from agentrl.errors import Failure
from agentrl.groups import Group, trajectories
from agentrl.observability.stats import SOLVED, pass_at_k
from agentrl.sample import Sample, Status

SUMMARY = ("reward", "response_length", "truncated", "failed", "tool_calls", "used_tool")
"""The most important numbers of a trajectory."""
Row = Mapping[str, float]  # one trajectory as numbers, by name


@dataclass(frozen=True, slots=True)
class Tokens:
    """Counts of tokens by their fate. Instances can be added."""

    generated: int = 0  # tokens that engines sampled
    lost: Counter[str] = field(default_factory=Counter)  # sampled tokens that will never be trained on, by reason

    @property
    def left(self) -> int:
        """Number of tokens that were trained on, or may still be."""
        return self.generated - self.lost.total()

    def lose(self, reason: str, tokens: int | None = None) -> "Tokens":
        """Count tokens that will not be trained on; default: all that are left."""
        return self + Tokens(0, Counter({reason: self.left if tokens is None else tokens}))

    def keep(self, tokens: int) -> "Tokens":
        """Count all tokens left, except `tokens`, as masked. Tokens from outside the run's engines are added first."""
        whole = self + Tokens(max(0, tokens - self.left))
        return whole.lose("masked", whole.left - tokens)

    def __add__(self, other: "Tokens") -> "Tokens":
        return Tokens(self.generated + other.generated, self.lost + other.lost)


@dataclass(frozen=True, slots=True)
class TokenBalance:
    """Tokens since this process began: generated = trained + waiting + lost, each counted separately."""

    generated: int = 0  # tokens that engines sampled, and tokens of groups that waited when the process began
    trained: int = 0  # tokens that were handed to the trainer
    waiting: int = 0  # tokens of groups in flight as last reported, and of groups that wait for a batch
    lost: Mapping[str, int] = field(default_factory=dict)  # tokens that will never be trained on, by reason


@dataclass(frozen=True, slots=True)
class RolloutStats:
    """Counts of one group, one rollout or one evaluation. Instances can be added."""

    offered: tuple[Row, ...] = ()  # every trajectory that ended
    graded: int = 0  # trajectories that got a reward, also in groups that were dropped
    failures: Counter[str] = field(default_factory=Counter)  # by `<blame>/<kind>`
    last_failure: str = ""
    retries: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # groups by reason
    tokens: Tokens = field(default_factory=Tokens)
    seconds: float = 0.0  # duration of the rollout. A sum has none
    account: TokenBalance = field(default_factory=TokenBalance)  # the fate of all tokens so far. A sum has none

    def __add__(self, other: "RolloutStats") -> "RolloutStats":
        return RolloutStats(
            self.offered + other.offered,
            self.graded + other.graded,
            self.failures + other.failures,
            other.last_failure or self.last_failure,
            self.retries + other.retries,
            self.dropped + other.dropped,
            self.tokens + other.tokens,
        )

    def lose(self, reason: str, tokens: int | None = None) -> "RolloutStats":
        """Count tokens that will not be trained on; see `Tokens.lose`."""
        return replace(self, tokens=self.tokens.lose(reason, tokens))

    @classmethod
    def of(cls, failure: Failure) -> "RolloutStats":
        """Count one failure by blame and kind."""
        return cls(failures=Counter([f"{failure.blame}/{failure.kind}"]), last_failure=str(failure))


class Tally:
    """The sum of a group's counts. At each trajectory's end, `report` gets the number of ended ones and the sum."""

    def __init__(self, report: Callable[[int, RolloutStats], None] = lambda ended, stats: None) -> None:
        self.stats, self._ended, self._report = RolloutStats(), 0, report

    def add(self, **counts: Any) -> None:
        """Add counts, by the names of `RolloutStats`."""
        self.stats += RolloutStats(**counts)

    def sampled(self, tokens: int) -> None:
        """Count tokens that an engine sampled."""
        self.stats = replace(
            self.stats, tokens=replace(self.stats.tokens, generated=self.stats.tokens.generated + tokens)
        )

    def end(self, trajectories: int = 1) -> None:
        """Report that trajectories ended and gave up their places."""
        self._ended += trajectories
        self._report(self._ended, self.stats)


def heads(group: Sequence[Sample]) -> Group:
    """Return one sample per trajectory: fan-out siblings share their reward and count once."""
    return [siblings[0] for siblings in trajectories(group)]


def describe(group: Sequence[Sample], reward_key: str | None) -> list[Row]:
    """Return one row per trajectory, with sums over its samples."""
    return [_row(siblings, reward_key) for siblings in trajectories(group)]


def _row(siblings: Sequence[Sample], reward_key: str | None) -> Row:
    counters: Counter[str] = Counter()
    for sample in siblings:
        counters.update(sample.metadata.get("counters", {}))
    kinds = {sample.metadata.get("grade", {}).get("unjudged") for sample in siblings} - {"", None}
    row = {
        # Of a hosted model's tokens only the server's count is known.
        "response_length": sum(s.spec_info.completion_token_num if s.hosted else s.response_length for s in siblings),
        "model_tokens": sum(s.spec_info.completion_token_num if s.hosted else sum(s.loss_mask or ()) for s in siblings),
        "truncated": any(s.status is Status.TRUNCATED for s in siblings),
        "failed": any(s.status is Status.FAILED for s in siblings),
        "turns": max((s.model_turns for s in siblings), default=0),
        "tool_calls": counters["tool_calls"],
        "used_tool": counters["tool_ok"] > 0,
        # Tool calls by outcome, their seconds, and the counts of an agent program's session.
        **{name: count for name, count in counters.items() if name.startswith(("tool_", "agent/"))},
        **{f"unjudged/{kind}": True for kind in kinds},
        **({f"stop/{siblings[-1].stop_reason[:40]}": True} if siblings[-1].stop_reason else {}),
        "non_generation_seconds": sum(s.non_generation_time for s in siblings),
    }
    if siblings[0].reward is not None:
        row["reward"] = siblings[0].get_reward_value(reward_key)
    return {name: float(value) for name, value in row.items()}


def means(rows: Sequence[Row]) -> dict[str, float]:
    """Return the mean of every number. A missing count is 0; a missing reward is left out of the mean."""
    names = dict.fromkeys(name for row in rows for name in row)
    found = {name: mean([row.get(name, 0.0) for row in rows]) for name in names}
    return found | {"reward": mean([row["reward"] for row in rows if "reward" in row])}


def by_environment(
    groups: Sequence[Sequence[Sample]], reward_key: str | None, environments: Sequence[str]
) -> dict[str, float]:
    """Return means and the number of groups, `env/<name>/...`, for each of several environments that has groups."""
    found: dict[str, float] = {}
    for name in environments:
        own = [group for group in groups if group and group[0].metadata.get("env") == name]
        if rows := [row for group in own for row in describe(group, reward_key)]:
            numbers = means(rows)
            found |= {f"env/{name}/{what}": numbers[what] for what in SUMMARY} | {f"env/{name}/groups": float(len(own))}
    return found


def pass_rates(rows: Sequence[Sequence[Row]]) -> dict[str, float]:
    """Return `pass@k` for k = 1, 2, 4, ... up to the size of the smallest group."""
    found, k = {}, 1
    while k <= min(map(len, rows), default=0):
        solved = [sum(row.get("reward", 0.0) >= SOLVED for row in group) for group in rows]
        found[f"pass@{k}"] = mean([pass_at_k(len(g), c, k) for g, c in zip(rows, solved, strict=True)])
        k *= 2
    return found


def speculation(samples: Sequence[Sample]) -> dict[str, float]:
    """Return `spec_accept_rate` (share of draft tokens that were accepted) and `spec_accept_length` (tokens per
    verification pass) of these samples' requests. Return an empty dict if the engine drafted no tokens."""
    names = ("spec_accept_token_num", "spec_draft_token_num", "completion_token_num", "spec_verify_ct")
    kept, drafted, written, passes = (sum(getattr(sample.spec_info, name) for sample in samples) for name in names)
    return {"spec_accept_rate": kept / drafted, "spec_accept_length": written / passes} if drafted and passes else {}


def categories(samples: Sequence[Sample], key: str) -> dict[str, float]:
    """Return `error_cat/<value of key in the reward>`: its share of the samples, for the 20 most frequent values."""
    said = Counter(str(s.reward.get(key, "none") if isinstance(s.reward, dict) else "none")[:40] for s in samples)
    return {f"error_cat/{name}": count / len(samples) for name, count in said.most_common(20)}


def standard_error(groups: Sequence[Sequence[float]]) -> float:
    """Return the standard error of the mean over groups of fixed prompts, each with at least two values."""
    return math.sqrt(sum(variance(group) / len(group) for group in groups)) / len(groups)


def mean(values: Sequence[float]) -> float:
    """Return the mean; 0 without values."""
    return sum(values) / len(values) if values else 0.0
