"""Grading a rollout's samples: which text of a sample is graded, by which grader, and what becomes of the grade.

1. The grader is the sample's own `metadata["rm_type"]`, else `args.rm_type`.
2. The reward is the grade's score; with `--reward-key` (or `--eval-reward-key`) it is the dict `{"score": ..., **parts}`
   from which the key picks.
3. The whole grade stays in `sample.metadata["grade"]`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import anyio

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub.grade import Grade
from agentrl.rm_hub.registry import GRADERS, find
from agentrl.rm_hub.running.runner import runner_for
from agentrl.sample import Message, Sample

Reward = float | dict[str, float]

_AT_ONCE = 128
"""Samples of a batch under way at once: enough for servers that are asked."""


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Reward:
    """The built-in reward of a sample, graded in a worker process or by a server, never on the event loop.

    Args:
        args: settings as attributes (`rm_type`, `reward_key`, `grader_timeout`, ...); what is not there has its default.
        sample: its final answer (or response), label and metadata are read.

    Raises:
        SettingsError: no grader is set, or there is none of that name.
        GraderFailure: it cannot be graded; `kind` says why (`grader_timeout`, `grader_no_label`, ...).
    """
    rm_type = rm_type_of(args, sample)
    spec = find(rm_type)
    text = final_answer(sample) if spec.reads == "answer" else sample.response
    metadata: Mapping[str, Any] = sample.metadata
    if spec.runs == "async":
        metadata = {"prompt": sample.prompt, **metadata}
    grade = await runner_for(args).grade(rm_type, text, sample.label, metadata)
    told = {name: getattr(grade, name) for name in ("score", "correct", "extracted", "reason")}
    sample.metadata["grade"] = {"rm_type": rm_type, **told, "parts": dict(grade.parts)}
    return _reward(args, rm_type, grade)


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """The rewards of many samples, in order, graded side by side.

    Raises:
        SettingsError: as of `async_rm`.
        GraderFailure: the first one that failed; the others were graded nevertheless and have their
            `metadata["grade"]`.
    """
    rewards: list[Reward] = [0.0] * len(samples)
    failures: dict[int, GraderFailure | SettingsError] = {}

    left = iter(enumerate(samples))

    async def work() -> None:
        for at, sample in left:
            try:
                rewards[at] = await async_rm(args, sample)
            except (GraderFailure, SettingsError) as failure:
                failures[at] = failure

    # Not one task a sample: starting thousands in one step of the event loop would hold it up.
    async with anyio.create_task_group() as group:
        for _ in range(min(len(samples), _AT_ONCE)):
            group.start_soon(work)
    if failures:
        raise failures[min(failures)]
    return rewards


def rm_type_of(args: Any, sample: Sample) -> str:
    """The sample's grader.

    Raises:
        SettingsError: none is set.
    """
    rm_type = sample.metadata.get("rm_type") or getattr(args, "rm_type", None)
    if not rm_type:
        raise SettingsError("no grader is set; pass --rm-type, one of " + ", ".join(GRADERS))
    if not isinstance(rm_type, str):
        raise SettingsError(f"rm_type in the metadata must be a grader's name, got {rm_type!r:.100}")
    return rm_type


def final_answer(sample: Sample) -> str:
    """The text to grade: the last assistant message where the conversation was recorded, else the response."""
    messages: Sequence[Message] = sample.metadata.get("messages", ())
    for message in reversed(messages):
        if message.get("role") == "assistant":
            content = message.get("content")
            if isinstance(content, (list, tuple)):
                return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
            return str(content or "")
    return sample.response


def _reward(args: Any, rm_type: str, grade: Grade) -> Reward:
    keys = [key for name in ("reward_key", "eval_reward_key") if (key := getattr(args, name, None))]
    if not keys:
        return grade.score
    reward = {**grade.parts, "score": grade.score}
    if missing := [key for key in keys if key not in reward]:
        raise GraderFailure(
            f"--reward-key {missing[0]}: --rm-type {rm_type} has no such score; it has {', '.join(reward)}",
            kind="grader_no_reward_key",
        )
    return reward
