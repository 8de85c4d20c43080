"""Chats over real chat templates and the real Qwen3 tokenizer."""

import functools
import re
from dataclasses import replace
from typing import Any

from agentrl.chat import Chat
from agentrl.engine.wire import Generation, join
from tests.support.assets import chat_templates, qwen3_tokenizer_folder

_CONTROL = re.compile(
    r"<\|[^\s<>|'\"{}]{1,40}\|>|<\|[a-z_]{1,24}>|<[a-z_]{1,24}\|>|<｜[^<>]{1,40}｜>|</?think>|</?tool_call>"
    r"|</?tool_response>|<end_of_turn>|<start_of_turn>|</s>|<s>|\[/?INST\]"
)
STOPS = {
    "qwen": ["<|im_end|>", "<|endoftext|>"],
    "llama3": ["<|eot_id|>", "<|eom_id|>"],
    "gemma": ["<end_of_turn>"],
    "gptoss": ["<|return|>", "<|call|>"],
    "deepseek": ["<｜end▁of▁sentence｜>"],
    "glm": ["<|user|>", "<|observation|>"],
    "phi3": ["<|end|>"],
    "cohere": ["<|END_OF_TURN_TOKEN|>"],
    "muse": ["<|end|>", "<|return|>", "<|eot|>"],
    "gemma4": ["<turn|>", "<|tool_response>"],
    "diffusion": ["<turn|>", "<|tool_response>"],
}
"""Tokens that end generation, by family, as in the checkpoints' `generation_config.json`."""


@functools.cache
def _tokenizer(control: frozenset[str]) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(qwen3_tokenizer_folder())
    missing = sorted(control - set(tokenizer.get_vocab()))
    tokenizer.add_tokens(missing, special_tokens=True)
    return tokenizer


@functools.cache
def _all_control() -> frozenset[str]:
    found = {text for source in chat_templates().values() for text in _CONTROL.findall(source)}
    return frozenset(found | {stop for stops in STOPS.values() for stop in stops})


@functools.cache
def make_chat(name: str, **options: Any) -> Chat:
    """Make a chat with a real template. Qwen templates get the real Qwen3 tokenizer unchanged. For the others the
    control tokens of all templates are added to it, so that each is a single token as in its own tokenizer."""
    source = chat_templates()[name]
    tokenizer = _tokenizer(frozenset() if name.startswith("qwen") else _all_control())
    family = next((f for f in sorted(STOPS, key=len, reverse=True) if name.startswith(f)), "qwen")
    return Chat(tokenizer, chat_template=source, stop_tokens=STOPS[family], **options)


def interrupted(chat: Chat, got: Generation, at: int) -> Generation:
    """Return an answer as if a weight update had interrupted it before its id `at`: each part is decoded separately."""
    places = slice(0, at), slice(at, len(got.ids))
    parts = [
        replace(
            got,
            ids=got.ids[place],
            log_probs=got.log_probs[place],
            text=chat.decode(got.ids[place]),
            weight_versions=((got.weight_version, 0, len(got.ids[place])),),
        )
        for place in places
    ]
    return join(parts, got.prompt_tokens)
