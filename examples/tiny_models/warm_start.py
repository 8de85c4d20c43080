"""The warm start: the project's own trainer teaches a random model a format, a tool and some bad habits.

1. A `Lessons` object defines the task. Skill phase: rounds of correct demonstrations, each with its own learning-rate
   decay, until the model passes the acceptance check (`examples.tiny_models.acceptance`). Copying from the context is
   learned suddenly, and at a different time for every seed; a fixed number of steps would sometimes stop before it.
2. Habit phase: fewer steps on imperfect demonstrations, so that reinforcement learning has something to improve. The
   model must pass the same check again.
3. The result is deterministic on one processor only: hundreds of steps amplify the last bits. So the models that users
   start from are shipped (`agentrl.tiny`).

With Muon, copying is learned within a minute or two: AdamW alone needs several times longer.
"""

import asyncio
import multiprocessing
import os
import shutil
import tempfile
import threading
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from agentrl.demo.example import Say
from agentrl.errors import TrainError
from agentrl.sample import Message, Sample
from agentrl.settings import Settings
from agentrl.tiny.create import Arch, create
from examples.tiny_models.acceptance import LEAST_PROBABILITY, LEAST_RIGHT, PhraseCheck, failures, measure

if TYPE_CHECKING:
    from agentrl.chat import Chat
    from agentrl.train.trainer import TrainBackend

Phase = Literal["skill", "habit"]

_MADE = {"arch", "layers", "hidden", "feed_forward", "vocab_size", "spaces_apart", "context_length", "seed"}
"""Settings that have the same names in `create`."""


class Lessons(Protocol):
    """Lessons of a tiny model; picklable.

    Attributes:
        markup: further tags that become one token each.
    """

    @property
    def markup(self) -> Sequence[str]: ...

    def corpus(self) -> Iterable[str]:
        """Texts to train the tokenizer on: the words of the task, so that each becomes a token or two."""

    def tools(self, conversation: Sequence[Message] = ()) -> Sequence[dict[str, Any]]:
        """Schemas of the tools that the prompt of a demonstration offers; none for formats without."""

    def demonstrations(self, phase: Phase, seed: int) -> AsyncIterator[list[Message]]:
        """Yield conversations without end, which end with the assistant and are the same for the same arguments."""

    async def checks(self) -> list[PhraseCheck]:
        """Correct conversations about held-out problems: every phrase and every tool form of the task, some times each."""


class WarmStartSettings(Settings):
    """The recipe; the defaults were tuned for the default tiny model."""

    seed: int = Field(0, ge=0, description="Seed of weights and demonstrations.")
    arch: Arch = Field("qwen3", description="Architecture of the model, a `model_type` of transformers.")
    layers: PositiveInt = Field(4, description="Transformer layers of the model.")
    hidden: PositiveInt = Field(128, description="Width of the model.")
    feed_forward: PositiveInt | None = Field(None, description="Width of a feed-forward layer; default 3 times hidden.")
    vocab_size: PositiveInt = Field(512, description="Ids of the tokenizer.")
    spaces_apart: bool = Field(False, description="Whether the tokenizer keeps spaces out of words.")
    context_length: PositiveInt = Field(1024, description="Longest sequence in tokens.")
    skill_steps: PositiveInt = Field(400, description="Optimizer steps of one round of the skill phase.")
    skill_rounds: PositiveInt = Field(4, description="Most rounds of the skill phase.")
    least_skill_rounds: PositiveInt = Field(
        1, description="Fewest rounds: a model that has just passed the check loses more in the habit phase."
    )
    skill_batch: PositiveInt = Field(16, description="Demonstrations a step in the skill phase.")
    skill_lr: PositiveFloat = Field(4e-3, description="Peak learning rate of embeddings and norms in the skill phase.")
    skill_muon_lr: PositiveFloat = Field(9e-3, description="Peak learning rate of the matrices, by Muon.")
    least_right: float = Field(
        LEAST_RIGHT, ge=0, le=1, description="Share of each phrase's texts that must be correct."
    )
    least_probability: float = Field(
        LEAST_PROBABILITY, ge=0, le=1, description="Least mean probability of these texts."
    )
    habit_steps: NonNegativeInt = Field(80, description="Optimizer steps of the habit phase; 0 leaves it out.")
    habit_batch: PositiveInt = Field(32, description="Demonstrations a step in the habit phase.")
    habit_lr: PositiveFloat = Field(1e-3, description="Peak learning rate of the habit phase, by AdamW.")
    train_threads: PositiveInt = Field(1, description="CPU threads.")


def unsaid(text: str) -> None:
    """Say nothing."""


def warm_start(target: Path, lessons: Lessons, settings: WarmStartSettings, say: Say = unsaid) -> Path:
    """Make a tiny model in the new folder `target` and teach it. Returns the folder.

    This joins and leaves torch.distributed in the calling process; use `in_own_process` from a process that has
    other things to do.

    Raises:
        TrainError: the model does not pass the acceptance check; the message names the phrases and forms that failed.
    """
    from agentrl.chat import Chat

    started = time.monotonic()
    say(f"warm start: teaching a tiny model, {settings.skill_steps} steps or more")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".work-") as folder:
        work = Path(folder)
        create(work / "random", corpus=lessons.corpus(), markup=lessons.markup, **settings.model_dump(include=_MADE))
        course = _Course(lessons, Chat.load(str(work / "random")), settings, say)
        asyncio.run(course.skill(work / "random", work / "skill"))
        if settings.habit_steps:
            asyncio.run(course.by_adam("habit", work / "skill", work / "habit"))
        (work / ("habit" if settings.habit_steps else "skill")).rename(target)
    say(f"warm start: done in {time.monotonic() - started:.0f} s")
    return target


def practise(target: Path, source: Path, lessons: Lessons, settings: WarmStartSettings, say: Say = unsaid) -> Path:
    """Teach the model in `source` with correct demonstrations for `habit_steps`. Returns the new folder `target`.

    The docstring of `warm_start` describes the process and the errors.
    """
    from agentrl.chat import Chat

    target.parent.mkdir(parents=True, exist_ok=True)
    asyncio.run(_Course(lessons, Chat.load(str(source)), settings, say).by_adam("skill", source, target))
    return target


def in_own_process(function: Callable[..., Path], *arguments: Any) -> Path:
    """Call `warm_start` or `practise` in a fresh process, whose memory and process groups end with it.

    All arguments, `say` included, must be picklable.
    """
    from concurrent.futures import ProcessPoolExecutor

    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_begin) as pool:
        return pool.submit(function, *arguments).result()


def _begin() -> None:
    """End with the parent, however it ends, and keep libraries' messages and progress bars out of the output."""
    from transformers.utils import logging

    threading.Thread(target=_follow_parent, daemon=True).start()
    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"megatron\.")


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


@dataclass(frozen=True, slots=True)
class _Course:
    """The lessons with the model's own chat template, and progress messages."""

    lessons: Lessons
    chat: "Chat"
    settings: WarmStartSettings
    say: Say

    async def skill(self, source: Path, target: Path) -> None:
        s = self.settings
        stream = self._samples("skill")
        muon = {"optimizer": "muon", "muon_lr": s.skill_muon_lr}
        with _trainer(source, s, s.skill_steps, lr=s.skill_lr, **muon) as backend:
            for round_number in range(1, s.skill_rounds + 1):
                loss = await _train(backend, stream, s.skill_steps, s.skill_batch, self.say)
                shutil.rmtree(target, ignore_errors=True)
                backend.save_hf(target)
                self.say(f"warm start: skill round {round_number}, {s.skill_steps} steps, loss {loss:.4f}")
                if not (failed := await self._failures(target)) and round_number >= s.least_skill_rounds:
                    return
        raise TrainError(
            f"the warm start with seed {s.seed} failed the acceptance check after {s.skill_rounds} rounds: {failed}; "
            f"expected at least {s.least_right:.0%} and {s.least_probability}; use another seed or more rounds"
        )

    async def by_adam(self, phase: Phase, source: Path, target: Path) -> None:
        s = self.settings
        with _trainer(source, s, s.habit_steps, lr=s.habit_lr) as backend:
            loss = await _train(backend, self._samples(phase), s.habit_steps, s.habit_batch, self.say)
            backend.save_hf(target)
        self.say(f"warm start: {phase}, {s.habit_steps} steps by AdamW, loss {loss:.3f}")
        if failed := await self._failures(target):
            raise TrainError(
                f"the warm start with seed {s.seed} failed the acceptance check after {s.habit_steps} steps of {phase}: "
                f"{failed}; expected at least {s.least_right:.0%} and {s.least_probability}; use another seed"
            )

    async def _failures(self, folder: Path) -> str:
        rows = await measure(folder, self.lessons)
        if failed := failures(rows, self.settings.least_right, self.settings.least_probability):
            self.say(f"warm start: acceptance check failed: {failed}")
        elif rows:
            worst = min(rows, key=lambda row: (row.right, row.probability))
            self.say(f"warm start: acceptance check passed; the worst of {len(rows)} rows is {worst}")
        return failed

    async def _samples(self, phase: Phase) -> AsyncIterator[Sample]:
        """Yield new demonstrations as samples, without end."""
        index = 0
        async for messages in self.lessons.demonstrations(phase, self.settings.seed):
            yield self._sample(messages, index)
            index += 1

    def _sample(self, messages: list[Message], index: int = 0) -> Sample:
        from agentrl.chat.demonstration import to_sample

        return to_sample(self.chat, messages, self.lessons.tools(messages), index=index)


@contextmanager
def _trainer(source: Path, settings: WarmStartSettings, steps: int, **optimizer: Any) -> "Iterator[TrainBackend]":
    """Make a trainer of the model in `source` whose learning rate warms up and decays over `steps`."""
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
    """Take `steps` optimizer steps of `size` samples. Returns the running mean of the loss per trained token."""
    from agentrl.train.batch import TrainBatch

    running, report_every = 0.0, max(1, steps // 4)
    for step in range(steps):
        batch = TrainBatch.from_samples([[await anext(stream)] for _ in range(size)], supervised=True)
        loss = backend.train(batch, step)["loss"]
        running = loss if step == 0 else 0.95 * running + 0.05 * loss
        if (step + 1) % report_every == 0 and step + 1 < steps:
            say(f"warm start: step {step + 1}/{steps}, loss {running:.3f}")
    return running
