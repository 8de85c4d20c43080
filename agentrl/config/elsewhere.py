"""Settings of other trainers (slime, Megatron, TRL) that are none here: what each of them is here, or why it is none.

A name ends in `*` where all of that beginning share the answer. Looked up with underscores, without `--`.
"""

import re
from collections.abc import Mapping

CALLED: Mapping[str, str] = {
    "batch_size": "rollout_batch_size",
    "debug_train_only": "load_debug_rollout_data",
    "epochs": "num_epoch",
    "gradient_checkpointing": "recompute_granularity",
    "group_size": "n_samples_per_prompt",
    "learning_rate": "lr",
    "log_probs_max_tokens_per_gpu": "max_tokens_per_gpu",
    "max_new_tokens": "rollout_max_response_len",
    "max_tokens": "rollout_max_response_len",
    "mis_mode": "tis_mode",
    "model": "hf_checkpoint",
    "model_name_or_path": "hf_checkpoint",
    "model_path": "hf_checkpoint",
    "num_generations": "n_samples_per_prompt",
    "num_gpus_per_node": "actor_num_gpus_per_node",
    "num_train_epochs": "num_epoch",
    "reward_function": "custom_rm_path",
    "rollout_function_path": "custom_generate_function_path",
    "rollout_health_check_interval": "engine_probe_interval",
    "rollout_health_check_timeout": "engine_hang_timeout",
    "temperature": "rollout_temperature",
    "train_data": "prompt_data",
    "update_weight_transport": "update_weight_mode",
}
"""What our settings are called elsewhere: spelling alone would not lead there."""

_ANSWERS: Mapping[str, str] = {
    "the model's shape is read from --hf-checkpoint; leave {it} out": """
        add_qkv_bias apply_layernorm_1p attention_output_gate disable_bias_linear ffn_hidden_size group_query_attention
        hidden_size kv_channels kv_lora_rank make_vocab_size_divisible_by max_position_embeddings model_name moe_* mscale*
        multi_latent_attention no_rope_fusion norm_epsilon normalization num_attention_heads num_experts num_layers
        num_query_groups padded_vocab_size position_embedding_type q_lora_rank qk_head_dim qk_layernorm
        qk_pos_emb_head_dim rotary_* seq_length spec swiglu untie_embeddings_and_output_weights use_gated_attention
        use_rotary_position_embeddings v_head_dim vocab_size""",
    "the trainer decides this itself; leave {it} out": """
        accumulate_allreduce_grads_in_fp32 attention_backend attention_dropout hidden_dropout finetune log_passrate
        log_probs_chunk_size loss_mask_type use_fault_tolerance""",
    "not supported yet; leave {it} out": """
        async_save decoder_*_pipeline_num_layers enable_mtp_training expert_* freeze_* mtp_* multimodal_keys no_save_optim
        only_train_params_name_list optimizer_cpu_offload overlap_* qwen_gdn_backend ref_update_interval release_train
        reset_optimizer_states update_weight_delta_* use_precision_aware_optimizer use_rollout_routing_replay
        use_routing_replay use_stateless_adam""",
    "there is no such hook; docs/algorithms.md and README.md name those that there are": """
        custom_*_function_path custom_*_hook_path custom_*_path eval_function_path rollout_*_path""",
    "W&B reads it from the environment (WANDB_API_KEY, WANDB_ENTITY, WANDB_MODE and the like); leave {it} out": """
        disable_wandb_random_suffix wandb_*""",
    "the run balances and watches its engines itself; for a router of your own give its address to "
    "--rollout-external-engine-addrs": "sglang_config sglang_router_* use_slime_router",
    "evaluation sets are read with --input-key, --label-key and --tool-key": "eval_*_key",
    "--loss-type says whether there are advantages; leave {it} out": "disable_compute_advantages_and_returns",
    "set --advantage-estimator ppo, which learns one": "use_critic",
    "a checkpoint says where the run goes on; leave {it} out": "start_rollout_id ckpt_step ref_ckpt_step opd_teacher_ckpt_step",
    "the model is written to OUTPUT-DIR/model at the end; leave {it} out": "save_hf",
    "set them in the shell that starts the run": "train_env_vars",
}


def _patterns() -> dict[str, re.Pattern[str]]:
    found = {}
    for answer, names in _ANSWERS.items():
        parts = (re.escape(name).replace(r"\*", ".+") for name in names.split())
        found[answer] = re.compile("|".join(parts))
    return found


_PATTERNS = _patterns()


def answer(name: str) -> str | None:
    """What to say to a setting that is none here but is one elsewhere; `{it}` stands for it, or them."""
    plain = name.lstrip("-").replace("-", "_")
    if plain in CALLED:
        return None
    return next((said for said, pattern in _PATTERNS.items() if pattern.fullmatch(plain)), None)
