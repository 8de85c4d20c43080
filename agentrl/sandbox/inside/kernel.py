"""The few system calls that the standard library does not wrap, by ctypes. A failure is an `OSError` naming the call."""

import ctypes
import os
import stat
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x00020000, 0x10000000, 0x20000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, _MS_REMOUNT, _MS_BIND = 1, 2, 4, 8, 32, 4096
_PRCTLS = {"SET_PDEATHSIG": 1, "SET_DUMPABLE": 4, "SET_CHILD_SUBREAPER": 36, "SET_NO_NEW_PRIVS": 38}
_PR_SET_SECCOMP, _PR_CAPBSET_DROP, _PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 22, 24, 47, 4
_SECCOMP_MODE_FILTER = 2
_SYS_CAPSET = {"x86_64": 126, "aarch64": 91}
_SYS_LANDLOCK_CREATE, _SYS_LANDLOCK_ADD, _SYS_LANDLOCK_RESTRICT = 444, 445, 446
_SYS_PIDFD_OPEN = 434
_CAPABILITY_VERSION_3 = 0x20080522

LANDLOCK_WRITE_FILE, LANDLOCK_READ_FILE, LANDLOCK_READ_DIR = 1 << 1, 1 << 2, 1 << 3


def unshare(flags: int) -> None:
    _checked("unshare", _LIBC.unshare(ctypes.c_int(flags)))


def mount_tmpfs(target: str, options: str, flags: int) -> None:
    """Mount an empty file system over a folder."""
    _checked(f"mount {target}", _LIBC.mount(b"tmpfs", target.encode(), b"tmpfs", flags, options.encode()))


def bind(source: str, target: str) -> None:
    """Bind-mount `source` at `target`; a read-only source stays read-only."""
    _checked(f"bind {target}", _LIBC.mount(source.encode(), target.encode(), None, _MS_BIND, None))


def make_read_only(target: str, flags: int) -> None:
    """Remount the file system at `target`, which was mounted with `flags`, read-only."""
    flags |= _MS_REMOUNT | _MS_BIND | MS_RDONLY
    _checked(f"remount {target}", _LIBC.mount(None, target.encode(), None, flags, None))


def process_descriptor(pid: int) -> int:
    """Return a descriptor that becomes readable when the process ends; some builds of Python lack `os.pidfd_open`."""
    return _checked("pidfd_open", _LIBC.syscall(ctypes.c_long(_SYS_PIDFD_OPEN), pid, 0))


def prctl(what: str, value: int) -> None:
    """Set a property (of `_PRCTLS`). A change of user clears SET_PDEATHSIG. A filter needs SET_NO_NEW_PRIVS first."""
    _checked(f"PR_{what}", _LIBC.prctl(_PRCTLS[what], ctypes.c_ulong(value), 0, 0, 0))


def drop_capabilities(machine: str) -> None:
    """Drop all capabilities, also capabilities that an exec could restore."""
    for capability in range(64):
        if _LIBC.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0) != 0:
            break  # past the last capability, or the process holds none that it could drop
    _LIBC.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = ctypes.create_string_buffer(struct.pack("=Ii", _CAPABILITY_VERSION_3, 0))
    data = ctypes.create_string_buffer(struct.pack("=6I", 0, 0, 0, 0, 0, 0))
    _checked("capset", _LIBC.syscall(ctypes.c_long(_SYS_CAPSET[machine]), header, data))


def filter_calls(program: bytes) -> None:
    """Install a seccomp filter for this process and all its children."""
    code = ctypes.create_string_buffer(program, len(program))
    fprog = struct.pack("@HP", len(program) // 8, ctypes.addressof(code))
    buffer = ctypes.create_string_buffer(fprog, len(fprog))
    _checked("seccomp", _LIBC.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, buffer, 0, 0))


def restrict_files(rules: dict[str, int]) -> None:
    """Allow this process the file access in `rules` (path -> LANDLOCK_ bits) and no other. If the kernel can, it
    forbids TCP, signals to others and abstract sockets too. Missing paths are left out. Needs SET_NO_NEW_PRIVS."""
    abi = _checked("landlock", _LIBC.syscall(ctypes.c_long(_SYS_LANDLOCK_CREATE), None, ctypes.c_size_t(0), 1))
    files = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(abi, 16)) - 1
    attributes = struct.pack("=QQQ", files, 3, 3)[: 24 if abi >= 6 else 16 if abi >= 4 else 8]
    buffer = ctypes.create_string_buffer(attributes, len(attributes))
    made = _LIBC.syscall(ctypes.c_long(_SYS_LANDLOCK_CREATE), buffer, ctypes.c_size_t(len(attributes)), 0)
    ruleset = _checked("landlock_create_ruleset", made)
    for path, access in rules.items():
        try:
            handle = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        if not stat.S_ISDIR(os.fstat(handle).st_mode):
            access &= ~LANDLOCK_READ_DIR
        beneath = ctypes.create_string_buffer(struct.pack("=Qi", access & files, handle), 12)
        result = _LIBC.syscall(ctypes.c_long(_SYS_LANDLOCK_ADD), ruleset, 1, beneath, 0)
        os.close(handle)
        _checked(f"landlock_add_rule {path}", result)
    _checked("landlock_restrict_self", _LIBC.syscall(ctypes.c_long(_SYS_LANDLOCK_RESTRICT), ruleset, 0))
    os.close(ruleset)


def _checked(what: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result
