"""The tiny models' chat template, and a byte-level BPE tokenizer of a few hundred ids for it."""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import SettingsError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
"""Control tokens with ids 0, 1, 2: padding, start of message, end of message (where generation stops)."""

MARKUP_TOKENS = tuple(
    tag for name in ("tool_call", "tool_response", "tools", "think", "answer") for tag in (f"<{name}>", f"</{name}>")
)
"""Tags that are one token each, but not special: they stay visible in decoded text."""

CHAT_TEMPLATE = (Path(__file__).parent / "models" / "tools" / "chat_template.jinja").read_text(encoding="utf-8")

# A digit, an operator or a bracket is always a token of its own: `*7` never merges, so numbers can be copied by token.
_SPLIT = r""" ?\p{L}+|\p{N}|[-+*/=()]| ?[^\s\p{L}\p{N}+*/=()-]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""

_BYTES = 256

DEFAULT_CORPUS = tuple(Path(__file__).with_name("corpus.txt").read_text(encoding="utf-8").split("---\n"))


def train_tokenizer(
    corpus: Iterable[str], vocab_size: int, extra_markup: Sequence[str] = (), *, spaces_apart: bool = False
) -> "PreTrainedTokenizerFast":
    """Return a tokenizer with `vocab_size` ids, or fewer if the corpus is too small for that many merges. With
    `spaces_apart` a space is never part of a word, so a name has the same ids in a sentence and in quotes. Raises
    SettingsError: `vocab_size` is too small for the bytes, the control tokens and the tags."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tags = (*MARKUP_TOKENS, *extra_markup)
    least = _BYTES + len(SPECIAL_TOKENS) + len(tags)
    if vocab_size < least:
        raise SettingsError(f"a tiny model's vocabulary needs at least {least} ids, got {vocab_size}")
    model = Tokenizer(models.BPE())
    model.decoder = decoders.ByteLevel()
    words = pre_tokenizers.Split(Regex(_SPLIT.removeprefix(" ?") if spaces_apart else _SPLIT), "isolated")
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    model.pre_tokenizer = pre_tokenizers.Sequence([words, as_bytes])
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(tags),
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        min_frequency=1,
    )
    markup = re.compile("|".join(map(re.escape, (*SPECIAL_TOKENS, *tags))))
    model.train_from_iterator((part for text in corpus for part in markup.split(text) if part), trainer)
    model.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in tags])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=model, eos_token="<|im_end|>", pad_token="<|endoftext|>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
