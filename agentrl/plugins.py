"""Loads a user's object by path: `pkg.mod:Name`, `pkg.mod.Name` or `path/file.py:Name`. A bare `path/file.py` is
accepted if the caller has default names. Errors give the missing name, its module, and the names in the module."""

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
    """Support for another trainer's interfaces. `agentrl.compat` implements it; an installation may lack that package.

    found = compat()
    hooks = RolloutHooks() if found is None else found.rollout_hooks(args)"""

    def install(self) -> None:
        """Make the trainer's module names importable. Called before a user's file is loaded."""

    def adapt(self, found: Any, what: str) -> Any:
        """Return `found`, converted to our form if it has the other trainer's. `what`: the setting that named it."""

    def is_foreign(self, path: str, flag: str) -> bool:
        """Return true if `path` names a function of training in the other trainer's form."""

    def flags(self) -> Any:
        """Return the settings of other trainers, a `config.compat_interface.CompatInterface`."""

    def read(self, document: Mapping[str, Any]) -> Any:
        """Return the settings in another trainer's settings file (`config.files.Said`); None for other files."""

    def rollout_hooks(self, args: Any) -> Any:
        """Return the `rollout.hooks.RolloutHooks` that a run's args name."""

    def train_hooks(self, args: Any) -> Any:
        """Return the `train.hooks.TrainHooks` that a run's args name."""

    def check_hook(self, name: str, path: str | None, settings: Any) -> str:
        """Call a hook as the run would, and return the finding."""


def compat() -> Compat | None:
    """Return the compatibility layer; None if the installation lacks it."""
    found: Compat | None = optional("agentrl.compat:COMPAT")
    return found


def load_object(path: str, *, what: str, default_names: tuple[str, ...] = ()) -> Any:
    """Load the object that `path` names (`find_object`), and convert an object of another trainer's form (`Compat`)."""
    if (foreign := compat()) is None:
        return find_object(path, what=what, default_names=default_names)
    foreign.install()
    return foreign.adapt(find_object(path, what=what, default_names=default_names), what)


def find_object(path: str, *, what: str, default_names: tuple[str, ...] = ()) -> Any:
    """Return the object that `path` names, unchanged. Raises PluginError: the module or file is missing, fails to
    import, or has no such name.

    Args:
        path: `pkg.mod:Name`, `pkg.mod.Name`, `path/file.py:Name`, or with `default_names` a bare `path/file.py`.
        what: the setting that gives the path (`--env`), for errors.
        default_names: names to try if the path has no name."""
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
    """Return the object `pkg.mod:Name` of one of our packages; None if the installation lacks the package. The caller
    annotates the result with a protocol. The package asserts for the type checker that the object has this protocol."""
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
    except (Exception, SystemExit) as error:  # a script ends at its import, or reads our command line
        del sys.modules[name]
        raise PluginError(f"{what}: {file} failed to import: {describe_error(error)}") from error
    finally:
        sys.path.remove(str(file.parent))
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # last, for imports that functions of the file make when they are called
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
    except (Exception, SystemExit) as error:
        raise PluginError(f"{what}: {source} failed to import: {describe_error(error)}") from error


def is_async(function: Any) -> bool:
    """Return true for a coroutine function, and for an object whose `__call__` is one."""
    return any(map(inspect.iscoroutinefunction, (function, getattr(function, "__call__", None))))  # noqa: B004


def describe_error(error: BaseException) -> str:
    """Return the error's text and the user's line that raised it. The text of a syntax error has its own line."""
    return f"{type(error).__name__}: {error}{'' if isinstance(error, SyntaxError) else raised_at(error)}"


@contextmanager
def user_code(what: str, *known: type[Exception]) -> Iterator[None]:
    """Raise errors of the code inside, except our own and `known` ones, as a `PluginError` that begins with `what`."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, (AgentRLError, *known)) or must_propagate(error):
            raise
        raise PluginError(f"{what} raised {describe_error(error)}") from error


def must_propagate(error: BaseException) -> bool:
    """Return true if `error` must end the caller: the caller's task is cancelled, or Ctrl-C came outside an event loop
    (a loop handles Ctrl-C itself). All other errors count as the user's. These include `SystemExit` and a
    `CancelledError` that user code raised, since both would end the event loop silently."""
    try:
        task = asyncio.current_task()
    except RuntimeError:
        return isinstance(error, KeyboardInterrupt)
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


def positional(function: Callable[..., Any]) -> list[inspect.Parameter]:
    """Return the parameters that a call may pass by position. Raises ValueError: Python does not know the signature."""
    parameters = inspect.signature(function).parameters.values()
    return [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


_OTHERS = tuple(f"{Path(folder)}{os.sep}" for folder in {*map(sysconfig.get_path, ("stdlib", "purelib", "platlib"))})
_OURS = f"{Path(__file__).parent}{os.sep}"


def raised_at(error: BaseException) -> str:
    """Return the innermost line outside our code and libraries, or else the innermost, as ` at FILE:LINE in NAME`."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith((*_OTHERS, _OURS, "<"))]
    return "".join(f" at {frame.filename}:{frame.lineno} in {frame.name}" for frame in (own or frames)[-1:])


def defined_at(value: Any) -> str:
    """Return `FILE:LINE` of a function, of an object's `__call__`, or of a partial's function; else the repr."""
    value = inspect.unwrap(getattr(value, "func", value))
    code = getattr(value if hasattr(value, "__code__") else type(value).__call__, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else f"{value!r:.80}"
