"""The OpenAI forms of a /generate answer: choices, log-probs, usage."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from agentrl.engine.embedded.model import Vocabulary

if TYPE_CHECKING:
    from agentrl.chat import Chat

Answer = dict[str, Any]


def chat_choice(
    index: int,
    result: Answer,
    *,
    body: dict[str, Any],
    chat: "Chat",
    tools: Sequence[dict[str, Any]],
    vocab: Vocabulary,
    parsed: bool,
) -> dict[str, Any]:
    """One choice of a chat completion; tool calls and reasoning are taken out of the text where `parsed`."""
    meta = result["meta_info"]
    message: dict[str, Any] = {"role": "assistant", "content": result["text"], "reasoning_content": None}
    finish = _finish(meta)
    if parsed:
        turn = chat.parse(result["text"], list(tools) or None)
        if tools or not (turn.tool_calls or turn.broken):
            message |= {"content": turn.content, "reasoning_content": turn.reasoning}
        if tools and turn.tool_calls:
            message["tool_calls"] = [{**call.to_message(), "index": i} for i, call in enumerate(turn.tool_calls)]
            if finish["finish_reason"] == "stop":
                finish["finish_reason"] = "tool_calls"
    choice = {
        "index": index,
        "message": message,
        "logprobs": {"content": _chat_logprobs(meta, vocab)} if body.get("logprobs") else None,
        **finish,
    }
    if body.get("return_token_ids"):
        choice["response_token_ids"] = result["output_ids"]
    if body.get("return_prompt_token_ids"):
        choice["prompt_token_ids"] = result["prompt_token_ids"]
    if body.get("return_meta_info"):
        choice["meta_info"] = meta
    return choice


def completion_choice(index: int, result: Answer, *, body: dict[str, Any], vocab: Vocabulary) -> dict[str, Any]:
    meta = result["meta_info"]
    text = result["text"]
    if body.get("echo"):
        text = vocab.decode(result["prompt_token_ids"]) + text
    choice = {
        "index": index,
        "text": text,
        "logprobs": _completion_logprobs(meta, vocab) if body.get("logprobs") is not None else None,
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


def _chat_logprobs(meta: dict[str, Any], vocab: Vocabulary) -> list[dict[str, Any]]:
    chosen = meta["output_token_logprobs"]
    tops = meta.get("output_top_logprobs") or [[]] * len(chosen)
    return [
        {**_token(vocab, t, p), "top_logprobs": [_token(vocab, other, q) for q, other, _ in top]}
        for (p, t, _), top in zip(chosen, tops, strict=True)
    ]


def _completion_logprobs(meta: dict[str, Any], vocab: Vocabulary) -> dict[str, Any]:
    chosen = meta["output_token_logprobs"]
    tops = meta.get("output_top_logprobs") or [[]] * len(chosen)
    return {
        "text_offset": [-1] * len(chosen),
        "token_logprobs": [p for p, _, _ in chosen],
        "tokens": [vocab.decode([t], False) for _, t, _ in chosen],
        "top_logprobs": [{vocab.decode([t], False): p for p, t, _ in top} for top in tops],
    }
