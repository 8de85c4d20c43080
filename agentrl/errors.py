"""The exception tree: every error a user can meet, in one place, with the sentence they need.

Two families:

1. `AgentRLError` and its plain subclasses: the run cannot go on as asked (settings, data, plug-ins, checkpoints).
2. `Failure`: one trajectory went wrong. It says who is to blame, so that a policy table can decide what follows."""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum


@dataclass(slots=True)
class TrajectoryPlace:
    """The trajectory, and the model's turn that it has come to."""

    group: int | None
    sample: int | None = None  # None for a whole group
    turn: int = 0

    def __str__(self) -> str:
        parts = (("group", self.group), ("sample", self.sample), ("turn", self.turn))
        return ", ".join(f"{name} {number}" for name, number in parts if number is not None)


DISTRIBUTION = "agentrl-sdk"  # name that pip installs this package by; the import name and the command are `agentrl`


def install(extra: str) -> str:
    """Return the command that installs one of the package's extras."""
    return f"pip install '{DISTRIBUTION}[{extra}]'"


SECRET = "<secret-not-kept>"  # the text that is printed and written in place of a secret
SECRET_WORDS = r"key|token|passw(?:or)?d|passphrase|secret|credentials?|auth(?:orization)?|bearer|sig(?:nature)?"
SECRET_NAME = re.compile(rf"(?:^|[_-]|(?<=[a-z0-9])(?=[A-Z]))(?i:api[_-]?k\w*|{SECRET_WORDS})$")
"""Names of values that are secrets, also in camelCase; `api_k...` covers misspelt API keys."""
_IN_TEXT = re.compile(rf"(://)[^/\s@]+(?=@)|([?&][\w-]*(?:{SECRET_WORDS})=)[^&\s]+|(\bBearer\s+)\S+", re.IGNORECASE)


def without_secrets(text: str) -> str:
    """`text` without the passwords and keys of the URLs in it, and without bearer tokens."""
    return _IN_TEXT.sub(lambda found: (found[1] or found[2] or found[3]) + SECRET, text)


class AgentRLError(Exception):
    """Base of all errors raised on purpose. The message says what was expected, what came, and what to do.

    Attributes:
        place: the group, sample and turn that it happened in; in front of the message where there is one."""

    place: TrajectoryPlace | None = None

    def __str__(self) -> str:
        said = without_secrets(super().__str__())
        return said if self.place is None else f"{self.place}: {said}"


class SettingsError(AgentRLError):
    """A setting is unknown, of the wrong type, or contradicts another one."""

    parts: tuple[str, ...] = ()  # the problems of a message that lists several


class MediaError(AgentRLError):
    """An image is refused: too large, damaged, of another format, or behind an address that is not read."""


class DataError(AgentRLError):
    """A data file is missing, empty or malformed; names the file, and the line and field where there is one."""


class PluginError(AgentRLError):
    """A user's object given by path (`pkg.mod:Name`, `path/file.py:Name`) could not be found, loaded or used."""


class SandboxUnavailable(AgentRLError):
    """No backend of the sandbox works as asked on this machine, or it is not open; names what is missing and what to do."""


class SampleError(AgentRLError, ValueError):
    """A sample's tokens, mask, log-probs and lengths disagree."""


class TemplateError(AgentRLError):
    """A chat template cannot render what was asked of it, or would rewrite history under policy `fail`."""


class CheckpointError(AgentRLError):
    """A checkpoint is missing, incomplete or belongs to another model."""


class LedgerError(AgentRLError):
    """The ledger refused a transition that would train a group twice or lose it."""


class TrainError(AgentRLError):
    """The training step cannot go on: impossible layout, non-finite loss, or a batch that does not fit."""


def leaves(error: BaseException) -> Iterator[BaseException]:
    """The errors inside nested exception groups, in order; the error itself if it is no group."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from leaves(inner)
    else:
        yield error


def first_error(error: BaseException) -> BaseException:
    """The first error inside nested exception groups; the error itself if it is no group."""
    return next(leaves(error))


@contextmanager
def ungrouped() -> Iterator[None]:
    """Let a task group's failure out as the first error in it: callers catch it by its own type."""
    try:
        yield
    except BaseExceptionGroup as group:
        raise first_error(group) from None


@contextmanager
def raised_as(kind: type[Exception], what: str, *errors: type[BaseException], remedy: str = "") -> Iterator[None]:
    """Raise these errors of a block as `kind`, with the message `what: the error; remedy`."""
    try:
        yield
    except errors as error:
        raise kind(f"{what}: {error}{remedy and f'; {remedy}'}") from error


def disk_trouble(error: BaseException) -> str | None:
    """One sentence if `error` is the disk's and not the program's: full, over quota, read-only, or not permitted."""
    if not isinstance(error, OSError) or error.errno not in _DISK:
        # Libraries in other languages have types of their own for it, and only the system's words in common.
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
    """A tool raised, hung or returned nonsense and the environment did not take it as an observation."""
    ENV = "env"
    """The environment's or the custom generate function's own code raised or returned the wrong type."""
    GRADER = "grader"
    """The reward function raised, timed out or returned something that is not a finite number."""
    ENGINE = "engine"
    """The inference engine was unreachable, died, or refused the request."""
    TIMEOUT = "timeout"
    """The whole trajectory outlived its deadline."""
    OVERFLOW = "overflow"
    """The conversation no longer fits into the model's context."""
    AGENT = "agent"
    """An agent program could not be started, or ended without a turn of the model."""


class Failure(AgentRLError):
    """One trajectory's failure: `blame` says whose fault, `kind` is a short stable slug for metrics.

    A class may have a `usual_kind`; without one it is the blame's name."""

    blame: Blame = Blame.ENV
    usual_kind: str = ""

    def __init__(self, message: str, *, kind: str | None = None) -> None:
        super().__init__(message)
        self.kind = kind or self.usual_kind or self.blame.value


class ModelFailure(Failure):
    blame = Blame.MODEL


class ToolFailure(Failure):
    blame = Blame.TOOL


class SandboxBusy(ToolFailure):
    """A run waited longer than `queue_seconds` for its turn and was not started."""

    usual_kind = "sandbox_busy"


class SandboxFailure(ToolFailure):
    """The sandbox itself broke during a run: its process ended or answered nonsense. The run may be tried again."""

    usual_kind = "sandbox_failure"


class SandboxInput(AgentRLError, ValueError):
    """A text that cannot be handed to a program as its standard input; says why and what to do."""


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
    """Base of what the engine client raises."""

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
