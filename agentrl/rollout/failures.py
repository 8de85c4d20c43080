"""Turning whatever goes wrong in one trajectory into a typed failure, and a failure into a marked sample.

User code is called through `guarded`: a deadline, and every exception it raises becomes a `Failure` that says
whose code it was, where it raised and why.
"""

import traceback
from collections.abc import Awaitable
from contextlib import nullcontext
from typing import TypeVar

import anyio

from agentrl.errors import AgentRLError, Failure, SampleError, first_error
from agentrl.sample import Sample, Status
from agentrl.tools.clock import work_clock

T = TypeVar("T")


async def guarded(
    call: Awaitable[T],
    *,
    what: str,
    timeout: float,
    failure: type[Failure],
    late: type[Failure] | None = None,
    work_only: bool = False,
) -> T:
    """Await `call` with a deadline; anything it raises comes out as `failure`.

    Args:
        call: the awaitable of user code.
        what: whose code it is, for the message (`SearchEnv.step`).
        timeout: seconds it may take.
        failure: the type that names who is to blame.
        late: the type for a missed deadline; default `failure`.
        work_only: the time that tools inside wait for a free place does not count.
    """
    try:
        with anyio.fail_after(timeout) as scope, work_clock(scope) if work_only else nullcontext():
            return await call
    except TimeoutError as error:
        if scope.cancelled_caught:
            late = late or failure
            raise late(f"{what} took longer than {timeout:g} s", kind=f"{late.blame}_timeout") from error
        raise failure(describe(what, error), kind=f"{failure.blame}_raised") from error
    except Exception as raised:  # noqa: BLE001 - user code may raise anything; all of it comes out typed
        first = first_error(raised)
        if isinstance(first, AgentRLError):
            raise first from None
        raise failure(describe(what, first), kind=f"{failure.blame}_raised") from first


def describe(what: str, error: BaseException) -> str:
    """`what` raised `error`, with the innermost line of the traceback."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}" if frames else ""
    return f"{what} raised {type(error).__name__}: {error}{where}"


def mark_failed(sample: Sample, failure: Failure) -> Sample:
    """Record `failure` on the sample; what it holds so far stays."""
    sample.status = Status.FAILED
    sample.metadata["failure"] = {"blame": failure.blame.value, "kind": failure.kind, "message": str(failure)}
    return sample


def trainable(sample: Sample) -> bool:
    """Whether what a failed trajectory left behind says which of its tokens the model wrote.

    User code may have been interrupted between tokens and mask: a mask that is missing or does not fit is no mask.
    """
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
    prompt token: a train batch has no place for none, nor for lists that disagree.
    """
    sample.remove_sample = True
    if not _whole(sample):
        sample.set_prompt_tokens(sample.tokens[:1] or [0])
    if sample.reward is None:
        sample.reward = 0.0
    return sample
