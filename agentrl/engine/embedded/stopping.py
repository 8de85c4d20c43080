"""Stop conditions of a sequence, and the text of its answer.

1. Order as in SGLang: length, token ids (EOS and `stop_token_ids`, unless `ignore_eos`), stop strings, regexes.
2. Ids and log-probs are never cut. The text loses a matched id or string unless `no_stop_trim`.
3. Stop strings are searched in the decoded tail only; regexes in the whole output, for `MAX_SEARCH` seconds at most.
   Both see special tokens, also if the text leaves them out."""

from collections.abc import Callable, Sequence
from typing import Any

import regex

from agentrl.engine.request_sampling import RequestSampling

MAX_SEARCH = 0.02
Decode = Callable[[Sequence[int], bool], str]  # (ids, skip_special_tokens) -> text

REPLACEMENT = "\ufffd"


def aborted(message: str = "Aborted", status: int | None = None, kind: str | None = None) -> dict[str, Any]:
    """Return the finish reason of an aborted sequence. With a `status`, the answer is an error."""
    return {"type": "abort", "message": message, "status_code": status, "err_type": kind}


ABORTED = aborted()


class StopRules:
    """The stop conditions of one sequence."""

    def __init__(self, params: RequestSampling, *, eos: frozenset[int], limit: int, decode: Decode | None) -> None:
        self.limit = limit  # maximum number of sampled tokens
        ids = eos.union(params.stop_token_ids)
        self.ids = frozenset() if params.ignore_eos and not params.grammar else ids
        self.forbidden_early = ids if params.min_new_tokens else frozenset()
        self._params, self._decode = params, decode
        self._tail = max((len(s.encode()) for s in params.stop), default=0) + 8

    def check(self, output: Sequence[int]) -> dict[str, Any] | None:
        """Return the finish reason after the newest token of `output`; None if the sequence continues."""
        if len(output) >= self.limit:
            return {"type": "length", "length": self.limit}
        if output and output[-1] in self.ids:
            return {"type": "stop", "matched": output[-1]}
        params = self._params
        if self._decode is None:
            return None
        if params.stop:
            tail = self._decode(output[-self._tail :], False)
            if (found := next((stop for stop in params.stop if stop in tail), None)) is not None:
                return {"type": "stop", "matched": found}
        if params.stop_regex:
            whole = self._decode(output, False)
            for pattern in params.stop_regex:
                try:
                    if regex.search(pattern, whole, timeout=MAX_SEARCH):
                        return {"type": "stop", "matched": pattern}
                except TimeoutError:
                    return aborted(f"stop_regex {pattern!r:.100} took over {MAX_SEARCH} s.", 400, "BadRequestError")
        return None


def shown_text(output: Sequence[int], reason: dict[str, Any] | None, params: RequestSampling, decode: Decode) -> str:
    """Return the text of an answer, trimmed at its stop. An unfinished text loses a trailing incomplete character."""
    matched, trim = (reason or {}).get("matched"), not params.no_stop_trim
    if trim and isinstance(matched, int):
        output = output[:-1]
    text = decode(output, params.skip_special_tokens)
    if reason is None:
        return text.rstrip(REPLACEMENT)
    if trim and isinstance(matched, str) and matched in params.stop:
        return text.partition(matched)[0]  # the newest token made the match, so the first occurrence is the match
    return text
