"""Grammars that constrain sampling. llguidance compiles them; it is imported on first use.

1. `json_schema`, `regex`, `ebnf` (llama.cpp's GBNF, or llguidance's Lark) and `structural_tag`.
2. A forbidden token has the logit -inf after penalties and biases, so reported log-probs are those within the grammar.
3. As in SGLang, a schema allows only named properties unless it says otherwise. White space is that of `json.dumps`.
4. Clients send grammars, so grammars are compiled one at a time in a thread, and a slow grammar ends its request."""

import json
import re
import threading
import time
from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from agentrl.chat.messages import map_schemas
from agentrl.engine.embedded.model import Vocabulary
from agentrl.engine.embedded.stopping import aborted
from agentrl.serving.http import refused

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

MAX_GRAMMARS, MAX_SECONDS = 64, 2.0  # grammars of one request; seconds for one token's mask
WHITESPACE = r" |\n[ \t]{0,32}"
ANY = r"/(.|\n)*/"  # in Lark: any text
_NAMING = {"properties", "patternProperties", "additionalProperties", "$ref", "allOf", "anyOf", "oneOf"}


class Grammar:
    """Constraint on the next tokens of one sequence; used in the engine's thread only."""

    def __init__(self, matcher: "LLMatcher", tokens: "LLTokenizer") -> None:
        self._matcher, self._tokens, self._read = matcher, tokens, 0
        self._allowed = torch.empty(0, dtype=torch.bool)

    def fresh(self) -> "Grammar":
        """Return this grammar at its beginning; llguidance shares what it computes between the two, up to a limit."""
        return Grammar(self._matcher.deep_copy(), self._tokens)

    def advance(self, output: Sequence[int]) -> dict[str, Any] | None:
        """Read the new tokens of `output`. Return a finish reason if the grammar failed or was too slow; else None."""
        start = time.monotonic()
        self._matcher.consume_tokens(list(output[self._read :]))
        self._read = len(output)
        self._allowed = torch.frombuffer(bytearray(self._matcher.compute_logit_bias()), dtype=torch.uint8) > 0
        forced = self._matcher.compute_ff_bytes()
        if forced and not self._matcher.validate_tokens(self._allowed.nonzero()[:1, 0].tolist()):
            # The grammar needs a control token's text as text. llguidance allows the token here, but then refuses it.
            self._allowed[:] = False
            self._allowed[self._tokens.tokenize_bytes(forced[:1])[0]] = True
        if self._matcher.is_error():
            return aborted(f"the grammar failed: {_first_line(self._matcher)}", 400, "BadRequestError")
        if time.monotonic() - start > MAX_SECONDS:
            return aborted(f"the grammar took over {MAX_SECONDS} s for a token", 400, "BadRequestError")
        return None

    def mask(self, row: Tensor) -> None:
        """Set the logits of forbidden tokens to -inf, in place; `row`: [vocabulary]."""
        row.masked_fill_(~self._allowed.to(row.device), float("-inf"))


class Grammars:
    """The grammars of one vocabulary."""

    def __init__(self, vocab: Vocabulary) -> None:
        self._vocab = vocab
        self._lock = threading.Lock()

    def compiled(self, kind: str, text: str) -> Grammar:
        """Compile a grammar; blocks. Raises RequestError: the grammar cannot be parsed, or cannot be served."""
        with self._lock:
            return Grammar(self._compile(kind, text), self._tokens)

    def literal(self, text: str) -> str:
        """Return `text` in Lark, with its control tokens as tokens."""
        pieces = (f"<[{self._special[p]}]>" if p in self._special else json.dumps(p) for p in self._pieces(text))
        return " ".join(pieces) or '""'

    def _pieces(self, text: str) -> list[str]:
        return [piece for piece in self._own.split(text) if piece]

    def until(self, text: str, rule: str) -> str:
        """Return a Lark rule for any text up to and including the first `text`."""
        if any(piece in self._special for piece in self._pieces(text)):
            return f"{rule}: {ANY} {self.literal(text)}"
        return f"{rule}[suffix={json.dumps(text)}]: {ANY}"

    def _compile(self, kind: str, text: str) -> "LLMatcher":
        import llguidance

        form: Any = "lark" if kind == "structural_tag" else kind
        try:
            if kind == "json_schema":
                text = schema_text(json.loads(text))
            elif kind == "structural_tag":
                text = self._tags(text)
            matcher = llguidance.LLMatcher(self._tokens, llguidance.grammar_from(form, text), log_level=0)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise refused(f"{kind} cannot be used: {type(error).__name__}: {error}"[:500]) from None
        first = matcher.deep_copy()
        if not matcher.is_error():
            first.compute_logit_bias()
        if first.is_error():
            raise refused(f"{kind} cannot be used: {_first_line(first)}")
        return matcher

    def _tags(self, text: str) -> str:
        """Return SGLang's older structural tag in Lark: free text in which each trigger begins a structure."""
        if "structures" not in (tag := json.loads(text)):
            raise ValueError('it needs "structures" and "triggers"; "format" needs a real SGLang server')
        rules = [f"rest: {ANY}"]
        for i, structure in enumerate(tag["structures"]):
            begin, schema = structure["begin"], schema_text(structure["schema"])
            if (trigger := next((t for t in tag["triggers"] if t and begin.startswith(t)), None)) is None:
                raise ValueError(f"no trigger begins {begin!r}")
            tail = f"{self.literal(begin[len(trigger) :])} %json {schema} {self.literal(structure['end'])}"
            rules += [self.until(trigger, f"head{i}"), f"tag{i}: head{i} {tail}"]
        names = " | ".join(f"tag{i}" for i in range(len(tag["structures"])))
        return "\n".join([f"start: ({names})* rest", *rules])

    @cached_property
    def _tokens(self) -> "LLTokenizer":
        import llguidance

        if self._vocab.tokenizer is None or not self._vocab.eos:
            raise refused("a grammar needs a model folder with a tokenizer.json and an end token.")
        vocab, ends = self._vocab.tokenizer.to_str(), sorted(self._vocab.eos)
        return llguidance.LLTokenizer(vocab, n_vocab=self._vocab.size, eos_token=ends)

    @cached_property
    def _special(self) -> dict[str, int]:
        """Ids of control tokens, by their text. A grammar's text never matches a control token."""
        added = self._vocab.tokenizer.get_added_tokens_decoder()
        return {token.content: i for i, token in added.items() if self._tokens.is_special_token(i)}

    @cached_property
    def _own(self) -> re.Pattern[str]:
        longest_first = sorted(map(re.escape, self._special), key=len, reverse=True)
        return re.compile(f"({'|'.join(longest_first)})" if longest_first else r"(?!)")


def schema_text(schema: Any) -> str:
    """Return a JSON schema for llguidance."""
    closed = strict(schema)
    spaces = {"x-guidance": {"whitespace_pattern": WHITESPACE}}
    return json.dumps({**spaces, **closed} if isinstance(closed, dict) else closed)


def strict(schema: Any) -> Any:
    """Return a JSON schema whose objects allow only named properties, unless the schema says otherwise. All objects
    stay open if several schemas that name properties apply to one object: each would forbid the others' properties."""
    joined = False

    def close(part: dict[str, Any]) -> dict[str, Any]:
        nonlocal joined
        own = [[{name: part[name]}] for name in ("properties", "$ref") if name in part]
        every, *either = (v if isinstance(v := part.get(name), list) else [] for name in ("allOf", "anyOf", "oneOf"))
        groups = [*own, *([one] for one in every), *either]
        joined |= sum(any(isinstance(m, dict) and _NAMING & m.keys() for m in group) for group in groups) > 1
        named = isinstance(part.get("properties"), dict) and "patternProperties" not in part
        return {"additionalProperties": False, **part} if named else part

    closed = map_schemas(schema, close)
    return schema if joined else closed


def _first_line(matcher: "LLMatcher") -> str:
    return matcher.get_error().partition("\n")[0][:300]
