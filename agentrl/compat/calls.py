"""Calls of a slime function, with slime's args and samples in place of ours.

1. `namespace(args)` returns slime's args: mutable, one object for all calls of a run, with the user's own keys
   (`compat_options`), and slime's defaults (`flags.tsv`) for flags that only slime has.
2. Samples, also in nested lists, are passed as `SlimeSample`, with a rendered prompt if slime renders it. After the
   call, changes are copied into our samples in place. Samples in the result are ours."""

import copy
import functools
import inspect
from argparse import Namespace as Open
from collections.abc import Awaitable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from agentrl import sample as ours
from agentrl.compat.flags import defaults
from agentrl.compat.sample import Rendered, SlimeSample
from agentrl.config.args import Args
from agentrl.config.problems import did_you_mean
from agentrl.plugins import is_async


class Namespace(Open):
    """slime's args. See the module."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name not in (slimes := defaults(ours=False)):
            near = did_you_mean(name, {**vars(self), **slimes})
            raise AttributeError(f"args have no {name!r} (keys of your own belong into compat_options){near}")
        return copy.copy(slimes[name])


_known: list[tuple[Args, Namespace]] = []
"""Settings of this process, with the args made of them. Evaluation sets have separate settings."""
_shared: dict[str, Any] = {}
_adapted: set[str] = set()


def namespace(args: Args) -> Namespace:
    """Return the args of a run's slime functions: the same object for the same `args`."""
    if made := next((made for known, made in _known if known is args or known == args), None):
        return made
    values = {name: list(value) if isinstance(value := getattr(args, name), tuple) else value for name in args}
    values.update(args.compat_options)  # the user's keys override settings that only we have
    values["sglang_server_concurrency"] = args.rollout_max_concurrency
    values["load"] = args.load or args.save
    values["eval_max_context_len"] = args.eval_max_context_len or args.rollout_max_context_len
    _known.append((args, Namespace(**{**values, **_shared})))
    return _known[-1][1]


def share(**values: Any) -> None:
    """Set these values in all args of this process."""
    _shared.update(values)
    for _, made in _known:
        vars(made).update(values)


@contextmanager
def served(url: str) -> Iterator[None]:
    """Set the engines' address in all args of this process. At the end, args and singletons are dropped."""
    from agentrl.compat.helpers import SingletonMeta

    address = urlsplit(url)
    share(sglang_router_ip=address.hostname, sglang_router_port=address.port)
    try:
        yield
    finally:
        _shared.clear()
        _known.clear()
        SingletonMeta.instances.clear()


def in_use() -> bool:
    """Return true if this process has loaded a slime function, which may ask for the engines' address."""
    return bool(_adapted)


def adapted(found: Any) -> Any:
    """Return a slime function in the form that our code calls."""
    _adapted.add(repr(found))
    if inspect.isclass(found) or not callable(found):
        return found

    @functools.wraps(found)
    def called(*args: Any, **kwargs: Any) -> Any:
        passed = _Passed(args, kwargs)
        result = found(*passed.args, **passed.kwargs)
        return passed.awaited(result) if inspect.isawaitable(result) else passed.ended(result)

    @functools.wraps(found)
    async def awaited(*args: Any, **kwargs: Any) -> Any:
        return await called(*args, **kwargs)

    called.__name__ = awaited.__name__ = getattr(found, "__name__", type(found).__name__)
    return awaited if is_async(found) else called


def four_to_three(found: Any) -> Any:
    """Adapt a buffer filter (args, rollout_id, buffer, num_samples) to our form, which has no rollout_id."""
    try:
        parameters = list(inspect.signature(found).parameters.values())
    except (TypeError, ValueError):
        return found
    if len([p for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]) != 4:
        return found
    return functools.wraps(found)(lambda args, buffer, num_samples: found(args, None, buffer, num_samples))


class _Passed:
    """The arguments of one call, as slime's function gets them."""

    def __init__(self, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self._run = next((value for value in (*args, *kwargs.values()) if isinstance(value, Args)), None)
        self._given: dict[int, tuple[Any, Any]] = {}
        self.args = [self._there(value) for value in args]
        self.kwargs = {name: self._there(value) for name, value in kwargs.items()}

    async def awaited(self, result: Awaitable[Any]) -> Any:
        return self.ended(await result)

    def ended(self, result: Any) -> Any:
        """Copy the function's changes into our samples, and return its result."""
        found = self.back(result)
        for given, own in list(self._given.values()):
            if isinstance(own, list):
                own[:] = [self.back(item) for item in given]
            else:
                given.plain(into=own)
        return found

    def _there(self, value: Any) -> Any:
        if isinstance(value, Args):
            return namespace(value)
        if isinstance(value, ours.Sample) and not isinstance(value, SlimeSample):
            given = as_slime(self._run, value)
            self._given[id(given)] = (given, value)
            return given
        if isinstance(value, list) and has_samples(value):
            items = [self._there(item) for item in value]
            self._given[id(items)] = (items, value)
            return items
        return value

    def back(self, value: Any) -> Any:
        """Return `value` with our samples in the place of slime's."""
        given, own = self._given.get(id(value), (None, None))
        if isinstance(value, SlimeSample):
            return value.plain(into=own)
        if isinstance(value, list) and has_samples(value):
            items = [self.back(item) for item in value]
            if given is None:
                return items
            own[:] = items
            return own
        return value


def taken_by(function: Any, given: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters
    every = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    return {name: value for name, value in given.items() if every or name in parameters}


def as_slime(args: Any, sample: ours.Sample) -> SlimeSample:
    """Return a sample in slime's form. Its prompt is one text if slime renders prompts when it reads the data."""
    from agentrl.compat.helpers import load_tokenizer

    made = SlimeSample.of(sample)
    if isinstance(made.prompt, list) and getattr(args, "apply_chat_template", False):
        render, tools = load_tokenizer(args.hf_checkpoint).apply_chat_template, sample.metadata.get("tools")
        more = args.apply_chat_template_kwargs or {}
        text = Rendered(render(made.prompt, tools=tools, tokenize=False, add_generation_prompt=True, **more))
        text.messages, made.prompt = made.prompt, text
    return made


def has_samples(value: Sequence[Any]) -> bool:
    return any(isinstance(item, ours.Sample) or (isinstance(item, list) and has_samples(item)) for item in value)
