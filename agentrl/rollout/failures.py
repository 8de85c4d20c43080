"""Conversion of a trajectory's errors into typed failures, and of failures into marked samples.

1. User code is called through `guarded`, with a deadline. Exceptions become `Failure`s that name code, place and cause.
2. The outermost call of a trajectory has a `TrajectoryPlace`; errors that leave it name group, sample and turn."""

import math
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
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
from agentrl.plugins import describe_error, must_propagate
from agentrl.sample import Sample, Status
from agentrl.tools import ToolError

T = TypeVar("T")
_OF_CONTENT = (DataError, MediaError, SampleError, TemplateError, ToolError)
"""Errors of this package that are about values or calls of user code, so that user code is to blame."""


class DropGroup(Exception):
    """Internal: the policy says that this failure drops the group."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@asynccontextmanager
async def between(first: Awaitable[None], last: Callable[[], Awaitable[None]]) -> AsyncIterator[None]:
    """Await `first` before a block and `last` after it. If the block fails too, a failure of `last` is only a note."""
    await first
    try:
        yield
    except BaseException as error:
        try:
            await last()
        except EnvFailure as failure:
            error.add_note(str(failure))
        raise
    await last()


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
    """Await `call` with a deadline; raise its errors as `failure`.

    Args:
        what: name of the code for messages (`SearchEnv.step`).
        failure, late: the failure type, which defines the blame; that for a missed deadline (default `failure`).
        timeout: maximum seconds; `agentrl.clock` defines which seconds count.
        work_only: time that tools wait for a free slot does not count.
        place: the trajectory or group of `call`, for error messages.
        held: returns the seconds of paused generation so far, which do not count.
        flag: the setting that defines `timeout`, for messages."""
    late = late or failure
    try:
        with Deadline(timeout, what, place=place, work_only=work_only, held=held) as limit:
            result = await call
        if limit.overdue:
            raise late(limit.verdict + (f"; {flag} sets the limit" if flag else ""), kind=f"{late.blame}_timeout")
        return result
    except BaseException as raised:
        if must_propagate(raised):
            raise
        first = first_error(raised)
        error: AgentRLError = failure(describe(what, first), kind=f"{failure.blame}_raised")
        if isinstance(first, AgentRLError) and not isinstance(first, _OF_CONTENT):
            error = first
        if place is not None:
            error.place = replace(place)
        raise error from None if error is first else first


def describe(what: str, error: BaseException) -> str:
    """Return the message that `what` raised `error`, with the line of user code that raised it."""
    return f"{what} raised {describe_error(error)}"


def bad_result(message: str) -> EnvFailure:
    """Return the failure of user code that returned an invalid value."""
    return EnvFailure(message, kind="env_bad_result")


def mark_failed(sample: Sample, failure: Failure) -> Sample:
    """Record `failure` on the sample; keep its tokens so far."""
    sample.status = Status.FAILED
    sample.stop_reason = "context" if failure.blame is Blame.OVERFLOW else "aborted"
    sample.metadata["failure"] = {"blame": failure.blame.value, "kind": failure.kind, "message": str(failure)}
    return sample


def trainable(sample: Sample) -> bool:
    """Return true if the sample of a failed trajectory has a loss mask that fits its tokens. User code may have been
    interrupted after it set the tokens and before it set the mask."""
    return bool(sample.response_length) and sample.loss_mask is not None and _whole(sample)


def _whole(sample: Sample) -> bool:
    try:
        sample.validate()
    except SampleError:
        return False
    return bool(sample.tokens)


def mask_out(sample: Sample) -> Sample:
    """Exclude the sample from training. It stays for statistics and baselines, with reward 0 if it has no reward. A
    sample without tokens, or with inconsistent lists, gets a single prompt token, because a train batch accepts
    neither. The sample of a hosted model gets none."""
    sample.remove_sample = True
    if not _whole(sample) and not sample.hosted:
        sample.set_prompt_tokens(sample.tokens[:1] or [0])
        sample.multimodal_train_inputs = None  # its images have no places in this token
    if sample.reward is None:
        sample.reward = 0.0
    return sample
