"""Loading a user's object by path: `pkg.mod:Name`, `pkg.mod.Name` or `path/file.py:Name`. A bare `path/file.py` is
accepted where the caller gives the name to look for. Errors say what was looked for, where, and what is there
instead."""

import asyncio
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from agentrl.errors import AgentRLError, PluginError


class Compat(Protocol):
    """All that another trainer's forms add to the core. `agentrl.compat` implements it; an installation may lack it.

    found = compat()
    hooks = RolloutHooks() if found is None else found.rollout_hooks(args)"""

    def install(self) -> None:
        """Let the trainer's module names resolve; called before a user's file is loaded."""

    def adapt(self, found: Any, what: str) -> Any:
        """Returns `found` in our form if it has the other trainer's; `what` is the setting that named it."""

    def is_foreign(self, path: str, flag: str) -> bool:
        """Returns true if `path` names a function of training in the other trainer's form."""

    def flags(self) -> Any:
        """Returns the settings of other trainers, a `config.compat_interface.CompatInterface`."""

    def read(self, document: Mapping[str, Any]) -> Any:
        """Returns what a settings file of another trainer means (`config.files.Said`), or None if it is none."""

    def rollout_hooks(self, args: Any) -> Any:
        """Returns the `rollout.hooks.RolloutHooks` that a run's args name."""

    def train_hooks(self, args: Any) -> Any:
        """Returns the `train.hooks.TrainHooks` that a run's args name."""

    def check_hook(self, name: str, path: str | None, settings: Any) -> str:
        """Call a hook as the run would; returns what was found."""


def compat() -> Compat | None:
    """Returns the compatibility layer, if the installation has it."""
    found: Compat | None = optional("agentrl.compat:COMPAT")
    return found


def load_object(path: str, *, what: str, default_names: tuple[str, ...] = ()) -> Any:
    """Load the object that `path` names, as `find_object` does; one of another trainer's form is made to fit (`Compat`)."""
    if (foreign := compat()) is None:
        return find_object(path, what=what, default_names=default_names)
    foreign.install()
    return foreign.adapt(find_object(path, what=what, default_names=default_names), what)


def find_object(path: str, *, what: str, default_names: tuple[str, ...] = ()) -> Any:
    """The object that `path` names, as it is. Raises PluginError: the module or file is missing, fails to import, or has
    no such name.

    Args:
        path: `pkg.mod:Name`, `pkg.mod.Name`, `path/file.py:Name`, or with `default_names` a bare `path/file.py`.
        what: what the caller wants it for, in the words of the setting (`--env`).
        default_names: names to try when the path gives none."""
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


def optional(path: str) -> Any:
    """Return what `pkg.mod:Name` names in a package of ours; None if the installation lacks the package. The caller
    annotates the result with a protocol; the package asserts for the type checker that it fulfils the protocol."""
    source, _, name = path.partition(":")
    try:
        return getattr(importlib.import_module(source), name)
    except ModuleNotFoundError as error:
        if error.name is None or not source.startswith(error.name):
            raise
        return None


def _split(path: str, what: str, default_names: tuple[str, ...]) -> tuple[str, str]:
    bare_file = path.endswith(".py") and ":" not in path
    if bare_file and default_names:
        return path, ""
    source, _, name = path.rpartition(":" if ":" in path else ".")
    if source and name and not bare_file:
        return source, name
    raise PluginError(f"{what} {path!r}: expected 'package.module:Name' or 'path/file.py:Name'")


def _load_file(source: str, what: str) -> ModuleType:
    file = Path(source).expanduser().resolve()
    if not file.is_file():
        raise PluginError(f"{what} {source}: no such file (looked for {file})")
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
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # behind all others, for what its functions import when they are called
    return module


def _load_module(source: str, what: str) -> ModuleType:
    if (cwd := os.getcwd()) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        return importlib.import_module(source)
    except ModuleNotFoundError as error:
        if error.name is None or not (source == error.name or source.startswith(error.name + ".")):
            raise PluginError(f"{what}: {source} failed to import: {describe_error(error)}") from error
        said = f"{what}: no module {error.name!r} (looked in {cwd} and on the Python path)"
        remedy = "install the package, run from its folder, or give 'path/file.py:Name'"
        raise PluginError(f"{said}; {remedy}") from error
    except Exception as error:
        raise PluginError(f"{what}: {source} failed to import: {describe_error(error)}") from error


def describe_error(error: BaseException) -> str:
    """The error and the user's line that it came out of; a syntax error's text names its own."""
    return f"{type(error).__name__}: {error}{'' if isinstance(error, SyntaxError) else raised_at(error)}"


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Whatever the code inside raises, but for our own errors, is a `PluginError` that begins with `what`."""
    try:
        yield
    except AgentRLError:
        raise
    except BaseException as error:
        if stops_the_caller(error):
            raise
        raise PluginError(f"{what} raised {describe_error(error)}") from error


def stops_the_caller(error: BaseException) -> bool:
    """Tell the end of the caller, which user code must pass on, from an error that user code raised. The caller ends if
    its task is cancelled, or by Ctrl-C outside of an event loop, which handles Ctrl-C itself. All else is the user's,
    `SystemExit` and the user's own `CancelledError` included: they would end the event loop without a word."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return isinstance(error, KeyboardInterrupt)
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters that a call may fill by their place. Raises ValueError: Python does not know the signature."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


_OTHERS = tuple(f"{Path(folder)}{os.sep}" for folder in {*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
_OURS = f"{Path(__file__).parent}{os.sep}"


def raised_at(error: BaseException) -> str:
    """The innermost line that is neither ours nor a library's, where the traceback has one; as ` at FILE:LINE in NAME`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_OTHERS, _OURS, "<"))]
    return "".join(f" at {frame.filename}:{frame.lineno} in {frame.name}" for frame in (own or frames)[-1:])


def defined_at(value: Any) -> str:
    """`FILE:LINE` of a function, of an object's `__call__`, or of a partial's function; else what it is."""
    value = inspect.unwrap(getattr(value, "func", value))
    code = getattr(value if hasattr(value, "__code__") else type(value).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else f"{value!r:.80}"
