"""The tests' side: runs them against stand-ins for the submission's objects. Runs after `values`, in another sandbox.

1. Tests run in a thread that waits whenever it needs the submission; `step` hands over an answer and prints what is
   wanted next: `{"ask": request}`, `{"result": [number, outcome, reason]}` or `{"done": true}`.
2. Comparisons with plain data happen here, with this process's own builtins: an object of the submission's own class
   is equal to no number or text, whatever its `__eq__` says, and is told no operand unless the tests name its class.
3. Names of the submission shadow neither built-ins nor modules nor what the tests define.
"""

import builtins
import json
import operator
import queue
import re
import sys
import threading
import traceback
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from agentrl.rm_hub.submissions.harness.values import NotPlain, decode, encode, encode_function

_ASKED = ("len", "iter", "next", "bool", "str", "repr", "hash", "int", "float", "abs", "neg", "pos", "reversed")
_ASKED_WITH = ("getitem", "setitem", "delitem", "enter", "exit")
_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor", "and", "or")
_MODULES = sys.stdlib_module_names | {"numpy", "np"}


class Abandoned(BaseException):
    """The test's time is over, or the submission's process is gone."""


class FromAnswer(Exception):
    """Marks exceptions that the submission raised."""


class Remote:
    """Stands for an object of the submission."""

    def __init__(self, tests: "Tests", data: list[Any], kind: str = "", plain: Any = None) -> None:
        vars(self).update(_tests=tests, _data=data, _kind=kind, _plain=plain)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._tests.ask("call", self, args, named)

    def __getattr__(self, name: str) -> Any:
        return self._tests.ask("getattr", self, (name,))

    def __setattr__(self, name: str, value: Any) -> None:
        self._tests.ask("setattr", self, (name, value))

    def __instancecheck__(self, other: Any) -> bool:
        return isinstance(other, Remote) and bool(self._tests.ask("isinstance", self, (other,)))

    def __eq__(self, other: Any) -> bool:
        if isinstance(other, Remote):
            return bool(self._tests.ask("eq", self, (other,)))
        return self._plain is not None and self._plain == other

    def __ne__(self, other: Any) -> bool:
        return not self == other

    def __contains__(self, item: Any) -> bool:
        if self._plain is not None:
            return item in self._plain
        if self._tests.trusts(self, item):
            return bool(self._tests.ask("contains", self, (item,)))
        return any(item == own for own in self)  # type: ignore[attr-defined]


def _forward(name: str) -> Callable[..., Any]:
    def method(self: Remote, *args: Any) -> Any:
        return self._tests.ask(name, self, args)

    return method


def _ordering(name: str) -> Callable[[Remote, Any], bool]:
    def method(self: Remote, other: Any) -> bool:
        if isinstance(other, Remote):
            return bool(self._tests.ask(name, self, (other,)))
        if self._plain is None:
            raise TypeError(f"an object of the answer's own class cannot be compared with {type(other).__name__}")
        return bool(getattr(self._plain, f"__{name}__")(other))

    return method


def _arithmetic(name: str, reverse: bool) -> Callable[[Remote, Any], Any]:
    function = getattr(operator, name + "_" if name in ("and", "or") else name)

    def method(self: Remote, other: Any) -> Any:
        if self._plain is not None:
            return function(other, self._plain) if reverse else function(self._plain, other)
        if not self._tests.trusts(self, other):
            # It would be told the expected value, and could say that the difference is nothing.
            raise TypeError(f"{name} of {type(other).__name__} and an object of a class that the tests do not know")
        return self._tests.ask(("r" if reverse else "") + function.__name__, self, (other,))

    return method


for _name in (*_ASKED, *_ASKED_WITH):
    setattr(Remote, f"__{_name}__", _forward(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(Remote, f"__{_name}__", _ordering(_name))
for _name in _ARITHMETIC:
    setattr(Remote, f"__{_name}__", _arithmetic(_name, reverse=False))
    setattr(Remote, f"__r{_name}__", _arithmetic(_name, reverse=True))


class Tests:
    """All tests of one submission."""

    def __init__(self, token: str, sources: Sequence[str], entry: str | None) -> None:
        self.token, self.sources, self.entry = token, sources, entry
        self.names: dict[str, Any] = {"__name__": "tests", "__builtins__": __builtins__}
        self._given: dict[str, Any] = {}
        self._words = set(re.findall(r"[A-Za-z_]\w*", "\n".join(sources)))
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._wanted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def step(self, text: str) -> None:
        """Hand over an answer (the submission's names at first) and print what comes next."""
        answer = json.loads(text)
        if not self._thread.is_alive():
            self._know(answer["names"])
            self._thread.start()
        else:
            self._answers.put(answer)
        wanted = self._wanted.get()
        sys.__stdout__.write(f"\n{self.token}{json.dumps(wanted)}\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]

    def ask(self, do: str, target: Remote, args: Sequence[Any] = (), named: dict[str, Any] | None = None) -> Any:
        """Have the submission's side do something; returns the value or raises what it raised."""
        request = {
            "do": do,
            "target": vars(target)["_data"],
            "args": [self._encode(item) for item in args],
            "named": {name: self._encode(item) for name, item in (named or {}).items()},
        }
        self._wanted.put({"ask": request})
        answer = self._answers.get()
        if "abandon" in answer:
            raise Abandoned(answer["abandon"])
        if "raised" in answer:
            *kind, args = answer["raised"]
            raise self._exception_class(*kind)(*args)
        for at, data in answer["changed"]:
            _update(args[at], self._decode(data))
        return self._decode(answer["value"])

    def trusts(self, target: Remote, operand: Any) -> bool:
        """Whether the submission may be told the operand: one of its own objects, or the class is part of the task."""
        kind: str = vars(target)["_kind"]
        return isinstance(operand, Remote) or (kind[:1].isupper() and kind in self._words)

    def _run(self) -> None:
        sys.setrecursionlimit(5000)
        for number, source in enumerate(self.sources):
            self._wanted.put({"result": [number, *self._one(source)]})
            self._know(self._answers.get()["names"])
        self._wanted.put({"done": True})

    def _one(self, source: str) -> tuple[str, str]:
        try:
            code = compile(source, "tests.py", "exec")
        except (SyntaxError, ValueError, RecursionError) as error:
            return "broken", f"the test is no Python: {error}"
        try:
            exec(code, self.names)
            for function in self._functions():
                function()
        except Abandoned as error:
            return "failed", str(error)
        except FromAnswer as error:
            return "failed", f"the answer's code raised {type(error).__name__}: {error}"
        except AssertionError as error:
            return "failed", f"assertion failed: {str(error) or _line(source, error)}"
        except ImportError as error:
            if error.name in ("solution", "main"):
                return "failed", f"the answer's code lacks a name: {error}"
            return "broken", f"the test needs a module that is not there: {error}"
        except NotPlain as error:
            return "broken", f"the test uses what cannot be done across processes: {error}"
        except BaseException as error:  # noqa: BLE001 - a test may raise anything; it then did not pass
            return "failed", f"{type(error).__name__}: {error} at {_line(source, error)}"
        return "passed", ""

    def _functions(self) -> Iterator[Callable[[], Any]]:
        """What a test source defines and does not call by itself: `check(candidate)` and `test_...()`."""
        check = self.names.pop("check", None)
        if self.entry and isinstance(check, types.FunctionType):
            if self.entry not in self.names:
                raise AssertionError(f"the answer does not define {self.entry}")
            yield lambda: check(self.names[self.entry or ""])
        for name in [name for name in self.names if name.startswith("test_")]:
            function = self.names[name]
            if isinstance(function, types.FunctionType) and not function.__code__.co_argcount:
                del self.names[name]
                yield function

    def _know(self, names: dict[str, Any]) -> None:
        solution = types.ModuleType("solution")
        for name, data in names.items():
            value = self._named(name, data)
            setattr(solution, name, value)
            hides = hasattr(builtins, name) or (name in _MODULES and not isinstance(value, types.ModuleType))
            own = name in self.names and self.names[name] is not self._given.get(name)
            if not own and (not hides or name == self.entry):
                self.names[name] = self._given[name] = value
        sys.modules["solution"] = sys.modules["main"] = solution

    def _named(self, name: str, data: Any) -> Any:
        """Stand-ins of functions and classes go by name: they outlive a submission that is loaded afresh."""
        if isinstance(data, list) and data[0] == "h":
            return Remote(self, ["name", name], data[3], self._plain(data))
        return self._decode(data)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._by_handle)

    def _by_handle(self, value: Any) -> Any:
        if isinstance(value, Remote):
            return vars(value)["_data"]
        if isinstance(value, type) and "agentrl_handle" in vars(value):
            return ["x", vars(value)["agentrl_handle"]]
        return encode_function(value, self.names, self._encode)

    def _decode(self, data: Any) -> Any:
        return decode(data, self._from_handle)

    def _from_handle(self, data: list[Any]) -> Any:
        if data[0] == "h":
            return Remote(self, data[:2], data[3], self._plain(data))
        if data[0] == "x":
            return self._exception_class(*data[1:])
        if data[0] == "mo" and data[1].partition(".")[0] in _MODULES:
            return __import__(data[1])
        return None

    def _plain(self, data: list[Any]) -> Any:
        return self._decode(data[4][1]) if data[4] is not None else None

    def _exception_class(self, handle: int, name: str, base: str) -> Any:
        known = self.names.get(name)
        if isinstance(known, type) and vars(known).get("agentrl_handle") == handle:
            return known
        kind = getattr(builtins, base, Exception)
        if not (isinstance(kind, type) and issubclass(kind, Exception)) or issubclass(kind, UnicodeError):
            kind = Exception
        kind = Exception if issubclass(kind, (AssertionError, ImportError)) else kind
        bases = (FromAnswer,) if kind is Exception else (FromAnswer, kind)
        return type(name, bases, {"agentrl_handle": handle})


def _update(held: Any, now: Any) -> None:
    """Give a container that was handed over the content that it has on the other side."""
    if isinstance(held, (list, bytearray)):
        held[:] = now
    elif isinstance(held, (dict, set)):
        held.clear()
        held.update(now)


def _line(source: str, error: BaseException) -> str:
    lines = source.splitlines()
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename == "tests.py"]
    at = frames[-1].lineno if frames else None
    return lines[at - 1].strip()[:200] if at and at <= len(lines) else ""
