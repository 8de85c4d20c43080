"""Helpers for custom generate functions that work with messages and text, and still train on the exact tokens.

    from agentrl.rollout.helpers import generate_single, extract_tool_call, execute_tool, build_loss_mask

`generate_single(conversation)` renders the new messages of the conversation, samples one turn and returns its text.
Ids, log-probs and weight versions are recorded. A conversation is recognized by its messages: pass the same list with
the new messages appended, or a copy that also has the assistant's turns as returned. When the function returns, samples
without tokens get the recorded tokens; `build_loss_mask(sample)` copies them at once. Also copied, unless the function
has set them: `metadata["messages"]`, from which graders take the final answer, and the counts of `execute_tool` in
`metadata["counters"]` and `non_generation_time`."""

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from agentrl.chat import AppendResult, Conversation, ToolCall
from agentrl.engine.wire import SamplingParams
from agentrl.envs import Environment
from agentrl.envs.base import outcome_counts
from agentrl.errors import AgentRLError, ContextOverflow, EnvFailure
from agentrl.rollout.agent_loop import count, sample_turn
from agentrl.rollout.context import RolloutContext
from agentrl.rollout.environment import closing, make_environment
from agentrl.sample import GROWN, Message, Origin, Sample, Status
from agentrl.tools import Toolbox


@dataclass(eq=False, slots=True)
class _Record:
    """One conversation of the function. `given`: the list it began with. `owner`: the sample that got its tokens."""

    given: list[Message]
    talk: Conversation
    sample: Sample
    owner: Sample | None = None
    copied: dict[str, Any] = field(default_factory=dict)  # values that `_copy` set last; the function may replace them


@dataclass(slots=True)
class Recorder:
    """Records the conversations of one call of a custom generate function."""

    context: RolloutContext
    params: SamplingParams
    origin: Sample
    records: list[_Record] = field(default_factory=list)
    environment: Environment | None = None
    toolbox: Toolbox = field(default_factory=Toolbox)

    def __post_init__(self) -> None:
        if self.context.environments is not None:
            self.environment = make_environment(self.context.environments.of(self.origin), self.context)
            self.toolbox = self.environment.toolbox

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        """Schemas of the tools that the model may call: those of `--env`, or else of the data row."""
        return self.toolbox.schemas or self.origin.metadata.get("tools")

    async def turn(self, messages: list[Message]) -> str:
        """Sample the next assistant turn of a conversation; returns its text without control tokens."""
        for number, message in enumerate(messages):
            if not isinstance(message, dict):
                raise _bad_call(
                    f"generate_single: message {number} is a {type(message).__name__}; append {{'role': 'assistant', "
                    "'content': ...}, with the text that generate_single returned as its content"
                )
        record = self._continued(messages) or self._begun(messages)
        generation, _ = await sample_turn(self.context, record.talk, self.params, f"custom-{id(record)}")
        cut = generation.finish_reason.type == "length"
        record.sample.stop(("length" if record.talk.room > 0 else "context") if cut else "done")
        text = self.context.chat.decode(generation.ids, skip_special_tokens=True)
        record.talk.record_shown_text(text)
        _RECORD.set(record)
        return text

    def _begun(self, messages: list[Message]) -> _Record:
        context, origin = self.context, self.origin
        # The numbers of the origin and the record give every conversation other sampling seeds.
        attempt = f"{origin.metadata.get('attempt', 0)}/{len(self.records)}"
        sample = Sample(origin.group_index, origin.index, metadata={"attempt": attempt}, images=origin.images)
        length, limit = context.context_length, context.settings.rollout_max_prompt_len
        talk = Conversation(context.chat, sample, messages, self.tools, context_length=length, prompt_limit=limit)
        self.records.append(_Record(messages, talk, sample))
        return self.records[-1]

    def _continued(self, messages: list[Message]) -> _Record | None:
        """Append new `messages` to the conversation that they continue, and return it; None if they begin another."""
        found = {r: r.talk.continued(messages, same_list=r.given is messages) for r in self.records}
        fits = {record: new for record, new in found.items() if new is not None}
        if not fits:
            return None
        own = [record for record in fits if record.given is messages]
        record = own[-1] if own else _only(list(fits))
        self._show(record.talk, fits[record])
        return record

    def _show(self, talk: Conversation, new: list[Message]) -> None:
        if not new:
            if not talk.earlier and (not (said := talk.sample.segments) or said[-1].origin is not Origin.MODEL):
                return  # the last call failed before the model answered
            raise _bad_call("generate_single was called twice with nothing new in the conversation")
        shown = talk.append_messages(new)
        if shown is AppendResult.SPLIT:
            raise _bad_call(
                "generate_single keeps one sample a conversation and cannot split it; use --template-rewrite-policy keep"
            )
        if shown is AppendResult.OUT_OF_CONTEXT:
            raise ContextOverflow(f"the conversation has {talk.length} tokens, {talk.context_length} fit")

    def claim(self, sample: Sample) -> bool:
        """Copy the tokens of its conversation to `sample`; return false if no conversation was recorded for it. The
        conversation is the one claimed before, the one whose list is `sample.prompt`, or the only free one. Raises
        EnvFailure: several conversations are possible."""
        free = [r for r in self.records if r.owner is None or r.owner is sample]
        mine = [r for r in free if r.owner is sample or r.given is sample.prompt] or free
        if not mine:
            return False
        mine = [r for r in mine if r.talk.turns] or mine  # the others are of calls that failed
        if len(mine) > 1 and mine[0].owner is not sample:
            raise _bad_call(
                f"{len(mine)} recorded conversations could be sample {sample.index}'s; call build_loss_mask(sample) "
                "before the next sample's first turn, or generate on the list that is sample.prompt"
            )
        record = mine[0]
        record.owner = sample
        _copy(record, sample)
        return True

    def rescue(self, sample: Sample) -> None:
        """Copy the record to the sample of a failed generate function, if there is only one record."""
        if len(self.records) == 1 and (not sample.tokens or sample.tokens is self.records[0].sample.tokens):
            _copy(self.records[0], sample)

    def fill(self, samples: Sequence[Sample]) -> None:
        """Copy conversations to samples without tokens, in order, and later turns to samples with earlier turns."""
        for sample in samples:
            grew = [r for r in self.records if r.owner is sample and r.sample.tokens is sample.tokens]
            if not sample.tokens or any(r.sample.response_length != sample.response_length for r in grew):
                self.claim(sample)


def _only(records: list[_Record]) -> _Record:
    """Choose one of several conversations with the same messages: the one that this task continued last, or the first
    if all have the same tokens. Raises EnvFailure: neither applies."""
    last, first = _RECORD.get(), records[0]
    if last in records:
        return last
    if all(record.sample.tokens == first.sample.tokens for record in records):
        return first
    said = f"{len(records)} conversations have the same messages and other tokens"
    raise _bad_call(f"{said}; pass the list that each began with, with what is new appended to it")


def _bad_call(message: str) -> EnvFailure:
    return EnvFailure(message, kind="env_bad_call")


_OWN = {"response": "", "status": Status.PENDING, "stop_reason": "", "non_generation_time": 0.0}


def _copy(record: _Record, target: Sample) -> None:
    source = record.sample
    for name in GROWN:
        setattr(target, name, getattr(source, name))
    target.images, target.spec_info = {**target.images, **source.images}, source.spec_info
    for name, unset in _OWN.items():
        other = name == "stop_reason" and target.status is not source.status
        if not other and getattr(target, name) in (unset, record.copied.get(name, unset)):
            setattr(target, name, getattr(source, name))
        record.copied[name] = getattr(source, name)
    target.metadata.setdefault("messages", record.talk.messages)
    if "counters" in source.metadata:
        target.metadata.setdefault("counters", source.metadata["counters"])


_RECORD: ContextVar[_Record | None] = ContextVar("agentrl_record", default=None)
"""The conversation that this task continued last, whose calls `execute_tool` runs."""
_RECORDER: ContextVar[Recorder | None] = ContextVar("agentrl_recorder", default=None)


@asynccontextmanager
async def recording(recorder: Recorder) -> AsyncIterator[None]:
    """Have the helpers of this module write to `recorder`; close its environment at the end."""
    token, before = _RECORDER.set(recorder), _RECORD.set(None)
    try:
        async with closing(lambda: recorder.environment, recorder.origin):
            yield
    finally:
        _RECORDER.reset(token)
        _RECORD.reset(before)


def _recorder() -> Recorder:
    if (recorder := _RECORDER.get()) is None:
        raise AgentRLError("no generate function is running here: call this helper from inside one")
    return recorder


def current() -> RolloutContext:
    """Return the context of the rollout that runs this code. Raises AgentRLError: no generate function runs."""
    return _recorder().context


async def generate_single(conversation: list[Message]) -> str:
    """Sample one assistant turn, and return its text without control tokens.

    `conversation`: all messages so far: the list that the conversation began with (the assistant's turns may be left
    out), or a copy with them as returned. A list that differs earlier begins a new conversation."""
    return await _recorder().turn(conversation)


def extract_tool_call(response: str) -> ToolCall | None:
    """Return the first well-formed tool call in a turn's text, or None."""
    recorder = _recorder()
    calls = recorder.context.chat.parse(response, recorder.tools).tool_calls
    return calls[0] if calls else None


async def execute_tool(call: ToolCall) -> str:
    """Run a call against the tools of `--env`. Errors of the tool are returned as text for the model. The call counts
    for the conversation that `generate_single` continued last in the same task. Tools keep state (variables of Python)
    for one call of the generate function. Raises ToolFailure: the tool failed, `on_failure` is "fail"."""
    recorder = _recorder()
    record, started = _RECORD.get(), time.monotonic()
    try:
        outcome = await recorder.toolbox.run(call.name, call.arguments, state=recorder.environment)
    finally:
        if record is not None:
            record.sample.non_generation_time += time.monotonic() - started
    if record is not None:
        count(record.sample, outcome_counts([outcome]))
    return outcome.text


def build_loss_mask(sample: Sample) -> list[int]:
    """Return the loss mask of the sample's recorded conversation; set its tokens and log-probs on the sample. Raises
    EnvFailure: nothing was generated for the sample."""
    if not _recorder().claim(sample) or sample.loss_mask is None:
        raise _bad_call("build_loss_mask: nothing was generated with generate_single yet")
    return list(sample.loss_mask)
