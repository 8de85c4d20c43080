"""The Jinja environment of chat templates: transformers' sandbox, with limits on the work of one rendering.

1. Loop iterations, macro calls, outputs and operations that make text longer are counted. A rendering that exceeds
   `MAX_WORK`, or computes longer than `SECONDS`, raises `TemplateError`. Compiling evaluates no expressions.
2. Filters and functions that chat templates do not need, and that can run without end, are removed."""

import re
import threading
import time
from collections.abc import Callable, Iterable
from functools import cache, wraps
from typing import Any, Final

from jinja2 import Template, nodes, pass_context
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, _PassArg
from jinja2.visitor import NodeTransformer

from agentrl.errors import TemplateError

MAX_WORK: Final = 1 << 27  # maximum work of a rendering, in characters; see `_ITEM` and `_TURN`
SECONDS: Final = 5.0  # CPU time of one rendering
_ITEM, _TURN, _LOOK = 500, 50, 1 << 12  # work of a list item; of a loop iteration; between two checks of the clock
_MAX_BITS, _MAX_WIDTH = 100_000, 100_000
_GROWING = "replace format center ljust rjust zfill expandtabs translate indent tojson string batch slice round sum"
_GROW = {"join", *_GROWING.split()}  # filters and str methods whose result may be longer than their input
_MISSING = ["lipsum", "striptags", "urlize", "wordwrap", "xmlattr", "pprint"]
_WIDTH = re.compile(r"\d{5}|\*|:[^{}]*\{")
_SPEND, _JOINED = "agentrl spend", "agentrl joined"  # filters of compiled templates; no template can write these names
_SAFE = {kind: {n for n in dir(kind) if not n.startswith(("_", "format"))} for kind in (LoopContext, str)}
"""Attributes that Jinja's sandbox allows and does not wrap, by type."""
_HIDDEN = {"_loop_vars", "_block_vars"}  # arguments that Jinja adds to every call and removes before it is made


class _Allowance(threading.local):
    work: int = MAX_WORK
    look: int = 0
    until: float = float("inf")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The environment with limits. Its templates must be rendered by `rendered`."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        from transformers.utils.chat_template_utils import _compile_jinja_template

        theirs = _compile_jinja_template("").environment
        extensions = [*map(type, theirs.extensions.values())]
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=extensions, optimized=False, finalize=_finalize
        )
        self.filters = {n: self._counted(n, f) for n, f in theirs.filters.items() if n not in _MISSING}
        self.filters |= {_SPEND: self.spend, _JOINED: self.joined}
        self.globals = {name: value for name, value in theirs.globals.items() if name not in _MISSING}
        self._budget = _Allowance()

    def rendered(self, template: Template, **values: Any) -> str:
        """Render a template. Raises TemplateError: the rendering exceeds the limits. Template errors pass through."""
        budget = self._budget
        budget.work, budget.look, budget.until = MAX_WORK, MAX_WORK - _LOOK, time.thread_time() + SECONDS
        return "".join(template.generate(**values))

    def spend(self, work: int) -> None:
        """Count `work`. Compiled templates call this method too. Raises TemplateError: a limit is exceeded."""
        budget = self._budget
        budget.work -= work
        if budget.work >= budget.look:
            return
        budget.look = max(0, budget.work - _LOOK)
        if budget.work < 0:
            raise TemplateError(f"it makes more than {MAX_WORK:,} characters, or loops without end")
        if time.thread_time() > budget.until:
            raise TemplateError(f"it computes for longer than {SECONDS:g} s")

    def joined(self, *parts: Any) -> str:
        self.spend(self.weight(parts))
        return "".join(map(str, parts))

    def weight(self, value: Any) -> int:
        """Return the approximate number of characters of a value as text. A part that occurs twice counts twice."""
        found, left = 0, [value]
        while left:
            part = left.pop()
            if isinstance(part, str | bytes):
                found += len(part)
            elif isinstance(part, dict):
                left += [*part, *part.values()]
            elif isinstance(part, list | tuple | set | range):
                left += part
            found += _ITEM
            if found > self._budget.work:
                break
        return found

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro, nodes.CallBlock)):
            text = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
            counted = _filter(_SPEND, nodes.Const(_TURN + text))
            node.body.insert(0, nodes.ExprStmt(counted).set_lineno(node.lineno))  # type: ignore[attr-defined]
            if isinstance(node, nodes.For) and node.test is not None:  # iterations that the condition skips count too
                node.test = nodes.Or(_filter(_SPEND, nodes.Const(_TURN)), node.test).set_lineno(node.lineno)
        changed: nodes.Template = _Concatenations().visit(tree)
        return changed

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Count the work of an operator in `intercepted_binops`, and apply the operator."""
        if operator == "+" and type(left) is type(right) is str:
            self.spend(len(left) + len(right))
            return left + right
        if operator == "%" and isinstance(left, str):
            self._grow("format", left, right)
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            if (left.bit_length() * abs(right) if operator == "**" else sum(bits)) > _MAX_BITS:
                raise TemplateError("it makes numbers without end")
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            self.spend(self.weight(value) * max(1, times if isinstance(times, int) else 1))
        elif operator == "+":
            sized = (part for part in (left, right) if hasattr(part, "__len__"))
            self.spend(sum(len(part) * (1 if isinstance(part, str) else _ITEM) for part in sized))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        """Count the work of a call, and make the call. Jinja calls filters in another way; see `_counted`."""
        method = getattr(__obj, "__wrapped__", __obj)
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            if method.__name__ == "join":
                args = tuple(map(list, args))
            __self._grow(method.__name__.removesuffix("_map"), owner, *args, *kwargs.values())
            if method is __obj and method.__name__ in _SAFE[str] and kwargs.keys() <= _HIDDEN:
                return method(*args)  # a fast path with the same result
        return super().call(__context, __obj, *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Return `obj.attribute` of a template. Frequent cases have a fast path with the same result."""
        if type(obj) is dict and not hasattr(dict, attribute):
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        namespace = isinstance(obj, Namespace) and attribute[:1] != "_" and hasattr(obj, attribute)
        if namespace or attribute in _SAFE.get(type(obj), ()):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def _counted(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the filter `function`, so that its result is counted before the result is made."""
        if name not in _GROW:
            return function
        first = 1 if _PassArg.from_obj(function) else 0

        @wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            value = args[first]
            if name != "round" and not isinstance(value, str | dict) and isinstance(value, Iterable):
                value = list(value)
            self._grow(name, value, *args[first + 1 :], *kwargs.values())
            return function(*args[:first], value, *args[first + 1 :], **kwargs)

        return counted

    def _grow(self, name: str, value: Any, *args: Any) -> None:
        """Count the result of a filter or str method, before the result is made."""
        if name not in _GROW:
            return
        widths = [abs(arg) if isinstance(arg, int) else len(arg) for arg in args if isinstance(arg, int | str)]
        wide = max(widths, default=0) > _MAX_WIDTH and name not in ("replace", "join", "format")
        if wide or (name == "format" and _WIDTH.search(str(value))):
            raise TemplateError(f"`{name}` is to make text of a width of more than {_MAX_WIDTH:,}")
        match name, args:
            case "replace", (old, new, *_):
                work = len(str(value)) + (len(str(value)) // max(1, len(str(old))) + 1) * len(str(new))
            case "join", _ if isinstance(value, str) and args:
                work = self.weight(args[0]) + len(value) * len(args[0])
            case "join", _:
                work = self.weight(value) + len(value) * sum(widths)
            case (("format" | "translate"), _):
                work = len(value) + (len(value) // (2 if name == "format" else 1) + 1) * self.weight(args)
            case _:
                work = self.weight(value) * max((1, *widths))
        self.spend(work)


environment = cache(TemplateEnvironment)
"""Returns the environment of this process. The limits count for each thread by itself."""


class _Concatenations(NodeTransformer):
    """Transformer that replaces operators `~`, which Jinja cannot intercept, by calls of `joined`."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_JOINED, *node.nodes).set_lineno(node.lineno)


def _filter(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [*args], [], None, None)


@pass_context  # without a context Jinja evaluates constant expressions when it compiles
def _finalize(context: Context, value: Any) -> Any:
    environment = context.environment
    assert isinstance(environment, TemplateEnvironment)
    environment.spend(len(value) + _ITEM if type(value) is str else environment.weight(value))
    return value
