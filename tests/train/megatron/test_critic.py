"""The critic on one process: against plain torch, its checkpoints, its critic-only rollouts, KL in the reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from agentrl.algorithms import AlgorithmSettings
from agentrl.errors import CheckpointError, TrainError
from agentrl.train.batch import TrainBatch
from agentrl.train.settings import TrainSettings
from agentrl.train.trainer import TrainBackend
from tests.support.nightly import nightly
from tests.support.tiny_models import Arch, make_tiny_model
from tests.train.megatron.helpers import PPO, backend, make_batch, settings, timeless


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3")


def exported(made: TrainBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in made.export_weights()}


def critics(made: TrainBackend) -> dict[str, torch.Tensor]:
    assert made.critic is not None
    return {name: tensor.to("cpu", copy=True) for name, tensor in made.critic.network.export()}


def with_head(folder: Path, seed: int = 3) -> Path:
    """Make the same model with its own value head, as a reward model has."""
    weights = load_file(folder / "model.safetensors")
    head = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed)) / 8
    weights["score.weight"] = head.to(weights["model.norm.weight"].dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


class Reference:
    """A trunk of transformers with a linear head, AdamW, and GAE in a loop over the trained tokens."""

    def __init__(self, folder: Path, train: TrainSettings, algorithm: AlgorithmSettings) -> None:
        self.trunk = AutoModel.from_pretrained(folder, dtype=torch.float32)
        self.head = torch.nn.Linear(64, 1, bias=False)
        self.head.weight.data = load_file(folder / "model.safetensors").get("score.weight", torch.zeros(1, 64)).float()
        self.named = {f"model.{name}": p for name, p in self.trunk.named_parameters()} | {
            "score.weight": self.head.weight
        }
        self.train_settings, self.algorithm = train.of_critic, algorithm
        wide, narrow = ([p for p in self.named.values() if (p.dim() > 1) is kind] for kind in (True, False))
        groups = [{"params": wide, "weight_decay": train.weight_decay}, {"params": narrow, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(groups, lr=self.train_settings.lr, eps=train.adam_eps)

    def values(self, batch: TrainBatch) -> torch.Tensor:
        """Return [R]: at each token the value of the position before the token, 0 if masked."""
        parts = []
        for i in range(len(batch)):
            ids = torch.from_numpy(batch.sample_tokens(i).astype(np.int64))
            hidden = self.trunk(ids[None]).last_hidden_state[0, :-1]
            mask = torch.from_numpy(batch.sample_loss_mask(i).copy())
            parts.append(self.head(hidden)[-len(mask) :, 0] * mask)
        return torch.cat(parts)

    def returns(self, batch: TrainBatch, old: torch.Tensor) -> torch.Tensor:
        out, gamma, lambd = torch.zeros(len(old), dtype=torch.float64), self.algorithm.gamma, self.algorithm.lambd
        for i in range(len(batch)):
            steps = [t for t in range(*batch.response_slice(i).indices(len(old))) if batch.loss_mask[t]]
            advantage, following, reward = 0.0, 0.0, float(batch.rewards[i])
            for t in reversed(steps):
                delta = reward + gamma * following - float(old[t])
                advantage = delta + gamma * lambd * advantage
                out[t], following, reward = advantage + float(old[t]), float(old[t]), 0.0
        return out

    def step(self, batch: TrainBatch) -> dict[str, float]:
        values = self.values(batch)
        old = values.detach()
        returns = self.returns(batch, old)
        mask = torch.from_numpy(batch.loss_mask.astype(bool))
        weights = torch.cat([mask[(at := batch.response_slice(i))] / mask[at].sum() for i in range(len(batch))]) / len(
            batch
        )
        loss = ((values - returns) ** 2 * weights).sum()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        limit = self.train_settings.clip_grad or float("inf")
        norm = torch.nn.utils.clip_grad_norm_(list(self.named.values()), limit)
        self.optimizer.step()
        left = (returns - old)[mask].var(correction=0) / returns[mask].var(correction=0)
        return {
            "value_loss": loss.item(),
            "critic/grad_norm": norm.item(),
            "critic/explained_variance": 1 - left.item(),
        }


@pytest.mark.parametrize(
    ("arch", "tied", "head", "changes"),
    nightly(
        [
            ("qwen3", True, True, {"clip_grad": 0.0}),
            ("qwen2", False, True, {"clip_grad": 0.05, "weight_decay": 1.0, "use_distributed_optimizer": True}),
            ("llama", False, False, {"clip_grad": 0.0}),
        ],
        1,
    ),
)
def test_values_gradients_and_steps_match_plain_torch(
    tmp_path: Path, arch: Arch, tied: bool, head: bool, changes: dict[str, Any]
) -> None:
    folder = make_tiny_model(tmp_path / arch, arch, tie_word_embeddings=tied)
    if head:
        with_head(folder)
    batch, train = make_batch(), settings(folder, critic_lr=2e-3, **changes)
    reference = Reference(folder, train, PPO)
    with backend(train, PPO) as made:
        assert made.critic is not None
        for number in range(3):
            np.testing.assert_allclose(made.values(batch), reference.values(batch).detach().numpy(), rtol=0, atol=1e-5)
            want, got = reference.step(batch), made.train(batch, number)
            for name, value in want.items():
                assert got[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
            assert got["value_clipfrac"] == 0
            assert got["critic/lr"] == 2e-3
            if not train.use_distributed_optimizer:
                network: Any = made.critic.network
                found = {name: p.main_grad for name, p in network.parameters().items()}
                for name, gradient in network.weights.export(found):
                    torch.testing.assert_close(
                        gradient.cpu(), reference.named[name].grad, rtol=1e-4, atol=2e-6, msg=name
                    )
        final = critics(made)
    assert set(final) == set(reference.named)
    for name, weight in reference.named.items():
        torch.testing.assert_close(final[name], weight.detach(), rtol=0, atol=2e-5, msg=name)


def test_the_critic_leaves_the_actor_alone_and_starts_where_it_is_told(folder: Path, tmp_path: Path) -> None:
    other = with_head(make_tiny_model(tmp_path / "other", "qwen3", seed=5))
    with backend(settings(folder, critic_load=str(other)), PPO) as made:
        start = critics(made)
        assert torch.equal(
            start["score.weight"].float(), load_file(other / "model.safetensors")["score.weight"].float()
        )
        assert "lm_head.weight" not in start
        assert "score.weight" not in exported(made)
        assert made.values(make_batch()).any()
    with backend(settings(folder), PPO) as made:
        assert not made.values(make_batch()).any()
    narrow = make_tiny_model(tmp_path / "narrow", "qwen3", hidden_size=32, layers=3)
    with backend(settings(folder, critic_load=str(narrow)), PPO) as made:
        assert np.isfinite(made.train(make_batch(), 0)["value_loss"])


def test_its_learning_rate_follows_the_actors_curve_with_its_own_peak_and_warm_up(folder: Path) -> None:
    curve = {"lr": 1e-3, "min_lr": 1e-4, "lr_decay_style": "linear", "lr_decay_iters": 4, "critic_lr_warmup_iters": 2}
    with backend(settings(folder, critic_lr=4e-3, **curve), PPO) as made:
        found = [made.train(make_batch(), number) for number in range(5)]
    assert [round(m["critic/lr"], 9) for m in found] == pytest.approx([0, 2e-3, 4e-3, 2.2e-3, 4e-4])
    assert found[0]["lr"] == 1e-3
    assert settings(folder).of_critic.lr == 1e-2


def test_first_rollouts_train_the_critic_alone(folder: Path) -> None:
    chosen = settings(folder, num_critic_only_steps=2, num_steps_per_rollout=2, lr_warmup_iters=2)
    with backend(chosen, PPO.model_copy(update={"entropy_target": 50.0, "entropy_coef_step": 1e-3})) as made:
        before, head = exported(made), critics(made)["score.weight"]
        for rollout in range(2):
            metrics = made.train(make_batch(seed=rollout), rollout)
            assert not {"loss", "perf/actor_train_time", "perf/actor_train_tflops"} & metrics.keys()
            assert metrics["entropy_coef"] == 0
            assert metrics["value_loss"] > 0
            assert metrics["tokens"] == make_batch(seed=rollout).loss_mask.sum()
        after = exported(made)
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert not torch.equal(head, critics(made)["score.weight"])
        metrics = made.train(make_batch(seed=2), 2)
        assert metrics["perf/actor_train_time"] > 0
        assert metrics["entropy_coef"] == 0  # the first rollout's; the next has a step more
        assert made.algorithm.settings.entropy_coef == 1e-3
        assert metrics["lr"] == pytest.approx(0.25e-3)  # the mean of its first two steps
        assert any(not torch.equal(before[name], tensor) for name, tensor in exported(made).items())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", nightly([{}, {"bf16": True, "use_distributed_optimizer": True}], 1), ids=["plain", "bf16"]
)
def test_resume_equals_uninterrupted_to_the_bit(folder: Path, tmp_path: Path, changes: dict[str, Any]) -> None:
    train = settings(folder, num_steps_per_rollout=2, **changes)
    with backend(train, PPO) as made:
        made.save(tmp_path / "rollout_0", 0)
        made.train(make_batch(seed=1), 0)
        made.save(tmp_path / "rollout_1", 1)
        want = made.train(make_batch(seed=2), 1)
        end = critics(made)
    with backend(train, PPO) as made:
        made.train(make_batch(seed=3), 0)
        assert made.load(tmp_path) == 1
        got = made.train(make_batch(seed=2), 1)
        assert timeless(got) == timeless(want)
        assert all(torch.equal(end[name], tensor) for name, tensor in critics(made).items())
        made.load(tmp_path / "rollout_0")
        assert not made.values(make_batch()).any()


def test_checkpoints_with_and_without_a_critic_are_told_apart(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with backend(settings(folder), PPO) as made:
        made.save(tmp_path / "with", 1)
        with pytest.raises(TrainError, match="vocabulary"):
            made.values(make_batch(vocab=600))
    with backend(settings(folder)) as made:
        with pytest.raises(CheckpointError, match="with: it holds a critic, and this run has none"):
            made.load(tmp_path / "with")
        with pytest.raises(TrainError, match="there is no critic: grpo"):
            made.values(make_batch())
        made.save(tmp_path / "without", 1)
    with backend(settings(folder), PPO) as made:
        with pytest.raises(CheckpointError, match="without: it holds no critic"):
            made.load(tmp_path / "without")
        assert made.load(tmp_path / "with") == 1
    narrow = make_tiny_model(tmp_path / "narrow", "qwen3", hidden_size=32)
    with (
        backend(settings(folder, critic_load=str(narrow)), PPO) as made,
        pytest.raises(CheckpointError, match="critic: a checkpoint of another model: .*hidden is 64 there and 32 here"),
    ):
        made.load(tmp_path / "with")
    assert "incomplete / corrupted" not in caplog.text  # megatron's warning about a folder that is not empty


def test_kl_in_the_reward_reaches_the_critics_targets(folder: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", "qwen3", seed=9)
    algorithm = PPO.model_copy(update={"kl_coef": 0.3, "kl_loss_type": "k3"})
    batch = make_batch()
    with backend(settings(folder, ref_load=str(other)), algorithm) as made:
        found = made.prepare(batch).arrays
        log_ratio = made.log_probs(batch, "ref").astype(np.float64) - made.log_probs(batch)
    kl = (np.exp(log_ratio) - log_ratio - 1) * batch.loss_mask
    for i in range(len(batch)):
        steps = [t for t in range(*batch.response_slice(i).indices(len(kl))) if batch.loss_mask[t]]
        total = 0.0
        for t in reversed(steps):
            earned = (batch.rewards[i] if t == steps[-1] else 0.0) - 0.3 * kl[t]
            total = earned + PPO.gamma * PPO.lambd * total  # the values are still all 0
            assert found["returns"][t] == pytest.approx(total, rel=1e-4, abs=1e-5)


@pytest.mark.slow
def test_a_critic_of_its_own_process_does_what_it_does_beside_the_actor(folder: Path, tmp_path: Path) -> None:
    """The calls that a run makes of actor and critic, in order. Each placement resumes from the other's checkpoint."""
    train, batch, later = settings(folder, num_steps_per_rollout=2), make_batch(), make_batch(seed=1)
    with backend(train, PPO) as made:
        made.train(batch, 0)
        made.save(tmp_path / "together", 1)
        want = made.train(later, 1)
    with backend(train, PPO, learners="critic") as critic:
        values = critic.values(batch)
    with backend(train, PPO, learners="actor") as actor:
        prepared = actor.prepare(batch, values)
    with backend(train, PPO, learners="critic") as critic:
        metrics = critic.train(batch, 0, prepared)
        critic.save(tmp_path / ".apart.critic", 1)
        assert critic.load(tmp_path / "together") == 1
        values = critic.values(later)
    assert "loss" not in metrics
    with backend(train, PPO, learners="actor") as actor:
        assert "value_loss" not in actor.train(batch, 0, prepared)
        actor.save(tmp_path / "apart", 1, tmp_path / ".apart.critic")
        prepared = actor.prepare(later, values)
        assert prepared.metrics.items() <= want.items()
        assert actor.train(later, 1, prepared)["loss"] == want["loss"]
    assert not (tmp_path / ".apart.critic").exists()
    with backend(train, PPO) as made:
        assert made.load(tmp_path / "apart") == 1
        assert timeless(made.train(later, 1)) == timeless(want)
