"""Small batches, backends, and the plain Hugging Face + torch trainer that megatron is compared with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from agentrl.algorithms import AlgorithmSettings, SampleView, compute_advantages
from agentrl.algorithms.ops.corrections import token_weights
from agentrl.sample import Sample
from agentrl.train.backends import backend_class
from agentrl.train.batch import TrainBatch
from agentrl.train.contracts import Learners, RankInfo
from agentrl.train.settings import TrainSettings
from agentrl.train.trainer import TrainBackend

backend_class("megatron")  # so that it is imported when `tests.conftest` checks

TEMPERATURE = 0.8
REPEATABLE = {"share_prefixes": not torch.cuda.is_available()}
"""Settings for steps that are equal to the bit: on a GPU, gradients of shared prefixes are summed in varying order."""
PPO = AlgorithmSettings(advantage_estimator="ppo", gamma=0.99, lambd=0.95)


def make_batch(groups: int = 3, per_group: int = 4, seed: int = 0, vocab: int = 512) -> TrainBatch:
    """Make agent samples of unequal lengths: prompt, model turn, observation, model turn.

    In the first group each sample has its own prompt, in the second all share one. In the third, two samples also
    share their first turn. This pattern repeats.
    """
    rng = np.random.default_rng(seed)

    def ids(low: int, high: int) -> list[int]:
        found: list[int] = rng.integers(4, vocab, int(rng.integers(low, high))).tolist()
        return found

    out: list[list[Sample]] = []
    for g in range(groups):
        out.append([])
        prompt, turn, observation = ids(18, 30), ids(18, 30), ids(1, 12)
        for i in range(per_group):
            sample = Sample(group_index=g, index=g * per_group + i, reward=float(rng.random()))
            sample.set_prompt_tokens(prompt if g % 3 else ids(2, 15))
            for number in range(2):
                wrote = turn if g % 3 == 2 and i < 2 and number == 0 else ids(2, 20)
                sample.append_model(wrote, (-5 * rng.random(len(wrote))).tolist(), "1", turn=number)
                if number == 0:
                    sample.append_observation(observation if g % 3 == 2 else ids(1, 12), turn=number)
            out[-1].append(sample)
    return TrainBatch.from_samples(out)


def settings(folder: Path, **changes: Any) -> TrainSettings:
    """Return settings: packed microbatches of at most 160 tokens, a large learning rate, no weight decay."""
    chosen: dict[str, Any] = {
        "hf_checkpoint": str(folder),
        "train_backend": "megatron",
        "lr": 1e-3,
        "weight_decay": 0.0,
        "adam_eps": 1e-4,  # so that gradients of pure rounding noise do not become full steps
        "bf16": False,  # also with a GPU: formulas are compared
        "use_dynamic_batch_size": True,
        "max_tokens_per_gpu": 160,
    }
    return TrainSettings(**(chosen | changes))


@contextlib.contextmanager
def backend(
    train: TrainSettings,
    algorithm: AlgorithmSettings | None = None,
    where: RankInfo | None = None,
    total_steps: int | None = None,
    learners: Learners = "all",
) -> Iterator[TrainBackend]:
    """Start a backend, and remove its process groups afterwards."""
    algorithm = algorithm or AlgorithmSettings()
    made: Any = backend_class(train.train_backend)(
        train, algorithm, rollout_temperature=TEMPERATURE, total_steps=total_steps, learners=learners
    )
    try:
        made.init(where or RankInfo())
        yield made
    finally:
        made.close()


def timeless(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return metrics without times and memory, which are never the same twice."""
    return {name: value for name, value in metrics.items() if not name.startswith("perf/") and name != "train_seconds"}


def gradients(made: TrainBackend) -> Iterator[tuple[str, torch.Tensor]]:
    """Return the last step's gradients (float32 as the weights, after clipping) under Hugging Face names."""
    network: Any = made.actor.network
    learning = {name: tensor.main_grad for name, tensor in network.parameters().items() if tensor.requires_grad}
    exported = network.weights.export({**network.parameters(), **learning})
    return ((name, tensor.cpu()) for name, tensor in exported if not name.endswith("e_score_correction_bias"))


def by_hub_name(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return transformers' tensors under the folders' names: transformers holds a layer's experts in one tensor."""
    found = {}
    for name, tensor in tensors.items():
        layer, fused, kind = name.partition(".experts.")
        if not fused:
            found[name] = tensor
            continue
        for number, expert in enumerate(tensor):
            parts = zip(("gate", "up"), expert.chunk(2), strict=True) if kind == "gate_up_proj" else [("down", expert)]
            found |= {f"{layer}.experts.{number}.{part}_proj.weight": weights for part, weights in parts}
    return found


class Reference:
    """The same training in a few lines of transformers and torch, one sample at a time."""

    def __init__(self, folder: Path, train: TrainSettings, algorithm: AlgorithmSettings) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.train_settings, self.algorithm = train, algorithm
        matrices, vectors = ([p for p in self.model.parameters() if (p.dim() > 1) is wide] for wide in (True, False))
        decayed = [{"params": matrices, "weight_decay": train.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(decayed, lr=train.lr, eps=train.adam_eps)

    def log_probs(self, batch: TrainBatch) -> torch.Tensor:
        """Return log-probs of all response tokens [R], with gradient."""
        parts = []
        for i in range(len(batch)):
            ids = torch.from_numpy(batch.sample_tokens(i).astype(np.int64))
            log_p = (self.model(ids[None]).logits[0, :-1] / TEMPERATURE).log_softmax(-1)
            parts.append(log_p.gather(-1, ids[1:, None])[-int(batch.response_lengths[i]) :, 0])
        return torch.cat(parts)

    def step(self, batch: TrainBatch, old: torch.Tensor | None = None) -> dict[str, float]:
        """Take one GRPO step with the policy itself as the old policy, or with the old log-probs `old` [R]."""
        mask, lengths, rollouts = map(
            torch.from_numpy, (batch.loss_mask.copy(), batch.response_lengths, batch.trajectory_ids.copy())
        )
        rewards, groups = torch.from_numpy(batch.rewards.copy()), torch.from_numpy(batch.group_ids.copy())
        inputs = SampleView(
            rewards=rewards, group_ids=groups, trajectory_ids=rollouts, lengths=lengths, loss_mask=mask.float()
        )
        advantages = compute_advantages(inputs, self.algorithm).advantages
        log_probs = self.log_probs(batch)
        ratio = (log_probs - (log_probs.detach() if old is None else old)).exp()
        weights, bounds = (
            token_weights(mask, lengths, rollouts),
            (1 - self.algorithm.eps_clip, 1 + self.algorithm.eps_clip),
        )
        kept = torch.minimum(ratio * advantages, ratio.clamp(*bounds) * advantages)
        loss = -(kept * weights).sum()
        self.optimizer.zero_grad()
        torch.autograd.backward(loss)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.train_settings.clip_grad or float("inf"))
        self.optimizer.step()
        stats = {"ppo_kl": -ratio.log(), "pg_clipfrac": kept < ratio * advantages}
        means = {name: (stat * weights).sum().item() for name, stat in stats.items()}
        return {"loss": loss.item(), "grad_norm": norm.item(), **means}
