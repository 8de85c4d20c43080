"""The exception tree: the errors that a user can get.

Two families:

1. `AgentRLError` and its plain subclasses: the run cannot continue (settings, data, plug-ins, checkpoints).
2. `Failure`: one trajectory failed. The failure policy decides by its `blame` what follows."""

import errno
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


@dataclass(slots=True)
class TrajectoryPlace:
    """A trajectory, and the model's turn that it has reached."""

    group: int | None
    sample: int | None = None  # None for a whole group
    turn: int = 0

    def __str__(self) -> str:
        parts = (("group", self.group), ("sample", self.sample), ("turn", self.turn))
        return ", ".join(f"{name} {number}" for name, number in parts if number is not None)


DISTRIBUTION = "agentrl-sdk"  # name of this package for pip; the import name and the command are `agentrl`


def install(extra: str) -> str:
    """Return the command that installs one of the package's extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


SECRET = "<secret-not-kept>"  # the text that is printed and written in place of a secret
SECRET_WORDS = r"key|token|passw(?:or)?d|passphrase|secret|credentials?|auth(?:orization)?|bearer|sig(?:nature)?"
SECRET_NAME = re.compile(rf"(?:^|[_-]|(?<=[a-z0-9])(?=[A-Z]))(?i:api[_-]?k\w*|{SECRET_WORDS})$")
"""Names of values that are secrets, also in camelCase; `api_k...` covers misspelt API keys."""
_IN_TEXT = re.compile(rf"(://)[^/\s@]+(?=@)|([?&][\w-]*(?:{SECRET_WORDS})=)[^&\s]+|(\bBearer\s+)\S+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """Return `text` with `SECRET` in place of bearer tokens and of the passwords and keys in URLs."""
    return _IN_TEXT.sub(lambda found: (found[1] or found[2] or found[3]) + SECRET, text)


class AgentRLError(Exception):
    """Base of all errors raised on purpose. The message says what was expected, what came, and what to do.

    Attributes:
        place: the group, sample and turn of the error. If it is known, the message begins with it."""

    place: TrajectoryPlace | None = None

    def __str__(self) -> str:
        said = without_secrets(super().__str__())
        return said if self.place is None else f"{self.place}: {said}"


class SettingsError(AgentRLError):
    """A setting is unknown, of the wrong type, or contradicts another one."""

    parts: tuple[str, ...] = ()  # the problems of a message that lists several


class MediaError(AgentRLError):
    """An image is refused: too large, damaged, of another format, or at an address that is not read."""


class DataError(AgentRLError):
    """A data file is missing, empty or malformed. The message names the file, and if known the line and field."""


class PluginError(AgentRLError):
    """A user's object given by path (`pkg.mod:Name`, `path/file.py:Name`) could not be found, loaded or used."""


class SandboxUnavailable(AgentRLError):
    """No sandbox backend works as set on this machine, or the sandbox is not open. The message says what to do."""


class SampleError(AgentRLError, ValueError):
    """A sample's tokens, mask, log-probs and lengths disagree."""


class TemplateError(AgentRLError):
    """A chat template cannot render a conversation, or would rewrite history under policy `fail`."""


class CheckpointError(AgentRLError):
    """A checkpoint is missing, incomplete or belongs to another model."""


class LedgerError(AgentRLError):
    """The ledger refused a transition that would train a group twice or lose it."""


class TrainError(AgentRLError):
    """The training step cannot continue: impossible layout, non-finite loss, or a batch that does not fit."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested exception groups, in order; the error itself if it is not a group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def first_error(error: BaseException) -> BaseException:
    """Return the first error inside nested exception groups; the error itself if it is not a group."""
    return next(leaves(error))


@contextmanager
def ungrouped() -> Iterator[None]:
    """Re-raise a task group's failure as its first error, so that callers can catch the error by type."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise first_error(group) from None


@contextmanager
def raised_as(
    kind: Callable[[str], Exception], what: str, *errors: type[BaseException], shown: str = ": {}", remedy: str = ""
) -> Iterator[None]:
    """Raise these errors of a block as `kind`, with the message `what: the error; remedy`. `shown` is the error's part of
    the message, as a format: `": {.strerror}"` has only the system's reason, `""` nothing."""
    try:
        yield
    except errors as error:
        raise kind(f"{what}{shown.format(error)}{remedy and f'; {remedy}'}") from error


def disk_trouble(error: BaseException) -> str | None:
    """Return a message if the disk caused `error` (full, over quota, read-only, not permitted); else None."""
    if not isinstance(error, OSError) or error.errno not in _DISK:
        # Libraries in other languages raise types of their own. Only the system's message of a full disk is common.
        full = os.strerror(errno.ENOSPC)
        return f"{error}; {_DISK[errno.ENOSPC]}" if full in str(error) else None
    where = f"{error.filename}: " if error.filename is not None else ""
    return f"{where}{error.strerror}; {_DISK[error.errno]}"


_AGAIN = "then start the same command again (a run goes on from its newest checkpoint)"
_DISK = {
    errno.ENOSPC: f"free some space, {_AGAIN}",
    errno.EDQUOT: f"free some of the quota, {_AGAIN}",
    **dict.fromkeys((errno.ENOTDIR, errno.ENAMETOOLONG), "choose another path"),
    errno.EROFS: "choose a folder on a disk that can be written",
    **dict.fromkeys((errno.EACCES, errno.EPERM), "choose a folder that you may write to, or change its permissions"),
}


class Blame(StrEnum):
    """The part that caused a failed trajectory."""

    MODEL = "model"
    """The model's output cannot be used: no answer, broken call, and the like."""
    TOOL = "tool"
    """A tool raised, hung or returned an invalid result, and the environment did not turn this into an observation."""
    ENV = "env"
    """The environment's or the custom generate function's own code raised or returned the wrong type."""
    GRADER = "grader"
    """The reward function raised, timed out or returned something that is not a finite number."""
    ENGINE = "engine"
    """The inference engine was unreachable, died, or refused the request."""
    TIMEOUT = "timeout"
    """The whole trajectory exceeded its deadline."""
    OVERFLOW = "overflow"
    """The conversation no longer fits into the model's context."""
    AGENT = "agent"
    """An agent program could not be started, or ended without a turn of the model."""


class Failure(AgentRLError):
    """One trajectory's failure: `blame` is the origin, `kind` is a short stable slug for metrics.

    The default of `kind` is the class's `default_kind`, or the blame's value if that is empty."""

    blame: Blame = Blame.ENV
    default_kind: str = ""

    def __init__(self, message: str, *, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind or self.default_kind or self.blame.value


class ModelFailure(Failure):
    blame = Blame.MODEL


class ToolFailure(Failure):
    blame = Blame.TOOL


class SandboxBusy(ToolFailure):
    """A run waited longer than `queue_seconds` for its turn and was not started."""

    default_kind = "sandbox_busy"


class SandboxFailure(ToolFailure):
    """The sandbox itself failed during a run: its process ended or sent an invalid answer. The run may be retried."""

    default_kind = "sandbox_failure"


class SandboxInput(AgentRLError, ValueError):
    """A text cannot be a program's standard input. The message says why, and what to do."""


class EnvFailure(Failure):
    blame = Blame.ENV


class GraderFailure(Failure):
    blame = Blame.GRADER


class TrajectoryTimeout(Failure):
    blame = Blame.TIMEOUT


class ContextOverflow(Failure):
    blame = Blame.OVERFLOW


class AgentFailure(Failure):
    blame = Blame.AGENT


class EngineFailure(Failure):
    """Base of the errors that the engine client raises."""

    blame = Blame.ENGINE


class EngineUnreachable(EngineFailure):
    """No answer at all: connection refused, reset or lost before a response."""


class EngineTimeout(EngineFailure):
    """The engine did not answer within the request's deadline."""


class EngineRejected(EngineFailure):
    """The engine answered with an error status: `status` and the server's own message are kept."""

    def __init__(self, message: str, *, status: int = 0, kind: str | None = None) -> None:
        super().__init__(message, kind=kind)
        self.status = status
