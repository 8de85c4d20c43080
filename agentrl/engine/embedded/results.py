"""The answers of POST /generate: `text`, `output_ids`, `meta_info`, as SGLang writes them.

1. `answer(job, ...)` may be called while the job runs (a stream's chunk): it takes one consistent length of the lists.
2. `weight_version` is the version when the answer is written. `weight_versions` gives the version of each token."""

import base64
import time
from typing import Any

from agentrl.engine.embedded.model import Vocabulary
from agentrl.engine.embedded.request import GenerateRequest
from agentrl.engine.embedded.sequence import SequenceState, TopEntry
from agentrl.engine.embedded.stopping import shown_text

Triple = tuple[float | None, int, str | None]


def answer(job: SequenceState, request: GenerateRequest, vocab: Vocabulary, version: str) -> dict[str, Any]:
    """Return one sequence's answer, final if `job.finish` is set."""
    finish = job.finish
    output = job.output if finish is not None else job.output[: len(job.log_probs)]
    text, meta = shown_text(output, finish, job.params, vocab.decode), _meta(job, finish, len(output), version)
    result: dict[str, Any] = {"text": text, "output_ids": output, "meta_info": meta}
    if job.want.return_logprob:
        meta |= _log_probs(job, vocab if request.body.return_text_in_logprobs else None, len(output))
    if job.want.return_sampling_mask:
        kept = job.kept[: len(output)]
        meta |= {
            "output_token_sampling_mask": [ids.tolist() for ids, _ in kept],
            "output_token_sampling_logprobs": [log_prob for _, log_prob in kept],
            "output_token_sampling_mask_length": len(kept),
        }
    if request.body.return_prompt_token_ids:
        result["prompt_token_ids"] = job.prompt
    return result


def _meta(job: SequenceState, finish: dict[str, Any] | None, count: int, version: str) -> dict[str, Any]:
    cached = job.cached_tokens
    meta: dict[str, Any] = {"id": job.rid, "finish_reason": finish, "prompt_tokens": len(job.prompt)}
    meta |= {"weight_version": version, "num_retractions": job.retractions, "reasoning_tokens": 0}
    meta |= {"completion_tokens": count, "cached_tokens": cached, "dp_rank": None}
    meta["cached_tokens_details"] = {"device": cached, "host": 0} if cached else None
    if finish is not None:
        meta["weight_versions"] = [{"version": v, "start": start, "end": end} for v, start, end in job.versions]
        meta["e2e_latency"] = (job.finished or time.monotonic()) - job.created
        if job.routed is not None:
            meta["routed_experts"] = base64.b64encode(job.routed.astype("<i4").tobytes()).decode()
    meta["response_sent_to_client_ts"] = time.time()
    return meta


def _log_probs(job: SequenceState, vocab: Vocabulary | None, count: int) -> dict[str, Any]:
    want, start = job.want, job.want.logprob_start_len
    output = [_triple(p, t, vocab) for p, t in zip(job.log_probs[:count], job.output, strict=False)]
    prompt: list[Triple] = []
    if 0 <= start < len(job.prompt):
        prompt = [_triple(None, job.prompt[start], vocab)]
        prompt += [_triple(p, t, vocab) for p, t in zip(job.input_log_probs, job.prompt[start + 1 :], strict=False)]
    entries: dict[str, Any] = {"input_token_logprobs": prompt, "output_token_logprobs": output}
    entries["output_token_logprobs_length"] = len(output)
    if want.top_logprobs_num:
        entries["input_top_logprobs"] = _rows(job.input_top, bool(prompt), vocab)
        entries["output_top_logprobs"] = _rows(job.output_top[:count], False, vocab)
    if want.token_ids_logprob:
        entries["input_token_ids_logprobs"] = _rows(job.input_ids_log_probs, bool(prompt), vocab)
        entries["output_token_ids_logprobs"] = _rows(job.output_ids_log_probs[:count], False, vocab)
    return entries


def _rows(rows: list[TopEntry], first_unknown: bool, vocab: Vocabulary | None) -> list[list[Triple] | None]:
    unknown: list[list[Triple] | None] = [None] if first_unknown else []
    return unknown + [[_triple(p, t, vocab) for p, t in row] for row in rows]


def _triple(log_prob: float | None, token: int, vocab: Vocabulary | None) -> Triple:
    return log_prob, token, None if vocab is None else vocab.decode([token], False)
