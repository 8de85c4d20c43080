"""`Chat`: messages to ids and model text to turns, for one tokenizer and one chat template.

1. Immutable except for a small cache, and thread-safe; one per process is enough. `load` does all slow work.
2. Training and evaluation use the same object, so they have the same template, deltas and parser.
3. transformers is imported inside `load`; torch is never needed."""

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

import orjson

from agentrl.chat.encoding import Codec, SafeEncoder
from agentrl.chat.messages import ParsedTurn, ToolSchema, normalise_messages, normalise_tools
from agentrl.chat.parsers import TurnParser, make_parser
from agentrl.chat.probe import choose_history_kwargs, find_closer, probe
from agentrl.chat.report import TemplateReport, Thought
from agentrl.chat.template import DeltaRenderer, Template
from agentrl.chat.vision import ImagePlaceholders
from agentrl.errors import MediaError, SettingsError, TemplateError, raised_as
from agentrl.media import Image, ImageLimits, ImageSpan, has_images, references, take_images
from agentrl.modelfolder import read_json
from agentrl.sample import Message

HistoryPolicy = Literal["keep", "split", "fail"]
_PROMPTS = 32  # prompts whose ids are cached, because a group's trajectories begin one after the other


class Chat:
    """A tokenizer with its chat template, which is probed at the start. Raises TemplateError: there is no template, or
    it does not compile. SettingsError: a policy or parser is unknown."""

    def __init__(
        self,
        tokenizer: Any,
        *,
        chat_template: str | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
        tool_call_parser: str = "auto",
        reasoning_parser: str = "auto",
        template_rewrite_policy: HistoryPolicy = "keep",
        stop_tokens: Iterable[int | str] = (),
        placeholders: ImagePlaceholders | None = None,
        image_limits: ImageLimits | None = None,
    ) -> None:
        """
        Args:
            tokenizer: a transformers tokenizer.
            chat_template: the template's text; the tokenizer's own if None.
            template_kwargs: arguments for the template (`enable_thinking=False`).
            tool_call_parser: "auto", a name of `parsers.FAMILIES`, or `pkg.mod:function`.
            reasoning_parser: "auto", a name of `parsers.REASONING`, or `pkg.mod:function`.
            template_rewrite_policy: if the template would rewrite history, keep it as sampled, split samples, or fail.
            stop_tokens: ids or texts of tokens that end generation, besides the tokenizer's EOS and the template's.
            placeholders: the model's image placeholders; None if it has no image input."""
        if template_rewrite_policy not in ("keep", "split", "fail"):
            raise SettingsError(f"--template-rewrite-policy {template_rewrite_policy!r}: expected keep, split or fail")
        source = chat_template if chat_template is not None else _own_template(tokenizer)
        self.tokenizer, self.placeholders = tokenizer, placeholders
        self.image_limits = image_limits or ImageLimits()
        self.template_rewrite_policy: HistoryPolicy = template_rewrite_policy
        self._codec = Codec(tokenizer)
        self._encoder = SafeEncoder(self._codec, source)
        special = tokenizer.special_tokens_map.items()
        named = {name: str(token) for name, token in special if not isinstance(token, list)}
        template = Template(source, named, template_kwargs)
        stops = self._find_stops(template, stop_tokens)
        parser = make_parser(tool_call_parser, reasoning_parser, source)
        chosen = choose_history_kwargs(template, self._codec, stops, parser.tags)
        self.template = template.with_kwargs(chosen) if chosen else template
        self.report: TemplateReport = probe(self.template, self._codec, stops, parser.tags, chosen)
        self.turn_parser = parser.opened(self.report.opens_reasoning)  # for turns that follow a user message
        opener, shown = parser.tags.open if parser.tags else "", self.report.generation_prompt
        self._opener = (opener + (shown.rpartition(opener)[2] if self.report.opens_reasoning else "")).rstrip()
        self.stop_token_ids: tuple[int, ...] = tuple(self._codec.added[stop] for stop in stops)
        self.stop_ids = frozenset(self.stop_token_ids)
        self.closer_ids = frozenset(self._codec.added[stop] for stop in self.report.closers)
        self.reasoning_close_ids: list[int] = self._codec.encode(parser.tags.close) if parser.tags else []
        self._prompts: OrderedDict[bytes, list[int]] = OrderedDict()
        self._delta = DeltaRenderer(self.template, self.report.can, stops)

    @classmethod
    def load(
        cls, path: str, *, chat_template: str | None = None, trust_remote_code: bool = False, **options: Any
    ) -> Self:
        """Load from a Hugging Face model folder. Raises SettingsError: the folder has no tokenizer, or an option is
        unknown. TemplateError: there is no template, or it does not compile.

        Args:
            path: folder with `tokenizer.json`, `tokenizer_config.json`, and perhaps `generation_config.json`.
            chat_template: a file (`*.jinja`) or the template's text; the folder's own if None.
            options: the other arguments of `Chat`."""
        tokenizer = load_tokenizer(path, trust_remote_code=trust_remote_code)
        options["placeholders"] = ImagePlaceholders.load(path, tokenizer)
        options["stop_tokens"] = _generation_stops(Path(path))
        return cls(tokenizer, chat_template=_read_template(chat_template), **options)

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return self._codec.vocab_size

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] | None = None) -> ParsedTurn:
        """Parse one model turn's text (end token removed)."""
        return self.turn_parser.parse(text, tools)

    def parser_after(self, prompt: Sequence[int]) -> TurnParser:
        """Return the parser for the turn after these ids. Their end shows if the template opened the reasoning."""
        if not self._opener:
            return self.turn_parser
        return self.turn_parser.opened(self.decode(prompt[-len(self._opener) - 8 :]).rstrip().endswith(self._opener))

    def thoughts(self, parsed: ParsedTurn, text: str) -> frozenset[Thought]:
        """Return the kinds of reasoning that a turn may have: with and without if the format is unknown."""
        tags = self.turn_parser.tags
        if self.turn_parser.reasoning is None and self.report.can.reasoning:
            return frozenset((Thought.WITH, Thought.WITHOUT))
        if parsed.reasoning is not None:
            return frozenset((Thought.WITH,))
        return frozenset((Thought.EMPTY if tags is not None and tags.close in text else Thought.WITHOUT,))

    def encode(self, text: str) -> list[int]:
        """Return the tokenizer's ids of trusted text: control strings become control tokens."""
        return self._codec.encode(text)

    def encode_turn(self, text: str) -> list[int]:
        """Return the ids of a model turn's text, without its end token. The texts of end tokens are ordinary text."""
        return self._encoder.encode_rendered(self._encoder.mark_only(text, self.report.stops))

    def least_tokens(self, messages: Sequence[Mapping[str, Any]]) -> int:
        """Return a lower bound for the messages' tokens: the contents' length over the longest token's length."""
        contents = (message.get("content") for message in messages)
        return sum(len(content) for content in contents if isinstance(content, str)) // self._codec.longest_token

    def take_images(
        self, messages: Sequence[Mapping[str, Any]], known: Mapping[str, Image]
    ) -> tuple[Sequence[Mapping[str, Any]], dict[str, Image]]:
        """Return messages with references in place of images, and their images that `known` lacks. Raises MediaError: an
        image is refused, or the model has no image input."""
        if not has_images(messages):
            return messages, {}
        if self.placeholders is None:
            raise MediaError("a message has an image; this model sees text only, --hf-checkpoint needs a vision model")
        return take_images(messages, known, self.image_limits)

    def image_spans(self, ids: Sequence[int], messages: Iterable[Mapping[str, Any]]) -> list[ImageSpan]:
        """Find the images of `messages` (normal form) in the ids of the rendered messages. The model sampled none of
        these ids. Raises TemplateError: the ids have another number of placeholders."""
        return [] if self.placeholders is None else self.placeholders.spans(ids, references(messages))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        return self._codec.decode(ids, skip_special_tokens)

    def render_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        generation_prompt: bool = True,
    ) -> list[int]:
        """Return the ids of a whole conversation as the template renders it. Control text in messages stays text."""
        return self._render(normalise_messages(messages), normalise_tools(tools), generation_prompt)

    def prompt_ids(self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None) -> list[int]:
        """Return `render_ids` of messages and tools in the normal form, cached for the trajectories of a group."""
        try:
            key = orjson.dumps((messages, tools))
        except TypeError:  # a value is not JSON
            return self._render(messages, tools, True)
        if (ids := self._prompts.get(key)) is None:
            ids = self._prompts[key] = self._render(messages, tools, True)
            if len(self._prompts) > _PROMPTS:
                self._prompts.popitem(last=False)
        return list(ids)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[ToolSchema] | None, generation_prompt: bool
    ) -> list[int]:
        marked = [self._encoder.mark_message(message) for message in messages]
        schemas = self._encoder.mark(tools) if tools else None
        return self._encode(self.template.render(marked, schemas, generation_prompt=generation_prompt), messages)

    def _encode(self, rendered: str, messages: Iterable[Mapping[str, Any]]) -> list[int]:
        if self.placeholders is not None:
            rendered = self.placeholders.expand(rendered, list(references(messages)))
        return self._encoder.encode_rendered(rendered)

    def delta_ids(self, calls: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids from a turn's end token through `new` (normal form) to the next generation prompt."""
        marked = [self._encoder.mark_message(dict(message)) for message in new]
        return self._encode(self._delta.text(self._encoder.mark(list(calls)), marked), new)

    def _find_stops(self, template: Template, extra: Iterable[int | str]) -> tuple[str, ...]:
        """Return the texts of the end tokens: the template's closer of turns, the tokenizer's EOS, and `extra`."""
        texts = {number: text for text, number in self._codec.added.items()}
        named = [texts.get(token) if isinstance(token, int) else token for token in extra]
        known = tuple(t for t in dict.fromkeys([self.tokenizer.eos_token, *named]) if t in self._codec.added)
        closer = find_closer(template, self._codec, known)
        return tuple(dict.fromkeys([*((closer,) if closer else ()), *known]))


def _own_template(tokenizer: Any) -> str:
    template = tokenizer.chat_template
    if isinstance(template, Mapping):
        template = template.get("tool_use") or template.get("default")
    if not isinstance(template, str) or not template:
        raise TemplateError("the tokenizer has no chat template; give one with --chat-template-path (a .jinja file)")
    return template


def _read_template(given: str | None) -> str | None:
    """Return a template's text: `given` is a file's path, or the text itself if it has template syntax."""
    if given is None or "{%" in given or "{{" in given:
        return given
    if not (file := Path(given).expanduser()).is_file():
        raise SettingsError(f"--chat-template-path: no file {given!r}, and it is not template text either")
    return file.read_text(encoding="utf-8")


def load_tokenizer(path: str, *, trust_remote_code: bool = False) -> Any:
    """Load the tokenizer of a Hugging Face model folder. Raises SettingsError: no tokenizer loads from there."""
    from transformers import AutoTokenizer, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    damage = (OSError, ValueError, AttributeError, KeyError, TypeError)
    with raised_as(SettingsError, f"{path}: no tokenizer could be loaded from here", *damage):
        kind = read_json(file).get("model_type") if (file := Path(path, "config.json")).is_file() else None
        # transformers fails on some config.json files of unknown types. The tokenizer does not need the config.
        unknown = kind is not None and kind not in CONFIG_MAPPING and not trust_remote_code
        options = {"config": PreTrainedConfig()} if unknown else {}
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code, **options)


def _generation_stops(folder: Path) -> list[int]:
    if not (file := folder / "generation_config.json").is_file():
        return []
    with raised_as(SettingsError, f"{file}: not valid JSON", ValueError):
        eos = orjson.loads(file.read_bytes()).get("eos_token_id")
    return [eos] if isinstance(eos, int) else list(eos or [])
