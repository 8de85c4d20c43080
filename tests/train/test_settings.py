import pytest
from pydantic import ValidationError

from agentrl.algorithms.settings import AlgorithmSettings
from agentrl.train.settings import TrainSettings


def test_field_names_are_unique_over_both_sections_and_have_help() -> None:
    assert not set(TrainSettings.model_fields) & set(AlgorithmSettings.model_fields)
    assert all(field.description for field in TrainSettings.model_fields.values())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"use_dynamic_batch_size": True}, "max_tokens_per_gpu"),
        ({"max_tokens_per_gpu": 10}, "use_dynamic_batch_size"),
        ({"lr": 1e-6, "min_lr": 1e-5}, "min_lr"),
        ({"lr_warmup_init": 1.0}, "lr_warmup_init"),
        ({"lr_warmup_iters": 3, "lr_warmup_fraction": 0.1}, "not both"),
        ({"lr_warmup_iters": 10, "lr_decay_iters": 10}, "below lr_decay_iters"),
        ({"lr_decay_style": "WSD"}, "lr_wsd_decay_iters"),
        ({"muon_lr": 0.1}, "optimizer"),
        ({"sequence_parallel": True}, "tensor_model_parallel_size"),
        ({"recompute_granularity": "full"}, "recompute_method"),
        ({"recompute_method": "uniform"}, "recompute_granularity"),
        ({"recompute_num_layers": 2}, "recompute_num_layers needs recompute_granularity full"),
        ({"attention_softmax_in_fp32": False}, "cannot be turned off"),
        ({"optimizer": "muon", "tensor_model_parallel_size": 2}, "whole matrices"),
        ({"optimizer": "muon", "expert_tensor_parallel_size": 2}, "whole matrices"),
        ({"optimizer": "muon", "use_distributed_optimizer": True}, "cannot be sharded"),
        ({"train_backend": "fsdp9"}, "megatron"),
        (
            {"use_pytorch_profiler": True, "profile_step_start": 20},
            "profile_step_end 12 must be above profile_step_start 20",
        ),
    ],
)
def test_contradictions_are_named(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        TrainSettings(**changes)


def test_a_pattern_of_a_path_takes_the_rollouts_number_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert TrainSettings(save_hf="~/model_{rollout_id}").save_hf == "/home/me/model_{rollout_id}"
    for wrong in ("model_{step}", "model_{}", "model_{"):
        with pytest.raises(ValueError, match="rollout_id"):
            TrainSettings(save_hf=wrong)


def test_all_contradictions_are_reported_at_once() -> None:
    with pytest.raises(ValidationError, match=r"max_tokens_per_gpu.*sequence_parallel"):
        TrainSettings(use_dynamic_batch_size=True, sequence_parallel=True)


def test_folders_may_lie_in_the_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    settings = TrainSettings(hf_checkpoint="~/model", ref_load="~/reference")
    assert (settings.hf_checkpoint, settings.ref_load) == ("/home/somebody/model", "/home/somebody/reference")


def test_model_parallel_size() -> None:
    settings = TrainSettings(
        tensor_model_parallel_size=2, pipeline_model_parallel_size=3, context_parallel_size=4, sequence_parallel=True
    )
    assert settings.model_parallel_size == 24
