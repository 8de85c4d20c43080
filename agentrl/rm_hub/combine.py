"""Combines weighted graders, checks that gate or penalise, and step rewards into one reward (docs/graders.md).

1. A `Combined` is a reward function: `--custom-rm-path rewards.py:reward`, or `return await reward(self.args, sample)`
   in `Environment.reward`. It writes the reward ("score") and its parts to `sample.metadata["rewards"]`. With
   `--reward-key` or `--eval-reward-key` the reward is that dict.
2. The trajectory's reward is the weighted sum of the graders' scores. Step rewards (`metadata["step_rewards"]`) are
   added with their weight. Gates act on the total.
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
    """A check of a sample, and the effect of a failed check on the reward. `check`: `sample -> bool`, plain or async;
    or a grader's name: the grade must be correct. `otherwise`: effect of a failure: "zero" (no grader is called),
    "multiply" by `amount`, or "subtract" `amount`. `name`: the name of its part, after the prefix `verifier_`; default:
    the name of the function or grader."""

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
    """One grader and its weight in the sum. `grader`: a grader's name, or `sample -> float` (or a `Grade`), plain or
    async. `weight`: its factor; negative for a penalty. `part`: the one of the grade's `parts` that counts instead of
    the score. `name`: the name of its part; default: the name of the grader or function."""

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
    """Rule that combines rewards of steps (the model's turns) with the trajectory's reward. The trajectory's reward is
    credited to the "last" step, to "all" in full, or in equal shares ("average"). `weight` multiplies step rewards."""

    distribution: CreditStrategy = "last"
    weight: float = 1.0

    def __post_init__(self) -> None:
        _one_of("StepRewards: distribution", self.distribution, CreditStrategy)
        _number("StepRewards: weight", self.weight)

    def total(self, rewards: Sequence[float | None]) -> float:
        return self.weight * math.fsum(reward for reward in rewards if reward is not None)

    def credit(self, rewards: Sequence[float | None], trajectory: float, turns: int) -> list[float]:
        """Return for each turn its own reward (None: 0) times the weight, plus its share of the trajectory's reward."""
        credit = [self.weight * (reward or 0.0) for reward in rewards] + [0.0] * (turns - len(rewards))
        share = trajectory / turns if self.distribution == "average" else trajectory
        for turn in range(turns - 1 if self.distribution == "last" else 0, turns):
            credit[turn] += share
        return credit


class Combined:
    """A reward function made of several. `parts` are weighted graders. Each failed check of `gate` changes the total,
    in order. `steps`, if given, adds the environment's step rewards. Raises SettingsError: two parts have the same
    name, or there is nothing to combine."""

    def __init__(
        self, *parts: Weighted, gate: Verifier | Sequence[Verifier] = (), steps: StepRewards | None = None
    ) -> None:
        self._parts, self._steps = parts, steps
        self._gates = (gate,) if isinstance(gate, Verifier) else tuple(gate)
        self._labels = ["score", "trajectory", *(part.label for part in parts), *(gate.label for gate in self._gates)]
        if double := sorted(label for label, times in Counter([*self._labels, "steps"]).items() if times > 1):
            raise SettingsError(f"combine: {', '.join(double)} occurs twice; set name= of one of them")
        if not parts and steps is None:
            raise SettingsError("combine: nothing to combine; give it Weighted graders or steps=StepRewards()")

    async def __call__(self, args: Any, sample: Sample, **kwargs: Any) -> float | dict[str, float]:
        """Return the reward of a sample. Raises GraderFailure: a grader failed, or a reward is not a finite number."""
        scores = await self.scores(args, sample)
        sample.metadata["rewards"] = scores
        if getattr(args, "reward_key", None) not in (None, "score"):
            sample.metadata.pop("step_credit", None)  # the credit is of the score, but another key is trained
        keys = reward_keys(args)
        return keyed("the combined reward", keys, scores) if keys else scores["score"]

    async def scores(self, args: Any, sample: Sample) -> dict[str, float]:
        """Return the reward as "score", and all its parts. If a "zero" gate fails, the graders' parts are 0."""
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
    """Write each turn's credit to the metadata. Return the weighted sum of the step rewards."""
    given = enumerate(sample.metadata.get("step_rewards", ()), 1)
    rewards = [None if r is None else _number(f"step reward {turn}", r, _bad_reward) for turn, r in given]
    written = [segment.turn for segment in sample.segments if segment.origin is Origin.MODEL]
    credit = steps.credit(rewards, trajectory, max([1, len(rewards), *written]))
    for gate in failed:  # a factor acts on every step, "subtract" only on the last
        first = len(credit) - 1 if gate.otherwise == "subtract" else 0
        credit[first:] = map(gate.apply, credit[first:])
    sample.metadata["step_credit"] = credit
    return steps.total(rewards)


async def _asked(args: Any, sample: Sample, what: Any) -> Any:
    """Return the result of a grader (given by name) or of a function."""
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
