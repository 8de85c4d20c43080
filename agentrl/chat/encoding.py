"""Text to ids, so that text from users, tools and data never becomes a control token.

1. `mark` puts private-use characters around each control string in untrusted text; `encode_rendered` encodes each marked
   string as ordinary text. Text without control strings gets the tokenizer's own ids.
2. Control strings are added tokens that are special, that the template writes, or that look like `<|...|>`.
3. Assistant messages may carry markers that a model writes (`<think>`, `<tool_call>`), but no special tokens."""

import re
from collections.abc import Iterable
from functools import cache, cached_property
from typing import Any

from agentrl.chat.messages import map_texts
from agentrl.chat.words import WordEncoder
from agentrl.sample import Message

OPEN, CLOSE, ESCAPE = "\U0010fffb", "\U0010fffc", "\U0010fffd"
"""Private-use code points of the last plane. They are escaped in untrusted text, so nothing is lost."""

_ESCAPES = {ESCAPE: ESCAPE + "e", OPEN: ESCAPE + "o", CLOSE: ESCAPE + "c"}
_UNESCAPES = {v: k for k, v in _ESCAPES.items()}
_RESERVED = re.compile(f"[{OPEN}{CLOSE}{ESCAPE}]")
_ESCAPED = re.compile(f"{ESCAPE}[eoc]")
_LOOKS_LIKE_CONTROL = re.compile(r"<\|.*\|>|<｜.*｜>|<\|[a-z_]+>|<[a-z_]+\|>")


class Codec:
    """A tokenizer's `encode` and `decode`, without added special tokens, truncation or padding."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._words = self._backend and WordEncoder.of(self._backend)
        decoder = tokenizer.added_tokens_decoder
        self.added: dict[str, int] = {str(token.content): int(number) for number, token in decoder.items()}
        self.special = frozenset(str(token.content) for token in decoder.values() if token.special)
        self.vocab_size = len(tokenizer)

    @cached_property
    def longest_token(self) -> int:
        """Upper bound of the number of bytes of one token's text."""
        return max(map(len, map(str.encode, self.tokenizer.get_vocab())))

    def encode(self, text: str) -> list[int]:
        """Return the ids of trusted text: control strings become control tokens."""
        if self._words is not None:
            return self._words.encode(text)
        if self._backend is not None:
            return list(self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids)  # without offsets
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """Return the text of ids, without any clean-up."""
        if self._backend is not None:
            return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))


class SafeEncoder:
    """Marks untrusted text and encodes rendered text; immutable apart from a cache, thread-safe."""

    def __init__(self, codec: Codec, template: str) -> None:
        self._codec = codec
        self.controls = _control_strings(codec, template)
        self._control_ids = frozenset(codec.added[text] for text in self.controls)
        self._firsts = tuple({text[0] for text in self.controls})
        self._all = re.compile(_alternatives(self.controls))
        self._hard = re.compile(_alternatives(self.controls & codec.special))
        self._marked = re.compile(f"{OPEN}(?:({_alternatives(self.controls)}){CLOSE}?)?|{CLOSE}")
        self._as_text = cache(self._split_control)

    def mark(self, value: Any) -> Any:
        """Return `value` with every control string marked, also in keys, lists and dicts."""
        return self._mark(value, self._all)

    def mark_message(self, message: Message) -> Message:
        """Mark the texts of a normalized message, except its role. In assistant text, only special tokens are marked."""
        usual = self._hard if message["role"] == "assistant" else self._all
        marked = {key: self._mark(value, self._all if key == "tool_calls" else usual) for key, value in message.items()}
        return {**marked, "role": message["role"]}

    def mark_only(self, text: str, controls: Iterable[str]) -> str:
        """Return `text` with these control strings marked, and no others."""
        return self._mark_text(text, re.compile(_alternatives(controls)))

    def encode_rendered(self, text: str) -> list[int]:
        """Return the ids of rendered text. Marked control strings are encoded as ordinary text."""
        if OPEN not in text and CLOSE not in text and ESCAPE not in text:
            return self._codec.encode(text)
        ids, at = list[int](), 0
        for match in self._marked.finditer(text):
            ids += self._encode_piece(text[at : match.start()])
            if match[1] in self.controls:
                ids += self._as_text(match[1])
                at = match.end()
            else:
                at = match.start() + 1
        return ids + self._encode_piece(text[at:])

    def _encode_piece(self, text: str) -> list[int]:
        if not text:
            return []
        if ESCAPE in text:
            text = _ESCAPED.sub(lambda match: _UNESCAPES[match[0]], text)
        return self._codec.encode(text)

    def _mark(self, value: Any, matcher: re.Pattern[str]) -> Any:
        return map_texts(value, lambda text: self._mark_text(text, matcher))

    def _mark_text(self, text: str, matcher: re.Pattern[str]) -> str:
        if not text.isascii() and any(mark in text for mark in _ESCAPES):
            text = _RESERVED.sub(lambda match: _ESCAPES[match[0]], text)
        if not any(first in text for first in self._firsts):
            return text
        return matcher.sub(lambda match: f"{OPEN}{match[0]}{CLOSE}" if match[0] in self.controls else match[0], text)

    def _split_control(self, control: str) -> tuple[int, ...]:
        """Encode a control string as ordinary text: the shortest split, in two parts or in characters, without control ids."""
        cuts = ((control[:cut], control[cut:]) for cut in range(1, len(control)))
        splits = [tuple(i for part in parts for i in self._codec.encode(part)) for parts in (*cuts, tuple(control))]
        safe = [ids for ids in splits if not self._control_ids.intersection(ids)]
        faithful = [ids for ids in safe if self._codec.decode(ids) == control]
        return min(faithful or safe or [()], key=len)


def _control_strings(codec: Codec, template: str) -> frozenset[str]:
    return frozenset(
        text
        for text in codec.added
        if len(text) > 1
        and not text.isspace()
        and (text in codec.special or (len(text) > 2 and text in template) or _LOOKS_LIKE_CONTROL.fullmatch(text))
    )


def _alternatives(controls: Iterable[str]) -> str:
    """Return one pattern for all control strings, longest first. Numbered families (`<unused17>`) share a branch."""
    patterns = {re.sub(r"\d+", r"\\d+", re.escape(text)) for text in controls}
    return "|".join(sorted(patterns, key=len, reverse=True)) or r"(?!)"
