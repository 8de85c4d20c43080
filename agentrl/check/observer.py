"""Observer of an environment's methods during episodes, which finds their side effects."""

import asyncio
import functools
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from unittest.mock import patch

from agentrl.chat import normalise_messages
from agentrl.check.findings import Finding
from agentrl.data.prompts import ROLES
from agentrl.envs import Environment, Step, Turn
from agentrl.errors import TemplateError
from agentrl.sample import Sample


def own_methods(kind: type[Environment]) -> list[str]:
    return [n for n in ("reset", "step", "reward", "close") if getattr(kind, n) is not getattr(Environment, n)]


class Observer:
    """Observations of episodes. `alone`: one episode is played at a time, so that it is the cause of each change."""

    def __init__(self) -> None:
        self.findings, self.alone = list[Finding](), True

    @contextmanager
    def watching(self, kind: type[Environment]) -> Iterator[None]:
        """Watch `kind` itself instead of a subclass, so that code that names the class works as always."""
        with ExitStack() as stack:
            for name in own_methods(kind):
                watched = self._around(getattr(kind, name), f"{kind.__name__}.{name}")
                stack.enter_context(patch.object(kind, name, watched))
            yield

    def _around(self, method: Callable[..., Awaitable[Any]], where: str) -> Callable[..., Awaitable[Any]]:
        @functools.wraps(method)
        async def watched(env: Environment, *given: Any) -> Any:
            samples = (g.sample if isinstance(g, Turn) else g for g in given if isinstance(g, Turn | Sample))
            sample = next(samples, Sample())
            world, prompt = _world(), (sample.prompt, deepcopy(sample.prompt))
            cancels = task.cancelling() if (task := asyncio.current_task()) else 0
            answer = await method(env, *given)
            said = list(_shown(answer, where))
            if task and task.cancelling() > cancels:
                remedy = "let CancelledError through (`except Exception` does)"
                said.append(f"goes on when its trajectory is cancelled: {remedy}")
            if sample.prompt is prompt[0] and prompt[0] != prompt[1]:
                said.append("changes the list that is the sample's prompt, for later uses of the row: make a new list")
            if self.alone and (changed := sorted(dict(world ^ _world()))):
                said.append(f"changes {' and '.join(changed)}, which all trajectories of the process share")
            self.findings += [Finding(f"{where} {what}") for what in said]
            return answer

        return watched


def _world() -> set[tuple[str, str]]:
    return {("the working directory", os.path.realpath(".")), *((f"${k}", v) for k, v in os.environ.items())}


def _shown(answer: Any, where: str) -> Iterator[str]:
    """Yield the mistakes in the messages that `reset` or `step` returns."""
    messages = answer.messages if isinstance(answer, Step) else answer if where.endswith(".reset") else None
    if not isinstance(messages, list | tuple) or not all(isinstance(message, dict) for message in messages):
        return  # the agent loop refuses it
    try:
        roles = [message["role"] for message in normalise_messages(messages)]
    except TemplateError as error:
        yield f"gives messages that cannot be shown: {error}"
        return
    if strange := [role for role in roles if role not in ROLES]:
        yield f"gives a message of the role {strange[0]!r}: expected one of {', '.join(ROLES)}"
    if isinstance(answer, Step) and "assistant" in roles:
        yield "gives a message of the assistant, which the model would read as a turn of its own: use another role"
    elif not isinstance(answer, Step) and roles and roles[-1] == "assistant":
        yield "ends with a message of the assistant, so that the model would answer itself: end with a user's message"
