"""Algorithms, by families, on the tensor code in `ops/`. Imports no other package, and torch only when called.

`--advantage-estimator` takes a built-in name or the path `pkg.mod:Name` of one's own: a function
`(SampleView, AlgorithmSettings) -> Tensor[N]` that gives the advantages of the clipped policy gradient, or a
subclass of `Algorithm` (`algorithm.py` has the contract) or `PolicyGradient` that gives its loss as well."""

from agentrl.algorithms.algorithm import Algorithm
from agentrl.algorithms.base import AdvantageInputs, Estimate, SampleView, TokenLoss, TokenView, WeightInputs
from agentrl.algorithms.policy import Estimator, PolicyGradient
from agentrl.algorithms.registry import algorithm_of, compute_advantages
from agentrl.algorithms.settings import AlgorithmSettings

__all__ = [
    "AdvantageInputs", "Algorithm", "AlgorithmSettings", "Estimate", "Estimator", "PolicyGradient", "SampleView",
    "TokenLoss", "TokenView", "WeightInputs", "algorithm_of", "compute_advantages",
]  # fmt: skip
