"""Trajectories of a hosted model: conversations in messages, samples without token ids. A `HostedConversation` takes
the place of a `Conversation`, so that environments and tools are the same. Its sample names the model
(`Sample.hosted`), and a train batch refuses it."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any, Final, cast

from agentrl.chat import AppendResult, Chat, ParsedTurn
from agentrl.chat.messages import ToolCall, ToolSchema, normalise_messages, normalise_tools, whole_text
from agentrl.chat.session import name_results
from agentrl.clock import note_turn
from agentrl.engine.hosted import KIND, NO_TOKENS, HostedModel, sent
from agentrl.engine.wire import Generation, SamplingParams
from agentrl.errors import EnvFailure
from agentrl.media import ImageLimits, take_images
from agentrl.rollout.context import RolloutContext
from agentrl.sample import Message, Sample, content_text


class NoChat:
    """The chat of a hosted model. Its tokenizer is not known, so that uses of token ids raise an error."""

    stop_token_ids: Final = ()

    def __getattr__(self, name: str) -> Any:
        raise EnvFailure(
            f"Chat.{name} is not available: {NO_TOKENS}, and no tokenizer is known to be its own", kind=KIND
        )

    @classmethod
    def as_chat(cls) -> "Chat":
        """Return an instance with the type `Chat`."""
        return cast("Chat", cls())


class HostedConversation:
    """A trajectory in flight, with the attributes of a `Conversation` that the agent loop uses. `sample` gets the texts,
    the tools and the server's count of tokens. `earlier` is empty: a conversation in messages is not split."""

    room: Final = sys.maxsize  # no limit is known; the server refuses prompts that are too long

    def __init__(
        self,
        model: HostedModel,
        sample: Sample,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[ToolSchema] | None = None,
        image_limits: ImageLimits | None = None,
    ) -> None:
        """Begin with `messages`. Raises TemplateError: a message or a tool is malformed."""
        self.sample, self.earlier, self.messages = sample, list[Sample](), list[Message]()
        self._model, self._tools, self._turns = model, whole_text(normalise_tools(tools)), 0
        self._sent, self._calls, self._limits = list[Message](), tuple[ToolCall, ...](), image_limits or ImageLimits()
        if self._tools:
            sample.metadata["tools"] = self._tools
        sample.response, sample.metadata["messages"] = "", self.messages
        self.messages += normalise_messages(self._taken(messages))
        self._sent += sent(self.messages, sample.images)

    async def turn(self, context: RolloutContext, params: SamplingParams) -> tuple[Generation, ParsedTurn]:
        """Have the model write the next turn. Raises what `HostedModel.turn` raises."""
        self._turns += 1
        note_turn(self._turns)
        params = context.turn_params(params, self.sample, self._turns, self.room)
        got = await self._model.turn(self._sent, self._tools, params)
        self._sent.append(got.message)
        self._calls = got.parsed.tool_calls
        self.messages.append(got.parsed.to_message())
        self._respond([got.parsed.content])
        self.sample.spec_info.add(got.generation.meta_info)
        for tally in context.tallies:
            tally.sampled(got.generation.meta_info["completion_tokens"])
        return got.generation, got.parsed

    def append_messages(self, messages: Sequence[Mapping[str, Any]]) -> AppendResult:
        """Answer the last turn; tool messages get its calls' ids. Raises TemplateError: a message is malformed."""
        self._sent += sent(self.remember(messages), self.sample.images)
        return AppendResult.FITS

    def restart(self, messages: Sequence[Mapping[str, Any]]) -> AppendResult:
        """Refuse: the conversation would not be a demonstration any more."""
        raise EnvFailure("Step.restart: a hosted model's conversation cannot begin anew", kind=KIND)

    def remember(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Add messages to the conversation without sending them; return them normalized."""
        new = name_results(normalise_messages(self._taken(messages)), self._calls)
        self._respond([content_text(message["content"]) for message in new])
        self.messages += new
        return new

    def _taken(self, messages: Sequence[Mapping[str, Any]]) -> list[Message]:
        """Return messages with references in place of images; the sample gets the images. Raises MediaError."""
        taken, new = take_images(messages, self.sample.images, self._limits)
        self.sample.images = {**self.sample.images, **new}
        return taken

    def _respond(self, texts: Sequence[str]) -> None:
        self.sample.response = "\n".join(filter(None, (self.sample.response, *texts)))
