"""The whole demo: tiny model, warm start, GRPO with evaluation before and after, report."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from agentrl.demo.data import TEST_PROBLEMS, write_train_and_test
from agentrl.demo.demonstrations import CalculatorLessons
from agentrl.demo.example import EVAL_SET, ExampleResult, held_out, must_be_new
from agentrl.tiny.warm_start import Say, WarmStartSettings, in_own_process

if TYPE_CHECKING:
    from agentrl.config import RunSettings

BATCH_PROMPTS = 16
GOOD = 0.8
"""Success on held-out problems that the demo expects to reach; every seed tried ended above it."""


def run_demo(
    folder: Path, cache: Path, *, seed: int = 0, steps: int = 20, backend: Literal["local", "ray"] = "local", say: Say
) -> ExampleResult:
    """Run it.

    Args:
        folder: for everything this run writes; it must be new, as the same folder given again would resume.
        cache: where warm-started models are kept between runs.
        seed: of weights, data and sampling.
        steps: GRPO steps of 16 prompts x 8 samples.
        backend: everything in this process, or on Ray.
        say: where progress goes, one line a call; picklable.

    Raises:
        DataError: the folder is not empty.
    """
    must_be_new(folder, "demo")
    started = time.monotonic()
    model = in_own_process(cache, CalculatorLessons(), WarmStartSettings(seed=seed), say)
    warm = time.monotonic()
    train_file, test_file = write_train_and_test(folder / "data", train_count=steps * BATCH_PROMPTS, seed=seed)
    say(f"training: {steps} GRPO steps, evaluated on {TEST_PROBLEMS} problems whose operands never occur in training")
    settings = demo_settings(folder, model, train_file, test_file, seed=seed, steps=steps).replace(backend=backend)

    from agentrl.cluster.launch import train
    from agentrl.observability.report import write_report

    train(settings)
    success, used_tool = held_out(folder, "reward"), held_out(folder, "used_tool")
    result = ExampleResult(success, used_tool, warm - started, time.monotonic() - warm, GOOD)
    page = write_report(folder, title=f"Calculator demo, seed {seed}")
    say(f"held-out success at temperature 1: {success[0]:.1%} before, {success[-1]:.1%} after")
    say(f"report: {page}")
    say(f"every trajectory, token by token: agentrl view {folder}")
    return result


def demo_settings(
    folder: Path, model: Path, train_file: Path, test_file: Path, *, seed: int = 0, steps: int = 20
) -> "RunSettings":
    """The settings of the demo's training run, an example of a complete small configuration."""
    from agentrl.config import RunSettings

    rate, warmup = 3e-4, 5
    return RunSettings.from_flat(
        {
            "hf_checkpoint": str(model),
            "output_dir": str(folder),
            "env": "agentrl.demo.task:CalculatorEnv",
            "prompt_data": str(train_file),
            "input_key": "prompt",
            "label_key": "label",
            # One rollout ahead, with the engine in a process beside this one: both cores work, without Ray.
            "backend": "local",
            "max_staleness": 1,
            "num_rollout": steps,
            "rollout_batch_size": BATCH_PROMPTS,
            "n_samples_per_prompt": 8,
            "rollout_seed": seed,
            "rollout_temperature": 1.0,
            "rollout_max_response_len": 48,
            "eval_prompt_data": (EVAL_SET, str(test_file)),
            "eval_interval": min(10, steps),
            "eval_before_train": True,
            "advantage_estimator": "grpo",
            "eps_clip": 0.2,
            "eps_clip_high": 0.28,
            "calculate_per_token_loss": True,
            "lr": rate,
            # Step 0 of a warm-up from zero would change nothing.
            "lr_warmup_init": rate / warmup,
            "lr_warmup_iters": warmup - 1,
            "weight_decay": 0.0,
            "adam_beta2": 0.95,
            "clip_grad": 1.0,
            "use_dynamic_batch_size": True,
            "max_tokens_per_gpu": 4096,
            "seed": seed,
            "train_threads": 1,
            "embedded_threads": 1,
            "embedded_slots": BATCH_PROMPTS * 8,
        }
    )
