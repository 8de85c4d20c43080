"""Acceptance of the verdict: healthy runs and deliberately spoiled runs, and the expected verdict on each.

The thresholds of `agentrl.observability.verdict` were chosen with the runs that are not `held_out`. The others were
judged once, afterwards. `python -m tests.observability.verdicts.cases FOLDER [NAME ...]` runs and records cases.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.main import run
from agentrl.cluster.launch import train
from agentrl.config import RunSettings
from agentrl.demo.data import write_train_and_test
from agentrl.demo.run import DEMO
from agentrl.tiny import shipped

ENVIRONMENTS = Path(__file__).with_name("environments.py")
RECORDED = Path(__file__).with_name("recorded")
_LEFT_OUT = ("perf/", "stalls/", "engines/", "env/", "tokens/", "time", "train/advantages/", "rollout/error_cat/")


@dataclass(frozen=True, slots=True)
class Case:
    """One run.

    Attributes:
        name: of its recorded metrics.
        cause: the cause that the verdict must name; empty for a healthy run.
        flags: flags of `agentrl train` that differ from the demo's.
        env: a class of `environments.py` instead of the demo's.
        project: the project of `agentrl new` with its skilled model, instead of the demo.
        held_out: not used to choose thresholds.
    """

    name: str
    cause: str | None
    flags: str = ""
    env: str | None = None
    project: bool = False
    held_out: bool = False

    def run(self, folder: Path) -> Path:
        """Run the case in a new folder. Returns the folder of metrics."""
        argv = self._project(folder / "my_env") if self.project else self._demo(folder)
        train(
            RunSettings.from_cli([*argv, "--output-dir", str(folder), "--keep-trajectories", "0", *self.flags.split()])
        )
        return folder

    def _demo(self, folder: Path) -> list[str]:
        prompts, _ = write_train_and_test(folder / "data", train_count=300, seed=0)
        config = folder / "calculator.yaml"
        text = DEMO.config.read_text().replace("  eval_interval: 10\n", "")
        config.write_text(text.replace("num_rollout: 20", "num_rollout: 15").replace("batch_size: 16", "batch_size: 8"))
        argv = [
            "--config",
            str(config),
            "--hf-checkpoint",
            str(shipped(str(DEMO.model))),
            "--prompt-data",
            str(prompts),
        ]
        return argv + (["--env", f"{ENVIRONMENTS}:{self.env}"] if self.env else [])

    def _project(self, folder: Path) -> list[str]:
        run(["new", str(folder)])
        argv = ["--config", f"{folder}/run.yaml", "--env", f"{folder}/my_env.py:MyEnv", "--hf-checkpoint"]
        argv += [str(shipped("tools")), "--prompt-data", f"{folder}/train.jsonl"]
        return [*argv, "--eval-prompt-data", "held_out", f"{folder}/test.jsonl"]


_IN_TURN = "--max-staleness 0 --rollout-batch-size 5 --num-rollout 12"
_SHORT = "--max-staleness 0 --rollout-batch-size 4 --num-rollout 8"
_JUDGE = f"--group-rm --custom-rm-path {ENVIRONMENTS}:longer_half --rollout-max-response-len 96"
SPOILED = (
    Case("constant_reward", "equal rewards", env="ConstantReward"),
    Case("lr_100_times", "learning rate too high", "--lr 3e-2 --lr-warmup-init 3e-2"),
    Case("lr_1e-9", "learning rate too low", "--lr 1e-9 --lr-warmup-init 0"),
    Case("stale", "stale samples", "--max-staleness 4 --lr 2e-3 --lr-warmup-init 2e-3"),
    Case("entropy_bonus", "entropy grows", "--entropy-coef 1.0"),
    Case("other_temperature", "engine and trainer differ", f"--use-rollout-logprobs {_IN_TURN}", "OtherTemperature"),
    Case("judge_likes_length", "length drift", f"{_JUDGE} {_IN_TURN}"),
    Case("wrong_label", "no reward", _SHORT, "WrongLabel", held_out=True),
    Case("tools_fail", "tools fail", _SHORT, "ToolsFail", held_out=True),
    Case("short_turns", "truncation", f"--rollout-max-response-len 12 {_SHORT}", held_out=True),
    Case("small_context", "truncation", f"--rollout-max-context-len 80 {_SHORT}", held_out=True),
    Case("grader_raises", "failed trajectories", f"--n-samples-per-prompt 4 {_SHORT}", "GraderRaises", held_out=True),
    Case("cold", "equal rewards", f"--rollout-temperature 0.02 {_SHORT}", held_out=True),
)
HEALTHY = (
    Case("demo", None),
    Case("in_turn", None, f"--seed 1 --rollout-seed 1 {_IN_TURN}"),
    Case("starts_high", None, "--rollout-temperature 1.9 --rollout-batch-size 4 --num-rollout 8", project=True),
    Case("two_steps", None, f"--num-steps-per-rollout 2 --seed 2 --rollout-seed 2 {_IN_TURN}", held_out=True),
    # This run was meant to fail, but it learned.
    Case("entropy_penalty", None, f"--entropy-coef -1.0 {_IN_TURN}", held_out=True),
)
CASES = {case.name: case for case in (*SPOILED, *HEALTHY)}


def record(case: Case, folder: Path) -> None:
    """Run a case and keep the metrics that a verdict may read, rounded."""
    rows = []
    for line in (case.run(folder) / "metrics.jsonl").read_text().splitlines():
        kept = {name: value for name, value in json.loads(line).items() if not name.startswith(_LEFT_OUT)}
        rows.append({name: float(f"{v:.5g}") if isinstance(v, float) else v for name, v in kept.items()})
    RECORDED.mkdir(exist_ok=True)
    (RECORDED / f"{case.name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    for name in sys.argv[2:] or CASES:
        record(CASES[name], Path(sys.argv[1], name))
