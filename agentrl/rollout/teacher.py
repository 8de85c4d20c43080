"""A teacher that is called over HTTP for log-probs of the tokens in finished groups.

1. A group is sent to the teacher as soon as it is kept for training, while other groups are in flight. The log-probs
   are stored in the samples, ledger and dumps. Samples that have them, or train no token, are not sent.
2. With `opd_privileged_key` the teacher's prompt is longer than the student's: a user message from the sample's
   metadata follows. The teacher may then be the trained model itself, on the run's engines (arXiv:2601.18734). A sample
   that does not fit with this message is not trained; `failures/engine/teacher_overflow` counts it.
3. Any SGLang server with the student's vocabulary can be the teacher. Its log-probs are at temperature 1.
4. A teacher's failure is an engine failure. It ends the run if the policy is to raise; otherwise it drops the group."""

from collections.abc import Sequence
from functools import partial
from typing import Any

from agentrl.engine.images import ImageInputs
from agentrl.engine.pool import EnginePool
from agentrl.errors import ContextOverflow, EngineFailure, Failure, SampleError, SettingsError
from agentrl.groups import Group
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.failures import DropGroup
from agentrl.rollout.settings import FailureAction
from agentrl.rollout.stats import RolloutStats, Tally
from agentrl.sample import Sample
from agentrl.tasks import together

_PIECES = 200


async def teach(group: Group, context: RolloutContext, tally: Tally) -> None:
    """Set the teacher's log-probs of the response on every sample of the group, if there is a teacher. Raises, if the
    teacher failed: EngineFailure if the policy ends the run, else DropGroup."""
    if (teacher := context.teacher) is None:
        return

    async def ask(sample: Sample) -> None:
        # One session per group: its requests go to the server that has the prompt in its cache.
        session, count = str(sample.group_index), sample.response_length
        ids = seen_by_teacher(sample, context)
        added, first = len(ids) - len(sample.tokens), sample.prompt_length
        spans = [span.moved(added) if span.start >= first else span for span in sample.image_spans]
        images = ImageInputs.of(sample.images, spans)
        try:
            sample.teacher_log_probs = await teacher.log_probs(ids, count, session_id=session, images=images)
        except ContextOverflow as failure:
            if not added:
                raise
            sample.remove_sample = True
            said = (
                f"sample index={sample.index} is not trained, as it does not fit with --opd-privileged-key: {failure}"
            )
            tally.stats += RolloutStats.of(EngineFailure(said, kind="teacher_overflow"))

    try:
        wanted = [sample for sample in group if sample.teacher_log_probs is None and sample.trained_tokens]
        await together(*(partial(ask, sample) for sample in wanted))
    except Failure as failure:
        failure.args = (f"the teacher: {failure}",)
        tally.stats += RolloutStats.of(failure)
        if context.settings.action(failure.blame) is FailureAction.RAISE:
            raise
        raise DropGroup(f"teacher/{failure.kind}") from failure


def seen_by_teacher(sample: Sample, context: RolloutContext) -> list[int]:
    """Return the sample's ids, with the privileged message after the prompt if the settings ask for it. Raises
    SampleError: the sample has no such text. SettingsError: the prompt does not end with a generation prompt."""
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
    """Check that the teacher's servers answer and have the student's vocabulary. `longest`: tokens of context needed,
    if known. Raises EngineFailure: no answer, or no SGLang. SettingsError: another vocabulary or a short context."""
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
    """Return a text with all kinds of tokens: special ones, and others from the whole vocabulary."""
    special = sorted(tokenizer.get_added_vocab())[:_PIECES]
    others = range(0, len(tokenizer), max(1, len(tokenizer) // _PIECES))
    return "".join([tokenizer.decode(list(others)), *special])


def same_vocabulary(tokenizer: Any, text: str, ids: Sequence[int], who: str) -> None:
    """Check that `ids`, the server's ids of `text`, are those of the student's tokenizer. Raises SettingsError."""
    own = tokenizer(text)["input_ids"]
    if list(ids) != own:
        at = next(i for i in range(len(own) + 1) if own[: i + 1] != list(ids[: i + 1]))
        raise SettingsError(
            f"{who} has another vocabulary than --hf-checkpoint: {tokenizer.decode(own[at : at + 1])!r} is "
            f"{own[at : at + 1]} to the student and {ids[at : at + 1]} to the teacher; choose one of the same family"
        )
