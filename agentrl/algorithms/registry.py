"""From a run's settings to its algorithm: the one place where names are known.

1. `--loss-type` names an algorithm that has no advantages to estimate; with policy_loss `--advantage-estimator` does.
2. A name with a colon is a path to a user's `Estimator` or `Algorithm`, loaded when first used.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import AdvantageInputs, Estimate, need
from agentrl.algorithms.cispo import CISPO
from agentrl.algorithms.grpo import GRPO
from agentrl.algorithms.gspo import GSPO
from agentrl.algorithms.policy import Estimated
from agentrl.algorithms.ppo import PPO
from agentrl.algorithms.reinforce_plus_plus import ReinforcePlusPlus
from agentrl.algorithms.reinforce_plus_plus_baseline import ReinforcePlusPlusBaseline
from agentrl.algorithms.rloo import RLOO
from agentrl.algorithms.sft import SFT
from agentrl.errors import SettingsError
from agentrl.plugins import load_object

if TYPE_CHECKING:
    from agentrl.algorithms.fields import AlgorithmFields

ESTIMATORS: Mapping[str, type[Algorithm]] = {
    algorithm.name: algorithm
    for algorithm in (GRPO, GSPO, CISPO, RLOO, ReinforcePlusPlus, ReinforcePlusPlusBaseline, PPO)
}
LOSS_TYPES: Mapping[str, type[Algorithm]] = {SFT.name: SFT}


def check_estimator_name(name: str) -> str:
    """Return `name` if it is a built-in estimator or looks like a path to one.

    Raises:
        ValueError: it is neither; the message lists what exists.
    """
    if name in ESTIMATORS or ":" in name:
        return name
    close = difflib.get_close_matches(name, ESTIMATORS, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    raise ValueError(
        f"unknown advantage_estimator {name!r}, expected one of {sorted(ESTIMATORS)} or pkg.mod:function{hint}"
    )


def built_in(settings: AlgorithmFields) -> Algorithm | None:
    """The algorithm that the settings name, or None if they give a path."""
    found = LOSS_TYPES.get(settings.loss_type) or ESTIMATORS.get(settings.advantage_estimator)
    return found(settings) if found else None


def algorithm_of(settings: AlgorithmFields) -> Algorithm:
    """The algorithm that the settings ask for.

    Raises:
        PluginError: a path cannot be loaded.
        SettingsError: what the path names is no algorithm, or takes no such settings.
    """
    if algorithm := built_in(settings):
        return algorithm
    path = settings.advantage_estimator
    found = load_object(path, what="--advantage-estimator")
    if not callable(found):
        raise SettingsError(f"--advantage-estimator {path}: expected a function or an Algorithm class, got {found!r}")
    own = isinstance(found, type) and issubclass(found, Algorithm)
    algorithm = found(settings) if own else Estimated(settings, found)
    if problems := algorithm.problems():
        raise SettingsError(f"--advantage-estimator {path}: {'; '.join(problems)}")
    return algorithm


def compute_advantages(inputs: AdvantageInputs, settings: AlgorithmFields) -> Estimate:
    """Advantages by the algorithm of the settings, whitened if it `whitens`, with a critic's targets.

    Raises:
        SettingsError: the algorithm is unknown or returned something of another shape.
    """
    from agentrl.algorithms.ops.normalization import spread, whiten

    algorithm = algorithm_of(settings)
    found = algorithm.advantages(inputs)
    if found.shape != inputs.loss_mask.shape:
        raise SettingsError(
            f"advantage_estimator {settings.advantage_estimator!r} must return one value for each of the "
            f"{inputs.loss_mask.numel()} response tokens, got shape {tuple(found.shape)}"
        )
    returns = (found + need(inputs.values, "values", algorithm.name)).float() if "values" in algorithm.reads else None
    advantages = whiten(found, inputs.loss_mask) if algorithm.whitens else found
    metrics = {f"advantages/{name}": value for name, value in spread(advantages, inputs.loss_mask).items()}
    return Estimate(advantages.float(), returns, metrics)
