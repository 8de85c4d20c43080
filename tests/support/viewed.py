"""Runs for the viewer: folders with metrics and a trajectory store, written by the classes that a run uses."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from agentrl.buffer.store import TrajectoryStore
from agentrl.observability.metrics import MetricsLogger
from agentrl.observability.settings import ObservabilitySettings
from agentrl.sample import Origin, Sample, Status

EVIL = "<script>window.hurt=1</script><img src=x onerror=window.hurt=1>{{ hurt }}\"'>"
"""Text that a model may write: a page must show it and never run it."""

WORDS = [
    "<|user|>",
    "What",
    " is",
    " six",
    " times",
    " seven",
    "?",
    "<|call|>",
    "multiply",
    "<|end|>",
    "\n",
    " 42",
    EVIL,
]


def trajectory(group: int, index: int, *, version: int = 0, right: bool = True, evil: bool = False) -> Sample:
    """Make two turns: a call, its answer, and the model's reply."""
    sample = Sample(
        group_index=group,
        index=index,
        prompt=[{"role": "system", "content": "<|user|>"}, {"role": "user", "content": f"What is six times {group}?"}],
        label="42",
        reward=float(right),
        status=Status.COMPLETED,
        non_generation_time=0.25 * index,
    )
    sample.set_prompt_tokens([0, 1, 2, 3, 4, 5, 6])
    sample.append_model([7, 8], [-0.1, -1.5], str(version), text="<|call|>multiply", turn=1)
    sample.append_observation([9, 10], turn=1, origin=Origin.CLOSE)
    sample.append_observation([11] * (3 + 90 * (index % 2)), text=" 42", turn=1)
    answer = 12 if evil else 11 if right else 5
    sample.append_model([answer, 9], [-0.2, -0.01], str(version), text=WORDS[answer], turn=2)
    call = {"type": "function", "function": {"name": "multiply", "arguments": "{}"}}
    sample.metadata = {
        "step_rewards": [0.5, None],
        "generate_seconds": [1.5, 0.25],
        "step_seconds": [0.125, 0.0],
        "messages": [
            *sample.prompt,
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": " 42"},
            {"role": "assistant", "content": WORDS[answer]},
        ],
    }
    if evil:
        sample.label, sample.metadata["counters"] = EVIL, {EVIL: 1}
    return sample


def failed(group: int, index: int) -> Sample:
    """Make a trajectory that a tool failed."""
    sample = Sample(group_index=group, index=index, prompt=f"What is {group}?", status=Status.FAILED)
    sample.set_prompt_tokens([0, 1])
    sample.append_model([5], [-0.5], "0", text=" seven", turn=1)
    sample.metadata["failure"] = {"blame": "tool", "kind": "timeout", "message": EVIL}
    return sample


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer of `WORDS`, one token each."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    folder.mkdir(parents=True, exist_ok=True)
    Tokenizer(WordLevel({word: at for at, word in enumerate(WORDS)}, unk_token="?")).save(
        str(folder / "tokenizer.json")
    )


def write_metrics(run: Path, steps: Iterable[int]) -> None:
    """Append metrics of these steps."""
    steps = list(steps)
    with MetricsLogger(ObservabilitySettings(use_tensorboard=False), run, resume_step=steps[0]) as logger:
        for step in steps:
            metrics = {"rollout/reward": step / 10, "train/loss": 1 / (step + 1), "rollout/response_length": 12.0}
            logger.log(step, {**metrics, EVIL: 1.0, "perf/rollout_tokens_per_second": 300.0})


def write_step(store: TrajectoryStore, step: int, groups: int = 3, size: int = 4, **options: Any) -> None:
    """Write one training step of `groups` groups, with the trainer's values for its tokens."""
    made = [
        [
            trajectory(step * groups + g, (step * groups + g) * size + i, version=step, right=bool(i), **options)
            for i in range(size)
        ]
        for g in range(groups)
    ]
    store.add("train", "", step, made)
    tokens = sum(sample.response_length for group in made for sample in group)
    numbers = np.linspace(-2, 0, tokens, dtype=np.float16)
    store.add_details(step, {"log_probs": numbers, "advantages": -numbers})


def write_run(run: Path, steps: int = 4, **options: Any) -> Path:
    """Write a run of some steps. One of its trajectories failed, and one writes HTML."""
    write_tokenizer(run / "model")
    (run / "settings.json").write_text(json.dumps({"train": {}}))
    write_metrics(run, range(steps))
    with TrajectoryStore(run / "trajectories.sqlite", 100_000) as store:
        for step in range(steps):
            write_step(store, step, **options)
        store.add("eval", "dev set", 0, [[trajectory(0, 0, evil=True)], [failed(1, 1)]])
    return run
