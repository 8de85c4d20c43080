"""Whole runs with settings files of retrain and a tiny model."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from agentrl.chat import Chat
from agentrl.cluster.launch import train
from agentrl.compat.retrain import AlgorithmConfig, SlimeTrainerAdapter, TrainingConfig
from agentrl.config import RunSettings
from agentrl.errors import CheckpointError
from tests.compat.retrain.test_bridges import rollout
from tests.support.audit import audit_ledger
from tests.tools.test_mcp import http_server

pytestmark = pytest.mark.timeout(900)

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


def check_trained(folder: Path, steps: int) -> list[dict[str, Any]]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(steps))
    result = audit_ledger(folder / "ledger.sqlite", through_step=steps - 1, groups_per_step=2)
    assert result.ok, result.problems
    assert (folder / "model" / "model.safetensors").is_file()
    return rows


def run(tiny: Path, folder: Path, changes: dict[str, str], **settings: Any) -> Path:
    """Run the configuration through the command's own path, with a real MCP server."""
    with http_server() as url:
        text = BRIDGE
        for old, new in {"MODEL": str(tiny), "URL": url, ": out": f": {folder}/out", **changes}.items():
            text = text.replace(old, new)
        (folder / "run.yaml").write_text(text)
        own = {"device": "cpu", "train_threads": 1, "progress": "off", **settings}
        assert train(RunSettings.from_file(folder / "run.yaml", **own)) == 0
    return folder / "out"


def test_trl_is_the_run_without_ray(tiny: Path, tmp_path: Path) -> None:
    output = run(tiny, tmp_path, {})
    assert json.loads((output / "processes.json").read_text()) == {"driver": [os.getpid()]}
    rows = check_trained(output, steps=2)
    assert all(row["rollout/reward"] < 0 for row in rows)  # a random model hardly ever answers: -2
    assert list((output / "logs").iterdir())


@pytest.mark.slow
def test_the_bridge_configuration_runs(tiny: Path, tmp_path: Path) -> None:
    shared = {"backend: trl": "backend: slime", "slime_bf16: true": "slime_bf16: true\n    slime_colocate: true"}
    check_trained(run(tiny, tmp_path, shared), steps=2)


@pytest.mark.parametrize(("style", "end"), [("linear", 5 * 2), ("constant", None)])
async def test_steps_share_the_decay_of_the_whole_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, style: str, end: int | None
) -> None:
    sizes = {"num_generations": 2, "rollout_batch_size": 2, "num_steps_per_rollout": 2, "num_iterations": 5}
    config = TrainingConfig(
        AlgorithmConfig("grpo", "trl", {**sizes, "lr_decay_style": style}),
        model={"name_or_path": str(tiny)}, environment={"type": "fastmcp_env", "env_specific_config": {"server_url": "http://x"}},
    )  # fmt: skip
    adapter, asked = SlimeTrainerAdapter(config, output_dir=str(tmp_path / "out")), list[RunSettings]()

    async def run(settings: RunSettings) -> dict[str, Any]:
        asked.append(settings)
        return {}

    monkeypatch.setattr(adapter, "_run", run)
    chat = Chat.load(str(tiny))
    await adapter.step([rollout(chat, rewards=[1.0, float(at)], sampled=True) for at in range(4)])
    assert [(s.rollout.num_rollout, s.train.lr_decay_iters) for s in asked] == [(1, end)]


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
