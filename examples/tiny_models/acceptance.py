"""Acceptance check of a taught tiny model: forced decoding of every phrase and tool form of its task.

1. A `PhraseCheck` is a correct conversation about a held-out problem, and texts in it that the model must write: the
   arguments of calls, and the copied part of the answer. The text before each of them is forced.
2. Conversations are grouped by phrase and by form. A model is accepted if in every group nearly all texts are written by
   greedy decoding, and if the mean probability of a text is high: reinforcement learning only sharpens existing skills.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from agentrl.sample import Message, Origin, Sample

LEAST_RIGHT, LEAST_PROBABILITY = 0.98, 0.8
_BATCH = 32


@dataclass(frozen=True, slots=True)
class PhraseCheck:
    """A correct conversation about a held-out problem.

    Attributes:
        phrase: the phrase of its question.
        messages: the conversation, which ends with the assistant.
        texts: by the index of an assistant message, the form that is checked there and the text that must be written.
    """

    phrase: str
    messages: list[Message]
    texts: Mapping[int, tuple[str, str]]


@dataclass(frozen=True, slots=True)
class Row:
    """The result of one phrase or form: its number of texts, the share that greedy decoding writes, the mean probability."""

    name: str
    count: int
    right: float
    probability: float

    def __str__(self) -> str:
        return f"{self.name!r}: {self.right:.1%} of {self.count} correct, mean probability {self.probability:.2f}"

    def accepted(self, right: float = LEAST_RIGHT, probability: float = LEAST_PROBABILITY) -> bool:
        """Return true if the row reaches the bar."""
        return self.right >= right and self.probability >= probability

    def record(self) -> dict[str, Any]:
        """Return the row as JSON, rounded."""
        return {name: round(value, 3) if isinstance(value, float) else value for name, value in asdict(self).items()}


class CheckedLessons(Protocol):
    """The part of `examples.tiny_models.warm_start.Lessons` that the check reads."""

    def tools(self, conversation: Sequence[Message] = ()) -> Sequence[dict[str, Any]]: ...

    async def checks(self) -> list[PhraseCheck]: ...


async def measure(folder: Path, lessons: CheckedLessons) -> list[Row]:
    """Force the correct conversations on the model in `folder`. Returns a row for each phrase, then for each form."""
    from agentrl.chat import Chat
    from agentrl.chat.demonstration import to_sample

    chat, checks = Chat.load(str(folder)), await lessons.checks()
    samples = [to_sample(chat, check.messages, lessons.tools(check.messages)) for check in checks]
    found: dict[tuple[int, str], list[tuple[bool, float]]] = {}
    for check, sample, (greedy, probabilities) in zip(checks, samples, _forced(folder, samples), strict=True):
        for form, place in _places(chat, check, sample):
            result = (bool(greedy[place].all()), float(probabilities[place].prod()))
            for key in ((0, check.phrase), (1, form)):
                found.setdefault(key, []).append(result)
    ordered = sorted(found.items(), key=lambda item: item[0][0])
    return [Row(name, len(of), *map(float, np.mean(of, axis=0))) for (_, name), of in ordered]


def _places(chat: Any, check: PhraseCheck, sample: Sample) -> Iterator[tuple[str, NDArray[np.int64]]]:
    """Return the forms of a conversation and the places in `sample.tokens` of the texts that must be written."""
    turns = [part for part in sample.segments if part.origin is Origin.MODEL]
    assistant = [at for at, message in enumerate(check.messages) if message["role"] == "assistant"]
    for at, (form, text) in check.texts.items():
        part = turns[assistant.index(at)]
        first = sample.prompt_length + part.start
        pieces = [chat.decode([id]) for id in sample.tokens[first : sample.prompt_length + part.end]]
        ends = np.array(list(accumulate(map(len, pieces))))
        start = "".join(pieces).index(text)
        yield form, first + np.flatnonzero((ends > start) & (ends - np.array([*map(len, pieces)]) < start + len(text)))


def _forced(folder: Path, samples: Sequence[Sample]) -> Iterator[tuple[NDArray[np.bool_], NDArray[np.float32]]]:
    """Return for each sample, by token: true if the greedy choice is this token; the token's probability."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for start in range(0, len(samples), _BATCH):
        rows = [sample.tokens for sample in samples[start : start + _BATCH]]
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows])
        with torch.inference_mode():
            logits = model(input_ids=ids).logits[:, :-1].float()
        said = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0].exp()
        greedy = logits.argmax(-1) == ids[:, 1:]
        for row, right, probability in zip(rows, greedy.numpy(), said.numpy(), strict=True):
            # A place without a token before it is never requested.
            yield np.r_[False, right[: len(row) - 1]], np.r_[np.float32(0), probability[: len(row) - 1]]


def failures(rows: Iterable[Row], right: float = LEAST_RIGHT, probability: float = LEAST_PROBABILITY) -> str:
    """Name the phrases and forms below the bar, one after another; empty if the model is accepted."""
    return "; ".join(str(row) for row in rows if not row.accepted(right, probability))
