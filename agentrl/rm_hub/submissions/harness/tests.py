"""Runs tests against stand-ins for the submission's objects. Its code follows `values`, `standins` and `forms`.

1. Tests run in a thread that waits for answers of the submission. `step` passes an answer and prints what follows:
   `{"ask": request}` or `{"result": [outcome, reason]}` (`passed`, `failed`, or `broken` with any submission).
2. Names of the submission are looked up like built-ins. They shadow neither built-ins, modules nor names of the tests.
3. Test code runs as `__main__`, then its `check(candidate)`, doctests, functions and classes. A test that passes
   without a request to the submission is broken."""

import ast
import builtins
import json
import linecache
import queue
import sys
import threading
import traceback
import types
from collections.abc import Sequence
from functools import partial
from typing import Any, NoReturn

from agentrl.rm_hub.submissions.harness.forms import BadTests, parse, prepare, run_doctests, run_functions, same_value
from agentrl.rm_hub.submissions.harness.standins import Held, Remote, held, is_remote
from agentrl.rm_hub.submissions.harness.values import NotPlain, decode, encode, encode_function

_MODULES = sys.stdlib_module_names | {"numpy", "np"}
_TELLING = (AssertionError, ImportError, UnicodeError, StopIteration, StopAsyncIteration)
"""Errors that mean a fault of the tests, or end their loops. Those of the submission get another type."""


class Abandoned(BaseException):
    """A test ends early. `Tests` keeps the reason, where test code cannot swallow it."""


class FromAnswer(Exception):
    """Marks exceptions that the submission raised."""


class Tests:
    """All tests of one submission: code as text, and calls as name, arguments and expected value."""

    def __init__(self, token: str, tests: Sequence[Any], entry: str | None) -> None:
        self.token, self.tests, self.entry = token, tests, entry
        self.used: set[str] = set()
        self._module = sys.modules["__main__"] = types.ModuleType("__main__")
        self._names, self._shown = vars(self._module), {**vars(builtins)}
        self._names.update(__file__="tests.py", __builtins__=self._shown)
        self._given: dict[str, Any] = {}
        self._asked = self._told = False
        """True if the test has sent a request; true if it got an answer that not every submission would give."""
        self._end: tuple[str, str] | None = None
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._encode = partial(encode, by_handle=self._by_handle)
        self._decode = partial(decode, from_handle=self._from_handle)
        prepare()
        threading.Thread(target=self._run, daemon=True).start()

    def step(self, text: str) -> None:
        """Pass an answer to the tests (before each test: the submission's names), and print the next message."""
        self._answers.put(json.loads(text))
        print(f"\n{self.token}{json.dumps(self._wanted.get())}", file=sys.__stdout__, flush=True)

    def ask(self, do: str, target: Remote, /, *args: Any, **named: Any) -> Any:
        """Send a request to the submission's side. Return the value, or raise the submission's exception."""
        mine, self._asked = held(target), True
        if self._end:
            raise Abandoned
        if mine.form == "class" and mine.given and mine.data[1][:1].isupper():
            self.used.add(mine.data[1])
        try:
            packed = [self._encode(item) for item in args], {name: self._encode(named[name]) for name in named}
        except NotPlain as error:
            # The tests are at fault if they would send this request to every submission.
            blamed = mine.given and (error.own or not self._told)
            self._abandon("broken" if blamed else "failed", f"the test cannot ask this of another process: {error}")
        self._wanted.put({"ask": {"do": do, "target": mine.data, "args": packed[0], "named": packed[1]}})
        if "abandon" in (answer := self._answers.get()):
            self._abandon("failed", answer["abandon"])
        raised: BaseException | None = None
        try:
            if sys.stdout is not sys.__stdout__:  # the test captures the output
                sys.stdout.write(answer.get("out", ""))
            if "raised" in answer:
                *kind, shown = answer["raised"]  # only `next` may end an iterator
                ended = do == "next" and kind[2] == "StopIteration"
                raised = StopIteration(*shown) if ended else self._exception_class(*kind)(*shown)
            else:
                value = self._decode(answer["value"])
                for at, data in answer["changed"]:
                    now = self._decode(data)
                    args[at].clear()
                    (args[at].update if isinstance(args[at], dict | set) else args[at].extend)(now)
        except Exception:  # noqa: BLE001 - the submission's process forged the answer
            self._abandon("failed", "the answer's code broke its process")
        given = mine.given and (do == "getattr" or (do == "call" and mine.data[1] in self.used))
        self._told = self._told or raised is not None or not (given and is_remote(value))
        if raised is not None:
            raise raised
        if is_remote(value):  # attributes of what every submission has, and objects of its classes
            held(value).given = given
        return value

    def _abandon(self, outcome: str, why: str) -> NoReturn:
        self._end = (outcome, why)
        raise Abandoned

    def _run(self) -> None:
        sys.setrecursionlimit(5000)
        for test in self.tests:
            self._end, outcome = None, ("passed", "")
            try:
                self._know(self._answers.get()["names"])
                self._call(*test) if isinstance(test, list) else self._execute(test)
            except BaseException as error:  # noqa: BLE001 - a test may raise anything; it then did not pass
                try:
                    outcome = _outcome(error)
                except BaseException:  # noqa: BLE001 - its text may ask the submission, which may end here
                    outcome = "failed", type(error).__name__
            self._wanted.put({"result": self._end or outcome})

    def _call(self, name: str, args: list[Any], want: Any) -> None:
        solution = self._given.get("Solution")
        got = (getattr(solution(), name) if solution is not None else self._given[name])(*args)
        if not same_value(got, want):
            raise AssertionError(f"returned {got!r:.80}, expected {want!r:.80}")

    def _execute(self, text: str) -> None:
        tree, before = parse(text), {**self._names}
        names = [node for node in ast.walk(tree) if isinstance(node, ast.Name)]
        reads = {name.id for name in names if isinstance(name.ctx, ast.Load)}
        functions = [node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
        idle = [name for name in functions if name not in reads and not name.startswith("test")]
        linecache.cache["tests.py"] = (len(text), None, text.splitlines(keepends=True), "tests.py")
        self._asked, self._told, self._names["__doc__"] = False, False, None
        try:
            exec(compile(tree, "tests.py", "exec"), self._names)
        except SystemExit as error:  # how a main program ends
            if error.code:
                raise
        if "check" in idle:
            mine = {name: held(value).form for name, value in self._given.items() if is_remote(value)}
            functions = [name for name, form in mine.items() if form == "callable"]
            entry = self.entry or ["a_function", *functions][-1]  # its text may be an expression: Solution().add
            self._names["check"](eval(entry, self._names))  # noqa: S307
        if ">>>" in text:
            run_doctests(self._module)
        defined = types.ModuleType("__main__")
        new = {k: v for k, v in self._names.items() if before.get(k, before) is not v and not is_remote(v)}
        vars(defined).update(new)
        run_functions(defined, asked=self._asked)
        if self._asked:
            return
        bound = {getattr(node, "arg", "") for node in ast.walk(tree)}
        needs = reads - bound - {name.id for name in names if not isinstance(name.ctx, ast.Load)}
        if missing := sorted(needs - self._names.keys() - self._shown.keys()):
            raise AssertionError(f"the answer does not define {', '.join(missing)}")
        # Data is passed by value, so reading its name counts as a request.
        read = [self._given[name] for name in needs & self._given.keys()]
        if idle or all(is_remote(value) or isinstance(value, types.ModuleType) for value in read):
            raise BadTests(f"the test asks the submission nothing; nothing calls {', '.join(idle) or 'its functions'}")

    def _know(self, names: dict[str, Any]) -> None:
        self._given = {name: self._decode(data) for name, data in names.items()}
        for name, value in self._given.items():
            if is_remote(value):  # a handle by name stays valid after a reload of the submission
                held(value).data, held(value).given = ["name", name], True
        # A name of the submission must not replace a built-in or a module.
        modules = {name for name, value in self._given.items() if isinstance(value, types.ModuleType)}
        hidden = vars(builtins).keys() | (_MODULES - modules)
        shown = {name: value for name, value in self._given.items() if name == self.entry or name not in hidden}
        self._shown.update(shown)
        solution = sys.modules["solution"] = sys.modules["main"] = types.ModuleType("solution")
        vars(solution).update(self._given, __all__=list(shown))

    def _by_handle(self, value: Any) -> Any:
        if is_remote(value):
            return held(value).data
        if isinstance(value, type) and "agentrl_handle" in vars(value):
            return ["x", vars(value)["agentrl_handle"]]
        return encode_function(value, self._names, self._given, self._encode)

    def _from_handle(self, data: list[Any]) -> Any:
        match data:
            case ["h", _, str(form), str(kind), plain]:
                value = self._decode(plain[1]) if plain else None
                return Remote(Held(self.ask, self.used, data[:2], form, kind, value))
            case ["x", int(handle), str(name), str(base)]:
                return self._exception_class(handle, name, base)
            case ["co", result]:
                return _ready(self._decode(result))
            case ["mo", str(name)] if name.partition(".")[0] in _MODULES and name in sys.modules:
                return sys.modules[name]
        return None

    def _exception_class(self, handle: int, name: str, base: str) -> Any:
        known = self._given.get(name)
        if isinstance(known, type) and vars(known).get("agentrl_handle") == handle:
            return known
        kind = getattr(builtins, base, Exception)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, _TELLING):
            kind = RuntimeError if base.startswith("Stop") else Exception
        bases = (FromAnswer,) if kind is Exception else (FromAnswer, kind)
        return type(name, bases, {"agentrl_handle": handle, "__module__": "builtins"})


async def _ready(value: Any) -> Any:
    """Return the result of a coroutine that has already run on the submission's side."""
    return value


def _outcome(error: BaseException) -> tuple[str, str]:
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    line = (frames[-1].line or "")[:200] if frames else ""
    match error:
        case BadTests():
            return "broken", str(error)
        case FromAnswer():
            return "failed", f"the answer's code raised {type(error).__name__}: {error}"
        case ImportError() if error.name not in ("solution", "main"):
            return "broken", f"the test needs a module that is not there: {error}"
        case AssertionError():
            return "failed", f"assertion failed: {str(error) or line}"
    return "failed", f"{type(error).__name__}: {error} at {line}"
