"""Other names that slime's functions import: loading, HTTP, tokens, rollouts and filters, rewards."""

import asyncio
import functools
import inspect
import threading
import time
import weakref
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NoReturn, TypeVar

import httpx

from agentrl import rm_hub
from agentrl import sample as ours
from agentrl.compat.sample import SlimeSample
from agentrl.plugins import find_object
from agentrl.rollout.filters import FilterOutput

T = TypeVar("T")


@functools.cache
def load_function(path: str) -> Any:
    """Return the object at a path, unadapted, because its callers have slime's args and samples."""
    return find_object(path, what="load_function")


class SingletonMeta(type):
    """Metaclass of classes with one instance in a process, until the run ends."""

    instances: ClassVar[dict[type, Any]] = {}

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls not in SingletonMeta.instances:
            SingletonMeta.instances[cls] = super().__call__(*args, **kwargs)
        return SingletonMeta.instances[cls]


_clients: "weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient]" = weakref.WeakKeyDictionary()


def _client() -> httpx.AsyncClient:
    if (loop := asyncio.get_running_loop()) not in _clients:
        _clients[loop] = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)
    return _clients[loop]


async def post(
    url: str, payload: Mapping[str, Any] | None, max_retries: int = 60, headers: Mapping[str, str] | None = None
) -> Any:
    """Return a server's JSON answer. A server that is unreachable or fails is asked again after a second.

    The trajectory's deadline ends the retries, as it ends everything that a generate function awaits."""
    for left in range(max_retries - 1, -1, -1):
        try:
            if (answer := await _client().post(url, json=payload or {}, headers=headers)).is_error:
                said = f"{answer.status_code} from {url}: {answer.text:.500}"
                raise httpx.HTTPStatusError(said, request=answer.request, response=answer)
            return answer.json() if "json" in answer.headers.get("content-type", "json") else answer.text
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 429
            if refused or not left:
                raise
            await asyncio.sleep(1)
    raise ValueError("max_retries must be at least 1")


async def get(url: str) -> Any:
    return (await _client().get(url)).raise_for_status().json()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slime functions", daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Return the result of a coroutine to synchronous code. The coroutine runs in a separate event loop."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@functools.cache
def load_tokenizer(name_or_path: str, **kwargs: Any) -> Any:
    """Return the tokenizer of a model folder. Code in the folder is never run, even with `trust_remote_code`."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **{**kwargs, "trust_remote_code": False})


class MultiTurnLossMaskGenerator:
    """Ids and loss mask of a whole conversation, by the chat template itself; `tokenizer_type` is not needed."""

    def __init__(self, tokenizer: Any, tokenizer_type: str = "qwen") -> None:
        from agentrl.chat import Chat

        self.tokenizer, self.tokenizer_type, self._chat = tokenizer, tokenizer_type, Chat(tokenizer)

    def get_loss_mask(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
    ) -> tuple[list[int], list[int]]:
        from agentrl.chat.demonstration import to_sample

        sample = to_sample(self._chat, messages, tools)
        return list(sample.tokens), [0] * sample.prompt_length + list(sample.loss_mask or ())

    def get_response_lengths(self, loss_masks: list[list[int]]) -> list[int]:
        return [len(mask) - mask.index(1) if 1 in mask else 0 for mask in loss_masks]


@dataclass
class RolloutFnTrainOutput:
    """The result of a rollout function to train on."""

    samples: list[list[ours.Sample]]
    metrics: dict[str, Any] | None = None


@dataclass
class RolloutFnEvalOutput:
    """The result of an evaluation: for each set `rewards`, `truncated` and `samples`, with one entry per sample."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None


def call_rollout_fn(function: Callable[..., Any], *args: Any, evaluation: bool, **kwargs: Any) -> Any:
    """Call a rollout function, and wrap a bare result in its record."""
    output = function(*args, **kwargs, evaluation=evaluation)
    if isinstance(output, (RolloutFnTrainOutput, RolloutFnEvalOutput)):
        return output
    return RolloutFnEvalOutput(output) if evaluation else RolloutFnTrainOutput(output)


def sleep(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> NoReturn:
    """Block forever: a rollout function that keeps the engines up for other programs."""
    while True:
        time.sleep(3600)


def call_dynamic_filter(function: Callable[..., Any] | None, *args: Any, **kwargs: Any) -> FilterOutput:
    output = True if function is None else function(*args, **kwargs)
    return output if isinstance(output, FilterOutput) else FilterOutput(output)


def should_drop_dynamic_filter_output(
    output: FilterOutput, *, remaining_batch_size: int, target_data_size: int
) -> bool:
    return not output.keep and (remaining_batch_size > target_data_size or not output.keep_when_insufficient)


def check_reward_nonzero_std(args: Any, samples: Sequence[SlimeSample], **kwargs: Any) -> FilterOutput:
    """Keep a group only if its rewards differ."""
    rewards = [sample.get_reward_value(args) for sample in samples]
    keep = max(rewards) - min(rewards) > 1e-6
    return FilterOutput(keep, None if keep else f"zero_std_{round(rewards[0], 1)}")


def check_reward_nonzero_std_with_fallback(args: Any, samples: Sequence[SlimeSample], **kwargs: Any) -> FilterOutput:
    """Keep a group if its rewards differ, or if dropping it would need more sampling."""
    return replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


async def async_rm(args: Any, sample: SlimeSample, **kwargs: Any) -> Any:
    """Return the sample's reward, by the sample's function, the run's function, or a built-in grader."""
    path = getattr(sample, "custom_rm_path", None) or getattr(args, "custom_rm_path", None)
    return await _awaited(load_function(path)(args, sample, **kwargs)) if path else await rm_hub.async_rm(args, sample)


async def batched_async_rm(args: Any, samples: Sequence[SlimeSample], **kwargs: Any) -> list[Any]:
    """Return the rewards of many samples. The run's function is called once with all of them."""
    if path := getattr(args, "custom_rm_path", None):
        return list(await _awaited(load_function(path)(args, samples, **kwargs)))
    return await asyncio.gather(*(async_rm(args, sample, **kwargs) for sample in samples))


async def _awaited(value: T | Awaitable[T]) -> T:
    return await value if inspect.isawaitable(value) else value


def grade_answer_verl(response: str, label: str) -> bool:
    return rm_hub.grade("math", response, label).correct


def get_deepscaler_rule_based_reward(response: str, label: Any) -> float:
    return rm_hub.grade("deepscaler", response, label).score


def compute_gpqa_reward(response: str, label: Any, metadata: Mapping[str, Any] | None = None) -> float:
    return rm_hub.grade("gpqa", response, label, metadata).score


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> dict[str, Any]:
    """Return slime's `dapo` score: `score` (1 or -1), `acc` and `pred`, by the `dapo` grader."""
    form = {"dapo_form": "boxed" if strict_box_verify else "answer"}
    grade = rm_hub.grade("dapo", solution_str, ground_truth, form)
    return {"score": grade.score, "acc": grade.score > 0, "pred": grade.extracted}
