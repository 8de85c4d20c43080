"""Truncated sampling in a run: the trainer computes log-probs among the engine's sampling support."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from agentrl.config import RunSettings
from agentrl.engine.local import in_process
from agentrl.engine.pool import EnginePool
from agentrl.engine.settings import EngineSettings
from agentrl.engine.wire import SamplingParams
from agentrl.errors import SampleError, SettingsError
from agentrl.run.rollouts import make_batch
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from tests.support.runs import RunKit
from tests.support.tiny_models import make_tiny_model
from tests.train.megatron.helpers import TEMPERATURE, backend, settings

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def kit(tmp_path_factory: pytest.TempPathFactory) -> RunKit:
    return RunKit.make(Path(tmp_path_factory.mktemp("kit")))


async def play(model: Path, filters: dict[str, Any]) -> list[Sample]:
    """Play four conversations of two turns with an observation between them."""
    own = EngineSettings(embedded_slots=4)
    asked = SamplingParams(
        temperature=TEMPERATURE, max_new_tokens=12, ignore_eos=True, return_sampling_mask=True, **filters
    )
    samples = []
    async with (
        in_process(own, model) as url,
        EnginePool([url], own, vocab_size=512) as pool,
    ):
        for index in range(4):
            sample = Sample(index=index, group_index=0, reward=float(index % 2))
            sample.set_prompt_tokens([10, 60 + index, 61])
            for turn in (1, 2):
                got = await pool.generate(list(sample.tokens), asked)
                sample.append_model(got.ids, got.log_probs, got.weight_versions, turn=turn, kept=got.kept)
                sample.append_observation([70, 71], turn=turn)
            samples.append(sample)
    return samples


async def test_the_trainers_log_probs_are_the_engines_among_what_was_kept(tmp_path: Path) -> None:
    make_tiny_model(tmp_path, "qwen3")
    cuts: list[dict[str, Any]] = [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.7}, {"top_p": 0.5, "top_k": 300}]
    played = [await play(tmp_path, filters) for filters in cuts]
    batch = TrainBatch.from_samples(played, truncated=True)
    whole = replace(batch, support_ids=None, support_offsets=None)
    trained, said = batch.loss_mask == 1, batch.rollout_log_probs
    assert said is not None
    with backend(settings(tmp_path)) as made:
        assert np.abs(made.log_probs(batch) - said)[trained].max() < 1e-4
        assert np.abs(made.log_probs(whole) - said)[trained].max() > 1
        first = made.train(batch, 0)
        assert first["train_rollout_logprob_abs_diff"] < 1e-5
        assert 0 < first["entropy"] < made.train(whole, 1)["entropy"]


@pytest.mark.slow
def test_a_run_trains_with_top_p(kit: RunKit) -> None:
    run = kit.start(kit.arguments("top_p", backend="local", rollout_top_p=0.9, num_steps_per_rollout=2))
    assert run.wait() == 0, run.output
    for row in run.metrics():
        assert row["train/train_rollout_logprob_abs_diff"] <= 1e-4
        assert row["train/grad_norm"] > 0
        assert 1 < row["truncation/kept"] < 512
        assert "truncation/biased" not in row


@pytest.mark.slow
def test_interrupted_trajectories_keep_their_sets(kit: RunKit) -> None:
    flags = {"partial_rollout": True, "max_staleness": 1, "over_sampling_batch_size": 6, "rollout_top_k": 20}
    run = kit.start(kit.arguments("partial", backend="local", num_rollout=4, env="env.py:WaitEnv", **flags))
    assert run.wait() == 0, run.output
    assert [row["truncation/kept"] for row in run.metrics()] == [20.0] * 4


@pytest.mark.slow
def test_a_run_that_does_not_replay_says_so(kit: RunKit) -> None:
    arguments = kit.arguments("biased", backend="local", rollout_top_k=5, allow_truncated_sampling=True, num_rollout=1)
    run = kit.start(arguments)
    assert run.wait() == 0, run.output
    assert [row["truncation/biased"] for row in run.metrics()] == [1.0]
    assert run.metrics()[0]["train/train_rollout_logprob_abs_diff"] <= 1e-4  # both over the whole vocabulary


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rollout_top_k": 1}, "--rollout-top-k 1: .*greedy"),
        (
            {"use_opd": True, "opd_teacher_url": ("h:1",), "rollout_top_p": 0.9},
            "--opd-teacher-url with --rollout-top-p",
        ),
        ({"allow_truncated_sampling": True}, "--allow-truncated-sampling has no effect"),
        (
            {"engine": "sglang", "sglang_options": {"preferred-sampling-params": "{}"}},
            "--sglang-preferred-sampling-params",
        ),
    ],
)
def test_sampling_that_cannot_train_is_refused(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    chosen = RunSettings.from_flat({"hf_checkpoint": str(tmp_path), "env": "env.py:AddEnv", **changes})
    with pytest.raises(SettingsError, match=said):
        chosen.check_complete("train")
    chosen.check_complete("rollout")


def test_samples_without_kept_sets_are_refused_where_they_are_needed(tmp_path: Path) -> None:
    chosen = RunSettings.from_flat({"hf_checkpoint": str(tmp_path), "rollout_top_p": 0.9})
    sample = Sample(index=3, reward=1.0)
    sample.set_prompt_tokens([1])
    sample.append_model([2], [-0.1])
    with pytest.raises(SampleError, match="sample index=3: 1 of its trained tokens"):
        make_batch(chosen, [[sample]], {}, 0)
    assert len(make_batch(chosen.replace(allow_truncated_sampling=True), [[sample]], {}, 0).payload) == 1
