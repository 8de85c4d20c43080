"""Hooks that change the trained data or only observe it: when they are called, their arguments, and their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.compat.conformance import check_hook, hooks
from agentrl.config import RunSettings
from agentrl.errors import PluginError, SettingsError
from agentrl.run.rollouts import _check_of
from agentrl.run.rollouts import make_batch as make_run_batch
from agentrl.sample import Sample
from agentrl.train.batch import TrainBatch
from agentrl.train.hooks import hooks_of
from tests.compat.training import hook_examples
from tests.compat.training.test_train_hooks import backend, path, root
from tests.train.megatron.helpers import make_batch

__all__ = ["root"]

PER_TOKEN = ("loss_masks", "log_probs", "ref_log_probs", "rollout_log_probs", "values", "advantages", "returns")


def hooked(**paths: str) -> dict[str, Any]:
    return {"compat_options": {name: path(value) for name, value in paths.items()}}


@pytest.fixture(autouse=True)
def seen() -> list[tuple[Any, ...]]:
    hook_examples.SEEN.clear()
    return hook_examples.SEEN


def groups() -> list[list[Sample]]:
    out = []
    for g in range(2):
        for i in range(3):
            sample = Sample(group_index=g, index=3 * g + i, reward=float(g + i * i))
            sample.set_prompt_tokens([5, 6, 7])
            sample.append_model([8 + i, 9], [-1.0, -2.0], "0", turn=1)
            out.append(sample)
    return [out[:3], out[3:]]


def test_a_rollout_comes_as_lists_of_one_entry_a_sample(root: Path, seen: list[tuple[Any, ...]]) -> None:
    batch = make_batch()
    chosen = {**hooked(rollout_data_postprocess_path="look"), "advantage_estimator": "ppo", "use_kl_loss": True}
    with backend(root, chosen, num_steps_per_rollout=2) as made:
        made.train(batch, 3)
        want = made.log_probs(batch)
    [(_, rollout, data)] = seen
    assert rollout == 3
    for i, (n, total) in enumerate(zip(batch.response_lengths, batch.lengths, strict=True)):
        assert [len(data[key][i]) for key in PER_TOKEN] == [n] * len(PER_TOKEN)
        assert len(data["tokens"][i]) == total
        assert data["unconcat_tokens"][i].tolist() == batch.sample_tokens(i).tolist()
        mask = torch.from_numpy(batch.sample_loss_mask(i).copy())
        assert torch.equal(data["loss_masks"][i], mask.int())
    assert batch.rollout_log_probs is not None
    assert torch.cat(data["rollout_log_probs"]).tolist() == batch.rollout_log_probs.tolist()
    assert data["response_lengths"] == batch.response_lengths.tolist()
    assert data["total_lengths"] == batch.lengths.tolist()
    assert data["raw_reward"] == batch.rewards.tolist()
    assert data["rollout_mask_sums"].tolist() == [batch.sample_loss_mask(i).sum() for i in range(len(batch))]
    assert len(want) == sum(map(len, data["log_probs"]))


def test_what_it_changes_of_a_rollout_is_trained_on(root: Path) -> None:
    batch = make_batch(per_group=3)
    with backend(root, hooked(rollout_data_postprocess_path="no_early_tokens")) as made:
        metrics = made.train(batch, 0)
        shown = made.details()
    early = np.concatenate([np.arange(n) < 3 for n in batch.response_lengths])
    assert np.isnan(shown["advantages"]).tolist() == (early | (batch.loss_mask == 0)).tolist()
    with backend(root, {}) as made:
        plain = made.train(batch, 0)
        before = made.prepare(batch).arrays["advantages"]
    kept = ~np.isnan(shown["advantages"])
    np.testing.assert_allclose(shown["advantages"][kept], 2 * before[kept], rtol=2e-3)
    # slime's denominators are those of the original masks, so that the remaining tokens keep their weight
    assert metrics["tokens"] == kept.sum() < plain["tokens"]
    assert metrics["loss"] == pytest.approx(float(-(2 * before[kept] * weights(batch)[kept]).sum()), rel=1e-5)


def weights(batch: TrainBatch) -> np.ndarray[Any, Any]:
    each = [np.full(n, 1 / max(batch.sample_loss_mask(i).sum(), 1)) for i, n in enumerate(batch.response_lengths)]
    return np.concatenate(each) / len(batch)


def test_it_may_not_train_what_was_not_computed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def more(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        rollout_data["loss_masks"] = [torch.ones_like(mask) for mask in rollout_data["loss_masks"]]

    def fewer(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        rollout_data["advantages"] = rollout_data["advantages"][1:]

    for function, words in (
        (more, "may only take tokens out"),
        (fewer, 'rollout_data."advantages".: expected tensors'),
    ):
        monkeypatch.setattr(hook_examples, "look", function)
        with (
            backend(root, hooked(rollout_data_postprocess_path="look")) as made,
            pytest.raises(PluginError, match=f"--rollout-data-postprocess-path: .*{words}"),
        ):
            made.train(make_batch(), 0)


def run_of(**paths: str) -> RunSettings:
    return RunSettings.from_flat(hooked(**paths))


def test_rewards_that_a_hook_normalized_are_final() -> None:
    settings, played = run_of(custom_reward_post_process_path="normalized"), groups()
    hooks = hooks_of(settings.args)
    batch = make_run_batch(settings, played, {}, 0, hooks).payload
    assert batch.rewards.tolist() == pytest.approx(
        hook_examples.normalized(None, [sample for group in played for sample in group])[1]
    )
    assert not hooks.objective(settings.algorithm).rewards_normalization
    assert [sample.reward for group in played for sample in group] == [0, 1, 4, 1, 2, 5]
    with pytest.raises(SettingsError, match="rloo compares rewards within their group, and a hook gives final ones"):
        hooks_of(settings.replace(advantage_estimator="rloo").args)


COMPARING: dict[str, dict[str, Any]] = {
    "rloo": {},
    "reinforce_plus_plus_baseline": {},
    "gdpo": {"gdpo_weights": {"a": 1.0}, "reward_key": "a"},
    "pass_at_k": {},
}


@pytest.mark.parametrize("estimator", COMPARING)
def test_final_rewards_are_refused_where_rewards_are_compared(estimator: str) -> None:
    settings = RunSettings.from_flat({"advantage_estimator": estimator, **COMPARING[estimator]})
    for hook in ("custom_reward_post_process_path", "custom_convert_samples_to_train_data_path"):
        chosen = settings.replace(**hooked(**{hook: "normalized" if "reward" in hook else "columns"}))
        with pytest.raises(SettingsError, match=f"{estimator} compares rewards within their group, and a hook gives"):
            hooks_of(chosen.args)


def test_rows_of_train_data_become_samples_again() -> None:
    settings, played = run_of(custom_convert_samples_to_train_data_path="columns"), groups()
    assert _check_of(settings) is None, "groups are stored as they are, and the hook says what is trained"
    batch = make_run_batch(settings, played, {}, 0, hooks_of(settings.args)).payload
    plain = TrainBatch.from_samples(played, trained=0).arrays()
    for name, array in batch.arrays().items():
        if name not in ("rewards", "metadata"):
            assert array.tolist() == plain[name].tolist(), name
    assert batch.rewards.tolist() == pytest.approx(
        hook_examples.normalized(None, [sample for group in played for sample in group])[1]
    )
    assert batch.metadata[4] == b'{"kind":"of 4"}'
    assert batch.select([4, 1]).metadata.tolist() == [b'{"kind":"of 4"}', b'{"kind":"of 1"}']


def test_rows_of_a_trajectory_with_several_samples_keep_what_is_known() -> None:
    settings, played = run_of(custom_convert_samples_to_train_data_path="columns"), groups()
    first, second = played[0][:2]
    second.index = first.index
    hooks = hooks_of(settings.args)
    kept, _ = hooks.samples(played)
    assert hooks.makes_rows
    assert [sample.weight_versions for sample in kept[0]] == [sample.weight_versions for sample in played[0]]
    assert [sample.model_turns for sample in kept[0]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"rewards": None}, "something is wrong with rewards"),
        ({"reward": [0.0] * 6}, "something is wrong with reward"),
        ({"loss_masks": [[1, 1]] * 5}, "different lengths"),
        ({"sample_indices": [0, 1, 2, 3, 4, 60]}, r"sample_indices\[5\] is 60, which no sample"),
    ],
)
def test_train_data_that_is_none_is_refused(
    change: dict[str, Any], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(args: Any, samples: list[Sample]) -> dict[str, Any]:
        found = {**hook_examples.columns(args, samples), **change}
        return {key: column for key, column in found.items() if column is not None}

    monkeypatch.setattr(hook_examples, "look", wrong)
    settings = run_of(custom_convert_samples_to_train_data_path="look")
    with pytest.raises(PluginError, match=f"--custom-convert-samples-to-train-data-path: .*{words}"):
        make_run_batch(settings, groups(), {}, 0, hooks_of(settings.args))


def test_the_trainers_own_moments(root: Path, seen: list[tuple[Any, ...]], tmp_path: Path) -> None:
    names = {
        "custom_megatron_init_path": "begin",
        "custom_megatron_before_log_prob_hook_path": "before_log_probs",
        "custom_megatron_before_train_step_hook_path": "before_step",
        "custom_update_weight_post_write_path": "written",
    }
    chosen = {**hooked(**names), "use_kl_loss": True, "update_weight_mode": "disk"}
    with backend(root, chosen, num_steps_per_rollout=2) as made:
        made.train(make_batch(), 1)
        made.save_hf(tmp_path / "plain")
        made.save_hf(tmp_path / "1", served=True)
    assert [entry[0] for entry in seen] == ["begin", "log_probs", "log_probs", "step", "step", "written"]
    assert [entry[1:] for entry in seen[1:3]] == [(1, ""), (1, "ref_")]
    assert [entry[1:3] for entry in seen[3:5]] == [(1, 0), (1, 1)]
    assert "model.safetensors" in seen[-1][1]


def test_a_model_of_the_users_making(root: Path) -> None:
    with backend(root, hooked(custom_model_provider_path="provider")) as made:
        parameters = made.actor.network.parameters()
        before = {name: value.detach().clone() for name, value in parameters.items()}
        made.train(make_batch(), 0)
        moved = {name for name, value in parameters.items() if not torch.equal(before[name], value)}
    frozen = {name for name in before if name.startswith("embedding")}
    assert frozen
    assert moved == before.keys() - frozen


def test_a_hook_is_looked_at_before_anything_starts() -> None:
    for name, words in (("grpo", "expected a function .args, rollout_id, rollout_data."), ("none", "has no 'none'")):
        with pytest.raises(PluginError, match=f"--rollout-data-postprocess-path.*{words}"):
            hooks_of(run_of(rollout_data_postprocess_path=name).args)
    with pytest.raises(SettingsError, match="--custom-update-weight-post-write-path has no effect on a broadcast"):
        hooks_of(run_of(custom_update_weight_post_write_path="written").args)


def test_an_exception_names_the_hook_and_its_line(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
        rollout_data["no such key"].append(1)

    monkeypatch.setattr(hook_examples, "look", broken)
    with (
        backend(root, hooked(rollout_data_postprocess_path="look")) as made,
        pytest.raises(
            PluginError, match="examples:look raised KeyError: 'no such key' at .*test_moments.py:.* in broken"
        ),
    ):
        made.train(make_batch(), 0)


EXAMPLES = {
    "custom_reward_post_process": "normalized",
    "custom_convert_samples_to_train_data": "columns",
    "custom_advantage_function": "grpo",
    "rollout_data_postprocess": "no_early_tokens",
    "custom_loss_function": "clipped",
    "custom_tis_function": "truncated",
    "custom_pg_loss_reducer_function": "sample_means",
    "custom_megatron_init": "begin",
    "custom_model_provider": "provider",
    "custom_megatron_before_log_prob_hook": "before_log_probs",
    "custom_megatron_before_train_step_hook": "before_step",
    "custom_update_weight_post_write": "written",
}


def test_each_hook_has_an_example_that_passes_the_check() -> None:
    assert [f"{name}_path" for name in EXAMPLES] == [n for n, hook in hooks().items() if hook.side == "training"]
    said = [check_hook(name, path(example), RunSettings()) for name, example in EXAMPLES.items()]
    assert ["; returned what it should" in text for text in said] == 7 * [True] + 5 * [False]
    assert all("; not called" in text for text in said[7:])
    with pytest.raises(PluginError, match="expected None; it may .*, got"):
        check_hook("rollout_data_postprocess", path("look_back"), RunSettings())
