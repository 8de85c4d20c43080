"""The warm start: the project's own trainer teaches a random model the format, the tool and some bad habits.

1. Skill phase: rounds of correct demonstrations, each with its own learning-rate decay, until the model reproduces
   correct demonstrations of held-out problems token for token. Copying a number out of the context appears suddenly
   and at a different time for every seed; a fixed number of steps would sometimes stop before it.
2. Habit phase: fewer steps on imperfect demonstrations.
3. The result is kept in a folder named after the hash of all settings; the same settings find it there.

Muon is what makes copying appear within a minute or two: AdamW alone needs several times longer.
"""

import asyncio
import hashlib
import random
import tempfile
import time
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import Field, PositiveFloat, PositiveInt

from agentrl.demo.demonstrations import Phase, corpus, demonstrate, demonstrations, to_sample
from agentrl.demo.task import CalculatorEnv, make_problem
from agentrl.errors import TrainError
from agentrl.sample import Sample
from agentrl.settings import Settings

if TYPE_CHECKING:
    from agentrl.chat import Chat
    from agentrl.train.megatron.backend import MegatronBackend

Say = Callable[[str], None]

_RECIPE = 1
"""Part of the cache's key: raised when the demonstrations or the loop change."""

_CHECKS = 64
_SURE = 0.5
"""A token with more than this probability is the one that greedy decoding picks."""


class WarmStartSettings(Settings):
    """The recipe; the defaults were tuned for the default tiny model."""

    seed: int = Field(0, ge=0, description="Seed of weights and demonstrations.")
    layers: PositiveInt = Field(4, description="Transformer layers of the model.")
    hidden: PositiveInt = Field(128, description="Width of the model.")
    skill_steps: PositiveInt = Field(260, description="Optimizer steps of one round of the skill phase.")
    skill_rounds: PositiveInt = Field(4, description="Most rounds of the skill phase.")
    skill_batch: PositiveInt = Field(16, description="Demonstrations a step in the skill phase.")
    skill_lr: PositiveFloat = Field(4e-3, description="Peak learning rate of embeddings and norms in the skill phase.")
    skill_muon_lr: PositiveFloat = Field(9e-3, description="Peak learning rate of the matrices, by Muon.")
    skill_success: float = Field(
        0.85, ge=0, le=1, description="Share of held-out demonstrations that must be reproduced to leave the phase."
    )
    habit_steps: PositiveInt = Field(80, description="Optimizer steps of the habit phase.")
    habit_batch: PositiveInt = Field(32, description="Demonstrations a step in the habit phase.")
    habit_lr: PositiveFloat = Field(1e-3, description="Peak learning rate of the habit phase, by AdamW.")
    train_threads: PositiveInt = Field(1, description="CPU threads.")

    @property
    def key(self) -> str:
        """What the result is cached under: all settings that change it, hashed."""
        described = f"{_RECIPE} {self.model_dump_json(exclude={'train_threads'})}"
        return hashlib.sha256(described.encode()).hexdigest()[:16]


def warm_start(cache: Path, settings: WarmStartSettings, say: Say = lambda text: None) -> Path:
    """Make a tiny model and teach it, or find it in `cache`.

    This joins and leaves torch.distributed in the calling process; use `in_own_process` from a process that has
    other things to do.

    Returns:
        The Hugging Face folder of the model.

    Raises:
        TrainError: after all rounds the model still cannot reproduce held-out demonstrations.
    """
    done = cache / f"warm-{settings.key}"
    if (done / "config.json").is_file():
        say(f"warm start: found in {done}")
        return done
    from agentrl import tiny
    from agentrl.chat import Chat

    started = time.monotonic()
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache, prefix=".work-") as folder:
        work = Path(folder)
        tiny.create(
            work / "random", layers=settings.layers, hidden=settings.hidden, seed=settings.seed, corpus=corpus()
        )
        chat = Chat.load(str(work / "random"))
        asyncio.run(_skill(work / "random", work / "skill", chat, settings, say))
        asyncio.run(_habit(work / "skill", work / "habit", chat, settings, say))
        _publish(work / "habit", done)
    say(f"warm start: done in {time.monotonic() - started:.0f} s")
    return done


def _publish(made: Path, done: Path) -> None:
    """Move the folder to its place in the cache; if another run was faster, its result (the same) stays."""
    try:
        made.rename(done)
    except OSError:
        if not (done / "config.json").is_file():
            raise


def in_own_process(cache: Path, settings: WarmStartSettings, say: Say | None = None) -> Path:
    """`warm_start` in a fresh process, whose memory and process groups go with it; `say` must be picklable."""
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    arguments = (cache, settings) if say is None else (cache, settings, say)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=context, initializer=_quiet) as pool:
        return pool.submit(warm_start, *arguments).result()


def _quiet() -> None:
    """Keep the libraries' remarks on optional packages and their progress bars off the demo's output."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", module=r"megatron\.")


async def _skill(source: Path, target: Path, chat: "Chat", settings: WarmStartSettings, say: Say) -> None:
    checks = await _held_out_demonstrations(chat)
    stream = _samples(chat, "skill", settings.seed)
    schedule: dict[str, Any] = {
        "optimizer": "muon",
        "muon_lr": settings.skill_muon_lr,
        "lr": settings.skill_lr,
        "lr_warmup_iters": min(20, settings.skill_steps // 4),
        "lr_decay_iters": settings.skill_steps,
    }
    with _trainer(source, schedule, settings) as backend:
        for round_number in range(1, settings.skill_rounds + 1):
            loss = await _train(backend, stream, settings.skill_steps, settings.skill_batch, say)
            success = _reproduced(backend, checks)
            say(
                f"warm start: skill round {round_number}, {settings.skill_steps} steps, loss {loss:.4f}, "
                f"{success:.0%} of held-out demonstrations reproduced"
            )
            if success >= settings.skill_success:
                backend.save_hf(target)
                return
    raise TrainError(
        f"the warm start with seed {settings.seed} reproduced {success:.0%} of held-out demonstrations after "
        f"{settings.skill_rounds} rounds, expected {settings.skill_success:.0%}; use another --seed or more rounds"
    )


async def _habit(source: Path, target: Path, chat: "Chat", settings: WarmStartSettings, say: Say) -> None:
    schedule: dict[str, Any] = {
        "lr": settings.habit_lr,
        "lr_warmup_iters": min(20, settings.habit_steps // 4),
        "lr_decay_iters": settings.habit_steps,
    }
    with _trainer(source, schedule, settings) as backend:
        stream = _samples(chat, "habit", settings.seed)
        loss = await _train(backend, stream, settings.habit_steps, settings.habit_batch, say)
        backend.save_hf(target)
    say(f"warm start: habits, {settings.habit_steps} steps, loss {loss:.3f}")


@contextmanager
def _trainer(source: Path, schedule: dict[str, Any], settings: WarmStartSettings) -> "Iterator[MegatronBackend]":
    from agentrl.algorithms.settings import AlgorithmSettings
    from agentrl.train.backend import RankInfo
    from agentrl.train.megatron.backend import MegatronBackend
    from agentrl.train.settings import TrainSettings

    train = TrainSettings(
        hf_checkpoint=str(source),
        lr_decay_style="cosine",
        weight_decay=0.0,
        adam_beta2=0.95,
        clip_grad=1.0,
        use_dynamic_batch_size=True,
        max_tokens_per_gpu=16_384,
        seed=settings.seed,
        train_threads=settings.train_threads,
        **schedule,
    )
    backend = MegatronBackend(train, AlgorithmSettings(loss_type="sft_loss", calculate_per_token_loss=True))
    backend.init(RankInfo())
    try:
        yield backend
    finally:
        backend.close()


async def _samples(chat: "Chat", phase: Phase, seed: int) -> AsyncIterator[Sample]:
    """Fresh demonstrations as samples, without end."""
    index = 0
    async for messages in demonstrations(phase, seed):
        yield to_sample(chat, messages, index)
        index += 1


async def _train(backend: "MegatronBackend", stream: AsyncIterator[Sample], steps: int, size: int, say: Say) -> float:
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


async def _held_out_demonstrations(chat: "Chat") -> list[Sample]:
    rng, toolbox = random.Random("held-out demonstrations"), CalculatorEnv().toolbox
    problems = [make_problem(rng, "test", drill=True) for _ in range(_CHECKS)]
    return [to_sample(chat, await demonstrate(problem, "good", rng, toolbox)) for problem in problems]


def _reproduced(backend: "MegatronBackend", samples: list[Sample]) -> float:
    """Share of samples of which every trained token has a probability above one half.

    Greedy decoding writes exactly these demonstrations, so this is a lower bound of its success.
    """
    import numpy as np

    from agentrl.train.batch import TrainBatch

    batch = TrainBatch.from_samples([[sample] for sample in samples], supervised=True)
    sure = (np.exp(backend.compute_log_probs(batch)) > _SURE) | (batch.loss_mask == 0)
    return float(np.mean([sure[batch.response_slice(index)].all() for index in range(len(samples))]))
