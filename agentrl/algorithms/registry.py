"""Selection of a run's algorithm by its settings. Only this module knows the algorithms' names."""

from __future__ import annotations

from collections.abc import Mapping

from agentrl.algorithms import ops
from agentrl.algorithms.algorithm import SFT, Algorithm
from agentrl.algorithms.base import Estimate, SampleView, Tensor, need
from agentrl.algorithms.fields import AlgorithmFields
from agentrl.algorithms.group_relative import CISPO, GDPO, GRPO, GSPO, RLOO, PassAtK, ReinforcePlusPlusBaseline
from agentrl.algorithms.own import check_functions, finite, load_function
from agentrl.algorithms.policy import PPO, Estimated, OnPolicyDistillation, ReinforcePlusPlus
from agentrl.algorithms.trust_region import DPPO, GMPO, SAPO
from agentrl.errors import SettingsError

ESTIMATORS: Mapping[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (
        *(GRPO, GSPO, CISPO, SAPO, DPPO, GMPO, GDPO, PassAtK, RLOO),
        *(ReinforcePlusPlus, ReinforcePlusPlusBaseline, PPO, OnPolicyDistillation),
    )
}
LOSS_TYPES: Mapping[str, type[Algorithm]] = {SFT.name: SFT}


def built_in(settings: AlgorithmFields) -> Algorithm | None:
    """Return the algorithm that the settings name, or None if they give a path."""
    found = LOSS_TYPES.get(settings.loss_type) or ESTIMATORS.get(settings.advantage_estimator)
    return found(settings) if found else None


def algorithm_of(settings: AlgorithmFields) -> Algorithm:
    """Return the algorithm that the settings ask for. Raises PluginError: a path cannot be loaded. SettingsError: the
    object at the path is no algorithm, or does not take these settings."""
    check_functions(settings)
    if (algorithm := built_in(settings)) is None:
        path = settings.advantage_estimator
        found = load_function(path, "--advantage-estimator")
        own = isinstance(found, type) and issubclass(found, Algorithm)
        algorithm = found(settings) if own else Estimated(settings, found)
        if problems := algorithm.problems():
            raise SettingsError(f"--advantage-estimator {path}: {'; '.join(problems)}")
    if algorithm.anchored_at_rollout and settings.use_rollout_logprobs is None and not settings.old_is_trainers:
        return algorithm.with_settings({"use_rollout_logprobs": True})
    return algorithm


def compute_advantages(
    inputs: SampleView, settings: AlgorithmFields, given: tuple[Tensor, Tensor] | None = None
) -> Estimate:
    """Compute advantages by the settings' algorithm (or take `given`), whiten them if it `whitens`, and add a critic's
    targets. Raises PluginError: an advantage of a trained token is not a finite number."""
    algorithm = algorithm_of(settings)
    if buffer := settings.overlong_buffer_len:
        if (limit := settings.loss_max_length) is None:
            raise SettingsError("overlong_buffer_len needs loss_max_length, the length that it counts back from")
        inputs = ops.returns.overlong_shaped(inputs, buffer, limit, settings.overlong_penalty_factor)
    what = f"--advantage-estimator {settings.advantage_estimator}: the advantages"
    found = finite(algorithm.advantages(inputs) if given is None else given[0], inputs.loss_mask, what)
    metrics: dict[str, float] = {}
    returns = None
    if "values" in algorithm.reads:
        values = need(inputs.values, "values", algorithm.name)
        returns = given[1].float() if given else (found + values).float()
        metrics["critic/explained_variance"] = ops.returns.explained_variance(values, returns, inputs.loss_mask)
    if algorithm.distills:
        distance = ops.kl.reverse_kl(inputs)
        found = found - settings.opd_kl_coef * distance
        metrics["opd_reverse_kl"] = ops.normalization.spread(distance, inputs.loss_mask).get("mean", 0.0)
    advantages = ops.normalization.whiten(found, inputs.loss_mask) if algorithm.whitens else found
    spread = ops.normalization.spread(advantages, inputs.loss_mask)
    metrics |= {f"advantages/{name}": value for name, value in spread.items()}
    controlled = settings.entropy_control != "none"
    chosen = ops.entropy.chosen_tokens(inputs, advantages, settings) if controlled else None
    if settings.entropy_target is not None:
        metrics["sampled_entropy"] = ops.entropy.sampled_entropy(inputs)
    return Estimate(advantages.float(), returns, metrics, chosen)
