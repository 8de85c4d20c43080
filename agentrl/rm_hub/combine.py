"""One reward out of several: weighted graders, checks that gate or penalise, and rewards of steps (docs/graders.md).

1. The object is a reward function: `--custom-rm-path rewards.py:reward`, or `return await reward(self.args, sample)` in
   `Environment.reward`. Its parts are in `sample.metadata["rewards"]`; with `--reward-key` (or `--eval-reward-key`) the
   reward is a dict of them and of itself ("score").
2. The weighted sum of the graders' scores is the trajectory's reward. Those of its steps (`metadata["step_rewards"]`) are
   added with their weight. Gates act on the whole.
3. Each turn's credit is written to `metadata["step_credit"]`, for estimators that credit turns or tokens."""

import math
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, Literal, get_args

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.reading.common import finite
from agentrl.rm_hub.registry import find
from agentrl.rm_hub.running.runner import each
from agentrl.rm_hub.sample import grade_sample, keyed, reward_keys
from agentrl.sample import Origin, Sample
from agentrl.tools.threads import result_of as result_of

Scored = float | Grade
Scorer = Callable[[Sample], Scored | Awaitable[Scored]]
Check = Callable[[Sample], bool | Awaitable[bool]]
Otherwise = Literal["zero", "multiply", "subtract"]
CreditStrategy = Literal["last", "all", "average"]


@dataclass(frozen=True, slots=True)
class Verifier:
    """A check of a sample, and what a failed one does to the reward.

    Attributes:
        check: `sample -> bool`, plain or async; or a grader's name, which must find the answer correct.
        otherwise: "zero" (the graders are then not asked), "multiply" by `amount`, or "subtract" it.
        amount: the factor or the penalty.
        name: what it is called among the parts, with `verifier_` before it; default the function's name."""

    check: Check | str
    otherwise: Otherwise = "zero"
    amount: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        _one_of("Verifier: otherwise", self.otherwise, Otherwise)
        _number("Verifier: amount", self.amount)
        if isinstance(self.check, str):
            find(self.check)

    @property
    def label(self) -> str:
        return f"verifier_{self.name or _name(self.check)}"

    def apply(self, score: float) -> float:
        return {"zero": 0.0, "multiply": score * self.amount, "subtract": score - self.amount}[self.otherwise]


@dataclass(frozen=True, slots=True)
class Weighted:
    """One grader and its weight in the sum.

    Attributes:
        grader: a grader's name, or `sample -> float` (or a `Grade`), plain or async.
        weight: its factor; negative for a penalty.
        part: which of the grade's `parts` counts instead of its score.
        name: what it is called among the parts; default the grader's or function's name."""

    grader: Scorer | str
    weight: float = 1.0
    part: str | None = None
    name: str = ""

    def __post_init__(self) -> None:
        _number("Weighted: weight", self.weight)
        if isinstance(self.grader, str):
            find(self.grader)

    @property
    def label(self) -> str:
        return self.name or _name(self.grader) + (f".{self.part}" if self.part else "")


@dataclass(frozen=True, slots=True)
class StepRewards:
    """Rule that combines the rewards of steps, which are the model's turns, with the trajectory's. `distribution` says which
    steps get the latter: the "last", "all" (each the whole), or "average"; `weight` is a factor of the steps' own."""

    distribution: CreditStrategy = "last"
    weight: float = 1.0

    def __post_init__(self) -> None:
        _one_of("StepRewards: distribution", self.distribution, CreditStrategy)
        _number("StepRewards: weight", self.weight)

    def total(self, rewards: Sequence[float | None]) -> float:
        return self.weight * math.fsum(reward for reward in rewards if reward is not None)

    def credit(self, rewards: Sequence[float | None], trajectory: float, turns: int) -> list[float]:
        """Return for each turn its own reward (None: 0) times the weight, plus its share of the trajectory's."""
        credit = [self.weight * (reward or 0.0) for reward in rewards] + [0.0] * (turns - len(rewards))
        share = trajectory / turns if self.distribution == "average" else trajectory
        for turn in range(turns - 1 if self.distribution == "last" else 0, turns):
            credit[turn] += share
        return credit


class Combined:
    """One reward function out of several; see the module's text. `parts` are graders with their weights, `gate` checks that
    guard the whole reward, applied in order, `steps` whether and how the environment's step rewards count.

    Raises SettingsError: an unknown grader, two parts of one name, or nothing to combine."""

    def __init__(
        self, *parts: Weighted, gate: Verifier | Sequence[Verifier] = (), steps: StepRewards | None = None
    ) -> None:
        self._parts, self._steps = parts, steps
        self._gates = (gate,) if isinstance(gate, Verifier) else tuple(gate)
        self._labels = ["score", "trajectory", *(part.label for part in parts), *(gate.label for gate in self._gates)]
        if double := sorted(label for label, times in Counter([*self._labels, "steps"]).items() if times > 1):
            raise SettingsError(f"combine: {', '.join(double)} is there twice; give one of them another name=")
        if not parts and steps is None:
            raise SettingsError("combine: nothing to combine; give it Weighted graders or steps=StepRewards()")

    async def __call__(self, args: Any, sample: Sample, **kwargs: Any) -> float | dict[str, float]:
        """The reward of a sample. Raises GraderFailure: a grader failed, or a reward is no finite number."""
        scores = await self.scores(args, sample)
        sample.metadata["rewards"] = scores
        if getattr(args, "reward_key", None) not in (None, "score"):
            sample.metadata.pop("step_credit", None)  # it is the score's, and another entry trains
        keys = reward_keys(args)
        return keyed("the combined reward", keys, scores) if keys else scores["score"]

    async def scores(self, args: Any, sample: Sample) -> dict[str, float]:
        """The reward as "score", and all its parts; parts behind a closed gate are 0."""
        said = dict.fromkeys(self._labels, 0.0)

        async def ask(_: int, gate: Verifier) -> None:
            passed = await _asked(args, sample, gate.check)
            passed = passed.correct if isinstance(passed, Grade) else passed
            if not isinstance(passed, bool):
                wrong = f"{gate.label} must return True or False, got {passed!r:.80}"
                raise GraderFailure(wrong, kind="grader_bad_verifier")
            said[gate.label] = float(passed)

        await each(self._gates, ask)
        failed = [gate for gate in self._gates if not said[gate.label]]
        if all(gate.otherwise != "zero" for gate in failed):
            await each(self._parts, lambda _, part: _score(args, sample, part, said))
        said["trajectory"] = sum(part.weight * said[part.label] for part in self._parts)
        if self._steps is not None:
            said["steps"] = _credit(self._steps, sample, said["trajectory"], failed)
        whole = said["trajectory"] + said.get("steps", 0.0)
        said["score"] = reduce(lambda score, gate: gate.apply(score), failed, whole)
        return said


combine = Combined


async def _score(args: Any, sample: Sample, part: Weighted, said: dict[str, float]) -> None:
    grade = await _asked(args, sample, part.grader)
    grade = grade if isinstance(grade, Grade) else Grade(grade, correct=False)
    score = grade.part(part.part or "score")
    if part.part and score is None:
        has = ", ".join(grade.parts) or "none"
        raise GraderFailure(f"{part.label}: no part {part.part!r}; it has {has}", kind="grader_no_part")
    said[part.label] = _number(part.label, score, _bad_reward)


def _credit(steps: StepRewards, sample: Sample, trajectory: float, failed: Sequence[Verifier]) -> float:
    """Write down each turn's credit; returns what the steps add to the trajectory's reward."""
    given = enumerate(sample.metadata.get("step_rewards", ()), 1)
    rewards = [None if r is None else _number(f"step reward {turn}", r, _bad_reward) for turn, r in given]
    written = [segment.turn for segment in sample.segments if segment.origin is Origin.MODEL]
    credit = steps.credit(rewards, trajectory, max([1, len(rewards), *written]))
    for gate in failed:  # a factor acts on every step, a penalty on the last
        first = len(credit) - 1 if gate.otherwise == "subtract" else 0
        credit[first:] = map(gate.apply, credit[first:])
    sample.metadata["step_credit"] = credit
    return steps.total(rewards)


async def _asked(args: Any, sample: Sample, what: Any) -> Any:
    """The result of a grader by name, or of a function."""
    return await (grade_sample(args, sample, what) if isinstance(what, str) else result_of(partial(what, sample)))


def _one_of(what: str, value: str, choices: Any) -> None:
    if value not in (known := get_args(choices)):
        raise SettingsError(f"{what} must be one of {', '.join(known)}, got {value!r}")


def _number(what: str, value: Any, raises: Callable[[str], Exception] = SettingsError) -> float:
    if (number := finite(value)) is None:
        raise raises(f"{what} must be a finite number, got {value!r:.80}")
    return number


_bad_reward = partial(GraderFailure, kind="grader_bad_reward")


def _name(what: Any) -> str:
    return what if isinstance(what, str) else str(getattr(what, "__name__", type(what).__name__))
