"""Whole runs by settings files of retrain, with a tiny model."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.chat import Chat
from agentrl.compat.retrain import AlgorithmConfig, SlimeTrainerAdapter, TrainingConfig
from agentrl.errors import CheckpointError
from tests.compat.retrain.test_bridges import rollout
from tests.support.audit import audit_ledger
from tests.support.checkout import import_path
from tests.tools.test_mcp import http_server

pytestmark = pytest.mark.timeout(200)

BRIDGE = """
experiment_name: slime_bridge_example
seed: 42
logging_level: INFO
model: {name_or_path: MODEL, loader: huggingface, torch_dtype: bfloat16}
environment:
  type: fastmcp_env
  env_specific_config:
    server_url: URL
    initial_prompt_template: "Hello! I need help with this task:"
    max_steps: 5
algorithm:
  name: grpo
  backend: trl
  hyperparameters:
    learning_rate: 1e-5
    num_iterations: 2
    rollout_batch_size: 2
    global_batch_size: 4
    slime_actor_num_nodes: 1
    slime_actor_num_gpus_per_node: 1
    slime_rollout_num_gpus: 1
    slime_use_retrain_environment: true
    slime_use_retrain_rewards: true
    slime_rollout_temperature: 0.8
    slime_rollout_top_p: 0.9
    slime_rollout_max_response_len: 16
    slime_bf16: true
    slime_save_interval: 2
prompt_source: {type: environment, source_config: {}}
reward_setup:
  step_reward_configs:
    task_completion: {weight: 1.0, params: {success_bonus: 10.0, failure_penalty: -2.0}}
  rollout_reward_configs: {}
num_episodes: 10
batch_size: 2
output_dir: out
logging_dir: out/logs
"""


def agentrl(folder: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "agentrl", "train", "--config", "run.yaml", *arguments]
    environment = {**os.environ, "PYTHONPATH": import_path(), "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=180, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def check_trained(folder: Path, steps: int) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps))
    result = audit_ledger(folder / "ledger.sqlite", through_step=steps - 1, groups_per_step=2)
    assert result.ok, result.problems
    assert (folder / "model" / "model.safetensors").is_file()
    return rows


def test_trl_is_the_run_without_ray(tiny: Path, tmp_path: Path) -> None:
    with http_server() as url:
        (tmp_path / "run.yaml").write_text(BRIDGE.replace("MODEL", str(tiny)).replace("URL", url))
        said = agentrl(tmp_path, "--train-threads", "1", "--device", "cpu", "--progress", "plain")
    assert "Ray" not in said
    rows = check_trained(tmp_path / "out", steps=2)
    assert all(row["rollout/reward"] <= 0 for row in rows)  # a random model never answers: -2, and less for its calls
    assert list((tmp_path / "out" / "logs").iterdir())


@pytest.mark.slow
def test_the_bridge_configuration_runs(tiny: Path, tmp_path: Path) -> None:
    with http_server() as url:
        text = BRIDGE.replace("MODEL", str(tiny)).replace("URL", url).replace("backend: trl", "backend: slime")
        (tmp_path / "run.yaml").write_text(text)
        agentrl(tmp_path, "--train-threads", "1", "--device", "cpu")
        agentrl(tmp_path, "--train-threads", "1", "--device", "cpu", "--num-rollout", "3")
    check_trained(tmp_path / "out", steps=3)


@pytest.mark.slow
async def test_the_adapter_trains_saves_and_loads(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "env.py").write_text(
        "class Two:\n    def reset(self):\n        return 'Say it.', {}\n\n"
        "    def step(self, action):\n        return '', len(action['raw_llm_output']) % 5 / 5, True, False, {}\n"
    )
    algorithm = AlgorithmConfig("grpo", "trl", {"num_generations": 2, "rollout_batch_size": 2, "learning_rate": 1e-3})
    config = TrainingConfig(algorithm, model={"name_or_path": str(tiny)}, environment={"type": "env.py:Two"})
    own = {"device": "cpu", "train_threads": 1, "progress": "off", "rollout_max_response_len": 12}
    first = SlimeTrainerAdapter(config, output_dir="first", **own)
    with pytest.raises(CheckpointError, match="nothing was trained yet"):
        first.save_checkpoint("saved")
    assert (await first.train(1))["step"] == 0
    chat = Chat.load(str(tiny))
    batch = [rollout(chat, rewards=[1.0, float(at)], sampled=True, last=f"It is {at}.") for at in range(4)]
    assert (await first.step(batch))["train/grad_norm"] > 0
    first.save_checkpoint("saved")
    again = SlimeTrainerAdapter(config, output_dir="again", **own)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        again.load_checkpoint("first/model")
    again.load_checkpoint("saved")
    with pytest.raises(CheckpointError, match="goes on from its own"):
        first.load_checkpoint("saved")
    for adapter in (first, again):
        assert (await adapter.step(batch))["step"] == 2
    one, two = (load_file(tmp_path / name / "model" / "model.safetensors") for name in ("first", "again"))
    assert all(one[name].equal(two[name]) for name in one)
