"""The settings of the objective, checked by the algorithm that they name."""

from typing import Self

from pydantic import field_validator, model_validator

from agentrl.algorithms.fields import AlgorithmFields
from agentrl.algorithms.registry import algorithm_of, built_in, check_estimator_name


class AlgorithmSettings(AlgorithmFields):
    """What is optimised. Names are slime's flags; formulas are in the algorithms' files and `ops/`."""

    @field_validator("advantage_estimator")
    @classmethod
    def _known_estimator(cls, name: str) -> str:
        return check_estimator_name(name)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.kl_loss_coef and not self.use_kl_loss:
            raise ValueError(f"kl_loss_coef is {self.kl_loss_coef} but use_kl_loss is off; set use_kl_loss")
        if self.use_unbiased_kl and not self.use_kl_loss:
            raise ValueError("use_unbiased_kl changes the KL term of the loss; set use_kl_loss")
        algorithm = built_in(self)
        if algorithm and (problems := algorithm.problems()):
            raise ValueError("; ".join(problems))
        return self

    @property
    def supervised(self) -> bool:
        """Whether samples need neither rewards nor log-probs."""
        return algorithm_of(self).supervised

    @property
    def needs_reference(self) -> bool:
        """Whether log-probs under the reference model are needed."""
        return "ref_log_probs" in algorithm_of(self).reads
