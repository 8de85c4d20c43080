"""A teacher that is asked over HTTP: its log-probs of the tokens that a finished group's trajectories hold.

1. A group is shown to it as soon as it is kept for training, while others play; what it says is a part of the samples, so
   that ledger and dumps have it too. Samples that have it, or train nothing, are not shown.
2. With `opd_privileged_key` the teacher sees a longer prompt than the student: a user message follows with what the sample's
   metadata holds there. The teacher may then be the model itself, as the engines have it (arXiv:2601.18734).
3. Every SGLang server with the student's vocabulary will do. It says log-probs at temperature 1.
4. A teacher that fails is an engine's failure: the run ends, or with another policy for those the group is dropped."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import anyio

from agentrl.engine.images import ImageInputs
from agentrl.errors import EngineFailure, Failure, SampleError, SettingsError, ungrouped
from agentrl.groups import Group
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.settings import FailureAction
from agentrl.rollout.stats import RolloutStats, Tally
from agentrl.sample import Sample

if TYPE_CHECKING:
    from agentrl.engine.pool import EnginePool

_PIECES = 200


async def teach(group: Group, context: RolloutContext, tally: Tally) -> None:
    """Give every sample of the group the teacher's log-probs of its response, if there is a teacher. Raises
    EngineFailure: the teacher failed, and the policy says that this ends the run. DropGroup: the policy says anything
    else."""
    if (teacher := context.teacher) is None:
        return

    async def ask(sample: Sample) -> None:
        # One session a group: of several servers the one that has the prompt in its cache is asked.
        session, count = str(sample.group_index), sample.response_length
        ids = seen_by_teacher(sample, context)
        added, first = len(ids) - len(sample.tokens), sample.prompt_length
        spans = [span.moved(added) if span.start >= first else span for span in sample.image_spans]
        images = ImageInputs.of(sample.images, spans)
        sample.teacher_log_probs = await teacher.log_probs(ids, count, session_id=session, images=images)

    try:
        with ungrouped():
            async with anyio.create_task_group() as tasks:
                for sample in group:
                    if sample.teacher_log_probs is None and sample.trained_tokens:
                        tasks.start_soon(ask, sample)
    except Failure as failure:
        failure.args = (f"the teacher: {failure}",)
        tally.stats += RolloutStats.of(failure)
        if context.settings.action(failure.blame) is FailureAction.RAISE:
            raise
        raise DropGroup(f"teacher/{failure.kind}") from failure


def seen_by_teacher(sample: Sample, context: RolloutContext) -> list[int]:
    """The sample's ids, with the privileged message after the prompt where the settings ask for it. Raises SampleError:
    the sample has no such text. SettingsError: its prompt does not end as the chat template ends a prompt."""
    key, ids = context.settings.opd_privileged_key, list(sample.tokens)
    if key is None:
        return ids
    text = sample.metadata.get(key, sample.label if key == "label" else None)
    if not isinstance(text, str):
        raise SampleError(
            f"sample index={sample.index}: metadata[{key!r}] must be a text for the teacher (--opd-privileged-key), got "
            f"{text!r:.80}; write it into the row's metadata, or into sample.metadata in Environment.reset"
        )
    message = {"role": "user", "content": context.settings.opd_privileged_prompt.replace("{text}", text)}
    asked: list[dict[str, str]] = [{"role": "user", "content": "?"}]
    before = len(context.chat.render_ids(asked, generation_prompt=False))
    opening = context.chat.render_ids(asked)[before:]
    prompt, response = ids[: sample.prompt_length], ids[sample.prompt_length :]
    end = len(prompt) - len(opening)
    if prompt[end:] != opening:
        raise SettingsError(
            "--opd-privileged-key puts a message before the model's first turn, and the prompt of sample index="
            f"{sample.index} does not end with the template's generation prompt; use --apply-chat-template, or leave it out"
        )
    return prompt[:end] + context.chat.render_ids([*asked, message])[before:] + response


async def check_teacher(teacher: "EnginePool", tokenizer: Any, longest: int | None) -> None:
    """Make sure that the teacher's servers are there and read ids as the student's tokenizer writes them. `longest`:
    what their context must hold, where that is known. Raises EngineFailure: one does not answer, or is no SGLang
    server. SettingsError: one has another vocabulary, or too small a context."""
    try:
        await teacher.check()
    except EngineFailure as failure:
        failure.args = (f"--opd-teacher-url: {failure}; start the server first, or correct the address",)
        raise
    for url, info in (await teacher.server_info()).items():
        context = info.get("context_length")
        if longest and isinstance(context, int) and context < longest:
            raise SettingsError(
                f"--opd-teacher-url {url} reads fewer than {context} tokens, and a trajectory may have more; "
                f"set --rollout-max-context-len {context - 1}, or start it with a longer context"
            )
    text = probe_text(tokenizer)
    for url, ids in (await teacher.encode(text)).items():
        same_vocabulary(tokenizer, text, ids, f"--opd-teacher-url {url}")


def probe_text(tokenizer: Any) -> str:
    """A text of all kinds of tokens: the special ones, and others from the whole vocabulary."""
    special = sorted(tokenizer.get_added_vocab())[:_PIECES]
    others = range(0, len(tokenizer), max(1, len(tokenizer) // _PIECES))
    return "".join([tokenizer.decode(list(others)), *special])


def same_vocabulary(tokenizer: Any, text: str, ids: Sequence[int], who: str) -> None:
    """Refuse a teacher to which `text` is other `ids` than to the student's tokenizer."""
    own = tokenizer(text)["input_ids"]
    if list(ids) != own:
        at = next(i for i in range(len(own) + 1) if own[: i + 1] != list(ids[: i + 1]))
        raise SettingsError(
            f"{who} has another vocabulary than --hf-checkpoint: {tokenizer.decode(own[at : at + 1])!r} is "
            f"{own[at : at + 1]} to the student and {ids[at : at + 1]} to the teacher; choose one of the same family"
        )
