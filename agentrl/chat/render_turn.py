"""Renders a message as the model's text with the chat template, and checks that the parser reads tool calls back."""

import re
from collections.abc import Sequence

from agentrl.chat.chat import Chat
from agentrl.chat.messages import ToolSchema, normalise_messages, normalise_tools
from agentrl.chat.probe import TOOL, assistant, common, user
from agentrl.errors import SettingsError, TemplateError
from agentrl.sample import Message


def render_turn(chat: Chat, message: Message, tools: Sequence[ToolSchema] | None = None) -> str:
    """Return the text of an assistant's `message` as the template renders it after a user's message, without the end
    token. `tools`: schemas of the model's tools. Raises TemplateError: the template cannot render the message."""
    before, schemas = [user(1)], normalise_tools(tools)
    prompt = chat.template.render(before, schemas, generation_prompt=True)
    whole = chat.template.render([*before, *normalise_messages([message])], schemas, generation_prompt=False)
    tags = chat.turn_parser.tags
    if tags is not None and chat.report.opens_reasoning and not whole.startswith(prompt):
        prompt = prompt[: prompt.rfind(tags.open)]
    body = whole[common(prompt, whole) :]
    if stops := chat.report.stops:
        body = re.split("|".join(map(re.escape, stops)), body, maxsplit=1)[0]
    if tags is not None and chat.report.opens_reasoning and tags.close not in body:
        body = f"{tags.close}\n\n{body}"
    return body


def unread_call(chat: Chat) -> str | None:
    """Return a tool call of the template if the parser cannot read it; None if it can, or the template has no calls."""
    if not chat.report.can.tool_messages:
        return None
    try:
        text = render_turn(chat, assistant(1, calls=[1], content=False), [TOOL])
    except TemplateError:
        return None
    calls = [(call.name, call.arguments) for call in chat.parse(text, [TOOL]).tool_calls]
    return None if calls == [("zqtool", {"a": "zqArg1zq"})] else text


def check_calls_are_read(chat: Chat, parser: str) -> list[str]:
    """Check that the parser reads the model's tool calls. `parser`: `--tool-call-parser`; "none" means that another
    program reads the calls. Returns a warning if no format of calls was found. Raises SettingsError: the parser does
    not read the template's tool call. The message shows the call."""
    if parser == "none":
        return []
    if (text := unread_call(chat)) is not None:
        raise SettingsError(
            f"--tool-call-parser {parser} (here {chat.turn_parser.family.name!r}) does not read the tool calls that the "
            f"chat template writes, such as {text.strip()!r:.200}: no tool would ever run. Name another parser, your own "
            "with --tool-call-parser pkg.mod:function, or none if the environment reads turn.text itself"
        )
    if chat.turn_parser.family.name != "none":
        return []
    said = "--tool-call-parser auto found no format of tool calls in the chat template: no tool runs, calls are text"
    return [f"{said}; name the format (docs/parsers.md), or set none if the environment reads turn.text itself"]
