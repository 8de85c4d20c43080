"""The settings of all algorithms, as algorithms read them: estimator, loss, clipping, KL and entropy terms."""

from typing import Literal

from pydantic import Field

from agentrl.settings import Settings

RatioLevel = Literal["token", "sequence", "geometric"]


class AlgorithmFields(Settings):
    """Parts of the objective. Names are slime's flags; formulas are in the algorithms' files and `ops/`."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = "policy_loss"
    """policy_loss: the loss of the estimator (the clipped policy gradient). sft_loss: the negative log-likelihood of
    the response. custom_loss: the loss of custom_loss_function_path."""
    custom_loss_function_path: str | None = None
    """pkg.mod:function (TokenView, settings) -> TokenLoss, the loss of custom_loss."""
    advantage_estimator: str = "grpo"
    """grpo, gspo, cispo, sapo, dppo, gmpo, gdpo, pass_at_k, rloo, reinforce_plus_plus, reinforce_plus_plus_baseline,
    ppo, on_policy_distillation, or pkg.mod:function for your own; docs/algorithms.md says which to choose."""
    rewards_normalization: bool = Field(True, description="Subtract the group's mean reward from each reward.")
    grpo_std_normalization: bool = True
    """Also divide by the group's reward standard deviation; off gives Dr. GRPO's advantages."""
    normalize_advantages: bool | None = None
    """Whiten the advantages over all trained tokens of the rollout (mean 0, variance 1). Default: on with
    reinforce_plus_plus and reinforce_plus_plus_baseline, whose papers do so."""
    turn_credit: Literal["none", "returns", "gigpo"] = "none"
    """Advantages of turns, with estimators that compare within groups. `returns`: compares a turn's discounted return
    with the same turn of the prompt's other trajectories. `gigpo`: adds to the sample's advantage the turn's advantage
    among all turns that answer the same observation."""
    turn_credit_weight: float = Field(1.0, ge=0, description="Weight of the turn's advantage with turn_credit gigpo.")
    gamma: float = Field(1.0, ge=0, le=1, description="Discount factor per token, or per turn with turn_credit.")
    lambd: float = Field(1.0, ge=0, le=1, description="GAE lambda of estimators that use a value function.")

    eps_clip: float = Field(0.2, ge=0)
    """Clip the ratio from below at 1 - eps_clip. For cispo, 1 or more means no lower bound."""
    eps_clip_high: float | None = Field(None, ge=0)
    """Clip the ratio from above at 1 + eps_clip_high; default: eps_clip."""
    eps_clip_c: float | None = Field(None, gt=1)
    """Dual clip: the loss of a negative advantage A is at most eps_clip_c * |A|."""
    sapo_tau_positive: float = Field(1.0, gt=0, description="Temperature of sapo's gate for positive advantages.")
    sapo_tau_negative: float = Field(1.05, gt=0, description="Temperature of sapo's gate for other advantages.")
    dppo_divergence: Literal["tv", "kl"] = Field("tv", description="Divergence of dppo: total variation, or KL.")
    dppo_threshold: float | None = Field(None, gt=0)
    """Divergence above which dppo masks a token; default: 0.15 for tv, 0.05 for kl."""
    gdpo_weights: dict[str, float] = Field({})
    """Entries of a dict reward that gdpo compares, each with its weight. Metrics and filters still use the entry of
    reward_key."""
    pass_k: int = Field(4, ge=1, description="Trajectories in a set of pass_at_k.")
    pass_threshold: float = Field(0.5, description="Reward above which a trajectory is a success for pass_at_k.")
    use_rollout_logprobs: bool | None = None
    """Take the old log-probs from the engine. Off takes the trainer's own before the step; the first step's ratio is
    then 1. Default: on with dppo or max_staleness above 0, unless use_tis or use_rs is set."""
    calculate_per_token_loss: bool = False
    """Weigh every trained token of a step alike; off weighs every trajectory alike (see loss_denominator)."""
    loss_denominator: Literal["live", "all", "constant"] = "live"
    """Divisor of a step's loss, a sum of the trajectories' mean losses. `live`: trajectories with a trained token.
    `all`: all trajectories (slime; GRPO's 1/G). `constant`: divides the sum of all token losses by all trajectories
    times loss_max_length (Dr. GRPO)."""
    loss_max_length: int | None = Field(None, gt=0)
    """Maximum length for loss_denominator constant and overlong_buffer_len; default: rollout_max_response_len."""
    custom_pg_loss_reducer_function_path: str | None = None
    """pkg.mod:function (SampleView, settings) -> weights [N] of the tokens in the loss of a step. It replaces
    calculate_per_token_loss and loss_denominator."""
    overlong_buffer_len: int | None = Field(None, gt=0)
    """DAPO's overlong reward shaping: number of tokens before loss_max_length in which a penalty grows linearly from 0
    to overlong_penalty_factor."""
    overlong_penalty_factor: float = Field(1.0, gt=0, description="Maximum penalty of overlong_buffer_len.")
    value_clip: float = Field(0.2, gt=0)
    """Clip the critic's loss if a value moved further than this from its old value."""

    use_tis: bool = False
    """Truncated importance sampling: multiply each token's policy term by the ratio of the trainer's probability before
    the step to the engine's. The old log-probs are then the trainer's."""
    tis_clip: float = Field(2.0, gt=0, description="Upper bound of the importance weights.")
    tis_clip_low: float = Field(0.0, ge=0, description="Lower bound of the importance weights.")
    tis_level: RatioLevel = "token"
    """Ratio per token, per sample (product), or per sample (geometric mean of its tokens)."""
    tis_mode: Literal["truncate", "mask"] = "truncate"
    """A weight outside the bounds becomes the bound (TIS), or 0 (MIS, as in IcePop)."""
    custom_tis_function_path: str | None = Field(None, description="pkg.mod:function that gives the weights instead.")
    use_rs: bool = Field(False, description="Train no token whose ratio of trainer to engine is outside rs_*_bound.")
    rs_level: RatioLevel = Field("token", description="Ratios that the bounds apply to, as tis_level.")
    rs_lower_bound: float | None = Field(None, gt=0, description="Least ratio; by default 1 / rs_upper_bound.")
    rs_upper_bound: float = Field(2.0, gt=0, description="Greatest ratio.")
    rs_veto_threshold: float | None = Field(None, gt=0, lt=1)
    """Train no sample that has a token with a ratio below this; for example 1e-4."""
    use_opsm: bool = False
    """Drop the policy term of tokens with negative advantage in samples beyond opsm_delta."""
    opsm_delta: float = Field(1e-4, ge=0)
    """Distance beyond which use_opsm drops a sample: mean of log(engine / policy), in nats per token."""

    kl_coef: float = Field(0.0, ge=0)
    """Subtract kl_coef times the KL to the reference model from the reward: per token with ppo and reinforce_plus_plus,
    else per sample."""
    use_kl_loss: bool = Field(False, description="Compute the KL to the reference model and add it to the loss.")
    kl_loss_coef: float = Field(0.0, ge=0, description="Weight of the KL term in the loss.")
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = "k1"
    """KL estimator per token: k1, k2, k3, or low_var_kl (k3 clamped to [-10, 10])."""
    use_unbiased_kl: bool = False
    """Multiply the KL term by the ratio to the old policy, so that its gradient is the KL's."""
    entropy_coef: float = 0.0
    """Weight of the entropy bonus (subtracted from the loss); its start with entropy_target."""
    entropy_target: float | None = Field(None, gt=0)
    """Target entropy in nats per token. entropy_coef rises by entropy_coef_step after a rollout below the target, and
    falls after others. It applies only in rollouts that are not above the target."""
    entropy_coef_step: float = Field(1e-4, gt=0, description="Change of entropy_coef per rollout, with entropy_target.")
    entropy_coef_max: float = Field(5e-3, gt=0, description="Maximum of entropy_coef with entropy_target.")
    entropy_control: Literal["none", "clip", "kl"] = "none"
    """Control of the tokens with high covariance of log-prob and advantage, which lower the entropy. `clip` (clip-cov):
    some of them have no policy term. `kl` (kl-cov): covariance_kl_coef times |log ratio| is added to their loss."""
    covariance_ratio: float = Field(2e-4, gt=0, le=1)
    """Share of a rollout's trained tokens that entropy_control acts on; at least one."""
    covariance_low: float = Field(1.0, description="Least covariance of the tokens of entropy_control clip.")
    covariance_high: float = Field(5.0, description="Greatest covariance of the tokens of entropy_control clip.")
    covariance_kl_coef: float = Field(1.0, gt=0, description="Weight of the penalty of entropy_control kl.")

    use_opd: bool = False
    """On-policy distillation on top of the estimator: a teacher's log-probs of the sampled tokens change their
    advantages. To train on the teacher alone, set advantage_estimator on_policy_distillation."""
    opd_type: Literal["sglang", "megatron", "self"] | None = None
    """The teacher: the servers at opd_teacher_url, the model in opd_teacher_load, which the trainer holds, or the
    trained model itself with opd_privileged_key. Default: whichever of them is given."""
    opd_kl_coef: float = Field(1.0, ge=0, description="Factor of log(student / teacher), subtracted from advantages.")

    @property
    def old_is_trainers(self) -> bool:
        """Return true if a correction compares the engine's log-probs with the trainer's. The old log-probs are then
        the trainer's."""
        return self.use_tis or self.use_rs
