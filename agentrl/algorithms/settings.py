"""The settings of the objective, checked by the algorithm that they name."""

from collections.abc import Iterator
from typing import Self

from pydantic import field_validator, model_validator

from agentrl.algorithms.base import Computed
from agentrl.algorithms.fields import AlgorithmFields
from agentrl.algorithms.own import WEIGHTS, is_own
from agentrl.algorithms.registry import ESTIMATORS, algorithm_of, built_in

_SWITCHES = {"tis_": "use_tis", "custom_tis_": "use_tis", "rs_": "use_rs", "opsm_": "use_opsm"}
"""The setting that the settings of that beginning need."""


class AlgorithmSettings(AlgorithmFields):
    """The objective. Names are slime's flags; formulas are in the algorithms' files and `ops/`."""

    @field_validator("advantage_estimator")
    @classmethod
    def _known_estimator(cls, name: str) -> str:
        if name in ESTIMATORS or ":" in name:
            return name
        raise ValueError(
            f"unknown advantage_estimator {name!r}, expected one of {sorted(ESTIMATORS)} or pkg.mod:function"
        )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        algorithm = built_in(self)
        if problems := [*self._problems(), *(algorithm.problems() if algorithm else ())]:
            raise ValueError("; ".join(problems))
        return self

    def _problems(self) -> Iterator[str]:
        own_loss = self.custom_loss_function_path
        if (self.loss_type == "custom_loss") != bool(own_loss):
            yield "loss_type custom_loss and custom_loss_function_path go together; set both or none"
        if self.kl_loss_coef and not self.use_kl_loss:
            yield f"kl_loss_coef is {self.kl_loss_coef} but use_kl_loss is off; set use_kl_loss"
        if self.use_unbiased_kl and not self.use_kl_loss:
            yield "use_unbiased_kl changes the KL term of the loss; set use_kl_loss"
        if self.kl_loss_type != "k1" and not (self.use_kl_loss or self.kl_coef or own_loss):
            yield f"kl_loss_type {self.kl_loss_type} has no effect without use_kl_loss or kl_coef; set one of them"
        apart = ("calculate_per_token_loss", "loss_denominator", "custom_pg_loss_reducer_function_path")
        given = [name for name in apart if getattr(self, name) != type(self).model_fields[name].default]
        if len(given) > 1 and (apart[-1] not in given or is_own(self.custom_pg_loss_reducer_function_path, WEIGHTS)):
            yield f"{' and '.join(given)} each say what a token counts in the loss; set one of them"
        if self.overlong_buffer_len is None and self.overlong_penalty_factor != 1.0:
            yield "overlong_penalty_factor has no effect without overlong_buffer_len; set both or none"
        if self.loss_max_length is not None and not self.needs_length:
            without = "loss_denominator constant or overlong_buffer_len"
            yield f"loss_max_length has no effect without {without}; leave it out"
        if not own_loss:  # which may read any setting
            yield from self._correction_problems()
            yield from self._entropy_problems()

    def _correction_problems(self) -> Iterator[str]:
        for name, field in type(self).model_fields.items():
            owner = next((switch for start, switch in _SWITCHES.items() if name.startswith(start)), None)
            if owner and not getattr(self, owner) and (value := getattr(self, name)) != field.default:
                yield f"{name} {value} has no effect without {owner}; set it, or leave {name} out"
        if self.use_rollout_logprobs and self.old_is_trainers:
            why = "already takes the ratio against the policy that sampled, and leaves nothing that use_tis or use_rs"
            yield f"use_rollout_logprobs {why} could correct; leave it out, or them"
        if self.tis_clip_low >= self.tis_clip:
            yield f"tis_clip_low {self.tis_clip_low} must be below tis_clip {self.tis_clip}"
        if (self.rs_lower_bound or 1 / self.rs_upper_bound) >= self.rs_upper_bound:
            yield f"rs_lower_bound (by default 1 / rs_upper_bound) must be below rs_upper_bound {self.rs_upper_bound}"

    def _entropy_problems(self) -> Iterator[str]:
        control, target = self.entropy_control, self.entropy_target is not None
        effects = {
            **dict.fromkeys(("entropy_coef_step", "entropy_coef_max"), ("entropy_target", target)),
            "covariance_ratio": ("entropy_control", control != "none"),
            **dict.fromkeys(("covariance_low", "covariance_high"), ("entropy_control clip", control == "clip")),
            "covariance_kl_coef": ("entropy_control kl", control == "kl"),
        }
        for name, (owner, set_) in effects.items():
            if not set_ and (value := getattr(self, name)) != type(self).model_fields[name].default:
                yield f"{name} {value} has no effect without {owner}; set it, or leave {name} out"
        if self.covariance_low >= self.covariance_high:
            yield f"covariance_low {self.covariance_low} must be below covariance_high {self.covariance_high}"
        if target and not 0 <= self.entropy_coef <= self.entropy_coef_max:
            yield f"entropy_coef {self.entropy_coef} must be from 0 to entropy_coef_max {self.entropy_coef_max}"

    @property
    def needs_length(self) -> bool:
        """True if `loss_max_length` is read."""
        return self.loss_denominator == "constant" or self.overlong_buffer_len is not None

    @property
    def supervised(self) -> bool:
        """True if samples need neither rewards nor log-probs."""
        return algorithm_of(self).supervised

    @property
    def reads(self) -> frozenset[Computed]:
        """Values that models must compute: a learned critic's values, log-probs under the reference or a teacher."""
        return algorithm_of(self).reads

    @property
    def needs_rewards(self) -> bool:
        """True if a grader is required."""
        return algorithm_of(self).needs_rewards
