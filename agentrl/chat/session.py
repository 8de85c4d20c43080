"""A conversation as token ids: it takes the ids of each model turn and returns the ids that follow.

1. `prompt_ids` is rendered once. `append_model_turn` takes the sampled ids; `extend` returns the ids that come next:
   `close` (the end of the turn, if the model did not end it), then `env` (new messages, generation prompt).
2. Work per turn is proportional to the turn, except for a restart under policy `split`.
3. One task at a time uses a session."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from agentrl.chat.chat import Chat
from agentrl.chat.messages import ParsedTurn, ToolCall, normalise_messages, normalise_tools
from agentrl.chat.report import Thought, Verdict
from agentrl.errors import TemplateError
from agentrl.sample import Message


@dataclass(frozen=True, slots=True)
class Delta:
    """The ids that follow a model turn."""

    close: list[int] = field(default_factory=list)  # ends a turn that the model did not end (mask 0, `Origin.CLOSE`)
    env: list[int] = field(default_factory=list)  # new messages, next generation prompt (mask 0, `Origin.ENV`)
    new: list[Message] = field(default_factory=list)  # the new messages, in the normal form
    verdict: Verdict = Verdict.EXACT  # difference from the template's full rendering of the conversation
    restart: list[int] | None = None  # under policy `split`, a new sample's prompt; `close` and `env` are then empty


@dataclass(slots=True)
class _Turn:
    """The parts of the last model turn that `extend` needs."""

    ids: list[int]
    stop_at: int | None
    parsed: ParsedTurn


class ChatSession:
    """A growing conversation. It keeps the `messages` so far, in normal form, and renders the next ids; the caller keeps
    the ids. `prompt_ids` is the first prompt, generation prompt included."""

    def __init__(
        self, chat: Chat, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        """Render the prompt. Raises TemplateError: the template cannot render the messages."""
        self._chat = chat
        self.messages = normalise_messages(messages)
        self._tools = normalise_tools(tools)
        self._thoughts: set[Thought] = set()
        self._beside = False
        self._calls_made = sum(len(message.get("tool_calls", ())) for message in self.messages)
        self._turn: _Turn | None = None
        self.prompt_ids: list[int] = chat.prompt_ids(self.messages, self._tools)
        self.parser = chat.parser_after(self.prompt_ids)  # of the next turn; after the turn, still its parser

    def fork(self) -> Self:
        other = copy.copy(self)
        other.messages, other._thoughts = list(self.messages), set(self._thoughts)
        return other

    def append_model_turn(self, ids: Sequence[int]) -> ParsedTurn:
        """Parse the ids that the model sampled, exactly as the engine returned them, with or without an end token.
        Raises TemplateError: `extend` was not called since the last model turn."""
        if self._turn is not None:
            raise TemplateError("append_model_turn was called twice in a row; answer the first turn with extend")
        ids = list(ids)
        stops = self._chat.stop_ids
        stop_at = next((at for at, token in enumerate(ids) if token in stops), None)
        text = self._chat.decode(ids[:stop_at])
        parsed = self.parser.parse(text, self._tools, first_call=self._calls_made + 1)
        self._calls_made += len(parsed.tool_calls)
        self._thoughts |= self._chat.thoughts(parsed, text)
        self._beside = self._beside or bool(parsed.broken or (parsed.tool_calls and parsed.content))
        # A broken call has no message form.
        message = {"role": "assistant", "content": text.strip()} if parsed.broken else parsed.to_message()
        self.messages += normalise_messages([message])
        self._turn = _Turn(ids, stop_at, parsed)
        return parsed

    def extend(self, messages: Sequence[Mapping[str, Any]]) -> Delta:
        """Answer the last model turn with new messages. Tool messages without `tool_call_id` or `name` get the ids
        and names of the turn's calls, in order. Raises TemplateError: there is no model turn to answer, the template
        cannot render a message, or the policy is `fail` and the template would rewrite history."""
        if (turn := self._turn) is None:
            raise TemplateError("extend was called before append_model_turn; there is no model turn to answer")
        new = name_results(normalise_messages(messages), turn.parsed.tool_calls)
        roles = {message["role"] for message in new} or {"user"}
        verdicts = [self._chat.report.predict(role, self._thoughts, beside=self._beside) for role in roles]
        verdict = max(verdicts, key=list(Verdict).index)
        if verdict.rewrites and self._chat.template_rewrite_policy == "fail":
            remedy = "choose 'keep' or 'split' as --template-rewrite-policy"
            raise TemplateError(f"the chat template would rewrite history here ({verdict}); {remedy}")
        if verdict.rewrites and self._chat.template_rewrite_policy == "split":
            self._thoughts.clear()
            self._beside = False
            delta = Delta(new=new, verdict=verdict, restart=self._chat.render_ids([*self.messages, *new], self._tools))
        else:
            delta = self._append(turn, new, verdict)
        self.messages += new
        self.parser = self._chat.parser_after(delta.env if delta.restart is None else delta.restart)
        self._turn = None
        return delta

    def _append(self, turn: _Turn, new: list[Message], verdict: Verdict) -> Delta:
        env = self._chat.delta_ids(_calls_for(turn.parsed.tool_calls, new), new)
        if turn.stop_at is None:  # cut by the length limit or a stop string: reasoning and turn are closed
            close = [*self._chat.reasoning_close_ids] if turn.parsed.reasoning_open else []
            if env and env[0] in self._chat.closer_ids:
                close, env = [*close, env[0]], env[1:]
        else:
            close, env = self._join_at_stop(turn.ids[turn.stop_at], env)
            after = turn.ids[turn.stop_at + 1 :]  # ids after the end token are kept as sampled
            if not close and env[: len(after)] == after:
                env = env[len(after) :]
        return Delta(close, env, new, verdict)

    def _join_at_stop(self, stop: int, env: list[int]) -> tuple[list[int], list[int]]:
        """Return close and env after a turn with end token `stop`; `env` begins with the template's end token."""
        closers = self._chat.closer_ids
        if not env or env[0] == stop:
            return [], env[1:]
        if env[0] not in closers:
            return [], env
        # If `stop` can close a turn, it replaces the template's end token; otherwise that token is added as context.
        return ([] if stop in closers else [env[0]]), env[1:]


def name_results(new: list[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """Add the ids and names of the answered calls, in order, to tool messages in the normal form."""
    names = {call.id: call.name for call in calls}
    taken = {message.get("tool_call_id") for message in new}
    free = iter([call for call in calls if call.id not in taken])
    for message in new:
        if message["role"] != "tool":
            continue
        if "tool_call_id" not in message:
            named = next(free, None)
            message["tool_call_id"] = named.id if named else "call00000"
            message.setdefault("name", named.name if named else "tool")
        message.setdefault("name", names.get(message["tool_call_id"], "tool"))
    return new


def _calls_for(calls: Sequence[ToolCall], new: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the calls of the last model turn; if it has none, an empty call for each tool message in `new`."""
    if calls:
        return [ToolCall(call.id, call.name, "").to_message() for call in calls]  # their arguments are not rendered
    results = [m for m in new if m["role"] == "tool"] if new and new[0]["role"] == "tool" else []
    return [ToolCall(str(m["tool_call_id"]), str(m["name"]), {}).to_message() for m in results]
