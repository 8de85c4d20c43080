"""Settings of the rollout room: what to generate, how to grade it, how long it may take, what failures lead to."""

import re
from enum import StrEnum
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, JsonValue, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from agentrl.errors import Blame
from agentrl.settings import Settings


class FailureAction(StrEnum):
    """Consequence of a failed trajectory."""

    RETRY = "retry"  # start the trajectory again from its prompt; after `rollout_max_retries` it is kept masked
    KEEP_MASKED = "keep_masked"  # keep it with reward 0 for statistics and the group baseline; train none of its tokens
    SCORE = "score"  # keep what the model wrote so far and train on it, with reward 0 if it was not graded yet
    DROP_GROUP = "drop_group"  # drop its whole group, with the reason in the ledger, and lease another prompt
    RAISE = "raise"  # stop the run with the failure's message


DEFAULT_FAILURE_POLICY: dict[Blame, FailureAction] = {
    Blame.MODEL: FailureAction.SCORE,
    Blame.TOOL: FailureAction.RETRY,
    Blame.ENV: FailureAction.RAISE,
    Blame.GRADER: FailureAction.DROP_GROUP,
    Blame.ENGINE: FailureAction.RAISE,
    Blame.TIMEOUT: FailureAction.KEEP_MASKED,
    Blame.OVERFLOW: FailureAction.SCORE,
    Blame.AGENT: FailureAction.RETRY,
}


class RolloutSettings(Settings):
    """Generation, grading and evaluation of trajectories."""

    env: str | dict[str, str] | None = Field(None, min_length=1)
    """The agent's environment: pkg.mod:Name, path/file.py:Name or SCHEME:NAME (docs/ecosystem.md). Several: NAME=PATH
    for each, repeatable; env_key names the one for a row. Without an environment, the model gives one answer per
    prompt."""
    env_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Keyword arguments of the environment's __init__; with several environments NAME={...} for each."""
    custom_generate_function_path: str | None = None
    """Your own generate function instead of an environment: pkg.mod:fn or path/file.py[:fn]."""
    agent: str | None = Field(None, min_length=1)
    """An agent program instead of an environment, for example 'claude -p {prompt}'. It gets the model's address
    (docs/gateway.md)."""
    agent_sandbox: Literal["bubblewrap", "none"] = "bubblewrap"
    """Sandbox of the agent's program; none gives it your rights and your network."""
    agent_readable: tuple[str, ...] = Field((), description="More paths that the agent's program may read.")
    max_turns: PositiveInt | None = Field(None, description="Model turns per trajectory; default: the environment's.")

    num_rollout: PositiveInt = Field(100, description="Rollouts (generate, then train) in the whole run.")
    rollout_batch_size: PositiveInt = Field(16, description="Prompts per rollout.")
    n_samples_per_prompt: PositiveInt = Field(8, description="Trajectories per prompt: the group's size.")
    over_sampling_batch_size: PositiveInt | None = None
    """Prompts in flight at once, at least rollout_batch_size: a batch does not wait for the slowest. Unfinished groups
    continue for the next batch if max_staleness allows it; with 0 they are discarded."""
    max_staleness: NonNegativeInt = 0
    """Maximum age, in rollouts, of the weights that sampled a trained token. With 0, the run generates and trains in
    turn. With 1, it trains while it generates the next rollout. With more, slow trajectories do not delay a batch."""
    stale_groups: Annotated[
        Literal["regenerate", "drop"], BeforeValidator(lambda given: "regenerate" if given == "remake" else given)
    ] = "regenerate"
    """Regenerate or drop a group that is too old to be trained on."""
    partial_rollout: bool = False
    """Stop generating while the trainer trains; trajectories in flight keep tokens and resume later."""
    mask_offpolicy_in_partial_rollout: bool = False
    """Train only the tokens that the newest weights sampled; no trajectory is too old then."""
    max_token_staleness: NonNegativeInt | None = None
    """Train no token older than this many rollouts; the sample's other tokens are trained within max_staleness."""
    rollout_seed: int = Field(42, description="Seed of prompt order and of each trajectory's sampling.")
    rollout_deterministic: bool = Field(True, description="Send the engine a sampling seed with every request.")

    rollout_temperature: float = Field(1.0, ge=0, description="Sampling temperature while training.")
    rollout_top_p: float = Field(1.0, gt=0, le=1, description="Nucleus sampling while training.")
    rollout_top_k: int = Field(-1, ge=-1, description="Top-k sampling while training; -1 is off.")
    allow_truncated_sampling: bool = False
    """Train with --rollout-top-p or --rollout-top-k although log-probs are over the whole vocabulary. For engines that
    do not report the kept tokens; gradients are biased, and the run's report says so."""
    use_rollout_routing_replay: bool = False
    """Train a mixture of experts with the experts that the engine chose for each token, not the trainer's own
    choice."""
    rollout_max_prompt_len: PositiveInt | None = None
    """Longest prompt in tokens; a longer one fails."""
    rollout_max_response_len: PositiveInt = Field(1024, description="Maximum tokens of one turn of the model.")
    rollout_max_context_len: PositiveInt | None = None
    """Maximum tokens of a whole trajectory; default: the model's context length."""
    rollout_stop: tuple[str, ...] = Field((), description="Extra stop strings.")
    rollout_stop_token_ids: tuple[int, ...] = Field((), description="Extra stop token ids.")
    rollout_skip_special_tokens: bool = Field(True, description="Leave special tokens out of the response text.")

    rm_type: str | None = Field(None, description="Built-in grader of agentrl.rm_hub, for example exact_match.")
    custom_rm_path: str | None = Field(None, description="Your own reward function: pkg.mod:fn or path/file.py[:fn].")
    group_rm: bool = Field(False, description="Call the reward function once per group, with all its samples.")
    reward_key: str | None = Field(None, description="Entry of a dict reward that training uses.")
    log_reward_category: str | None = None
    """Entry of a dict reward by which trajectories are counted, for example why they failed."""
    eval_reward_key: str | None = Field(None, description="Entry of a dict reward that evaluation uses.")
    dynamic_sampling_filter_path: str | None = None
    """fn(args, samples) -> bool: keep this group? Built in: agentrl.rollout.filters:nonzero_std."""

    opd_teacher_url: tuple[str, ...] = Field(())
    """Addresses (host:port or URL) of running SGLang servers of a teacher with the student's vocabulary, for use_opd;
    `agentrl serve` is one."""
    opd_privileged_key: str | None = None
    """Entry of a sample's metadata (or label) that only the teacher sees, for example a solution: as a user message
    after the prompt. With opd_type self the teacher is the model itself."""
    opd_privileged_prompt: str = "Here is a reference solution:\n\n{text}\n\nNow solve the task in your own words."
    """The message of opd_privileged_key; {text} is the entry."""

    demonstration_min_reward: float | None = None
    """Least reward of a hosted model's conversation that `agentrl rollout` writes to demonstrations.jsonl; default: all
    that ended by themselves."""

    eval_prompt_data: tuple[str, ...] = Field(())
    """Evaluation sets: NAME PATH pairs, or one PATH; repeatable."""
    eval_config: str | None = None
    """YAML file of evaluation sets, instead of eval_prompt_data: each with its own number of samples, sampling, reward,
    environment, generate function and field names (docs/environments.md)."""
    eval_interval: PositiveInt | None = None
    """Evaluate every this many rollouts, and after the last."""
    eval_while_training: bool = False
    """Continue training during an evaluation, which keeps the weights of its step; needs --engine-groups eval=..."""
    eval_before_train: bool = Field(True, description="Evaluate once before the first rollout.")
    n_samples_per_eval_prompt: PositiveInt = Field(1, description="Trajectories per prompt in evaluation.")
    eval_temperature: float | None = Field(None, ge=0, description="Temperature in evaluation; default: training's.")
    eval_top_p: float | None = Field(None, gt=0, le=1, description="Nucleus sampling in evaluation.")
    eval_top_k: int | None = Field(None, ge=-1, description="Top-k sampling in evaluation.")
    eval_max_response_len: PositiveInt | None = Field(None, description="Maximum tokens per turn in evaluation.")
    eval_min_new_tokens: NonNegativeInt | None = Field(None, description="Minimum tokens per turn in evaluation.")
    eval_max_prompt_len: PositiveInt | None = Field(None, description="rollout_max_prompt_len in evaluation.")
    eval_max_context_len: PositiveInt | None = Field(None, description="rollout_max_context_len in evaluation.")
    eval_input_key: str | None = Field(None, description="input_key of the evaluation sets.")
    eval_label_key: str | None = Field(None, description="label_key of the evaluation sets.")
    eval_tool_key: str | None = Field(None, description="tool_key of the evaluation sets.")

    rollout_max_concurrency: PositiveInt = Field(1024, description="Trajectories in flight at once.")
    trajectory_timeout: PositiveFloat = Field(600.0, description="Seconds one trajectory may take in all.")
    env_timeout: PositiveFloat = Field(
        120.0, description="Seconds that one call of the environment, or of a data source of your own, may take."
    )
    reward_timeout: PositiveFloat = Field(60.0, description="Seconds one call of the reward function may take.")
    event_loop_block_warning: PositiveFloat = 1.0
    """Seconds that code may block the event loop before a warning names this code."""
    rollout_max_retries: int = Field(2, ge=0, description="Restarts of a trajectory whose failure action is retry.")
    failure_policy: dict[Blame, FailureAction] = Field(default_factory=lambda: dict(DEFAULT_FAILURE_POLICY))
    """Action for a failed trajectory, by the part that caused the failure, for example tool=retry or env=drop_group."""

    chat_template_path: str | None = Field(None, description="A Jinja chat template instead of the model's own.")
    tool_call_parser: str = "auto"
    """Format of tool calls: auto (read from the template), a name (docs/parsers.md), none, or pkg.mod:fn."""
    reasoning_parser: str = "auto"
    """Format of reasoning in the model's text: auto, a name (docs/parsers.md), none, or pkg.mod:fn."""
    template_rewrite_policy: Literal["keep", "split", "fail"] = "keep"
    """When the template would rewrite history: keep the sampled tokens, split the sample, fail."""

    @field_validator("env")
    @classmethod
    def _names_for_metrics(cls, value: str | dict[str, str] | None) -> str | dict[str, str] | None:
        names = value if isinstance(value, dict) else ()
        if value == {} or not all(re.fullmatch(r"[\w.-]+", name) for name in names):
            raise ValueError(f"expected NAME=PATH with names of letters, digits, '_', '-' and '.'; got {value!r:.200}")
        return value

    @field_validator("rollout_top_k", "eval_top_k")
    @classmethod
    def _some_or_all(cls, value: int | None) -> int | None:
        if value == 0:
            raise ValueError("0 leaves no token to sample; use -1 for all, or at least 1")
        return value

    @property
    def evaluates(self) -> bool:
        """True if there are evaluation sets."""
        return bool(self.eval_prompt_data or self.eval_config)

    @property
    def replays_truncation(self) -> bool:
        """True if the trainer's log-probs are over the tokens that truncation left to the engine."""
        return (self.rollout_top_p < 1 or self.rollout_top_k > 0) and not self.allow_truncated_sampling

    def action(self, blame: Blame) -> FailureAction:
        """Return the policy table's action for a failure caused by `blame`."""
        return self.failure_policy.get(blame, DEFAULT_FAILURE_POLICY[blame])
