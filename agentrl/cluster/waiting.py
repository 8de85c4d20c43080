"""Awaiting Ray's references, and turning what Ray reports into our errors. Deadlines are the caller's cancel scopes."""

from collections.abc import Sequence
from typing import Any, TypeVar

import anyio
from ray import ObjectRef
from ray.exceptions import RayActorError, RayError, RayTaskError

from agentrl.errors import AgentRLError, disk_trouble, ungrouped
from agentrl.run.parts import PartLost

T = TypeVar("T")


async def value(reference: "ObjectRef[T]") -> T:
    """The value of one reference.

    Raises:
        AgentRLError: the remote code raised one.
        PartLost: the actor died, or the remote code raised anything else.
    """
    try:
        return await reference
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, AgentRLError):
            raise cause from None
        raise PartLost(disk_trouble(cause) or f"{type(cause).__name__}: {cause}") from error
    except RayActorError as error:
        lines = str(error).strip().splitlines()
        raise PartLost(
            f"a process of the run died ({lines[0] if lines else 'no reason given'}); "
            "start the same command again to resume"
        ) from error
    except RayError as error:
        raise PartLost(f"Ray could not deliver an answer: {error}") from error


async def values(references: "Sequence[ObjectRef[Any]]") -> list[Any]:
    """The values of several, in order.

    The first failure ends the wait, even while the other calls hang in a collective that cannot finish.
    """
    found: list[Any] = [None] * len(references)

    async def one(at: int) -> None:
        found[at] = await value(references[at])

    with ungrouped():
        async with anyio.create_task_group() as tasks:
            for at in range(len(references)):
                tasks.start_soon(one, at)
    return found


async def unless(serving: "ObjectRef[Any]", reference: "ObjectRef[T]") -> T:
    """The value of `reference`; or what ended `serving`, which should not end before."""
    with ungrouped():
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(value, serving)
            found: T = await value(reference)
            tasks.cancel_scope.cancel()
    return found
