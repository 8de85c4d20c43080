"""The OpenAI forms of a /generate answer: choices, log-probs, usage."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl.engine.embedded.model import Vocabulary

if TYPE_CHECKING:
    from agentrl.chat.parsers import TurnParser

Answer = dict[str, Any]


def chat_choice(
    index: int,
    result: Answer,
    *,
    body: dict[str, Any],
    vocab: Vocabulary,
    parser: "TurnParser | None",
    tools: Sequence[dict[str, Any]],
    first_call: int = 1,
) -> dict[str, Any]:
    """One choice of a chat completion.

    Args:
        parser: takes reasoning and calls out of the text; None: it is all content.
        first_call: the number in the first call's id.
    """
    meta = result["meta_info"]
    message: dict[str, Any] = {"role": "assistant", "content": result["text"], "reasoning_content": None}
    finish = _finish(meta)
    if parser is not None:
        turn = parser.parse(result["text"], list(tools) or None, first_call=first_call)
        message |= {"content": turn.content, "reasoning_content": turn.reasoning}
        if turn.tool_calls:
            message["tool_calls"] = [{**call.to_message(), "index": i} for i, call in enumerate(turn.tool_calls)]
            if finish["finish_reason"] == "stop":
                finish["finish_reason"] = "tool_calls"
    choice = {
        "index": index,
        "message": message,
        "logprobs": chat_log_probs(result, 0, body=body, vocab=vocab),
        **finish,
    }
    if body.get("return_token_ids"):
        choice["response_token_ids"] = result["output_ids"]
    if body.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = result["prompt_token_ids"]
    if body.get("return_meta_info"):
        choice["meta_info"] = meta
    return choice


def completion_choice(
    index: int, result: Answer, start: int = 0, *, body: dict[str, Any], vocab: Vocabulary
) -> dict[str, Any]:
    """One choice of a completion, with the log-probs from token `start` on; `echo` puts the prompt before all of it."""
    meta = result["meta_info"]
    text = result["text"]
    if body.get("echo"):
        given = body["prompt"]
        text = (given if isinstance(given, str) else vocab.decode(result["prompt_token_ids"])) + text
    choice = {
        "index": index,
        "text": text,
        "logprobs": _completion_log_probs(meta, vocab, start) if body.get("logprobs") is not None else None,
        **_finish(meta),
    }
    if body.get("return_token_ids"):
        choice["response_token_ids"] = result["output_ids"]
    return choice


def usage(answers: Sequence[Answer]) -> dict[str, Any]:
    """`usage` and `metadata` of a whole answer; a prompt sampled n times counts once."""
    metas = [a["meta_info"] for a in answers]
    prompts = {id(a["prompt_token_ids"]): a["meta_info"]["prompt_tokens"] for a in answers}
    prompt, completion = sum(prompts.values()), sum(meta["completion_tokens"] for meta in metas)
    return {
        "usage": {
            "prompt_tokens": prompt,
            "total_tokens": prompt + completion,
            "completion_tokens": completion,
            "prompt_tokens_details": None,
            "reasoning_tokens": 0,
            "completion_tokens_details": None,
        },
        "metadata": {"weight_version": metas[0]["weight_version"], "weight_versions": metas[0]["weight_versions"]},
    }


def _finish(meta: dict[str, Any]) -> dict[str, Any]:
    reason = meta["finish_reason"] or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}


def _token(vocab: Vocabulary, token: int, log_prob: float) -> dict[str, Any]:
    text = vocab.decode([token], False)
    return {"token": text, "bytes": list(text.encode()), "logprob": log_prob}


def chat_log_probs(result: Answer, start: int, *, body: dict[str, Any], vocab: Vocabulary) -> dict[str, Any] | None:
    """Those of the tokens from `start` on; None where nobody asked."""
    meta = result["meta_info"]
    if not body.get("logprobs"):
        return None
    chosen = meta["output_token_logprobs"]
    tops = meta.get("output_top_logprobs") or [[]] * len(chosen)
    pairs = zip(chosen[start:], tops[start:], strict=True)
    content = [
        {**_token(vocab, t, p), "top_logprobs": [_token(vocab, other, q) for q, other, _ in top]}
        for (p, t, _), top in pairs
    ]
    return {"content": content}


def _completion_log_probs(meta: dict[str, Any], vocab: Vocabulary, start: int) -> dict[str, Any]:
    """Of the prompt's tokens too where they were asked for; the first of these has none."""
    chosen = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
    tops = [*meta.get("input_top_logprobs", ()), *meta.get("output_top_logprobs", ())] or [[]] * len(chosen)
    return {
        "text_offset": [-1] * len(chosen[start:]),
        "token_logprobs": [p for p, _, _ in chosen[start:]],
        "tokens": [vocab.decode([t], False) for _, t, _ in chosen[start:]],
        "top_logprobs": [
            None if top is None else {vocab.decode([t], False): p for p, t, _ in top} for top in tops[start:]
        ],
    }
