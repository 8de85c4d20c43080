"""Loading a user's object by path: `pkg.mod:Name`, `pkg.mod.Name` or `path/file.py:Name`.

A bare `path/file.py` is accepted where the caller gives the name to look for. Errors say what was looked for,
where, and what is there instead.
"""

import difflib
import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from agentrl.errors import PluginError


def load_object(path: str, *, what: str, default_names: tuple[str, ...] = ()) -> Any:
    """Load the object that `path` names.

    Args:
        path: `pkg.mod:Name`, `pkg.mod.Name`, `path/file.py:Name`, or with `default_names` a bare `path/file.py`.
        what: what the caller wants it for, in the words of the setting (`--env`).
        default_names: names to try when the path gives none.

    Raises:
        PluginError: the module or file is missing, fails to import, or has no such name.
    """
    source, name = _split(path, what, default_names)
    module = _load_file(source, what) if source.endswith(".py") else _load_module(source, what)
    names = (name,) if name else default_names
    for candidate in names:
        found: Any = module
        for part in candidate.split("."):
            found = getattr(found, part, None)
        if found is not None:
            return found
    public = sorted(n for n in vars(module) if not n.startswith("_"))
    close = difflib.get_close_matches(names[0], public, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else f"; it defines {', '.join(public) or 'nothing public'}"
    raise PluginError(f"{what} {path!r}: {source} has no {' or '.join(map(repr, names))}{hint}")


def _split(path: str, what: str, default_names: tuple[str, ...]) -> tuple[str, str]:
    if ":" in path:
        source, _, name = path.rpartition(":")
        if source and name:
            return source, name
    elif path.endswith(".py"):
        if default_names:
            return path, ""
    elif "." in path:
        source, _, name = path.rpartition(".")
        if source and name:
            return source, name
    raise PluginError(f"{what} {path!r}: expected 'package.module:Name' or 'path/file.py:Name'")


def _load_file(source: str, what: str) -> ModuleType:
    file = Path(source).expanduser().resolve()
    if not file.is_file():
        raise PluginError(f"{what}: no file {file} (looked from {os.getcwd()})")
    name = f"agentrl_plugin_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(file.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise PluginError(f"{what}: {file} failed to import: {describe_error(error)}") from error
    finally:
        sys.path.remove(str(file.parent))
    return module


def _load_module(source: str, what: str) -> ModuleType:
    if (cwd := os.getcwd()) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(error.name + ".")):
            raise PluginError(f"{what}: {source} failed to import: {describe_error(error)}") from error
        raise PluginError(
            f"{what}: no module {error.name!r} (looked in {cwd} and on the Python path); "
            "install the package, run from its folder, or give 'path/file.py:Name'"
        ) from error
    except Exception as error:
        raise PluginError(f"{what}: {source} failed to import: {describe_error(error)}") from error


def describe_error(error: Exception) -> str:
    """The error and the line that raised it; a syntax error's text names its own."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return said
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{said} at {frame.filename}:{frame.lineno}"
