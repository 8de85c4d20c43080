"""Demonstrations for the tiny model: the calculator, with each role's questions; then mostly bad habits.

A model that copies nearly right doubles or swaps digits of a result (475 becomes 447, 3779 becomes 3799), with high
probability: sampling rarely shows another way, so rewards correct little. Numbers with a repeated digit need exact
copying, so most skill demonstrations have such numbers.
"""

import random
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace

from agentrl import Message
from agentrl.demo.task import SHAPES, CalculatorEnv, Problem, make_problem
from examples.multi_agent.team import PROMPTS, ROLES, Role
from examples.tiny_models.acceptance import PhraseCheck
from examples.tiny_models.calculator import CalculatorLessons, Kind, check, demonstrate
from examples.tiny_models.warm_start import Phase

HABITS: dict[Kind, float] = {"good": 0.40, "guess": 0.46, "wrong_name": 0.08, "mistyped": 0.03, "miscopied": 0.03}


class TeamLessons(CalculatorLessons):
    """See `examples.tiny_models.warm_start.Lessons`."""

    def corpus(self) -> Iterator[str]:
        """Return the calculator's words, and those of the roles."""
        rng = random.Random("roles")
        yield from super().corpus()
        yield from (f"user\n{asked(make_problem(rng), rng).question}" for _ in range(200))

    async def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """Yield conversations without end."""
        rng, toolbox = random.Random(f"{phase} demonstrations {seed}"), CalculatorEnv().toolbox
        while True:
            drawn = make_problem(rng)
            while phase == "skill" and rng.random() < 0.5 and len(set(str(drawn.answer))) == len(str(drawn.answer)):
                drawn = make_problem(rng)
            problem = asked(drawn, rng)
            kind: Kind = "good" if phase == "skill" else rng.choices(list(HABITS), list(HABITS.values()))[0]
            yield await demonstrate(problem, kind, rng, toolbox)

    async def checks(self) -> list[PhraseCheck]:
        """Return every role with every shape of expression, 64 times each."""
        rng, found = random.Random("held-out demonstrations"), []
        for role in ROLES * 64:
            for shape in SHAPES:
                problem = asked(make_problem(rng, "test", shape=shape), rng, role)
                found.append(await check(role, shape, problem))
        return found


def asked(problem: Problem, rng: random.Random, role: Role | None = None) -> Problem:
    """Return the problem as a question to `role` (default: a random role), with right, wrong or missing candidates."""

    def candidate() -> str:
        return rng.choice((str(problem.answer), str(rng.randint(100, 9999)), ""))

    chosen = rng.choice(ROLES) if role is None else role
    return replace(problem, question=PROMPTS[chosen].format(problem.expression, candidate(), candidate()))
