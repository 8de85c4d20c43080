"""Turning whatever goes wrong in one trajectory into a typed failure, and a failure into a marked sample.

1. User code is called through `guarded`: a deadline, and exceptions become `Failure`s that name code, place and cause.
2. The outermost call of a trajectory has a `TrajectoryPlace`; errors that leave it name group, sample and turn."""

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from agentrl.clock import Deadline
from agentrl.errors import (
    AgentRLError,
    Blame,
    DataError,
    EnvFailure,
    Failure,
    MediaError,
    SampleError,
    TemplateError,
    TrajectoryPlace,
    first_error,
)
from agentrl.plugins import describe_error, stops_the_caller
from agentrl.sample import Sample, Status
from agentrl.tools import ToolError

T = TypeVar("T")
_OF_CONTENT = (DataError, MediaError, SampleError, TemplateError, ToolError)
"""Errors of this package that speak of what user code gave to it, or of a call that user code made."""


class DropGroup(Exception):
    """Internal: the policy says that this failure drops the group."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


async def guarded(
    call: Awaitable[T],
    *,
    what: str,
    failure: type[Failure],
    timeout: float = math.inf,
    late: type[Failure] | None = None,
    work_only: bool = False,
    place: TrajectoryPlace | None = None,
    held: Callable[[], float] = lambda: 0.0,
    flag: str = "",
) -> T:
    """Await `call` with a deadline; anything it raises comes out as `failure`.

    Args:
        call: the awaitable of user code.
        what: whose code it is, for the message (`SearchEnv.step`).
        failure: the type that names who is to blame.
        timeout: seconds it may take; `agentrl.clock` says which of them count.
        late: the type for a missed deadline; default `failure`.
        work_only: the time that tools inside wait for a free place does not count.
        place: what `call` plays; errors get it in front of their message.
        held: seconds for which generating was held so far; they do not count.
        flag: which setting says `timeout`."""
    late = late or failure
    try:
        with Deadline(timeout, what, place=place, work_only=work_only, held=held) as limit:
            result = await call
        if limit.overdue:
            raise late(limit.verdict + (f"; {flag} sets the limit" if flag else ""), kind=f"{late.blame}_timeout")
        return result
    except BaseException as raised:
        if stops_the_caller(raised):
            raise
        first = first_error(raised)
        error: AgentRLError = failure(describe(what, first), kind=f"{failure.blame}_raised")
        if isinstance(first, AgentRLError) and not isinstance(first, _OF_CONTENT):
            error = first
        if place is not None:
            error.place = replace(place)
        raise error from None if error is first else first


def describe(what: str, error: BaseException) -> str:
    """`what` raised `error`, with the line of the user's code that it came out of."""
    return f"{what} raised {describe_error(error)}"


def bad_result(message: str) -> EnvFailure:
    """User code returned what it must not."""
    return EnvFailure(message, kind="env_bad_result")


def mark_failed(sample: Sample, failure: Failure) -> Sample:
    """Record `failure` on the sample; what it holds so far stays."""
    sample.status = Status.FAILED
    sample.stop_reason = "context" if failure.blame is Blame.OVERFLOW else "aborted"
    sample.metadata["failure"] = {"blame": failure.blame.value, "kind": failure.kind, "message": str(failure)}
    return sample


def trainable(sample: Sample) -> bool:
    """Return true if what a failed trajectory left behind says which of its tokens the model wrote.

    User code may have been interrupted between tokens and mask: a mask that is missing or does not fit is no mask."""
    return bool(sample.response_length) and sample.loss_mask is not None and _whole(sample)


def _whole(sample: Sample) -> bool:
    try:
        sample.validate()
    except SampleError:
        return False
    return bool(sample.tokens)


def mask_out(sample: Sample) -> Sample:
    """Keep the sample for statistics and baselines with reward 0, and train on none of its tokens.

    One that failed before its prompt was rendered, or while user code was half-way through its lists, gets a single
    prompt token: a train batch has no place for none, nor for lists that disagree. A hosted model's gets none."""
    sample.remove_sample = True
    if not _whole(sample) and not sample.hosted:
        sample.set_prompt_tokens(sample.tokens[:1] or [0])
    if sample.reward is None:
        sample.reward = 0.0
    return sample
