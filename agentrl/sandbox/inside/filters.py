"""The system-call filter (seccomp BPF): calls that are not listed are refused.

1. An unlisted call fails with EPERM, an unknown number with ENOSYS. A call by another architecture's table is fatal.
2. With `own_view` (namespaces) a process may fork, execute and write files. Without it: no fork, no exec, no file
   changes, no signals to others, no queries about others.
3. The only sockets are connected pairs of Unix streams, which carry only bytes.
4. A file lock is granted and does nothing, because a real lock would be visible to others."""

import struct
from collections.abc import Sequence
from typing import NamedTuple

from agentrl.sandbox.inside.syscalls import BASE, CHECKED, OWN_VIEW

_LD, _JEQ, _JGE, _JSET, _AND, _RET = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_NR, _ARCH, _ARGS = 0, 4, 16
_X32 = 0x40000000
_CLONE_NEW = 0x7E020080  # NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET
_CLONE_THREAD = 0x00010000
# FIONREAD, FIONBIO, FIOCLEX, FIONCLEX, TCGETS, TIOCGWINSZ: libraries use these on pipes and files.
_IOCTLS = (0x541B, 0x5421, 0x5451, 0x5450, 0x5401, 0x5413)
# dup, flags, queries of locks; none that sends signals (SETOWN, SETSIG, SETLEASE, NOTIFY). A pipe's size can only be
# read, because a user's pipes share their memory.
_FCNTLS = (0, 1, 2, 3, 4, 5, 36, 1030, 1032)
_LOCKS = (6, 7, 37, 38)  # SETLK, SETLKW, OFD_SETLK, OFD_SETLKW
# PR_GET_NAME, PR_SET_NAME and PR_SET_VMA (malloc names its arenas).
_PRCTLS = (16, 15, 0x53564D41)
_AF_UNIX, _SOCK_STREAM, _MSG_OOB = 1, 1, 1
# SO_TYPE, SO_ERROR, SO_SNDBUF, SO_RCVBUF, SO_PROTOCOL, SO_DOMAIN.
_SOCKET_OPTIONS = (3, 4, 7, 8, 38, 39)
_CLOCKS = 12  # unsigned numbers from here on are clocks of other processes and of devices
_ABOUT_A_CLOCK = ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create")
_ABOUT_A_PROCESS = ("getpgid", "getsid", "sched_getaffinity", "sched_getparam", "sched_getscheduler")


class Ins(NamedTuple):
    """One BPF instruction; jumps count instructions to skip."""

    code: int
    true: int
    false: int
    value: int


_ALLOWED, _REFUSED = Ins(_RET, 0, 0, _ALLOW), Ins(_RET, 0, 0, _ERRNO | _EPERM)
_KILLED, _UNKNOWN = Ins(_RET, 0, 0, _KILL), Ins(_RET, 0, 0, _ERRNO | _ENOSYS)
_IGNORED = Ins(_RET, 0, 0, _ERRNO)  # the call does nothing and returns 0


def build(machine: str, *, own_view: bool, pid: int) -> bytes:
    """Return the filter program for `machine` ("x86_64" or "aarch64"), as an array of `struct sock_filter`. `own_view`:
    see the module's docstring. `pid`: the filtered process's own id; without `own_view` it may signal no other process.
    Raises KeyError: there is no table for the machine."""
    allowed = dict(BASE[machine]) | (OWN_VIEW[machine] if own_view else {})
    checked = CHECKED[machine]
    newest = max(*allowed.values(), *checked.values(), *OWN_VIEW[machine].values())
    program = [_load(_ARCH), Ins(_JEQ, 1, 0, _AUDIT_ARCH[machine]), _KILLED]
    program += [_load(_NR), Ins(_JGE, 0, 1, _X32), _KILLED, Ins(_JGE, 0, 1, newest + 1), _UNKNOWN]
    for number in sorted(allowed.values()):
        program += [Ins(_JEQ, 0, 1, number), _ALLOWED]
    for name, check in _conditions(own_view, pid).items():
        program += [Ins(_JEQ, 0, len(check), checked[name]), *check]
    program.append(_REFUSED)
    return b"".join(struct.pack("=HBBI", *ins) for ins in program)


def _conditions(own_view: bool, pid: int) -> dict[str, list[Ins]]:
    """Return, for each checked call, the instructions that end in a verdict."""
    own, thread = (0, pid), [Ins(_JSET, 0, 1, _CLONE_THREAD), _ALLOWED, _REFUSED]
    # SOCK_NONBLOCK and SOCK_CLOEXEC are above the type's low byte. A datagram pair could address other sockets.
    stream = [_load_arg(1), Ins(_AND, 0, 0, 0xFF), Ins(_JEQ, 0, 1, _SOCK_STREAM), _ALLOWED, _REFUSED]
    locks = [ins for lock in _LOCKS for ins in (Ins(_JEQ, 0, 1, lock), _IGNORED)]
    conditions = {
        "clone3": [_UNKNOWN],  # its flags are behind a pointer; libraries fall back to clone
        "clone": [_load_arg(0), Ins(_JSET, 0, 1, _CLONE_NEW), _REFUSED, *([_ALLOWED] if own_view else thread)],
        "socketpair": [*_only(0, (_AF_UNIX,)), *stream],
        "sendto": [_load_arg(3), Ins(_JSET, 0, 1, _MSG_OOB), _REFUSED, *_zero(4)],
        "prlimit64": [*([] if own_view else _only(0, own)), *_zero(2)],  # reading limits, not setting them
        "ioctl": _one_of(1, _IOCTLS),
        "getsockopt": _one_of(2, _SOCKET_OPTIONS),
        "prctl": _one_of(0, _PRCTLS),
        "fcntl": [_load_arg(1), *locks, *_one_of(1, _FCNTLS)],
        "flock": [_IGNORED],
    }
    clock = [_load_arg(0), Ins(_JGE, 0, 1, _CLOCKS), _REFUSED]
    about_others = {
        "kill": _only(0, (pid,)),
        "tgkill": _only(0, (pid,)),
        "tkill": [_REFUSED],
        "getpriority": _only(1, own, _UNKNOWN),
        # Unknown, not refused: a library whose thread queries itself continues without an answer.
        **{name: _only(0, own, _UNKNOWN) for name in _ABOUT_A_PROCESS},
        **{name: clock for name in _ABOUT_A_CLOCK},
    }
    return conditions | {name: [*([] if own_view else check), _ALLOWED] for name, check in about_others.items()}


def _one_of(arg: int, values: Sequence[int]) -> list[Ins]:
    return [*_only(arg, values), _ALLOWED]


def _only(arg: int, values: Sequence[int], otherwise: Ins = _REFUSED) -> list[Ins]:
    """Return instructions that fall through if the argument is one of the values, and else end with `otherwise`."""
    found = [Ins(_JEQ, len(values) - index, 0, value) for index, value in enumerate(values)]
    return [_load_arg(arg), *found, otherwise]


def _zero(arg: int) -> list[Ins]:
    """Return instructions that allow the call if a 64-bit argument is 0."""
    must_be_zero = (Ins(_JEQ, 1, 0, 0), _REFUSED)
    return [_load_arg(arg), *must_be_zero, _load(_ARGS + 8 * arg + 4), *must_be_zero, _ALLOWED]


def _load(offset: int) -> Ins:
    return Ins(_LD, 0, 0, offset)


def _load_arg(arg: int) -> Ins:
    """Return the load of the low half of an argument (both machines are little-endian)."""
    return _load(_ARGS + 8 * arg)
