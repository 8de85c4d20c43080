"""Runs the forms of tests. Its code follows `standins`. pytest runs functions and classes (`unittest.TestCase` among
them), and `doctest` runs examples in docstrings."""

import ast
import asyncio
import collections
import contextlib
import doctest
import inspect
import json
import math
import os
import re
import sys
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agentrl.rm_hub.submissions.harness.standins import held, is_remote
from agentrl.rm_hub.submissions.harness.values import EMPTY

_OWN = re.compile(
    r"(?:unittest\.)?mock\.patch|monkeypatch|caplog|recwarn|capfd|tmp_path|tmpdir|(?:tempfile|subprocess)(?:\.\w+)?|"
    r"sys\.stdin|os\.environ|pytest\.warns|\w+\.assert(?:(?:No)?Logs|Warns\w*)"
)
"""Names of functions and fixtures that act on the tests' own process, logs or files."""
_PYTEST_OPTIONS = ["-x", "-s", "-c/dev/null", "--rootdir=/tmp", "-pno:cacheprovider", "-pno:terminal", "-pno:logging"]

numpy: Any = sys.modules.get("numpy")
pytest: Any = sys.modules.get("pytest")  # the sandbox preloads both; None if not installed
_pytest_main = pytest and pytest.main
_CLOSE = ("allclose", "isclose", "array_equiv")
_ASSERTED = [f"assert_{n}" for n in ("allclose", "almost_equal", "array_almost_equal", "array_equal", "array_less")]


class BadTests(Exception):
    """The tests cannot be used, whatever the submission is."""


def parse(text: str) -> ast.Module:
    """Parse a test. Text with examples that is not Python becomes a docstring. Raises BadTests: the test is neither, or
    uses something that the submission's process does not share."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError) as error:
        if ">>>" not in text:
            raise BadTests(f"the test is not valid Python: {error}") from error
        tree = ast.parse(repr(text))
    names = {name for node in ast.walk(tree) for name in _names_in(node)}
    if found := next(filter(_OWN.fullmatch, sorted(names)), None):
        raise BadTests(
            f"{found} does not reach the submission, which runs in a process of its own (as unittest.mock.patch, "
            "monkeypatch, files, logs and warnings do not); test arguments, results, exceptions and what is printed"
        )
    if "doctest.testmod" in names and ">>>" not in text:
        raise BadTests("doctests of the submission are its own to write; write the doctest into the tests")
    return tree


def _names_in(node: ast.AST) -> list[str]:
    """Return the names that a node imports, takes as an argument, or reads as an attribute of a name."""
    match node:
        case ast.Attribute(ast.Name(of) | ast.Attribute(attr=of), name):
            return [f"{of}.{name}"]
        case ast.Import(aliases):
            return [alias.name for alias in aliases]
        case ast.ImportFrom(module, aliases):
            return [f"{module}.{alias.name}" for alias in aliases]
        case ast.arg(name):
            return [name]
    return []


def prepare() -> None:
    """Disable `unittest.main()` and `pytest.main()` in tests: the tests run afterwards. Let comparisons of empty arrays
    with non-empty ones fail, because numpy broadcasts an empty array against any number."""
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    setattr(unittest, "main", lambda *_, **__: types.SimpleNamespace(result=unittest.TestResult()))  # noqa: B010
    if pytest is not None:
        pytest.main = lambda *_, **__: 0
    if numpy is not None and pytest is not None:
        near = type(pytest.approx(1.0))
        for place, names in ((numpy, _CLOSE), (numpy.testing, _ASSERTED), (near, ("__eq__",))):
            for name in names:
                setattr(place, name, _compared(getattr(place, name)))
        for name in ("array", "asarray", "asanyarray"):
            setattr(numpy, name, _made(getattr(numpy, name)))


def _compared(compare: Callable[..., Any]) -> Callable[..., Any]:
    def checked(got: Any, want: Any, *args: Any, **named: Any) -> Any:
        got, want = (numpy.asarray(side) if is_remote(side) else side for side in (got, want))
        if (numpy.size(got) == 0) != (numpy.size(want) == 0):
            raise AssertionError("one array is empty and the other is not")
        return compare(got, want, *args, **named)

    return checked


class EmptyArray(numpy.ndarray if numpy is not None else object):  # type: ignore[misc]
    """An empty array of the submission. An elementwise operation with a non-empty value raises an AssertionError."""

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **named: Any) -> Any:
        if ufunc.signature is None and any(map(numpy.size, inputs)):
            raise AssertionError("an empty array is compared with one that is not empty")
        bare = [side.view(numpy.ndarray) if isinstance(side, EmptyArray) else side for side in inputs]
        return _as_empty(getattr(ufunc, method)(*bare, **{name: named[name] for name in named.keys() - {"out"}}))

    def __array_function__(self, *asked: Any) -> Any:
        return _as_empty(super().__array_function__(*asked))


def _as_empty(value: Any) -> Any:
    return value.view(EmptyArray) if isinstance(value, numpy.ndarray) and not value.size else value


def _made(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that makes arrays: an empty value of the submission becomes an EmptyArray."""

    def made(source: Any, *args: Any, **named: Any) -> Any:
        array = make(source, *args, **named)
        return _as_empty(array) if id(source) in EMPTY or isinstance(source, EmptyArray) else array

    return made


def run_doctests(module: types.ModuleType) -> None:
    """Run the examples of a module's docstrings. Raises AssertionError: an example failed."""
    runner, report = doctest.DocTestRunner(verbose=False), list[str]()
    for examples in doctest.DocTestFinder().find(module, "tests"):
        runner.run(examples, out=report.append)
    if report:
        raise AssertionError("".join(report).strip("*\n"))


def run_functions(module: types.ModuleType, *, asked: bool) -> None:
    """Run the test functions and classes of a module; raise the error of the first failed test. Raises BadTests: pytest
    is not installed, or refuses tests that were made without the submission's answers (`asked` is false)."""
    if not any(map(_is_test, vars(module), vars(module).values())):
        return
    if pytest is None:
        raise BadTests("tests that are functions or classes need pytest, which is not installed: pip install pytest")
    code = _pytest_main(_PYTEST_OPTIONS, plugins=[plugin := _InMemory(module, asked)])
    if plugin.error is not None:
        raise plugin.error
    if code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise AssertionError(f"pytest ended with {code!s}")


def _is_test(name: str, value: Any) -> bool:
    if isinstance(value, type):
        return value.__module__ == "__main__" and (name.startswith("Test") or issubclass(value, unittest.TestCase))
    return name.startswith("test") and isinstance(value, types.FunctionType)


class _InMemory:
    """A pytest plugin: collects from one module, awaits async tests, and keeps the first error."""

    def __init__(self, module: types.ModuleType, asked: bool) -> None:
        self.module, self.asked = module, asked
        self.error: BaseException | None = None

    def pytest_collection(self, session: Any) -> bool:
        kind: Any = type("InMemory", (pytest.Module,), {"_getobj": lambda _: self.module})
        session.items = list(session.genitems(kind.from_parent(session, path=Path("/tmp/tests.py"))))
        session.testscollected = len(session.items)
        return True

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            refused = AssertionError if self.asked else BadTests
            self.error = refused(f"pytest, which runs no generator tests, refuses them: {report.longreprtext}")

    def pytest_pyfunc_call(self, pyfuncitem: Any) -> bool | None:
        if not inspect.iscoroutinefunction(pyfuncitem.obj):
            return None
        wanted = inspect.signature(pyfuncitem.obj).parameters.keys() & pyfuncitem.funcargs.keys()
        asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in wanted}))
        return True

    def pytest_exception_interact(self, call: Any) -> None:
        self.error = self.error or call.excinfo.value


def same_value(got: Any, want: Any) -> bool:
    """Compare a value of the submission with an expected JSON value. Tuples equal lists, and dict keys may be texts. An
    expected integer must be equal, an expected float within 1e-6 (as for outputs of programs). An expected list of one
    value also accepts that value, and a text its JSON value: some data sets wrap results, or write both "3" and 3."""
    wanted = [want]
    if isinstance(want, str):
        with contextlib.suppress(ValueError, RecursionError):
            wanted.append(json.loads(want))
    wanted += [one[0] for one in wanted if isinstance(one, list) and len(one) == 1]
    return any(_agrees(got, one) for one in wanted)


def _agrees(got: Any, want: Any) -> bool:
    got = held(got).plain if is_remote(got) else got.tolist() if hasattr(got, "tolist") else got
    if isinstance(want, dict) and isinstance(got, dict):
        mine, theirs = ({key if isinstance(key, str) else repr(key): side[key] for key in side} for side in (got, want))
        return mine.keys() == theirs.keys() and all(_agrees(mine[key], theirs[key]) for key in theirs)
    if isinstance(want, list):
        got = sorted(got, key=repr) if isinstance(got, set | frozenset) else got
        sequence = isinstance(got, list | tuple | collections.deque)
        return sequence and len(got) == len(want) and all(map(_agrees, got, want))
    if isinstance(want, float) and type(got) in (int, float):
        return math.isclose(got, want, rel_tol=1e-6, abs_tol=1e-6) if abs(got) < 1e308 else bool(got == want)
    return (type(got) is type(want) or (type(want) is int and type(got) is float)) and bool(got == want)
