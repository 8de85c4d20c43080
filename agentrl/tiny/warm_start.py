"""The warm start: the project's own trainer teaches a random model a format, a tool and some bad habits.

1. What is taught is a `Lessons` object. Skill phase: rounds of correct demonstrations, each with its own learning-rate
   decay, until the model reproduces held-out ones token for token. Copying out of the context appears suddenly and at
   a different time for every seed; a fixed number of steps would sometimes stop before it.
2. Habit phase: fewer steps on imperfect demonstrations, so that reinforcement learning has something to improve.
3. The result is kept in a folder named after the lessons and the hash of all settings; the same find it there.

Muon is what makes copying appear within a minute or two: AdamW alone needs several times longer.
"""

import asyncio
import hashlib
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from agentrl.errors import TrainError
from agentrl.sample import Message, Sample
from agentrl.settings import Settings
from agentrl.tiny.create import Arch, create

if TYPE_CHECKING:
    from agentrl.chat import Chat
    from agentrl.train.trainer import TrainBackend

Say = Callable[[str], None]

Phase = Literal["skill", "habit"]

_RECIPE = 2
"""Part of the cache's key: raised when the loop changes."""

_MADE = {"arch", "layers", "hidden", "vocab_size", "spaces_apart", "context_length", "seed"}
"""Settings that `create` calls so too."""

_SURE = 0.5
"""A token with more than this probability is the one that greedy decoding picks."""


class Lessons(Protocol):
    """What a tiny model is taught; picklable.

    Attributes:
        name: of the folder in the cache, with the settings' key.
        version: raised when the lessons change, so that no model of older ones is found.
        markup: tags besides the usual ones that are to be one token each.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> int: ...
    @property
    def markup(self) -> Sequence[str]: ...

    def corpus(self) -> Iterable[str]:
        """Texts to train the tokenizer on: the words of the task, so that each becomes a token or two."""

    def tools(self, conversation: Sequence[Message] = ()) -> Sequence[dict[str, Any]]:
        """Schemas of the tools that the prompt of a demonstration offers; none for formats without."""

    def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """An endless stream of conversations that end with the assistant, the same for the same arguments."""

    async def checks(self) -> list[list[Message]]:
        """Some correct conversations about held-out problems, to know when the skill phase is over."""


class WarmStartSettings(Settings):
    """The recipe; the defaults were tuned for the default tiny model."""

    seed: int = Field(0, ge=0, description="Seed of weights and demonstrations.")
    arch: Arch = Field("qwen3", description="Architecture of the model, a `model_type` of transformers.")
    layers: PositiveInt = Field(4, description="Transformer layers of the model.")
    hidden: PositiveInt = Field(128, description="Width of the model.")
    vocab_size: PositiveInt = Field(512, description="Ids of the tokenizer.")
    spaces_apart: bool = Field(False, description="Whether the tokenizer keeps spaces out of words.")
    context_length: PositiveInt = Field(1024, description="Longest sequence in tokens.")
    skill_steps: PositiveInt = Field(260, description="Optimizer steps of one round of the skill phase.")
    skill_rounds: PositiveInt = Field(4, description="Most rounds of the skill phase.")
    skill_batch: PositiveInt = Field(16, description="Demonstrations a step in the skill phase.")
    skill_lr: PositiveFloat = Field(4e-3, description="Peak learning rate of embeddings and norms in the skill phase.")
    skill_muon_lr: PositiveFloat = Field(9e-3, description="Peak learning rate of the matrices, by Muon.")
    skill_success: float = Field(
        0.85, ge=0, le=1, description="Share of held-out demonstrations that must be reproduced to leave the phase."
    )
    habit_steps: NonNegativeInt = Field(80, description="Optimizer steps of the habit phase; 0 leaves it out.")
    habit_batch: PositiveInt = Field(32, description="Demonstrations a step in the habit phase.")
    habit_lr: PositiveFloat = Field(1e-3, description="Peak learning rate of the habit phase, by AdamW.")
    train_threads: PositiveInt = Field(1, description="CPU threads.")

    def folder_name(self, lessons: Lessons) -> str:
        """What the result is cached under: the lessons, and all settings that change it, hashed."""
        described = f"{_RECIPE} {lessons.version} {self.model_dump_json(exclude={'train_threads'})}"
        return f"{lessons.name}-{hashlib.sha256(described.encode()).hexdigest()[:16]}"


def unsaid(text: str) -> None:
    """Say nothing."""


def warm_start(cache: Path, lessons: Lessons, settings: WarmStartSettings, say: Say = unsaid) -> Path:
    """Make a tiny model and teach it, or find it in `cache`.

    This joins and leaves torch.distributed in the calling process; use `in_own_process` from a process that has
    other things to do.

    Returns:
        The Hugging Face folder of the model.

    Raises:
        TrainError: after all rounds the model still cannot reproduce held-out demonstrations.
    """
    done = cache / settings.folder_name(lessons)
    if (done / "config.json").is_file():
        say(f"warm start: found in {done}")
        return done
    from agentrl.chat import Chat

    started = time.monotonic()
    say(f"warm start: teaching a tiny model, {settings.skill_steps} steps or more; it is kept in {cache}")
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".work-") as folder:
        work = Path(folder)
        create(work / "random", corpus=lessons.corpus(), markup=lessons.markup, **settings.model_dump(include=_MADE))
        course = _Course(lessons, Chat.load(str(work / "random")), settings, say)
        asyncio.run(course.skill(work / "random", work / "skill"))
        if settings.habit_steps:
            asyncio.run(course.habit(work / "skill", work / "habit"))
        try:
            (work / ("habit" if settings.habit_steps else "skill")).rename(done)
        except OSError:
            # If another run was faster, its result (the same) stays.
            if not (done / "config.json").is_file():
                raise
    say(f"warm start: done in {time.monotonic() - started:.0f} s")
    return done


def in_own_process(cache: Path, lessons: Lessons, settings: WarmStartSettings, say: Say = unsaid) -> Path:
    """`warm_start` in a fresh process, whose memory and process groups go with it; `say` must be picklable."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_quiet) as pool:
        return pool.submit(warm_start, cache, lessons, settings, say).result()


def _quiet() -> None:
    """Keep the libraries' remarks on optional packages and their progress bars off the output."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"megatron\.")


@dataclass(frozen=True, slots=True)
class _Course:
    """The lessons with the model's own chat template, and where the course stands is said."""

    lessons: Lessons
    chat: "Chat"
    settings: WarmStartSettings
    say: Say

    async def skill(self, source: Path, target: Path) -> None:
        s = self.settings
        checks = [self._sample(messages) for messages in await self.lessons.checks()]
        stream = self._samples("skill")
        muon = {"optimizer": "muon", "muon_lr": s.skill_muon_lr}
        with _trainer(source, s, s.skill_steps, lr=s.skill_lr, **muon) as backend:
            for round_number in range(1, s.skill_rounds + 1):
                loss = await _train(backend, stream, s.skill_steps, s.skill_batch, self.say)
                success = _reproduced(backend, checks)
                self.say(
                    f"warm start: skill round {round_number}, {s.skill_steps} steps, loss {loss:.4f}, "
                    f"{success:.0%} of held-out demonstrations reproduced"
                )
                if success >= s.skill_success:
                    backend.save_hf(target)
                    return
        raise TrainError(
            f"the warm start with seed {s.seed} reproduced {success:.0%} of held-out demonstrations after "
            f"{s.skill_rounds} rounds, expected {s.skill_success:.0%}; use another seed or more rounds"
        )

    async def habit(self, source: Path, target: Path) -> None:
        s = self.settings
        with _trainer(source, s, s.habit_steps, lr=s.habit_lr) as backend:
            loss = await _train(backend, self._samples("habit"), s.habit_steps, s.habit_batch, self.say)
            backend.save_hf(target)
        self.say(f"warm start: habits, {s.habit_steps} steps, loss {loss:.3f}")

    async def _samples(self, phase: Phase) -> AsyncIterator[Sample]:
        """Fresh demonstrations as samples, without end."""
        index = 0
        async for messages in self.lessons.demonstrations(phase, self.settings.seed):
            yield self._sample(messages, index)
            index += 1

    def _sample(self, messages: list[Message], index: int = 0) -> Sample:
        from agentrl.chat.demonstration import to_sample

        return to_sample(self.chat, messages, self.lessons.tools(messages), index=index)


@contextmanager
def _trainer(source: Path, settings: WarmStartSettings, steps: int, **optimizer: Any) -> "Iterator[TrainBackend]":
    """A trainer of the model in `source` whose learning rate warms up and decays over `steps`."""
    from agentrl.algorithms.settings import AlgorithmSettings
    from agentrl.train.backends import backend_class
    from agentrl.train.contracts import RankInfo
    from agentrl.train.settings import TrainSettings

    train = TrainSettings(
        train_backend="megatron",  # which has Muon
        hf_checkpoint=str(source),
        lr_decay_style="cosine",
        weight_decay=0.0,
        adam_beta2=0.95,
        clip_grad=1.0,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16_384,
        seed=settings.seed,
        train_threads=settings.train_threads,
        lr_warmup_iters=min(20, steps // 4),
        lr_decay_iters=steps,
        **optimizer,
    )
    objective = AlgorithmSettings(loss_type="sft_loss", calculate_per_token_loss=True)
    backend = backend_class(train.train_backend)(train, objective)
    backend.init(RankInfo())
    try:
        yield backend
    finally:
        backend.close()


async def _train(backend: "TrainBackend", stream: AsyncIterator[Sample], steps: int, size: int, say: Say) -> float:
    """Take `steps` optimizer steps of `size` samples; returns the running mean of the loss per trained token."""
    from agentrl.train.batch import TrainBatch

    running, report_every = 0.0, max(1, steps // 4)
    for step in range(steps):
        batch = TrainBatch.from_samples([[await anext(stream)] for _ in range(size)], supervised=True)
        loss = backend.train(batch, step)["loss"]
        running = loss if step == 0 else 0.95 * running + 0.05 * loss
        if (step + 1) % report_every == 0 and step + 1 < steps:
            say(f"warm start: step {step + 1}/{steps}, loss {running:.3f}")
    return running


def _reproduced(backend: "TrainBackend", samples: list[Sample]) -> float:
    """Share of samples of which every trained token has a probability above one half.

    Greedy decoding writes exactly these demonstrations, so this is a lower bound of its success.
    """
    import numpy as np

    from agentrl.train.batch import TrainBatch

    batch = TrainBatch.from_samples([[sample] for sample in samples], supervised=True)
    sure = (np.exp(backend.log_probs(batch)) > _SURE) | (batch.loss_mask == 0)
    return float(np.mean([sure[batch.response_slice(index)].all() for index in range(len(samples))]))
