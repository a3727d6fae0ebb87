"""What people who know TRL, verl or prime-rl type, and what it is called here."""

OTHER_NAMES = {
    "model.path": "model_name_or_path model_name pretrain policy_model",
    "model.chat_template": "chat_template_path",
    "prompts.source": "dataset_name train_files train_data dataset",
    "prompts.eval_source": "val_files eval_dataset test_files",
    "prompts.prompt_field": "prompt_key input_key",
    "prompts.answer_field": "label_key answer_key",
    "environment.max_turns": "max_assistant_turns max_tool_calling_iterations",
    "generation.group_size": "num_generations rollout.n n_samples_per_prompt rollouts_per_example rollouts_per_prompt",
    "generation.max_new_tokens": (
        "max_completion_length max_response_length response_length generate_max_len sampling.max_tokens"
    ),
    "generation.engine": "use_vllm rollout.name rollout.backend",
    "generation.engine_args.tensor_parallel_size": (
        "vllm_tensor_parallel_size tensor_model_parallel_size rollout.tensor_parallel_size"
    ),
    "generation.engine_args.gpu_memory_utilization": "vllm_gpu_memory_utilization gpu_memory_utilization",
    "generation.engine_args.max_model_len": "max_model_len vllm_max_model_length",
    "scoring.reward": "reward_funcs reward_function custom_reward_function custom_reward_function.path reward_manager",
    "scoring.weights": "reward_weights",
    "scoring.model": "reward_model reward_model_path",
    "training.loss": "loss_type policy_loss loss_mode importance_sampling_level algorithm",
    "training.loss.clip_low": "epsilon clip_ratio clip_ratio_low cliprange eps_clip",
    "training.loss.clip_high": "epsilon_high clip_ratio_high eps_clip_high",
    "training.loss.dual_clip": "delta clip_ratio_c",
    "training.aggregation": "loss_agg_mode",
    "training.advantage": "adv_estimator advantage_estimator scale_rewards norm_adv_by_std_in_grpo",
    "training.kl.coefficient": "beta kl_coef kl_loss_coef use_kl_loss init_kl_coef",
    "training.kl.estimator": "kl_loss_type kl_penalty",
    "training.entropy_coefficient": "entropy_coeff entropy_coef",
    "training.max_steps": "num_train_epochs total_epochs total_training_steps num_steps",
    "training.groups_per_step": (
        "train_batch_size per_device_train_batch_size batch_size rollout_batch_size generation_batch_size"
    ),
    "training.minibatches": "ppo_mini_batch_size mini_batch_size",
    "training.epochs": "num_iterations ppo_epochs",
    "training.max_tokens_per_microbatch": (
        "micro_batch_size ppo_micro_batch_size_per_gpu ppo_max_token_len_per_gpu seq_len max_seq_length "
        "gradient_accumulation_steps"
    ),
    "training.learning_rate": "lr actor_learning_rate",
    "training.schedule.decay": "lr_scheduler_type lr_scheduler",
    "training.schedule.warmup_steps": "lr_warmup_steps warmup_ratio num_warmup_steps",
    "training.max_grad_norm": "grad_clip clip_grad",
    "training.adamw.beta1": "adam_beta1",
    "training.adamw.beta2": "adam_beta2",
    "training.adamw.epsilon": "adam_epsilon adamw.epsilon optim.epsilon",
    "training.compute_dtype": "bf16 fp16 torch_dtype",
    "training.activation_checkpointing": "gradient_checkpointing enable_gradient_checkpointing",
    "training.selection.truncated": "mask_truncated_completions",
    "training.selection.drop_zero_advantage": "filter_groups dynamic_sampling",
    "training.selection.overlong_buffer": "overlong_buffer_len",
    "training.checkpoint_every": "save_steps save_freq ckpt.interval",
    "training.checkpoint_keep": "save_total_limit max_actor_ckpt_to_keep",
    "training.lora.rank": "lora_r lora_rank",
    "training.lora.target_modules": "lora_target_modules",
    "training.parallel.data": "n_gpus_per_node num_processes",
    "staleness.max_staleness": "max_async_level async_level max_off_policy_steps staleness_threshold",
    "evaluation.every": "eval_steps test_freq eval_interval",
    "placement.train.hosts": "nnodes",
    "placement.colocated": "vllm_mode colocate",
    "storage.root": "output_dir default_local_dir save_path",
    "name": "run_name experiment_name",
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
