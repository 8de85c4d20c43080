"""The submission's side: loads it and does what the tests ask of it. Runs after `values`, in a sandbox of its own.

Nothing here decides anything: whatever the submission does to this process, it can only answer with values.
"""

import builtins
import contextlib
import io
import json
import operator
import os
import sys
import types
from collections.abc import Mapping
from typing import Any

from agentrl.rm_hub.submissions.harness.values import base_value, decode, decode_function, encode

_BUILT_IN = {"len", "iter", "next", "bool", "str", "repr", "hash", "int", "float", "abs", "reversed"}
_REVERSED = {
    f"r{name}" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "xor", "and_", "or_")
}
_MUTABLE = (list, dict, set, bytearray)


class Answer:
    """The loaded submission and the objects that the tests hold handles of."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.objects: dict[int, Any] = {}
        self.module = types.ModuleType("solution")
        self._say = os.dup(1)

    def serve(self, text: str) -> None:
        """Do one request and print its answer; output of the submission is dropped."""
        sys.stdin = io.StringIO()
        with open(os.devnull, "w") as sink, contextlib.redirect_stdout(sink):
            try:
                said = self._do(json.loads(text))
            except Exception as error:  # noqa: BLE001 - the submission may raise anything; the tests are told
                said = {"raised": self._error(error)}
            line = json.dumps(said)
        data = f"\n{self.token}{line}\n".encode()
        while data:
            data = data[os.write(self._say, data) :]

    def _do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "load":
            sys.modules["solution"] = self.module
            exec(compile(request["source"], "solution.py", "exec"), self.module.__dict__)
            return {"names": {k: self._encode(v) for k, v in self.module.__dict__.items() if not k.startswith("__")}}
        target = self._decode(request["target"]) if "target" in request else None
        args = [self._decode(item) for item in request.get("args", ())]
        before = [json.dumps(item) for item in request.get("args", ())]
        named = {name: self._decode(item) for name, item in request.get("named", {}).items()}
        value = self._encode(self._perform(request["do"], target, args, named))
        changed = [
            [at, now]
            for at, item in enumerate(args)
            if isinstance(item, _MUTABLE) and json.dumps(now := self._encode(item)) != before[at]
        ]
        return {"value": value, "changed": changed}

    def _perform(self, name: str, target: Any, args: list[Any], named: dict[str, Any]) -> Any:
        if name == "method":
            owner = getattr(self.module, args[0], None)
            function = getattr(owner(), args[1]) if owner is not None else getattr(self.module, args[1])
            return function(*args[2])
        if name == "call":
            return target(*args, **named)
        if name in ("getattr", "setattr"):
            return getattr(builtins, name)(target, *args)
        if name in ("enter", "exit"):
            return getattr(target, f"__{name}__")(*args)
        if name in _REVERSED:
            return getattr(operator, name[1:])(*args, target)
        if name == "isinstance":
            return isinstance(args[0], target)
        return getattr(builtins if name in _BUILT_IN else operator, name)(target, *args)

    def _encode(self, value: Any) -> Any:
        return encode(value, self._by_handle)

    def _by_handle(self, value: Any) -> Any:
        self.objects[id(value)] = value
        if isinstance(value, type) and issubclass(value, Exception):
            return ["x", id(value), value.__name__, _built_in_base(value)]
        if isinstance(value, types.ModuleType):
            return ["mo", value.__name__]
        plain = base_value(value)
        kind = "class" if isinstance(value, type) else "callable" if callable(value) else "object"
        return ["h", id(value), kind, type(value).__name__, None if plain is None else ["v", self._encode(plain)]]

    def _decode(self, data: Any) -> Any:
        return decode(data, self._from_handle)

    def _from_handle(self, data: list[Any]) -> Any:
        if data[0] in ("h", "x"):
            return self.objects[data[1]]
        if data[0] == "name":
            return getattr(self.module, data[1])
        return decode_function(data, self._decode)

    def _error(self, error: Exception) -> list[Any]:
        self.objects[id(type(error))] = type(error)
        args = [item if isinstance(item, (str, int, float, bool, type(None))) else str(item) for item in error.args[:4]]
        return [id(type(error)), type(error).__name__, _built_in_base(type(error)), args]


def _built_in_base(kind: type) -> str:
    return next(base.__name__ for base in kind.__mro__ if base.__module__ == "builtins")
