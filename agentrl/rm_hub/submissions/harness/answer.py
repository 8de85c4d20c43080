"""The submission's side: loads the submission and executes requests of the tests. Its code follows `values`, in its own
sandbox. It decides nothing: whatever the submission does to this process, the process can only answer with values."""

import asyncio
import builtins
import contextlib
import io
import json
import operator
import os
import sys
import types
from collections.abc import Mapping
from functools import partial
from typing import Any

from agentrl.rm_hub.submissions.harness.values import base_value, decode, decode_function, encode

_MAX_PRINTED = 100_000
_MUTABLE = (list, dict, set, bytearray)


class SubmissionServer:
    """The loaded submission and the objects that the tests hold handles of."""

    def __init__(self, token: str) -> None:
        self.token = token
        self.objects: dict[int, Any] = {}
        self.module = types.ModuleType("solution")
        self._say = os.dup(1)
        self._encode = partial(encode, by_handle=self._by_handle)
        self._decode = partial(decode, from_handle=self._from_handle)

    def serve(self, text: str) -> None:
        """Execute one request and print its answer, with the output that the submission printed meanwhile."""
        sys.stdin, printed = io.StringIO(), io.BytesIO()
        with contextlib.redirect_stdout(io.TextIOWrapper(printed, "utf-8", "replace", write_through=True)):
            try:
                said = self._do(json.loads(text))
            except Exception as error:  # noqa: BLE001 - the submission may raise anything; the tests are told
                said = {"raised": self._error(error)}
            with contextlib.suppress(ValueError):  # the submission has closed its output
                said["out"] = printed.getvalue()[:_MAX_PRINTED].decode("utf-8", "replace")
            line = json.dumps(said)
        data = f"\n{self.token}{line}\n".encode()
        while data:
            data = data[os.write(self._say, data) :]

    def _do(self, request: Mapping[str, Any]) -> dict[str, Any]:
        if request["do"] == "load":
            sys.modules["solution"] = self.module
            exec(request["imports"], usual := dict[str, Any]())
            # The usual imports are built-ins: a name that the submission does not define must not be tested.
            vars(self.module)["__builtins__"] = usual | vars(builtins)
            exec(compile(request["source"], "solution.py", "exec"), self.module.__dict__)
            return {"names": {k: self._encode(v) for k, v in self.module.__dict__.items() if not k.startswith("__")}}
        args = [self._decode(item) for item in request["args"]]
        named = {name: self._decode(item) for name, item in request["named"].items()}
        value = self._encode(self._perform(request["do"], self._decode(request["target"]), args, named))
        now = [[at, self._encode(item)] for at, item in enumerate(args) if isinstance(item, _MUTABLE)]
        changed = [[at, new] for at, new in now if json.dumps(new) != json.dumps(request["args"][at])]
        return {"value": value, "changed": changed}

    def _perform(self, name: str, target: Any, args: list[Any], named: dict[str, Any]) -> Any:
        """Apply a built-in or an operator by name. With the prefix `r`, the target is the last operand."""
        if name in ("enter", "exit"):
            return getattr(target, f"__{name}__")(*args)
        if (function := getattr(builtins, name, None) or getattr(operator, name, None)) is None:
            return (getattr(builtins, name[1:], None) or getattr(operator, name[1:]))(*args, target)
        return function(target, *args, **named)

    def _by_handle(self, value: Any) -> Any:
        if isinstance(value, types.CoroutineType):
            return ["co", self._encode(asyncio.run(value))]
        self.objects[id(value)] = value
        if isinstance(value, type) and issubclass(value, Exception):
            return ["x", id(value), value.__name__, _built_in_base(value)]
        if isinstance(value, types.ModuleType):
            return ["mo", value.__name__]
        plain = base_value(value)
        kind = "class" if isinstance(value, type) else "callable" if callable(value) else "object"
        return ["h", id(value), kind, type(value).__name__, None if plain is None else ["v", self._encode(plain)]]

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
