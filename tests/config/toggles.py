"""Evidence that a setting has an effect, for every setting.

1. `RUNS`: real runs in one process with the flags of a context, without the setting and with it. Metrics, trajectories,
   weights, checkpoints, files, printed output, or the failure must differ.
2. `SAID`: a flag that is refused or named as one without effect, and a part of the message.
3. `ELSEWHERE`: a test of a setting that needs a fault, a server or several processes, and a word in the test.
4. `UNSHOWN`: the reason why no test shows the setting.

The value `nothing` removes a flag of the base or the context.
"""

STOPS = " ".join(map(str, range(7, 512, 16)))

BASE = (
    "--env env.py:AddEnv --hf-checkpoint model --prompt-data prompts.jsonl --label-key label --num-rollout 2 "
    "--rollout-batch-size 2 --n-samples-per-prompt 2 --rollout-max-response-len 12 --lr 1e-2 --backend local "
    "--device cpu --progress off --no-use-tensorboard --train-threads 1 --event-loop-block-warning 60 "
    "--rollout-max-concurrency 1 --output-dir run"
)

PLUGINS = """
import anyio
import torch

from agentrl import Environment, Step
from agentrl.data.source import RolloutDataSource


class Turns(Environment):
    max_turns = 2

    def __init__(self, bonus: float = 0.0) -> None:
        self.bonus = bonus

    async def step(self, turn):
        reward = turn.sample.index % 3 + self.bonus + turn.index
        return Step([{"role": "user", "content": "Go on."}], reward=reward, done=turn.index == self.max_turns)


class Waiting(Turns):
    async def reset(self, sample):
        await anyio.sleep(0.05)
        return await super().reset(sample)


class Plain(Environment):
    pass


class Raising(Turns):
    async def step(self, turn):
        if turn.sample.index % 4 == 1:
            raise RuntimeError("a bug")
        return await super().step(turn)


class Two(Turns):
    async def reward(self, sample):
        return {"a": float(sample.index % 2), "b": float(sample.index % 3)}


async def generate(args, sample, sampling_params):
    sample.set_prompt_tokens([1, 2])
    sample.append_model([5, 6, 7 + sample.index % 2], [-1.0, -1.0, -1.0], "0")
    sample.reward = float(sample.index % 2)
    sample.status = type(sample.status).COMPLETED
    return sample


async def reward(args, sample):
    return float(sample.index % 2) * 3


async def group_reward(args, samples):
    return [float(s.index % 2) * len(samples) for s in samples]


def keep_some(args, samples):
    return samples[0].group_index != 1


class Source(RolloutDataSource):
    def get_samples(self, n):
        groups = super().get_samples(n)
        for group in groups:
            for sample in group:
                sample.prompt = "another prompt"
        return groups


def loss(view, settings):
    from agentrl.algorithms.base import TokenLoss

    value = -view.log_probs * view.advantages
    return TokenLoss(value, {"mine": value.detach()})


def advantages(inputs, settings):
    return torch.ones_like(inputs.loss_mask, dtype=torch.float64)


def weights(inputs, settings):
    return inputs.loss_mask.double() / 7


def tis(view, settings):
    return torch.full_like(view.log_probs.detach(), 0.5)
"""

CONTEXTS = {
    "": "",
    "eval": f"--eval-prompt-data dev prompts.jsonl@[0:2] --eval-interval 1 --rollout-stop-token-ids {STOPS}",
    "turns": f"--env plugins.py:Turns --rollout-stop-token-ids {STOPS} --rollout-max-response-len 40",
    "sapo": "--advantage-estimator sapo --num-steps-per-rollout 2",
    "dppo": "--advantage-estimator dppo --num-steps-per-rollout 2 --dppo-threshold 0.0001",
    "gdpo": "--env plugins.py:Two --reward-key a --advantage-estimator gdpo --gdpo-weights a=1 --gdpo-weights b=1 "
    f"--rollout-stop-token-ids {STOPS}",
    "pass at k": f"--advantage-estimator pass_at_k --pass-k 2 --n-samples-per-prompt 4 --rollout-stop-token-ids {STOPS}",
    "entropy": "--entropy-target 99 --entropy-coef 0.001 --num-rollout 3",
    "clip-cov": "--entropy-control clip --covariance-low=-99 --covariance-high 99 --covariance-ratio 0.5",
    "kl-cov": "--entropy-control kl --num-steps-per-rollout 2 --covariance-ratio 0.5",
    # Deterministic: the teacher scores a group while another plays, so batch composition depends on the machine's load.
    "itself": "--use-opd --opd-type self --opd-privileged-key label --embedded-deterministic",
    "gigpo": f"--env plugins.py:Turns --turn-credit gigpo --rollout-stop-token-ids {STOPS} --rollout-max-response-len 40",
    "two": f"--env plugins.py:Two --reward-key a --rollout-stop-token-ids {STOPS}",
    "two, evaluated": "--env plugins.py:Two --reward-key a --eval-prompt-data prompts.jsonl@[0:3]",
    "raising": f"--env plugins.py:Raising --rollout-stop-token-ids {STOPS} --failure-policy env=retry",
    "plain": "--env plugins.py:Plain --custom-rm-path plugins.py:reward",
    "graded": "--env plugins.py:Plain --rm-type f1",
    "groups": "--env plugins.py:Plain --custom-rm-path plugins.py:group_reward",
    "template": "--chat-template-path shouting.jinja",
    "short": "--prompt-data-limit 2",
    "broken": "--prompt-data broken.jsonl",
    "rows": "--env plugins.py:Plain --prompt-data rows.jsonl --rm-type exact_match",
    "several": "--env A=env.py:AddEnv --env B=plugins.py:Turns --prompt-data rows.jsonl",
    "saving": "--save-interval 1",
    "profiled": "--use-pytorch-profiler --profile-step-start 0 --profile-step-end 1",
    "dumped": "--load-debug-rollout-data kept --env nothing --prompt-data nothing --label-key nothing",
    "longer": "--num-rollout 3",
    "twice": "--num-steps-per-rollout 2",
    "ppo": "--advantage-estimator ppo --num-steps-per-rollout 2 --num-rollout 3",
    "tis": "--use-tis --num-steps-per-rollout 2 --tis-clip 1.0000001",
    "rs": "--use-rs --num-steps-per-rollout 2 --rs-upper-bound 1.0000001",
    "opsm": "--use-opsm --num-steps-per-rollout 2",
    "kl": "--use-kl-loss --kl-loss-type low_var_kl --kl-loss-coef 0.5 --num-steps-per-rollout 2",
    "opd": "--use-opd --opd-teacher-load other --num-steps-per-rollout 2",
    "constant": "--loss-denominator constant",
    "waiting": "--env plugins.py:Waiting",
    "overlong": "--overlong-buffer-len 6 --loss-max-length 12",
    "lengths": f"--rollout-stop-token-ids {STOPS}",
    "linear": "--lr-decay-style linear --num-rollout 3",
    "wsd": "--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-decay-iters 4 --num-rollout 4",
    "warm": "--lr-warmup-iters 2 --num-rollout 3",
    "megatron": "--train-backend megatron",
    "muon": "--train-backend megatron --optimizer muon",
    "adapter": "--lora-rank 2",
    "dynamic": "--use-dynamic-batch-size --max-tokens-per-gpu 4096",
    "cut": "--rollout-top-k 40",
    "sft": "--sft-turns all --loss-type sft_loss --prompt-data chats.jsonl --input-key messages --label-key nothing "
    "--n-samples-per-prompt 1 --env nothing --lr 1e-3",
}

RUNS: dict[str, dict[str, str]] = {
    "": {
        "env": "plugins.py:Turns",
        "custom_generate_function_path": "plugins.py:generate",
        "num_rollout": "3",
        "rollout_batch_size": "3",
        "n_samples_per_prompt": "3",
        "over_sampling_batch_size": "6",
        "rollout_seed": "7",
        "rollout_temperature": "0.5",
        "rollout_top_p": "0.5",
        "rollout_top_k": "5",
        "rollout_max_prompt_len": "2",
        "rollout_max_response_len": "5",
        "rollout_max_context_len": "40",
        "rollout_stop": "a",
        "rollout_stop_token_ids": STOPS,
        "rollout_deterministic": "no",
        "rollout_skip_special_tokens": "no",
        "custom_rm_path": "plugins.py:reward",
        "dynamic_sampling_filter_path": "plugins.py:keep_some",
        "eval_prompt_data": "dev prompts.jsonl@[0:2]",
        "eval_config": "eval.yaml",
        "trajectory_timeout": "0.0001",
        "failure_policy": "overflow=drop_group --rollout-max-prompt-len 2",
        "chat_template_path": "greeting.jinja",
        "tool_call_parser": "llama3",
        "prompt_data": "prompts.jsonl@[5:]",
        "prompt_data_limit": "1",
        "input_key": "label",
        "rollout_shuffle": "",
        "prompt_order": "difficulty",
        "data_source_path": "plugins.py:Source",
        "ledger_retention": "always",
        "ledger_dir": "local",
        "keep_trajectories": "2",
        "advantage_estimator": "rloo",
        "rewards_normalization": "no",
        "grpo_std_normalization": "no",
        "normalize_advantages": "",
        "custom_loss_function_path": "plugins.py:loss --loss-type custom_loss",
        "custom_pg_loss_reducer_function_path": "plugins.py:weights",
        "overlong_buffer_len": "6",
        "use_tis": "",
        "use_rs": "",
        "kl_coef": "0.5",
        "entropy_coef": "0.5",
        "hf_checkpoint": "other",
        "save": "elsewhere",
        "save_interval": "1",
        "global_batch_size": "2",
        "num_steps_per_rollout": "2",
        "lr": "1e-3",
        "lr_decay_style": "cosine",
        "lr_warmup_iters": "1",
        "lr_warmup_fraction": "0.6",
        "weight_decay": "0.5",
        "adam_beta1": "0.5",
        "adam_beta2": "0.5",
        "adam_eps": "1",
        "clip_grad": "0.001",
        "lora_rank": "2",
        "bf16": "",
        "micro_batch_size": "4",
        "use_dynamic_batch_size": " --max-tokens-per-gpu 4096",
        "engine_request_timeout": "0.000001",
        "engine_control_timeout": "0.000001",
        "embedded_dtype": "bfloat16",
        "engine_context_length": "40",
        "weight_sync_timeout": "0.000001",
        "train_timeout": "0.000001",
        "rollout_timeout": "0.000001",
        "output_dir": "run/below",
        "progress": "plain",
        "log_interval": "2",
        "use_tensorboard": "",
        "tensorboard_dir": "elsewhere/tb --use-tensorboard",
        "use_wandb": "",
        "save_debug_rollout_data": "dumps",
        "update_weight_disk_dir": "elsewhere",
        "dump_details": "details",
        "save_hf": "elsewhere/{rollout_id}",
        "freeze_params_name_list": "embed",
        "only_train_params_name_list": "layers.0",
        "use_pytorch_profiler": " --profile-step-start 0",
        "reset_optimizer_states": "",
        "distributed_backend": "nccl",
        "load_debug_rollout_data": "kept",
        "debug_rollout_only": "",
        "env_args": "bonus=2 --env plugins.py:Turns",
        "true_on_policy_mode": "",
        "embedded_deterministic": "",
        "ci_train_rollout_logprob_abs_diff_threshold": "0",
    },
    "turns": {
        "max_turns": "1",
        "turn_credit": "returns",
    },
    "sapo": {"sapo_tau_positive": "9", "sapo_tau_negative": "9"},
    "dppo": {"dppo_divergence": "kl", "dppo_threshold": "0.9"},
    "gdpo": {"gdpo_weights": "a=5"},
    "pass at k": {"pass_k": "1", "pass_threshold": "-0.1"},
    "entropy": {"entropy_target": "0.01", "entropy_coef_step": "0.003", "entropy_coef_max": "0.001"},
    "clip-cov": {"covariance_ratio": "0.1", "covariance_low": "-0.01", "covariance_high": "-0.01"},
    "kl-cov": {"entropy_control": "none --covariance-ratio 0.0002", "covariance_kl_coef": "50"},
    "itself": {
        "opd_privileged_key": "label --opd-privileged-prompt no:{text}",
        "opd_privileged_prompt": "another:{text}",
    },
    "gigpo": {"turn_credit_weight": "0.3", "gamma": "0.5"},
    "two": {"reward_key": "b", "log_reward_category": "b"},
    "profiled": {"profile_step_start": "1", "profile_step_end": "2", "profile_dir": "elsewhere/profile"},
    "dumped": {"load_debug_rollout_data_subsample": "0.5"},
    "two, evaluated": {"eval_reward_key": "b"},
    "raising": {"rollout_max_retries": "0"},
    "plain": {"reward_timeout": "1e-9"},
    "graded": {"rm_type": "random", "label_key": "nothing"},
    "groups": {"group_rm": ""},
    "template": {"apply_chat_template_kwargs": "shout=true"},
    "short": {"num_epoch": "1"},
    "broken": {"prompt_data_check": "lazy"},
    "rows": {"metadata_key": "meta2", "tool_key": "tools2"},
    "several": {"env_key": "which"},
    "saving": {"keep_checkpoints": "1", "no_save_optim": ""},
    "longer": {"load": "begun/checkpoints"},
    "eval": {
        "eval_interval": "2",
        "eval_before_train": "no",
        "n_samples_per_eval_prompt": "2",
        "eval_temperature": "0",
        "eval_top_p": "0.1",
        "eval_top_k": "2",
        "eval_max_response_len": "4",
        "eval_min_new_tokens": "12",
        "eval_max_prompt_len": "2",
        "eval_max_context_len": "40",
        "eval_input_key": "label",
        "eval_label_key": "none_such",
        "eval_tool_key": "label",
    },
    "twice": {
        "eps_clip": "0.00001",
        "eps_clip_high": "0.00001",
        "eps_clip_c": "1.00001",
        "use_opsm": "",
        "use_rollout_logprobs": "",
    },
    "ppo": {
        "lambd": "0.5",
        "value_clip": "0.00001",
        "critic_load": "other",
        "critic_lr": "0.5",
        "critic_lr_warmup_iters": "1",
        "num_critic_only_steps": "1",
    },
    "tis": {
        "tis_clip": "3",
        "tis_clip_low": "0.9999999",
        "tis_level": "sequence",
        "tis_mode": "mask",
        "custom_tis_function_path": "plugins.py:tis",
    },
    "rs": {
        "rs_level": "sequence",
        "rs_lower_bound": "0.5",
        "rs_upper_bound": "3",
        "rs_veto_threshold": "0.9999999",
    },
    "opsm": {"opsm_delta": "1e9"},
    "kl": {
        "use_kl_loss": "no --kl-loss-coef 0",
        "kl_loss_coef": "0.9",
        "kl_loss_type": "k2",
        "use_unbiased_kl": "",
        "ref_load": "other",
        "ref_update_interval": "1",
    },
    "opd": {"use_opd": "no --opd-teacher-load nothing", "opd_kl_coef": "0.3", "opd_teacher_load": "model"},
    "overlong": {"overlong_penalty_factor": "0.3"},
    "constant": {"loss_max_length": "11"},
    "waiting": {"env_timeout": "0.001"},
    "lengths": {"loss_denominator": "constant", "calculate_per_token_loss": ""},
    "linear": {"min_lr": "9e-3", "lr_decay_iters": "2"},
    "wsd": {"lr_wsd_decay_iters": "3", "lr_wsd_decay_style": "linear"},
    "warm": {"lr_warmup_init": "5e-3"},
    "megatron": {"optimizer": "muon", "use_distributed_optimizer": ""},
    "muon": {"muon_lr": "1e-4"},
    "adapter": {"lora_alpha": "2", "target_modules": "q_proj"},
    "dynamic": {"max_tokens_per_gpu": "16", "share_prefixes": "no"},
    "cut": {"allow_truncated_sampling": ""},
    "sft": {"sft_turns": "last", "loss_type": "policy_loss"},
}

SAID: dict[str, tuple[str, str]] = {
    "agent": ("'run {prompt}'", "with --env, which plays itself"),
    "agent_sandbox": ("none", "has no effect without --agent"),
    "agent_readable": ("/opt", "has no effect without --agent"),
    "apply_chat_template": ("", "--apply-chat-template has no effect where an environment plays"),
    "seed": ("7", "--seed 7 has no effect on the trainer, which draws no random numbers"),
    "stale_groups": ("drop", "--stale-groups drop has no effect without"),
    "rm_url": ("http://x", "--rm-url http://x has no effect without --rm-type remote_rm"),
    "rm_timeout": ("3", "has no effect without --rm-type remote_rm"),
    "rm_concurrency": ("3", "has no effect without --rm-type remote_rm"),
    "judge_url": ("http://x", "has no effect without --rm-type llm_judge"),
    "judge_model": ("x", "has no effect without --rm-type llm_judge"),
    "judge_rubric": ("x", "has no effect without --rm-type llm_judge"),
    "judge_timeout": ("3", "has no effect without --rm-type llm_judge"),
    "judge_concurrency": ("3", "has no effect without --rm-type llm_judge"),
    "judge_max_tokens": ("3", "has no effect without --rm-type llm_judge"),
    "judge_cache_path": ("x", "has no effect without --rm-type llm_judge"),
    "judge_api_key_env": ("X", "has no effect without --rm-type llm_judge"),
    "code_score": ("fraction", "has no effect without --rm-type code"),
    "code_test_timeout": ("3", "has no effect without --rm-type code"),
    "code_timeout": ("3", "has no effect without --rm-type code"),
    "code_concurrency": ("3", "has no effect without --rm-type code"),
    "attention_softmax_in_fp32": ("no", "attention_softmax_in_fp32 cannot be turned off"),
    "train_backend": ("fsdp9", "expected one of auto, megatron"),
    "fsdp_cpu_offload": (" --train-backend megatron", "without --train-backend fsdp"),
    "data_parallel_replicate_degree": ("2", "does not divide the 1 trainer processes"),
    "sequence_parallel": ("", "needs tensor_model_parallel_size above 1"),
    "opd_type": ("sglang", "opd_type sglang has no effect without use_opd"),
    "opd_teacher_url": ("x:1", "grpo uses no teacher"),
    "recompute_method": ("uniform", "needs recompute_granularity full"),
    "recompute_num_layers": ("1", "needs recompute_granularity full"),
    "rollout_external_engine_addrs": ("x:1 --engine embedded", "with an --engine that is not external"),
    "engine_start_timeout": ("3", "has no effect with --backend local"),
    "engine_connect_timeout": ("3", "has no effect with --backend local"),
    "engine_max_restarts": ("3", "has no effect with --backend local"),
    "engine_host": ("0.0.0.0", "has no effect with --backend local"),
    "engine_port_base": ("9000", "has no effect with --backend local"),
    "engine_python": ("python", "has no effect without --engine sglang"),
    "sglang_cpu": ("", "has no effect without --engine sglang"),
    "sglang_options": ("tp_size=2", "--sglang-tp-size has no effect without --engine sglang"),
    "ray_address": ("auto", "has no effect with --backend local"),
    "actor_num_nodes": ("2", "--backend local has one trainer process"),
    "actor_num_gpus_per_node": ("2", "--backend local has one trainer process"),
    "critic_num_nodes": ("2", "has no effect with --backend local"),
    "critic_num_gpus_per_node": ("2", "has no effect with --backend local"),
    "rollout_num_gpus": ("2", "--backend local has one built-in engine"),
    "rollout_num_gpus_per_engine": ("2", "--rollout-num-gpus 1 is no multiple"),
    "tensor_model_parallel_size": ("2", "has no effect with --train-backend fsdp"),
    "pipeline_model_parallel_size": ("2", "has no effect with --train-backend fsdp"),
    "decoder_first_pipeline_num_layers": ("1", "without --pipeline-model-parallel-size above 1"),
    "decoder_last_pipeline_num_layers": ("1", "without --pipeline-model-parallel-size above 1"),
    "context_parallel_size": ("2", "has no effect with --train-backend fsdp"),
    "expert_model_parallel_size": ("2", "has no effect with --train-backend fsdp"),
    "expert_tensor_parallel_size": ("2", "has no effect with --train-backend fsdp"),
    "offload_train": ("", "without --colocate"),
    "offload_rollout": ("", "without --colocate"),
    "num_gpus_per_node": ("1", "has no effect with --backend local"),
    "allow_fewer_devices": ("", "has no effect with --backend local"),
    "update_weight_mode": ("broadcast", "sends weights by disk"),
    "update_weight_local_checkpoint_dir": ("copies", "has no effect with --backend local"),
    "update_weight_buffer_size": ("4096", "has no effect with --update-weight-mode disk"),
    "memory_snapshot_dir": ("x", "has no effect without --record-memory-history"),
    "eval_while_training": ("", "evaluation needs engines of its own"),
    "wandb_project": ("x", "has no effect without --use-wandb"),
    "wandb_group": ("x", "has no effect without --use-wandb"),
    "wandb_name": ("x", "has no effect without --use-wandb"),
    "wandb_team": ("x", "has no effect without --use-wandb"),
    "wandb_mode": ("offline", "has no effect without --use-wandb"),
    "wandb_dir": ("x", "has no effect without --use-wandb"),
    "wandb_host": ("x", "has no effect without --use-wandb"),
    "wandb_random_suffix": ("", "has no effect without --use-wandb"),
    "base_url": ("http://x", "--base-url http://x has no effect without --engine openai"),
    "hosted_model": ("x", "has no effect without --engine openai"),
    "hosted_api_key_env": ("X", "has no effect without --engine openai"),
    "hosted_options": ("x=1", "has no effect without --engine openai"),
    "demonstration_min_reward": ("1", "has no effect without --engine openai"),
    "engine": ("external", "--rollout-external-engine-addrs HOST:PORT"),
}

ELSEWHERE: dict[str, tuple[str, str]] = {
    "image_key": ("data/test_images.py", "image_key"),
    "image_root": ("data/test_images.py", "image_root"),
    "image_max_pixels": ("data/test_images.py", "image_max_pixels"),
    "image_max_bytes": ("data/test_images.py", "image_max_bytes"),
    "image_max_count": ("data/test_images.py", "image_max_count"),
    "train_vision": ("train/fsdp/test_vision.py", "train_vision"),
    "colocate": ("run/test_driver.py", "colocate"),
    "engine_groups": ("cluster/test_engine_groups.py", "--engine-groups"),
    "record_memory_history": ("train/megatron/test_cuda.py", "record_memory_history"),
    "metrics_sinks": ("observability/test_sinks.py", "metrics_sinks"),
    "prometheus_port": ("observability/test_sinks.py", "prometheus_port"),
    "prometheus_host": ("observability/test_sinks.py", "prometheus_host"),
    "train_env_vars": ("cluster/test_train.py", "train_env_vars"),
    "use_rollout_routing_replay": ("run/test_routing.py", "use_rollout_routing_replay"),
    "slime_defaults": ("config/test_inapplicable.py", "slime_defaults"),
    "compat_options": ("config/test_settings.py", "compat_options"),
    "router_middleware_paths": ("gateway/test_router.py", "router_middleware_paths"),
    "reasoning_parser": ("chat/test_parsers.py", "reasoning_parser"),
    "template_rewrite_policy": ("rollout/test_agent_loop.py", "template_rewrite_policy"),
    "grader_processes": ("rm_hub/test_sample.py", "grader_processes"),
    "grader_timeout": ("rm_hub/test_sample.py", "grader_timeout"),
    "grader_memory_mb": ("rm_hub/test_pool.py", "memory_mb"),
    "grader_recycle": ("rm_hub/test_hostile.py", "recycle"),
    "grader_total_timeout": ("rm_hub/test_sample.py", "grader_total_timeout"),
    "buffer_filter_path": ("buffer/test_queue.py", "buffer_filter_path"),
    "max_staleness": ("rollout/test_between_batches.py", "max_staleness"),
    "partial_rollout": ("rollout/test_between_batches.py", "partial_rollout"),
    "mask_offpolicy_in_partial_rollout": ("rollout/test_between_batches.py", "mask_offpolicy"),
    "max_token_staleness": ("rollout/test_between_batches.py", "max_token_staleness"),
    "rollout_max_concurrency": ("rollout/test_admission.py", "places"),
    "async_save": ("train/megatron/test_checkpoint.py", "async_save"),
    "dist_ckpt_optim_fully_reshardable": ("train/megatron/test_checkpoint.py", "dist_ckpt_optim"),
    "rollout_workers": ("cluster/test_disturbed_runs.py", "kill_workers"),
    "update_weights_interval": ("run/test_driver.py", "update_weights_interval"),
    "embedded_slots": ("engine/embedded/test_core.py", "slots"),
    "event_loop_block_warning": ("test_clock.py", "Watchdog"),
    "deterministic_mode": ("train/megatron/test_single.py", "deterministic_mode"),
    "balance_data": ("train/test_packing.py", "balance"),
    "recompute_granularity": ("train/megatron/test_single.py", "recompute_granularity"),
    "moe_grouped_gemm": ("train/megatron/test_mixtures.py", "moe_grouped_gemm"),
    "sglang_server_concurrency": ("engine/test_pool.py", "sglang_server_concurrency"),
    "engine_max_retries": ("engine/test_pool.py", "engine_max_retries"),
    "engine_retry_backoff": ("engine/test_pool.py", "engine_retry_backoff"),
    "engine_absence_timeout": ("engine/test_members.py", "engine_absence_timeout"),
    "engine_probe_interval": ("engine/test_members.py", "engine_probe_interval"),
    "engine_hang_timeout": ("engine/test_members.py", "engine_hang_timeout"),
    "pause_generation_mode": ("engine/test_local.py", "pause_generation_mode"),
    "train_threads": ("run/test_local.py", "train_threads"),
    "embedded_threads": ("run/test_local.py", "embedded_threads"),
    "device": ("run/test_devices.py", "device"),
    "backend": ("cluster/test_train.py", "train"),
}

UNSHOWN = {
    "distributed_timeout_minutes": "a collective that hangs takes a minute and a second process to show",
    "start_timeout": "a start that is broken off leaves its thread behind, in one process with the runs that follow",
}
