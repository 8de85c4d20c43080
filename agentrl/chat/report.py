"""The effects of a chat template on a conversation, found once by probing (`probe.py`) and printed for people.

1. A `TemplateReport` is frozen and says what the template shows, how turns open and close, and what each kind of turn
   boundary does to the ids that the model sampled.
2. `predict` tells a session if `previous ids + delta` equals the template's own rendering. The answer is the worst
   verdict on boundaries of that kind: "exact" is certain, any other verdict is possible."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from agentrl.chat.template import Capabilities


class Verdict(StrEnum):
    """Result of a comparison of appended ids with the template's full rendering, from best to worst."""

    EXACT = "exact"  # the full rendering gives the same ids
    MERGES = "tokens merge"  # the same text, but the tokenizer would merge tokens across the generation prompt's end
    REASONING_DROPPED = "reasoning dropped"  # the template removes earlier reasoning from the history
    REWRITTEN = "history rewritten"  # the template renders an earlier turn differently from what the model wrote
    DELTA_DIFFERS = "delta differs"  # new messages render differently alone: the template keeps state across turns
    REFUSED = "refused"  # the template raises on this conversation

    @property
    def rewrites(self) -> bool:
        """True if the model would see a history that differs from what the model wrote."""
        return self in (Verdict.REASONING_DROPPED, Verdict.REWRITTEN)


class Thought(StrEnum):
    """Reasoning of a model turn; templates treat the three cases differently."""

    WITH = "with reasoning"
    EMPTY = "with an empty block"
    WITHOUT = "without reasoning"


@dataclass(frozen=True, slots=True)
class Boundary:
    """One probed case: the kind of history, the next message's role, the turns' reasoning, and the verdict. `beside`: a
    turn has text beside its calls. Some templates move such text."""

    name: str
    next_role: str
    thought: Thought
    verdict: Verdict
    detail: str = ""
    beside: bool = False


@dataclass(frozen=True, slots=True)
class TemplateReport:
    """The probe's findings."""

    can: Capabilities  # what the template shows
    generation_prompt: str  # text after the last message, before the model's text
    opens_reasoning: bool  # the generation prompt ends inside reasoning
    stops: tuple[str, ...]  # the tokens that end generation, as text
    closers: tuple[str, ...]  # tokens that close a turn in history; a stop that opens the next turn does not count
    history_kwargs: Mapping[str, Any]  # arguments that keep history as the model wrote it
    uses_date: bool  # the prompt depends on today's date
    boundaries: tuple[Boundary, ...]  # the probed turn boundaries

    def predict(self, next_role: str, thoughts: Iterable[Thought] = Thought, *, beside: bool = True) -> Verdict:
        """Return the worst verdict for a boundary before `next_role` ("tool", else a user). `thoughts`: the kinds of
        reasoning in the model's turns so far. `beside`: one of these turns may have text beside its calls."""
        role = "tool" if next_role == "tool" else "user"
        return max((self._worst(role, thought, beside) for thought in thoughts), key=list(Verdict).index)

    def _worst(self, role: str, thought: Thought, beside: bool) -> Verdict:
        cases = [b for b in self.boundaries if b.next_role == role and b.thought is thought]
        found = [b.verdict for b in cases if beside or not b.beside]
        unprobed = Verdict.REFUSED if role == "tool" and not self.can.tool_messages else Verdict.REWRITTEN
        return max(found, key=list(Verdict).index, default=unprobed)

    @property
    def exact_count(self) -> int:
        return sum(b.verdict is Verdict.EXACT for b in self.boundaries)

    def warnings(self) -> tuple[str, ...]:
        """Warnings before training on this template, one sentence each."""
        can, verdicts = self.can, {b.verdict for b in self.boundaries}
        notes = {
            "tool schemas are ignored: describe the tools in the system prompt, or set --chat-template-path": not can.tools,
            "tool calls and tool results are not shown: answer the model with user messages": not can.tool_messages,
            "only one tool call per turn can be shown": can.tool_messages and not can.parallel_calls,
            "system messages are not shown": not can.system,
            "the prompt holds today's date: runs on different days differ": self.uses_date,
            "no token ends a turn: generation stops at its length limit": not self.stops,
            "new messages render differently behind a real history: the context is not what it would be": (
                Verdict.DELTA_DIFFERS in verdicts
            ),
            "history would be rewritten: --template-rewrite-policy says whether to keep it, split samples, or fail": (
                any(verdict.rewrites for verdict in verdicts)
            ),
        }
        return tuple(note for note, holds in notes.items() if holds)

    def __str__(self) -> str:
        can = self.can
        rows = [
            ("shows", ", ".join(name for name in Capabilities.__slots__ if getattr(can, name)) or "user text only"),
            ("generation prompt", repr(self.generation_prompt) + (" (opens reasoning)" * self.opens_reasoning)),
            ("generation ends at", " ".join(self.stops) or "nothing"),
            ("turns are closed by", " ".join(self.closers) or "the next turn's opener"),
            ("history arguments", ", ".join(f"{k}={v}" for k, v in self.history_kwargs.items()) or "none"),
            ("boundaries", f"{self.exact_count} of {len(self.boundaries)} exact"),
        ]
        lines = [f"{name:20} {value}" for name, value in rows]
        lines += [f"  {b.name:30} {b.thought:20} {b.verdict}{b.detail and f': {b.detail}'}" for b in self.boundaries]
        return "\n".join([*lines, *(f"note: {note}" for note in self.warnings())])
