"""Wrappers that give user functions one interface.

Generate, accepted forms (all async, each optionally with `evaluation=...`):
    `(args, samples)`: a whole group at once;
    `(args, sample, sampling_params)`: one trajectory;
    `(base_url, sample)`: an agent that reaches the model at `base_url` by HTTP (docs/gateway.md); may return a reward.
The other forms return a `Sample`, a list of samples, or (group form) a list with a `Sample` or a list per input sample.
A class is accepted too. Its async method `generate` has one of these forms. Its optional async methods `setup(args)`
and `teardown()` are called once in each process that generates, on one object.

Reward, accepted forms (async or plain):
    `(args, sample, **kwargs)`; with `--group-rm` `(args, samples, **kwargs)`; `(samples, **kwargs)`.
A plain function runs in a worker thread, never on the event loop."""

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import anyio

from agentrl.engine.wire import SamplingParams
from agentrl.errors import AgentRLError, EnvFailure, PluginError, SampleError, raised_as
from agentrl.plugins import defined_at, is_async, load_object, must_propagate, positional, user_code
from agentrl.rollout.failures import bad_result, between, guarded
from agentrl.sample import Sample, Status
from agentrl.tools.threads import result_of

Generated = list[list[Sample]]  # for each input sample the samples that its trajectory produced, at least one
_OWNERS: dict[type, Any] = {}  # the only object of each class, which several evaluation sets may name


@dataclass(frozen=True, slots=True)
class GenerateFunction:
    """A user's generate function and how to call it."""

    function: Callable[..., Awaitable[Any]]
    name: str
    per_sample: bool
    takes_evaluation: bool
    agent: bool = False  # it is an agent: `(base_url, sample)`
    owner: Any = None  # the object whose method it is, if it was given as a class

    @classmethod
    def load(cls, path: str) -> "GenerateFunction":
        """Load `--custom-generate-function-path`. Raises PluginError: not found, not async, or a wrong signature."""
        flag = "--custom-generate-function-path"
        function = load_object(path, what=flag, default_names=("generate", "custom_generate"))
        if not inspect.isclass(function):
            return cls.of(function, f"{flag} {path}")
        with user_code(f"{function.__name__}()"):
            owner = _OWNERS[function] = _OWNERS.get(function) or function()
        return replace(cls.of(getattr(owner, "generate", None), f"{flag} {path}.generate"), owner=owner)

    def opened(self, args: Any, timeout: float) -> AbstractAsyncContextManager[None]:
        """Call the owner's `setup` now and `teardown` at the end. `timeout`: seconds for each. Raises EnvFailure."""
        return between(self._tell("setup", timeout, args), partial(self._tell, "teardown", timeout))

    async def _tell(self, name: str, timeout: float, *args: Any) -> None:
        if (hook := getattr(self.owner, name, None)) is not None:
            await guarded(hook(*args), what=f"{type(self.owner).__name__}.{name}", timeout=timeout, failure=EnvFailure)

    @classmethod
    def of_sample(cls, path: str) -> "GenerateFunction":
        """Load a sample's `generate_function_path`. Raises PluginError: as `load`, or it takes whole groups."""
        if not (found := cls.load(path)).per_sample:
            raise PluginError(f"generate_function_path {path}: expected (args, sample, sampling_params)")
        return found

    @classmethod
    def of(cls, function: Any, name: str) -> "GenerateFunction":
        """Inspect a function; `name` is used in messages."""
        if not is_async(function):
            raise PluginError(
                f"{name}: expected an async function, got {_kind(function)}; write `async def generate(...)`"
            )
        parameters = inspect.signature(function).parameters
        takes_evaluation = "evaluation" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())
        # A parameter with a default is the user's own option, except `sampling_params`.
        own = [p for p in positional(function) if p.name != "evaluation"]
        required = [p for p in own if p.default is p.empty or p.name == "sampling_params"]
        agent = [parameter.name for parameter in required[:1]] == ["base_url"]
        if len(required) not in ((2,) if agent else (2, 3)):
            raise PluginError(
                f"{name}: expected (args, samples), (args, sample, sampling_params) or (base_url, sample), each "
                f"optionally with evaluation=..., got ({', '.join(parameters)})"
            )
        return cls(function, name, agent or len(required) == 3, takes_evaluation, agent)

    async def call_one(self, args: Any, sample: Sample, params: SamplingParams, evaluation: bool) -> list[Sample]:
        """Call the per-sample form."""
        extra = {"evaluation": evaluation} if self.takes_evaluation else {}
        result = await self.function(args, sample, params.to_wire(), **extra)
        return self._distinct([self._members(result)])[0]

    async def call_group(self, args: Any, samples: list[Sample], evaluation: bool) -> Generated:
        """Call the group form."""
        extra = {"evaluation": evaluation} if self.takes_evaluation else {}
        result = await self.function(args, samples, **extra)
        if isinstance(result, Sample):
            result = [result]
        if not isinstance(result, (list, tuple)):
            raise bad_result(f"{self.name} must return a list of samples, got {_kind(result)}")
        if len(result) != len(samples):
            said = f"{self.name} returned {len(result)} items for a group of {len(samples)} samples"
            raise bad_result(f"{said}; return one item a sample (an item may itself be a list of samples)")
        return self._distinct([self._members(item) for item in result])

    def _distinct(self, generated: Generated) -> Generated:
        """Refuse a sample object that occurs twice: it would be trained twice."""
        members = [id(member) for item in generated for member in item]
        if len(set(members)) < len(members):
            raise bad_result(
                f"{self.name} returned the same Sample object more than once; return one of its own for each trajectory"
            )
        return generated

    def _members(self, item: Any) -> list[Sample]:
        members = [item] if isinstance(item, Sample) else item
        if not isinstance(members, (list, tuple)) or not members or not all(isinstance(m, Sample) for m in members):
            raise bad_result(f"{self.name} must return a Sample or a non-empty list of them, got {_kind(item)}")
        return list(members)


_REASONS = {Status.COMPLETED: "done", Status.TRUNCATED: "length", Status.ABORTED: "aborted"}
"""Stop reasons of samples that have only a status."""


def normalize_outputs(generated: list[Sample], origin: Sample, name: str) -> list[Sample]:
    """Check samples from user code, and fill in the fields that user code may leave out.

    Several samples of one trajectory get a common `rollout_id`. A missing loss mask becomes all ones. `PENDING` becomes
    `COMPLETED`. A missing stop reason follows from the status. Raises EnvFailure: tokens, mask or log-probs are missing
    or misaligned."""
    for member in generated:
        member.group_index = origin.group_index
        if len(generated) > 1 and member.rollout_id is None:
            member.rollout_id = origin.index
        if member.index is None:
            member.index = origin.index
        if not member.tokens:
            raise bad_result(
                f"{name} returned a sample without tokens; set tokens, response_length and loss_mask, or generate with "
                "agentrl.rollout.helpers so that they are recorded for you"
            )
        if member.loss_mask is None:
            member.loss_mask = [1] * member.response_length
        if member.status is Status.PENDING:
            member.status = Status.COMPLETED
        member.stop_reason = member.stop_reason or _REASONS.get(member.status, "")
        with raised_as(bad_result, f"{name} returned a misaligned sample", SampleError):
            member.validate()
    return generated


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A user's reward function and how to call it."""

    function: Callable[..., Any]
    name: str
    samples_only: bool
    group: bool

    @classmethod
    def load(cls, path: str, *, group: bool) -> "RewardFunction":
        """Load `--custom-rm-path`. Raises PluginError: it is not found, not callable, or has a wrong signature."""
        flag = "--custom-rm-path"
        names = ("batched_custom_rm", "reward_func", "custom_rm", "compute_reward")
        function = load_object(path, what=flag, default_names=names if group else names[1:])
        return cls.of(function, f"{flag} {path}", group=group)

    @classmethod
    def of(cls, function: Any, name: str, *, group: bool) -> "RewardFunction":
        """Inspect a function; `name` is used in messages."""
        if not callable(function):
            raise PluginError(f"{name}: expected a function, got {_kind(function)}")
        required = [p for p in positional(function) if p.default is p.empty]
        if len(required) not in (1, 2):
            raise PluginError(
                f"{name}: expected (args, sample), (args, samples) or (samples), got {len(required)} arguments"
            )
        samples_only = len(required) == 1
        return cls(function, name, samples_only, group or samples_only)

    @property
    def plain(self) -> bool:
        """True if the function is not async, so that it runs in a thread."""
        return not is_async(self.function)

    async def __call__(self, args: Any, samples: Sequence[Sample]) -> list[Any]:
        """Return the raw rewards of `samples`, in order. Their number is checked, their values are not."""
        if not self.group:
            return await self._each(args, samples)
        given = [list(samples)] if self.samples_only else [args, list(samples)]
        rewards = await result_of(partial(self.function, *given))
        if not isinstance(rewards, (list, tuple)) or len(rewards) != len(samples):
            size = len(rewards) if isinstance(rewards, (list, tuple)) else _kind(rewards)
            raise AgentRLError(
                f"{self.name} returned {size} rewards for {len(samples)} samples; return a list with one each"
            )
        return list(rewards)

    async def _each(self, args: Any, samples: Sequence[Sample]) -> list[Any]:
        rewards: list[Any] = [None] * len(samples)

        async def one(at: int, sample: Sample) -> None:
            try:
                rewards[at] = await result_of(partial(self.function, args, sample))
            except (SystemExit, KeyboardInterrupt, asyncio.CancelledError) as error:
                if must_propagate(error):
                    raise
                # Raised by a task, these errors would end the event loop, or be lost.
                raise BaseExceptionGroup(self.name, [error]) from None

        async with anyio.create_task_group() as group:
            for at, sample in enumerate(samples):
                group.start_soon(one, at, sample)
        return rewards


def whose(function: GenerateFunction | RewardFunction | None) -> str:
    """Return the setting that names a function, and the place of its definition."""
    return f"{function.name} ({defined_at(function.function)})" if function else ""


def _kind(value: Any) -> str:
    if inspect.isfunction(value):
        return f"the {'generator' if inspect.isasyncgenfunction(value) else 'plain'} function {value.__name__}"
    return f"{type(value).__name__} {value!r:.80}"
