"""Grades a rollout's samples: chooses the grader and the text, and stores the grade in `sample.metadata["grade"]`.

1. The grader is the sample's own `metadata["rm_type"]`, else `args.rm_type`.
2. The reward is the grade's score, or with `--reward-key` or `--eval-reward-key` the dict `{"score": ..., **parts}`."""

from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.errors import GraderFailure, SettingsError
from agentrl.rm_hub.grade import Grade, Metadata
from agentrl.rm_hub.registry import GRADERS, find
from agentrl.rm_hub.running.runner import each, runner_for
from agentrl.sample import Message, Sample, content_text

Reward = float | dict[str, float]


async def async_rm(args: Any, sample: Sample, **kwargs: Any) -> Reward:
    """Return the built-in reward of a sample. A worker process or a server grades it; the event loop is not blocked.
    `args` has settings as attributes (`rm_type`, `reward_key`, `grader_timeout`, ...); a missing setting has its
    default. The grader reads the sample's final answer (or response), label and metadata.

    Raises SettingsError: no grader is set, or its name is unknown. GraderFailure: the sample cannot be graded; `kind`
    is the reason (`grader_timeout`, `grader_no_label`, ...)."""
    if (rm_type := rm_type_of(args, sample)) is None:
        raise SettingsError("no grader is set; pass --rm-type, one of " + ", ".join(GRADERS))
    grade = await grade_sample(args, sample, rm_type)
    sample.metadata["grade"] = {"rm_type": rm_type, **grade.as_dict()}
    if not (keys := reward_keys(args)):
        return grade.score
    named = *keys, *getattr(args, "gdpo_weights", ()), *grade.parts, "score"
    parts = {key: grade.part(key) for key in named}
    return keyed(f"--rm-type {rm_type}", keys, {key: part for key, part in parts.items() if part is not None})


async def grade_sample(args: Any, sample: Sample, rm_type: str) -> Grade:
    """Grade the text of a sample that the grader reads, with the grader `rm_type`. Raises as `async_rm` does."""
    spec = find(rm_type)
    if sample.label is None and spec.needs_label and getattr(args, "slime_defaults", False):
        return Grade(0.0, correct=False, reason="there is no label, which slime rewards with 0")
    text = final_answer(sample) if spec.reads == "answer" else sample.response
    metadata: Metadata = sample.metadata
    if spec.runs != "process":
        metadata = {"prompt": sample.prompt, **metadata}
    return await runner_for(args).grade(rm_type, text, sample.label, metadata)


async def batched_async_rm(args: Any, samples: Sequence[Sample], **kwargs: Any) -> list[Reward]:
    """Return the rewards of many samples, in order, graded concurrently. Raises the error of the first sample that
    failed, as `async_rm` does. The other samples are graded nevertheless and have their `metadata["grade"]`."""
    rewards: list[Reward] = [0.0] * len(samples)
    failures: dict[int, GraderFailure | SettingsError] = {}

    async def one(at: int, sample: Sample) -> None:
        try:
            rewards[at] = await async_rm(args, sample)
        except (GraderFailure, SettingsError) as failure:
            failures[at] = failure

    await each(samples, one)
    if failures:
        raise failures[min(failures)]
    return rewards


def rm_type_of(args: Any, sample: Sample) -> str | None:
    """Return the name of the sample's grader, or None. Raises SettingsError: the name is not text."""
    match sample.metadata.get("rm_type") or getattr(args, "rm_type", None):
        case str(rm_type) if rm_type:
            return rm_type
        case None | "":
            return None
        case other:
            raise SettingsError(f"rm_type in the metadata must be a grader's name, got {other!r:.100}")


def final_answer(sample: Sample) -> str:
    """Return the text to grade: the last assistant message if the conversation was recorded, else the response."""
    messages: Sequence[Message] = sample.metadata.get("messages", ())
    turns = [message for message in messages if message.get("role") == "assistant"]
    return content_text(turns[-1].get("content")) if turns else sample.response


def reward_keys(args: Any) -> list[str]:
    """Return the keys of a dict reward that the settings name. If there is none, the reward is a plain number."""
    return [key for name in ("reward_key", "eval_reward_key") if (key := getattr(args, name, None))]


def keyed(what: str, keys: Sequence[str], scores: Mapping[str, float]) -> dict[str, float]:
    """Return `scores` as a dict reward. Raises GraderFailure: a key is not in `scores`."""
    if missing := [key for key in keys if key not in scores]:
        said = f"--reward-key {missing[0]}: {what} has no such score; it has {', '.join(scores)}"
        raise GraderFailure(said, kind="grader_no_reward_key")
    return dict(scores)
