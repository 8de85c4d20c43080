"""One example for each of slime's training hooks. Most repeat what the trainer does without them, for comparison."""

from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agentrl.sample import Sample

SEEN: list[tuple[Any, ...]] = []
"""The arguments of hook calls in this process."""


def grpo(args: Any, rollout_data: dict[str, Any]) -> None:
    """GRPO: all tokens of a sample have its reward, which is already relative to its group."""
    returns = [
        torch.full_like(kl, reward) for kl, reward in zip(rollout_data["kl"], rollout_data["rewards"], strict=True)
    ]
    rollout_data["advantages"], rollout_data["returns"] = list(returns), returns


def look(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    SEEN.append(("look", rollout_id, rollout_data))


def look_back(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> dict[str, Any]:
    return rollout_data


def no_early_tokens(args: Any, rollout_id: int, rollout_data: dict[str, Any]) -> None:
    """Masks the first tokens, and doubles the advantages of the others."""
    for mask, advantages in zip(rollout_data["loss_masks"], rollout_data["advantages"], strict=True):
        mask[:3] = 0
        advantages *= 2


def clipped(
    args: Any, batch: dict[str, Any], logits: Tensor, sum_of_sample_mean: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Compute PPO's clipped loss from the logits, in plain torch."""
    found, start = [], 0
    for tokens, total, response in zip(
        batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"], strict=True
    ):
        rows = logits[0, start + total - response - 1 : start + total - 1] / args.rollout_temperature
        found.append(rows.log_softmax(-1).gather(-1, tokens[-response:, None])[:, 0])
        start += total
    ratio = (torch.cat(found) - torch.cat(batch["log_probs"])).exp()
    advantages = torch.cat(batch["advantages"])
    losses = torch.maximum(-ratio * advantages, -ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip) * advantages)
    loss = sum_of_sample_mean(losses)
    return loss, {"loss": loss.detach(), "ppo_kl": sum_of_sample_mean(-ratio.log()).detach()}


def truncated(
    args: Any, *, pg_loss: Tensor, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **kwargs: Any
) -> Any:
    """Truncated importance sampling."""
    ratio = (torch.cat(train_log_probs) - torch.cat(rollout_log_probs)).exp()
    weights = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weights, loss_masks, {"tis": ratio, "tis_clipfrac": (weights != ratio).float()}


def rejecting(
    args: Any, *, pg_loss: Tensor, train_log_probs: Any, rollout_log_probs: Any, loss_masks: Any, **kwargs: Any
) -> Any:
    """Geometric rejection of whole samples."""
    masks = []
    for old, rollout, mask in zip(train_log_probs, rollout_log_probs, loss_masks, strict=True):
        ratio = (((old - rollout) * mask).sum() / mask.sum().clamp(min=1)).exp()
        masks.append(mask * (1 / args.rs_upper_bound <= ratio <= args.rs_upper_bound))
    return pg_loss, masks, {}


def sample_means(
    total_lengths: Sequence[int],
    response_lengths: Sequence[int],
    loss_masks: Sequence[Tensor],
    calculate_per_token_loss: bool = False,
) -> Callable[[Tensor], Tensor]:
    """slime's own reducer: the sum of the samples' means."""
    shares = torch.cat([mask / mask.sum().clamp(min=1) for mask in loss_masks])
    return lambda losses: (losses * shares).sum()


def normalized(args: Any, samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Return rewards relative to their group."""
    groups: dict[int | None, list[float]] = {}
    raw = [float(sample.reward) for sample in samples]  # type: ignore[arg-type]
    for sample, reward in zip(samples, raw, strict=True):
        groups.setdefault(sample.group_index, []).append(reward)
    stats = {group: (torch.tensor(rewards).mean(), torch.tensor(rewards).std()) for group, rewards in groups.items()}
    return raw, [
        float((reward - stats[sample.group_index][0]) / (stats[sample.group_index][1] + 1e-6))
        for sample, reward in zip(samples, raw, strict=True)
    ]


def columns(args: Any, samples: Sequence[Sample]) -> dict[str, list[Any]]:
    """The usual conversion, with metadata for the loss."""
    raw, rewards = normalized(args, samples)
    return {
        "tokens": [list(sample.tokens) for sample in samples],
        "response_lengths": [sample.response_length for sample in samples],
        "rewards": rewards,
        "raw_reward": raw,
        "truncated": [0 for _ in samples],
        "sample_indices": [sample.index for sample in samples],
        "loss_masks": [list(sample.loss_mask or ()) for sample in samples],
        "metadata": [{"kind": f"of {sample.index}"} for sample in samples],
    }


def begin(args: Any) -> None:
    SEEN.append(("begin", args.global_batch_size))


def before_log_probs(args: Any, model: Sequence[torch.nn.Module], store_prefix: str) -> None:
    SEEN.append(("log_probs", len(model), store_prefix))


def before_step(args: Any, rollout_id: int, step_id: int, model: Any, optimizer: Any, opt_param_scheduler: Any) -> None:
    SEEN.append(("step", rollout_id, step_id, opt_param_scheduler.get_lr(optimizer.param_groups[0])))


def provider(pre_process: bool = True, post_process: bool = True) -> Any:
    """Return our model with frozen embeddings."""
    from agentrl.compat.train_hooks import get_model_provider_func

    model = get_model_provider_func(SimpleNamespace())(pre_process, post_process)
    for parameter in model.embedding.parameters():
        parameter.requires_grad_(False)
    return model


def written(args: Any, version_dir: str, rollout_engines: Sequence[Any]) -> None:
    SEEN.append(("written", sorted(file.name for file in Path(version_dir).iterdir())))
