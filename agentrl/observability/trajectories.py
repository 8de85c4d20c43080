"""Trajectories for display: turns, and their tokens with text, author, and the data of sampling and training.

1. A trajectory has parts: the prompt before its last user message, that message, and for each turn the model's text and
   the text that it was shown. The parts together have the sample's tokens, each once and in order.
2. The first part, and long answers of the environment, are folded: closed until the reader opens them."""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any
from unicodedata import category

from agentrl.buffer.store import called_tools, first_words
from agentrl.errors import DataError
from agentrl.runfolder import STARTED_FROM
from agentrl.sample import Origin, Sample, Segment

TokenTexts = Callable[[Sequence[int]], Sequence[str]]
"""Maps token ids to as many pieces of text, whose concatenation is the decoded text."""
_INVISIBLE = (0x115F, 0x1160, 0x3164, 0xFFA0, *range(0xE0100, 0xE01F0))
"""Invisible characters whose category is another than format or private use."""

Trained = Mapping[str, Sequence[float]]
"""The trainer's `log_probs` and `advantages` of a sample: one per response token each, NaN where there is none."""

UNSURE = math.log(0.5)
LONG = 80  # an answer of the environment with this many tokens or more is folded


@dataclass(frozen=True, slots=True)
class Token:
    """One token as the page shows it; `origin` is prompt, model, close or env. `image`: data URL of an image."""

    text: str
    origin: str
    note: str
    unsure: bool = False
    image: str = ""

    @property
    def shown(self) -> str:
        return name_hidden(self.text)


@dataclass(frozen=True, slots=True)
class TokenSpan:
    """Tokens that belong together; `kind` is prompt, model or env, `turn` counts from 1 (0: the prompt)."""

    kind: str
    turn: int
    title: str
    tokens: tuple[Token, ...]
    folded: bool = False
    reward: float | None = None  # the environment's reward for this step
    seconds: float | None = None  # the seconds that the model, or the environment, took for it

    @property
    def preview(self) -> str:
        """The first words, shown while the part is folded."""
        return first_words("".join(token.shown for token in self.tokens[:LONG]))


@dataclass(frozen=True, slots=True)
class Trajectory:
    """One sample as the page shows it."""

    parts: tuple[TokenSpan, ...]
    reward: float | None
    status: str
    turns: int
    weights: str
    stop_reason: str
    scores: Mapping[str, float]  # the parts of the reward: its own if it is a dict, and the grade's
    grading: Mapping[str, str]  # the label, the answer that the grader extracted, and its reason, as far as known

    @property
    def tokens(self) -> tuple[Token, ...]:
        return tuple(token for part in self.parts for token in part.tokens)

    @property
    def model_tokens(self) -> int:
        return sum(t.origin == "model" for t in self.tokens)


def describe_sample(sample: Sample, texts: TokenTexts, trained: Trained | None = None) -> Trajectory:
    """Return a sample's tokens with authors and notes. Raises DataError: `texts` or `trained` have another length."""
    sample, pieces = _in_messages(sample) if sample.hosted else (sample, list(texts(sample.tokens)))
    if len(pieces) != len(sample.tokens):
        raise DataError(f"expected one text a token: got {len(pieces)} texts for {len(sample.tokens)} tokens")
    if trained and set(map(len, trained.values())) != {sample.response_length}:
        raise DataError(f"expected {sample.response_length} log-probs and advantages, one a response token")
    prompt, spans = sample.prompt_length, _spans(sample)
    tokens = [_token(sample, at, pieces[at], None, trained) for at in range(prompt)]
    for span in spans:
        places = range(prompt + span.start, prompt + span.end)
        tokens += [_token(sample, at, pieces[at], span, trained) for at in places]
    _show_images(sample, tokens)
    turns, weights = max((s.turn for s in spans), default=0), ", ".join(sample.weight_versions)
    parts = (*_prompt_parts(sample, tokens[:prompt]), *_answer_parts(sample, tokens[prompt:], spans, turns))
    grade = grade if isinstance(grade := sample.metadata.get("grade"), Mapping) else {}
    about = {"label": sample.label, "extracted": grade.get("extracted"), "reason": grade.get("reason")}
    said = {name: first_words(str(value), 200) for name, value in about.items() if value is not None}
    grading, scores = {name: text for name, text in said.items() if text}, _scores(sample, grade)
    reward, status = _reward(sample), sample.status.value
    return Trajectory(parts, reward, status, turns, weights, sample.stop_reason, scores, grading)


def _token(sample: Sample, at: int, text: str, span: Segment | None, trained: Trained | None) -> Token:
    """Return token `at` of the sample. `span`: the token's segment; None for the prompt."""
    origin = "prompt" if span is None else span.origin.value
    notes = [origin] if sample.hosted else [origin, f"id {sample.tokens[at]}"]
    at -= sample.prompt_length
    log_prob = math.nan
    if span and span.origin is Origin.MODEL:
        if sample.rollout_log_probs:
            log_prob = sample.rollout_log_probs[at]
            notes.append(f"log-prob {log_prob:.3f} (p {math.exp(min(log_prob, 0.0)):.1%})")
        if trained and math.isfinite(trained["log_probs"][at]):
            notes.append(f"in training {trained['log_probs'][at]:.3f}")
        if trained and math.isfinite(trained["advantages"][at]):
            notes.append(f"advantage {trained['advantages'][at]:+.3f}")
        if version := span.version or ", ".join(sample.weight_versions):
            notes.append(f"weights {version}")
    if span and text and not text.strip():
        text = text.replace("\n", "↵\n")
    return Token(text, origin, " · ".join(notes), math.isfinite(log_prob) and log_prob < UNSURE)


def _show_images(sample: Sample, tokens: list[Token]) -> None:
    """Replace the placeholders of each image by the image."""
    for span in sample.image_spans:
        if (image := sample.images.get(span.hash)) is None:
            continue
        note = f"image of {image.width} x {image.height} pixels, {span.end - span.start} tokens"
        for at in range(span.start, span.end):
            shown = image.url if at == span.start else ""
            tokens[at] = replace(tokens[at], text="", note=f"{tokens[at].origin} · {note}", image=shown)


def _in_messages(sample: Sample) -> tuple[Sample, list[str]]:
    """Return a hosted model's sample with one token for each message, and the messages' texts."""
    messages = _messages(sample)
    written = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    turns = written[len(written) - min(sample.model_turns, len(written)) :]
    first = min(turns, default=len(messages))
    segments = [
        Segment(Origin.MODEL if at in turns else Origin.ENV, at - first, at - first + 1, bisect_right(turns, at))
        for at in range(first, len(messages))
    ]
    grown = replace(sample, tokens=[0] * len(messages), response_length=len(messages) - first, segments=segments)
    return grown, [_said(message) for message in messages]


def _said(message: Mapping[str, Any]) -> str:
    functions = [call["function"] for call in message.get("tool_calls") or ()]
    calls = (f"{function['name']} {function['arguments']}" for function in functions)
    return "\n".join(str(part) for part in (message.get("reasoning_content"), message.get("content"), *calls) if part)


def _spans(sample: Sample) -> list[Segment]:
    """Return the response's segments. For a sample without segments they come from its loss mask."""
    if sample.segments or not sample.response_length:
        return sample.segments
    spans, at, turn = [], 0, 0
    for trains, run in groupby(sample.loss_mask or [0] * sample.response_length, bool):
        start, at, turn = at, at + len(list(run)), turn + trains
        spans.append(Segment(Origin.MODEL if trains else Origin.ENV, start, at, turn))
    return spans


def _prompt_parts(sample: Sample, tokens: Sequence[Token]) -> Iterator[TokenSpan]:
    """Yield the prompt, split where its last user message begins."""
    ends = list(accumulate(len(token.text) for token in tokens))
    text = "".join(token.text for token in tokens)
    messages = _messages(sample) or [{"role": "user", "content": sample.prompt}]
    said = [m["content"] for m in messages if m.get("role") == "user" and isinstance(m.get("content"), str)]
    begins = max((text.rfind(content.strip()) for content in said if content.strip()), default=0)
    if cut := bisect_right(ends, begins) if begins > 0 else 0:
        yield TokenSpan("prompt", 0, "system prompt, tools, earlier messages", tuple(tokens[:cut]), folded=True)
    if tokens[cut:]:
        yield TokenSpan("prompt", 0, "prompt", tuple(tokens[cut:]))


def _answer_parts(sample: Sample, tokens: Sequence[Token], spans: Sequence[Segment], turns: int) -> Iterator[TokenSpan]:
    """Yield for each turn a part with the tokens of the model and its close, and a part with the answer's tokens."""
    names = ("step_rewards", "generate_seconds", "step_seconds")
    given = (value if isinstance(value := sample.metadata.get(name), list) else () for name in names)
    rewards, generating, stepping = ({i: n for i, n in enumerate(v, 1) if isinstance(n, (int, float))} for v in given)
    written = [m for m in _messages(sample) if m.get("role") == "assistant"][-turns:]
    for (env, turn), joined in groupby(spans, lambda span: (span.origin is Origin.ENV, span.turn)):
        part = list(joined)
        held = tuple(tokens[part[0].start : part[-1].end])
        if env:
            folded = len(held) >= LONG and not any(token.image for token in held)
            yield TokenSpan("env", turn, "shown to the model", held, folded=folded, seconds=stepping.get(turn))
        else:
            calls = list(called_tools([written[turn - 1]])) if 0 < turn <= len(written) == turns else []
            title = f"turn {turn}" + (f" · calls {', '.join(calls)}" if calls else "")
            yield TokenSpan("model", turn, title, held, reward=rewards.get(turn), seconds=generating.get(turn))


def _messages(sample: Sample) -> list[Mapping[str, Any]]:
    """Return the conversation if it is known, else the prompt's messages. Other entries are left out."""
    found = sample.metadata.get("messages") or sample.prompt
    return [m for m in found if isinstance(m, Mapping)] if isinstance(found, list) else []


def _reward(sample: Sample) -> float | None:
    if isinstance(sample.reward, dict):
        return next((float(v) for v in sample.reward.values() if isinstance(v, (int, float))), None)
    return None if sample.reward is None else float(sample.reward)


def _scores(sample: Sample, grade: Mapping[str, Any]) -> dict[str, float]:
    given = (grade.get("parts"), sample.reward)
    found = (item for parts in given if isinstance(parts, Mapping) for item in parts.items())
    return {str(name): float(value) for name, value in found if isinstance(value, (int, float))}


def run_texts(folder: Path, settings: Mapping[str, Any]) -> TokenTexts:
    """Return token texts by the tokenizer of the model that a run wrote or began with; `id_texts` if there is none.
    `folder`: the folder of the run's metrics or trajectories. `settings`: the run's settings by section."""
    noted, said = folder / STARTED_FROM, settings.get("train", {}).get("hf_checkpoint") or ""
    start = Path(noted.read_text().strip() if noted.is_file() else said)  # a relative path may be another model here
    folders = [folder / "model", folder.parent / "model", *([start] if start.is_absolute() else [])]
    if (file := next((f / "tokenizer.json" for f in folders if (f / "tokenizer.json").is_file()), None)) is None:
        return id_texts
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(file))
    return lambda ids: split_texts(ids, lambda part: str(tokenizer.decode(list(part), skip_special_tokens=False)))


def split_texts(ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> list[str]:
    """Return the text of each token. A character of several tokens belongs to the last; the others are empty. Decoders
    that remove a space at the beginning get the token before too."""
    out, held = [], 0
    for at in range(len(ids)):
        first = at - held
        before = max(0, first - 1)
        text = decode(ids[before : at + 1])[len(decode(ids[before:first])) :]
        waits = text.endswith("�") and held < 3 and at + 1 < len(ids)
        out.append("" if waits else text)
        held = held + 1 if waits else 0
    return out


def name_hidden(text: str) -> str:
    """Return `text` with names for characters that are invisible or change the direction of the text."""
    if text.isascii():
        return text
    hidden = {code for code in map(ord, text) if code in _INVISIBLE or category(chr(code)) in ("Cf", "Co")}
    return text.translate({code: f"⟨U+{code:04X}⟩" for code in hidden})


def id_texts(ids: Sequence[int]) -> list[str]:
    """Return the ids as texts, for use without a tokenizer."""
    return [f"{token_id} " for token_id in ids]
