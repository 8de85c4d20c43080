"""Algorithms, by family, over the tensor code in `ops/`. They import no other package, and torch only when called.

`--advantage-estimator` takes a built-in name or a path `pkg.mod:Name`. The path names a function `(SampleView,
AlgorithmSettings) -> Tensor[N]` that returns the advantages of the clipped policy gradient. Or it names a subclass of
`Algorithm` (see `algorithm.py`) or `PolicyGradient` that also defines the loss."""

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import AdvantageInputs, Estimate, SampleView, TokenLoss, TokenView, WeightInputs
from agentrl.algorithms.policy import Estimator, PolicyGradient
from agentrl.algorithms.registry import algorithm_of, compute_advantages
from agentrl.algorithms.settings import AlgorithmSettings

__all__ = [
    "AdvantageInputs", "Algorithm", "AlgorithmSettings", "Estimate", "Estimator", "PolicyGradient", "SampleView",
    "TokenLoss", "TokenView", "WeightInputs", "algorithm_of", "compute_advantages",
]  # fmt: skip
