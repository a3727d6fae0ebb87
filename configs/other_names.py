"""Keys and algorithms of TRL, verl and prime-rl, and the keys of Millrace that they correspond to."""

OTHER_NAMES = {
    "name": "run_name experiment_name",
    "model.path": "model_name_or_path model_name pretrain",
    "prompts.source": "dataset_name train_files train_data dataset",
    "generation.group_size": "num_generations rollout.n n_samples_per_prompt rollouts_per_example rollouts_per_prompt",
    "generation.max_new_tokens": "max_completion_length max_response_length generate_max_len sampling.max_tokens",
    "generation.engine": "use_vllm rollout.name",
    "generation.engine_args.tensor_parallel_size": "vllm_tensor_parallel_size tensor_model_parallel_size",
    "generation.engine_args.gpu_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "scoring.reward": "reward_funcs reward_function custom_reward_function.path reward_manager",
    "training.loss": "loss_type policy_loss loss_mode importance_sampling_level algorithm",
    "training.loss.clip_low": "epsilon clip_ratio clip_ratio_low cliprange eps_clip",
    "training.loss.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "training.aggregation": "loss_agg_mode",
    "training.advantage": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    "training.kl.coefficient": "beta kl_coef kl_loss_coef use_kl_loss init_kl_coef",
    "training.entropy_coefficient": "entropy_coeff entropy_coef",
    "training.max_steps": "num_train_epochs total_epochs total_training_steps num_steps",
    "training.groups_per_step": "train_batch_size per_device_train_batch_size batch_size rollout_batch_size",
    "training.minibatches": "ppo_mini_batch_size mini_batch_size",
    "training.epochs": "num_iterations ppo_epochs",
    "training.max_tokens_per_microbatch": "micro_batch_size gradient_accumulation_steps seq_len",
    "training.learning_rate": "lr actor_learning_rate",
    "training.schedule.decay": "lr_scheduler_type lr_scheduler",
    "training.schedule.warmup_steps": "lr_warmup_steps warmup_ratio num_warmup_steps",
    "training.max_grad_norm": "grad_clip clip_grad",
    "training.adamw.epsilon": "adam_epsilon adamw.epsilon optim.epsilon",
    "training.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "training.selection.drop_zero_advantage": "filter_groups dynamic_sampling",
    "training.checkpoint_every": "save_steps save_freq ckpt.interval",
    "training.lora.rank": "lora_r lora_rank",
    "staleness.max_staleness": "max_async_level async_level max_off_policy_steps staleness_threshold",
    "evaluation.every": "eval_steps test_freq eval_interval",
    "storage.root": "output_dir default_local_dir",
}
"""Key → its names there, whole or as the end of a longer one."""
_KEYS = {other: key for key, others in OTHER_NAMES.items() for other in others.split()}

ALGORITHMS = {
    "grpo": "training.loss=ppo_clip training.advantage=grpo training.aggregation=sequence_mean "
    "training.kl.coefficient=0.04",
    "dapo": "training.loss=ppo_clip training.loss.clip_high=0.28 training.advantage=grpo "
    "training.aggregation=token_mean training.selection.drop_zero_advantage=true",
    "dr_grpo": "training.loss=ppo_clip training.advantage=group_mean training.aggregation=constant",
    "rloo": "training.loss=reinforce training.advantage=leave_one_out staleness.too_old=mask",
    "ppo": "training.loss=ppo_clip",
}
"""Algorithms, and the settings that make them."""


def key_here(typed: str) -> str | None:
    """The key that another library calls `typed`, or as the end of that; None if it is not known."""
    parts = typed.lower().split(".")
    ends = (".".join(parts[start:]) for start in range(len(parts)))
    return next((_KEYS[end] for end in ends if end in _KEYS), None)
