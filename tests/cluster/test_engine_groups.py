"""Several engine groups: an opponent with fixed weights, and engines that evaluate while the trainer trains."""

from pathlib import Path

import pytest

from agentrl.buffer.reader import Filter, StoreReader
from tests.support.runs import RunKit, still_running

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

ENV = """
import os
from pathlib import Path

import anyio

from agentrl import Environment


class Duel(Environment):
    max_turns = 1

    async def reset(self, sample):
        said = await self.engine_group("opponent").reply([{"role": "user", "content": "Go."}], temperature=0.0)
        sample.metadata["opponent"] = said
        rows = Path(os.environ["METRICS"])
        while self.evaluating and '"step":0' in rows.read_text() and '"step":1' not in rows.read_text():
            await anyio.sleep(0.05)  # until the step after this evaluation is trained
        return await super().reset(sample)

    async def reward(self, sample):
        return sum(sample.tokens[sample.prompt_length:]) % 7 / 7
"""


@pytest.mark.parametrize("backend", ["ray", "local"])
def test_an_opponent_stays_and_evaluation_keeps_its_weights_while_training_goes_on(
    tmp_path: Path, backend: str
) -> None:
    kit = RunKit.make(tmp_path)
    (tmp_path / "duel.py").write_text(ENV)
    form = {"env": "duel.py:Duel", "lr": "3e-3", "num_rollout": 3}
    form |= {"eval_prompt_data": ("held", "prompts.jsonl@[0:2]"), "eval_interval": 1, "eval_while_training": True}
    form |= {"backend": backend, "save_interval": 3}
    groups = ["--engine-groups", "opponent=1", "--engine-groups", "eval=1", "--no-eval-before-train"]
    run = kit.start([*kit.arguments("run", **form), *groups], METRICS=str(tmp_path / "run" / "metrics.jsonl"))
    assert run.wait(800) == 0, run.output
    rows = run.metrics()
    trained = [row["step"] for row in rows if "train/loss" in row]
    evaluated = [row["step"] for row in rows if "eval/held/reward" in row]
    assert trained == evaluated == [0, 1, 2]
    at = {(row["step"], "eval/held/reward" in row): i for i, row in enumerate(rows)}
    assert at[1, False] < at[0, True]
    opponent = set()
    with StoreReader(run.folder / "trajectories.sqlite") as reader:
        for kind in ("train", "eval"):
            for row in reader.query(Filter(equal={"kind": kind})):
                for sample in reader.group(row.key):
                    opponent.add(sample.metadata["opponent"])
                    if kind == "eval":
                        assert {int(segment.version) for segment in sample.segments if segment.version} == {row.step}
    assert len(opponent) == 1
    if backend == "ray":
        assert len(run.processes()["engine"]) == 3
    assert still_running(run.processes()) == []
