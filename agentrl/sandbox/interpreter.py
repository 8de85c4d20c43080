"""The Python that runs in the sandbox, and the files that it needs. The caller's own environment is taken if the
sandbox's user can read it. A process of root runs the code as an unprivileged user, and that one cannot read, for
example, what lies under /root; then a system Python of the same version serves, with the environment's packages if
those are readable, and `Interpreter.note` says so."""

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import NamedTuple

from agentrl.errors import SandboxUnavailable

_ASK = (
    "import sys, sysconfig; print(sys.version_info[0], sys.version_info[1], sys.base_prefix, "
    "sysconfig.get_path('stdlib'), sysconfig.get_path('platstdlib'), sep='\\n')"
)
_SYSTEM_LIBRARIES = ("/lib", "/lib64", "/lib32", "/usr/lib", "/usr/lib64", "/etc/ld.so.cache", "/usr/share/zoneinfo")


class Interpreter(NamedTuple):
    """A Python for the sandbox."""

    executable: str  # the interpreter, symbolic links resolved
    readable: tuple[str, ...]  # files and folders that it needs: its standard library, shared libraries, packages
    site: tuple[str, ...]  # folders with packages, for `sys.path`
    note: str = ""  # why it is not the caller's own, or ""


def find_interpreter(*, by_others: bool) -> Interpreter:
    """The Python to use. `by_others`: whether another user than the caller's must be able to read it. Raises
    SandboxUnavailable: there is none that could be read."""
    known = [sysconfig.get_path("purelib"), sysconfig.get_path("platlib")]
    named = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    site = tuple(path for path in dict.fromkeys(known + named) if os.path.isdir(path) and _readable(path, by_others))
    own = os.path.realpath(getattr(sys, "_base_executable", None) or sys.executable)
    stdlib = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")]
    if all(_readable(path, by_others) for path in (own, *stdlib)):
        return Interpreter(own, _files(own, sys.base_prefix, stdlib, site), site)
    tried = [own]
    version = f"{sys.version_info[0]}.{sys.version_info[1]}"
    for name in (f"python{version}", "python3"):
        found = shutil.which(name, path="/usr/bin:/usr/local/bin:/bin")
        if found is None or not _readable(executable := os.path.realpath(found), by_others):
            continue
        tried.append(executable)
        answer = subprocess.run([executable, "-I", "-S", "-c", _ASK], capture_output=True, text=True, timeout=20)
        lines = answer.stdout.splitlines()
        if answer.returncode != 0 or len(lines) != 5 or not all(_readable(path, by_others) for path in lines[3:]):
            continue
        same = (lines[0], lines[1]) == tuple(version.split("."))
        kept = site if same else ()
        note = f"the sandbox's user cannot read {own}, so {executable} runs the code"
        note += "" if same else f"; it is Python {lines[0]}.{lines[1]}, so packages of {version} are not there"
        return Interpreter(executable, _files(executable, lines[2], lines[3:], kept), kept, note)
    remedy = "install a system python3, or run as an ordinary user from an environment outside /root"
    raise SandboxUnavailable(f"no Python that the sandbox's user can read (looked at {', '.join(tried)}); {remedy}")


def _files(executable: str, prefix: str, stdlib: list[str], site: tuple[str, ...]) -> tuple[str, ...]:
    prefixes = () if prefix in ("/", "/usr") else (prefix, os.path.realpath(prefix))
    libraries = [f"{folder}/{name}" for folder in prefixes for name in ("lib", "lib64")]
    wanted = [executable, *libraries, *stdlib, *site, *_SYSTEM_LIBRARIES]
    found = [path for path in dict.fromkeys(wanted) if os.path.exists(path)]
    # A folder inside another one that is there already adds nothing.
    return tuple(path for path in found if not any(path.startswith(f"{other}/") for other in found))


def _readable(path: str, by_others: bool) -> bool:
    """Return true if the caller, or with `by_others` any user, can reach and read `path`."""
    if not by_others:
        return os.access(path, os.R_OK)
    try:
        real = Path(path).resolve(strict=True)
        return all(os.stat(part).st_mode & 0o001 for part in real.parents) and bool(os.stat(real).st_mode & 0o004)
    except OSError:
        return False
