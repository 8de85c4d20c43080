"""A run whose only signal is a teacher: over HTTP, or loaded by the trainer."""

from pathlib import Path

import pytest
import torch

from agentrl.chat import Chat
from agentrl.config import RunSettings
from agentrl.dumps import read_groups
from agentrl.run.preflight import teacher_pool
from agentrl.tiny import shipped
from tests.engine.protocol_checks import reference_log_probs
from tests.support.embedded_server import embedded_server
from tests.support.runs import RunKit
from tests.support.tiny_models import make_tiny_model

PLAIN = """
from agentrl import Environment


class Plain(Environment):
    max_turns = 1
"""


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_model_comes_nearer_to_itself_with_a_privileged_message(tmp_path: Path) -> None:
    kit = RunKit.make(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    flags = {
        "env": "plain.py:Plain",
        "backend": "local",
        "advantage_estimator": "on_policy_distillation",
        "opd_type": "self",
        "opd_privileged_key": "label",
        "opd_privileged_prompt": "Psst: {text}",
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 1,
        "rollout_max_response_len": 24,
        "lr": "1e-2",
        "num_rollout": 24,
        "save_debug_rollout_data": "dump/{rollout_id}.jsonl",
    }
    ran = kit.start(kit.arguments("itself", **flags))
    assert ran.wait() == 0, ran.output
    rows = [row["train/opd_reverse_kl"] for row in ran.metrics()]
    assert sum(rows[-3:]) < 0.5 * sum(rows[:3]), rows
    chat = Chat.load(str(tmp_path / "model"))
    for sample in (sample for group in read_groups(tmp_path / "dump" / "0.jsonl") for sample in group):
        secret = {"role": "user", "content": f"Psst: {sample.label}"}
        prompt = chat.render_ids([sample.metadata["messages"][0], secret])
        want = reference_log_probs(tmp_path / "model", prompt, list(sample.tokens[sample.prompt_length :]))
        assert (torch.tensor(sample.teacher_log_probs) - want).abs().max().item() <= 1e-4


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_student_comes_nearer_to_its_teacher(tmp_path: Path) -> None:
    kit = RunKit.make(tmp_path)
    (tmp_path / "plain.py").write_text(PLAIN)
    teacher = make_tiny_model(tmp_path / "teacher", "qwen3", seed=5)
    common = {
        "env": "plain.py:Plain",
        "backend": "local",
        "advantage_estimator": "on_policy_distillation",
        "label_key": None,
        "rollout_batch_size": 32,
        "n_samples_per_prompt": 1,
        "rollout_max_response_len": 24,
        "lr": "1e-2",
    }
    dump = "dump/{rollout_id}.jsonl"
    with embedded_server(teacher) as url:
        flags = {"opd_teacher_url": url, "num_rollout": 24, "save_debug_rollout_data": dump}
        asked = kit.start(kit.arguments("asked", **common, **flags))
        assert asked.wait() == 0, asked.output
    rows = [row["train/opd_reverse_kl"] for row in asked.metrics()]
    assert sum(rows[-3:]) < 0.75 * sum(rows[:3]), rows
    for sample in (sample for group in read_groups(tmp_path / "dump" / "0.jsonl") for sample in group):
        said, prompt = sample.teacher_log_probs, sample.prompt_length
        want = reference_log_probs(teacher, list(sample.tokens[:prompt]), list(sample.tokens[prompt:]))
        assert (torch.tensor(said) - want).abs().max().item() <= 1e-4
    flags = {"opd_teacher_load": "teacher", "num_rollout": 1, "load_debug_rollout_data": dump}
    held = kit.start(kit.arguments("held", **common, **flags))
    assert held.wait() == 0, held.output
    for name in ("loss", "grad_norm", "opd_reverse_kl"):
        assert held.metrics()[0][f"train/{name}"] == pytest.approx(asked.metrics()[0][f"train/{name}"], rel=1e-4)


async def test_a_teacher_scores_ids_that_the_model_has_and_its_tokenizer_has_not() -> None:
    model = shipped("calculator")
    rare = len(Chat.load(str(model)).tokenizer) + 1
    with embedded_server(model) as url:
        pool = teacher_pool(
            RunSettings.from_flat({"hf_checkpoint": str(model), "use_opd": True, "opd_teacher_url": [url]})
        )
        assert pool is not None
        async with pool:
            said = await pool.log_probs([1, rare, 3], 2)
    want = reference_log_probs(model, [1], [rare, 3])
    assert (torch.tensor(said) - want).abs().max().item() <= 1e-4
