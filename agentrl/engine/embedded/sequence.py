"""The state of one sequence in the engine.

1. Only the engine's thread writes a `SequenceState`. Its output lists only grow, so other threads may read them.
2. `on_token` and `on_finish` run in the engine's thread: they must only notify another thread and return.
3. A sequence is `prompt + output`; its first `filled` tokens have keys and values in `slot`."""

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, NonNegativeInt

from agentrl.engine.embedded.images import Ids, PromptImages
from agentrl.engine.embedded.model import Rows
from agentrl.engine.embedded.sampling import Kept
from agentrl.engine.embedded.stopping import StopRules
from agentrl.engine.request_sampling import RequestSampling

if TYPE_CHECKING:
    from agentrl.engine.embedded.grammar import Grammar

TopEntry = list[tuple[float, int]]


class Wanted(BaseModel):
    """Optional outputs of a request, besides the sampled tokens with their log-probs; names are SGLang's."""

    return_logprob: bool = False
    logprob_start_len: int = -1  # first prompt position whose log-prob is wanted; -1: none
    top_logprobs_num: NonNegativeInt = 0
    token_ids_logprob: list[Any] = []
    return_sampling_mask: bool = False  # also the kept set of each token
    return_routed_experts: bool = False
    routed_experts_start_len: int = 0  # first token whose experts are wanted


@dataclass(eq=False)
class SequenceState:
    """One sequence, from its prompt to its end."""

    rid: str
    prompt: list[int]
    params: RequestSampling
    stop: StopRules
    seed: int | None
    want: Wanted = field(default_factory=Wanted)
    grammar: "Grammar | None" = None
    images: PromptImages | None = None
    on_finish: "Callable[[SequenceState], object] | None" = None
    on_token: "Callable[[SequenceState], object] | None" = None

    output: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    output_top: list[TopEntry] = field(default_factory=list)
    output_ids_log_probs: list[TopEntry] = field(default_factory=list)
    kept: list[Kept] = field(default_factory=list)
    routed: Rows | None = None  # set at the end: experts of tokens `want.routed_experts_start_len` to the last but one
    input_log_probs: list[float] = field(default_factory=list)  # of the prompt tokens after `want.logprob_start_len`
    input_top: list[TopEntry] = field(default_factory=list)
    input_ids_log_probs: list[TopEntry] = field(default_factory=list)
    versions: list[tuple[str, int, int]] = field(default_factory=list)  # (weight version, start, end) over the output
    finish: dict[str, Any] | None = None
    cached_tokens: int = 0
    retractions: int = 0
    created: float = field(default_factory=time.monotonic)
    finished: float | None = None

    slot: int = -1
    filled: int = 0  # tokens (of prompt and output) whose KV is in the slot
    waits_for: "SequenceState | None" = None
    waits_until: int = 0

    @functools.cached_property
    def randomness(self) -> np.random.Generator:
        """Generator of the sequence's uniform numbers; each token takes one number."""
        return np.random.Generator(np.random.Philox(key=self.seed))

    @functools.cached_property
    def known(self) -> Ids:
        """Tokens to prefill before the next token is sampled, in the prefix cache's form; computed on first use."""
        return self.compared(0, len(self.prompt))

    @property
    def length(self) -> int:
        return len(self.prompt) + len(self.output)

    def tokens(self, start: int, stop: int) -> list[int]:
        """Return tokens `start` to `stop` of prompt plus output."""
        if start >= (base := len(self.prompt)):
            return self.output[start - base : stop - base]
        return self.prompt[start:stop] + self.output[: max(0, stop - base)]

    def compared(self, start: int, stop: int) -> Ids:
        """Return tokens `start` to `stop` in the prefix cache's form: an image's hash replaces its placeholders."""
        ids = np.asarray(self.tokens(start, stop), dtype=np.int64)
        if self.images is not None and start < len(self.prompt):
            self.images.mark(ids, start)
        return ids

    def restart(self) -> None:
        """Reset the sequence to wait for a slot. Its output so far is then prefilled again, like the prompt."""
        self.retractions += 1
        self.known = self.compared(0, self.length)
        self.slot, self.filled = -1, 0
        if not self.output:
            for partial in (self.input_log_probs, self.input_top, self.input_ids_log_probs):
                partial.clear()
