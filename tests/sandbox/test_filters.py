"""The system-call filter, run in a small BPF interpreter: both architectures are checked on either one."""

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.sandbox.inside import filters, frames
from agentrl.sandbox.inside.syscalls import BASE, CHECKED, OWN_VIEW

ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
ALLOW, KILL, EPERM, ENOSYS = "allow", "kill", 1, 38
PID = 4242


def verdict(machine: str, number: int, *args: int, own_view: bool = False, arch: int | None = None) -> str | int:
    """Return the kernel's verdict on a call."""
    program = filters.build(machine, own_view=own_view, pid=PID)
    given = [*args, *[0] * (6 - len(args))]
    data = struct.pack("=iIQ6Q", number, ARCH[machine] if arch is None else arch, 0, *given)
    instructions = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at = accumulator = 0
    while True:
        code, true, false, value = instructions[at]
        at += 1
        if code == 0x20:
            (accumulator,) = struct.unpack_from("=I", data, value)
        elif code == 0x54:
            accumulator &= value
        elif code == 0x06:
            low: int = value & 0xFFFF
            return {0x7FFF0000: ALLOW, 0x80000000: KILL}.get(value & 0xFFFF0000, low)
        else:
            holds = {0x15: accumulator == value, 0x35: accumulator >= value, 0x45: bool(accumulator & value)}[code]
            at += true if holds else false


machines = pytest.mark.parametrize("machine", ["x86_64", "aarch64"])


@machines
@pytest.mark.parametrize("own_view", [False, True])
def test_every_number_has_the_verdict_of_its_table(machine: str, own_view: bool) -> None:
    allowed = set(BASE[machine].values()) | (set(OWN_VIEW[machine].values()) if own_view else set())
    for number in range(700):
        if number not in CHECKED[machine].values():
            expected = ALLOW if number in allowed else EPERM if number <= 452 else ENOSYS
            assert verdict(machine, number, own_view=own_view) == expected, number


@machines
@settings(max_examples=30)
@given(st.integers(0, 2**31 - 1), st.lists(st.integers(0, 2**64 - 1), min_size=6, max_size=6), st.booleans())
def test_any_call_has_a_verdict(machine: str, number: int, args: list[int], own_view: bool) -> None:
    assert verdict(machine, number, *args, own_view=own_view) in (ALLOW, KILL, EPERM, ENOSYS)


@machines
def test_other_architectures_are_killed(machine: str) -> None:
    assert verdict(machine, 0, arch=0x40000003) == KILL
    assert verdict(machine, 0x40000000) == KILL


@machines
def test_arguments(machine: str) -> None:
    numbers = CHECKED[machine]

    def check(name: str, *args: int, own_view: bool = False) -> str | int:
        return verdict(machine, numbers[name], *args, own_view=own_view)

    thread = 0x3D0F00
    for flag in (0x10000000, 0x20000000, 0x00020000, 0x40000000, 0x80, 0x08000000, 0x04000000, 0x02000000):
        assert check("clone", flag | 17, own_view=True) == EPERM
        assert check("clone", flag | thread) == EPERM
    assert check("clone", 17, own_view=True) == ALLOW
    assert check("clone", 17) == EPERM
    assert check("clone", thread) == ALLOW
    assert check("clone3") == ENOSYS
    for name in ("kill", "tgkill"):
        assert check(name, PID, 9) == ALLOW
        assert [check(name, pid, 9) for pid in (1, PID + 1, 2**32 - 1, 0)] == [EPERM] * 4
        assert check(name, 1, 9, own_view=True) == ALLOW
    assert check("socketpair", 1, 1 | 0o2000000 | 0o4000) == ALLOW
    assert [check("socketpair", *pair) for pair in ((1, 2), (1, 5), (2, 1), (16, 3))] == [EPERM] * 4
    assert check("sendto", 0, 0, 0, 0, 0) == ALLOW
    assert check("sendto", 0, 0, 0, 0, 1) == EPERM
    assert check("sendto", 0, 0, 0, 0, 1 << 32) == EPERM
    assert check("sendto", 0, 0, 0, 0x4000, 0) == ALLOW
    assert check("sendto", 0, 0, 0, 0x4001, 0) == EPERM
    for pid in (0, PID):
        assert check("prlimit64", pid, 7, 0, 4096) == ALLOW
        assert check("prlimit64", pid, 7, 4096, 0) == EPERM
    assert check("prlimit64", PID + 1, 7, 0, 4096) == EPERM
    assert check("prlimit64", PID + 1, 7, 0, 4096, own_view=True) == ALLOW
    assert check("prlimit64", PID + 1, 7, 4096, 0, own_view=True) == EPERM
    assert check("ioctl", 0, 0x5401) == ALLOW
    assert [check("ioctl", 0, request) for request in (0x5412, 0x541C, 0x40086602)] == [EPERM] * 3
    assert [check("fcntl", 0, command) for command in (8, 10, 15, 1024, 1026, 1031)] == [EPERM] * 6
    assert [check("fcntl", 0, command) for command in (5, 36, 1030)] == [ALLOW] * 3
    assert [check("getsockopt", 3, 1, option) for option in (3, 4, 38)] == [ALLOW] * 3
    assert [check("getsockopt", 3, 1, option) for option in (17, 59, 77)] == [EPERM] * 3
    assert [check("prctl", option) for option in (1, 4, 22, 36, 38, 47)] == [EPERM] * 6


@machines
@pytest.mark.parametrize("own_view", [False, True])
def test_locks_are_granted_and_not_taken(machine: str, own_view: bool) -> None:
    numbers = CHECKED[machine]
    for command in (6, 7, 37, 38):
        assert verdict(machine, numbers["fcntl"], 3, command, own_view=own_view) == 0
    assert verdict(machine, numbers["flock"], 3, 2, own_view=own_view) == 0


@machines
def test_questions_about_others(machine: str) -> None:
    numbers = CHECKED[machine]
    for name in ("getpgid", "getsid", "sched_getaffinity", "sched_getparam", "sched_getscheduler", "getpriority"):
        for pid, expected in ((0, ALLOW), (PID, ALLOW), (PID + 1, ENOSYS), (2**32 - 1, ENOSYS)):
            args = (0, pid) if name == "getpriority" else (pid,)
            assert verdict(machine, numbers[name], *args) == expected
            assert verdict(machine, numbers[name], *args, own_view=True) == ALLOW
    for name in ("clock_gettime", "clock_getres", "clock_nanosleep", "timer_create"):
        for clock, expected in ((0, ALLOW), (11, ALLOW), (~PID << 3 | 2, EPERM), (12, EPERM)):
            assert verdict(machine, numbers[name], clock % 2**64) == expected
            assert verdict(machine, numbers[name], clock % 2**64, own_view=True) == ALLOW


@settings(max_examples=50)
@given(st.recursive(st.none() | st.integers() | st.text(), lambda inner: st.lists(inner), max_leaves=5), st.data())
def test_messages_survive_any_cut(value: object, data: st.DataObject) -> None:
    encoded = frames.encode({"value": value}) * 2
    decoder, seen = frames.FrameDecoder(), []
    while encoded:
        size = data.draw(st.integers(1, len(encoded)))
        decoder.feed(encoded[:size])
        encoded = encoded[size:]
        while (message := decoder.next()) is not None:
            seen.append(message)
    assert seen == [{"value": value}] * 2
