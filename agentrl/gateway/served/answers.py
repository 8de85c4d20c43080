"""OpenAI forms of a /generate answer: choices, log-probs, usage, and the new parts for a stream.

1. A chat's reasoning and content are streamed up to a possible tag or stop string. Calls come at the end. The sent text
   is always a prefix of the whole answer's reasoning and content.
2. Log-probs come with the next chunk, also for tokens without text (tags, the end)."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from uuid import uuid4

from agentrl.chat.parsers import TurnParser
from agentrl.engine.embedded.model import Vocabulary
from agentrl.gateway.contracts import Body
from agentrl.gateway.live import stable_prefix

Sent = Counter[str]
"""Counts of the sent part of a choice: characters of each text, by the text's name, and tokens with log-probs."""


@dataclass(frozen=True)
class ChatAnswers:
    """Choices of a chat completion. `parser` separates reasoning and calls from content; None: all is content."""

    body: Body
    vocab: Vocabulary
    parser: TurnParser | None
    tools: Sequence[Body]

    def choice(self, index: int, answer: Body) -> Body:
        meta = answer["meta_info"]
        message: Body = {"role": "assistant", "content": answer["text"], "reasoning_content": None}
        finish = _finish(meta)
        if self.parser is not None:
            turn = self.parser.parse(answer["text"], list(self.tools) or None)
            message |= {"content": turn.to_message()["content"], "reasoning_content": turn.reasoning}
            if turn.tool_calls:
                calls = (call.to_message() for call in turn.tool_calls)
                # Ids are unique over all answers. Mistral's templates require nine letters and digits.
                message["tool_calls"] = [{**call, "id": uuid4().hex[:9], "index": i} for i, call in enumerate(calls)]
                if finish["finish_reason"] == "stop":
                    finish["finish_reason"] = "tool_calls"
        choice = {"index": index, "message": message, "logprobs": self._log_probs(answer, 0), **finish}
        if self.body.get("return_token_ids"):
            choice["response_token_ids"] = answer["output_ids"]
        if self.body.get("return_prompt_token_ids"):
            choice["prompt_token_ids"] = answer["prompt_token_ids"]
        if self.body.get("return_meta_info"):
            choice["meta_info"] = meta
        return choice

    def new(self, index: int, answer: Body, sent: Sent, whole: bool) -> Iterator[Body]:
        """Yield the new parts of a choice, from its answer so far. `whole`: the answer is complete."""
        entry: Body = {"index": index, "logprobs": None, "finish_reason": None, "matched_stop": None}
        if not sent:
            sent["begun"] = 1
            yield {**entry, "delta": {"role": "assistant", "content": "", "reasoning_content": None}}
        if whole:
            entry |= self.choice(index, answer)
            message = entry.pop("message")
        else:
            reasoning, content = stable_prefix(self.parser, answer["text"]) if self.parser else ("", answer["text"])
            message = {"reasoning_content": reasoning, "content": content}
        delta: Body = {"tool_calls": message["tool_calls"]} if "tool_calls" in message else {}
        for name in ("reasoning_content", "content"):
            if len(text := message[name] or "") > sent[name]:
                delta[name], sent[name] = text[sent[name] :], len(text)
        if delta:
            logs = self._log_probs(answer, sent["tokens"])
            sent["tokens"] += len(logs["content"]) if logs else 0
            shown = {"reasoning_content": None, **delta}
            yield {"index": index, "delta": shown, "logprobs": logs, "finish_reason": None, "matched_stop": None}
        if whole:
            yield {**entry, "delta": {"reasoning_content": None}, "logprobs": self._log_probs(answer, sent["tokens"])}

    def _log_probs(self, answer: Body, start: int) -> Body | None:
        """Return the log-probs of the tokens from `start` on; None if they were not asked for."""
        if not self.body.get("logprobs"):
            return None
        meta = answer["meta_info"]
        chosen = meta["output_token_logprobs"]
        tops = meta.get("output_top_logprobs") or [[]] * len(chosen)
        content = [
            {**self._token(t, p), "top_logprobs": [self._token(other, q) for q, other, _ in top]}
            for (p, t, _), top in zip(chosen[start:], tops[start:], strict=True)
        ]
        return {"content": content}

    def _token(self, token: int, log_prob: float) -> Body:
        text = self.vocab.decode([token], False)
        return {"token": text, "bytes": list(text.encode()), "logprob": log_prob}


@dataclass(frozen=True)
class TextAnswers:
    """Choices of a completion; `echo` puts the prompt before the text."""

    body: Body
    vocab: Vocabulary

    def choice(self, index: int, answer: Body, start: int = 0) -> Body:
        """Return one entry of `choices`, with the log-probs from token `start` on."""
        meta, text = answer["meta_info"], answer["text"]
        if self.body.get("echo"):
            given = self.body["prompt"]
            text = (given if isinstance(given, str) else self.vocab.decode(answer["prompt_token_ids"])) + text
        logs = self._log_probs(meta, start) if self.body.get("logprobs") is not None else None
        choice = {"index": index, "text": text, "logprobs": logs, **_finish(meta)}
        if self.body.get("return_token_ids"):
            choice["response_token_ids"] = answer["output_ids"]
        return choice

    def new(self, index: int, answer: Body, sent: Sent, whole: bool) -> Iterator[Body]:
        one = self.choice(index, answer, sent["tokens"])
        text = one["text"][sent["text"] :]
        sent["text"] += len(text)
        sent["tokens"] += len(one["logprobs"]["tokens"]) if one["logprobs"] else 0
        yield {**one, "text": text, **({} if whole else {"finish_reason": None, "matched_stop": None})}

    def _log_probs(self, meta: Body, start: int) -> Body:
        """Return the log-probs, of the prompt's tokens too if they were asked for. The first prompt token has none."""
        chosen = [*meta["input_token_logprobs"], *meta["output_token_logprobs"]]
        tops = [*meta.get("input_top_logprobs", ()), *meta.get("output_top_logprobs", ())] or [[]] * len(chosen)
        decode = self.vocab.decode
        return {
            "text_offset": [-1] * len(chosen[start:]),
            "token_logprobs": [p for p, _, _ in chosen[start:]],
            "tokens": [decode([t], False) for _, t, _ in chosen[start:]],
            "top_logprobs": [
                None if top is None else {decode([t], False): p for p, t, _ in top} for top in tops[start:]
            ],
        }


Answers = ChatAnswers | TextAnswers


def usage(answers: Sequence[Body]) -> Body:
    """Return `usage` and `metadata` of a whole answer. A prompt that is sampled n times counts once."""
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


def _finish(meta: Body) -> Body:
    reason = meta["finish_reason"] or {}
    return {"finish_reason": reason.get("type"), "matched_stop": reason.get("matched")}
