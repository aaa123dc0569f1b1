"""Names of settings that are not the loss's, as TRL, verl, transformers and peft have them, and where the same is set
here.

They are told, not translated: units and meanings differ. Names of older versions of this package stand here too.
"""

FIELDS: dict[str, tuple[str, str]] = {
    # Sampling.
    "num_generations": ("rollout.group", ""),
    "rollout.n": ("rollout.group", ""),
    "max_completion_length": ("rollout.max_new_tokens", ""),
    "max_response_length": ("rollout.max_new_tokens", ""),
    "max_tokens": ("rollout.max_new_tokens", ""),
    "max_prompt_length": ("rollout.max_prompt_tokens", ""),
    "temperature": ("rollout.temperature", ""),
    "top_p": ("rollout.top_p", ""),
    "top_k": ("rollout.top_k", ""),
    # Batches.
    "train_batch_size": ("rollout.prompts", "prompts, each with rollout.group completions"),
    "generation_batch_size": ("rollout.prompts", "prompts, each with rollout.group completions"),
    "per_device_train_batch_size": (
        "learner.microbatch_rows",
        "of all devices; rollout.prompts is how many prompts a step has",
    ),
    "ppo_micro_batch_size": ("learner.microbatch_rows", "of all devices"),
    "ppo_micro_batch_size_per_gpu": ("learner.microbatch_rows", "of all devices"),
    "gradient_accumulation_steps": (
        "learner.microbatch_rows",
        "as many microbatches as an update needs are accumulated",
    ),
    "steps_per_generation": ("learner.minibatches", "updates of each batch"),
    "ppo_mini_batch_size": ("learner.minibatches", "how many there are, not how large they are"),
    "num_iterations": ("learner.epochs", ""),
    "ppo_epochs": ("learner.epochs", ""),
    "max_steps": ("steps", ""),
    "total_training_steps": ("steps", ""),
    "num_train_epochs": ("steps", "each of rollout.prompts prompts"),
    "total_epochs": ("steps", "each of rollout.prompts prompts"),
    # Data to learn from.
    "completion_only_loss": ("data.learn", "completion; all for False, trl for what SFTTrainer learns"),
    "assistant_only_loss": ("data.learn", "completion; trl for what SFTTrainer learns"),
    "max_length": ("batch.max_tokens", "of a prompt with its completion"),
    # Optimiser.
    "learning_rate": ("learner.optimiser.learning_rate", ""),
    "lr": ("learner.optimiser.learning_rate", ""),
    "warmup_steps": ("learner.optimiser.warmup", "in updates"),
    "lr_warmup_steps": ("learner.optimiser.warmup", "in updates"),
    "warmup_ratio": ("learner.optimiser.warmup", "in updates"),
    "lr_warmup_steps_ratio": ("learner.optimiser.warmup", "in updates"),
    "lr_scheduler_type": ("learner.optimiser.schedule", ""),
    "optim": ("learner.optimiser.name", ""),
    "weight_decay": ("learner.optimiser.weight_decay", ""),
    "adam_beta1": ("learner.optimiser.b1", ""),
    "adam_beta2": ("learner.optimiser.b2", ""),
    "adam_epsilon": ("learner.optimiser.eps", ""),
    "max_grad_norm": ("learner.optimiser.clip_norm", ""),
    "grad_clip": ("learner.optimiser.clip_norm", ""),
    # The model, and where it lives.
    "model_name_or_path": ("model", ""),
    "model.path": ("model", ""),
    "bf16": ("learner.compute_dtype", "bfloat16"),
    "fp16": ("learner.compute_dtype", "bfloat16"),
    "torch_dtype": ("learner.dtype", ""),
    "gradient_checkpointing": ("learner.remat", ""),
    "enable_gradient_checkpointing": ("learner.remat", ""),
    "use_peft": ("learner.lora.rank", "above 0"),
    "lora_r": ("learner.lora.rank", ""),
    "lora_rank": ("learner.lora.rank", ""),
    "lora_alpha": ("learner.lora.alpha", ""),
    "lora_target_modules": ("learner.lora.targets", ""),
    "target_modules": ("learner.lora.targets", ""),
    "tensor_model_parallel_size": ("mesh.tensor", ""),
    "sync_ref_model": ("recipe.resets.reference_every", "in steps"),
    "ref_model_sync_steps": ("recipe.resets.reference_every", "in steps"),
    "ref_model_mixup_alpha": ("recipe.resets.mix", "of the policy"),
    # What is kept and shown.
    "output_dir": ("output.run_dir", ""),
    "default_local_dir": ("output.run_dir", ""),
    "run_name": ("output.run_dir", ""),
    "save_steps": ("output.checkpoint_every", "in steps"),
    "save_freq": ("output.checkpoint_every", "in steps"),
    "save_total_limit": ("output.keep", ""),
    "eval_steps": ("evaluation.every", "in steps"),
    "test_freq": ("evaluation.every", "in steps"),
    "num_generations_eval": ("evaluation.samples", ""),
    "log_completions": ("output.samples", "groups of each step"),
    "num_completions_to_print": ("output.samples", "groups of each step"),
    "report_to": ("output.wandb", "with a project's name; TensorBoard's curves are written anyway"),
    "project_name": ("output.wandb", ""),
    # Older versions of this package.
    "recipe.reference_reset": ("recipe.resets.reference_every", ""),
    "recipe.reset_on_stall": ("recipe.resets.on_stall", ""),
    "recipe.reset_optimiser": ("recipe.resets.with_optimiser", ""),
    "recipe.optimiser_reset": ("recipe.resets.optimiser_every", ""),
}
"""The field that means it and a word on its value, by the last part of its name elsewhere, or the last two."""

SENTENCES: dict[str, str] = {
    "use_vllm": "the sampler is built in; --rollout.slots completions are sampled at a time",
    "vllm_mode": "the sampler is built in; --rollout.slots completions are sampled at a time",
    "logging_steps": "every step is logged",
    "dataset_name": "problems are the task of the configuration's file: Task(HubDataset(NAME))",
    "train_files": "problems are the task of the configuration's file: Task(Table(PATH))",
    "val_files": "problems to test on are evaluation.task of the configuration's file",
    "reward": "rewards are scoring.rewards of the configuration's file, functions too",
    "reward_funcs": "rewards are scoring.rewards of the configuration's file, functions too",
    "reward_weights": "each of scoring.rewards has its weight in the configuration's file",
    "recipe.controller": "a controller is set in the configuration's file: replace(GRPO, controller=AdaptiveKL())",
    "kl_ctrl.type": "a controller is set in the configuration's file: replace(GRPO, controller=AdaptiveKL())",
    "resume_from_checkpoint": "the same command goes on; --from RUN[@STEP] begins a new run with another's weights",
    "resume_mode": "the same command goes on; --from RUN[@STEP] begins a new run with another's weights",
}
"""What to do in place of settings that no field means."""


def hint(name: str) -> tuple[str, str]:
    """(the field that means it, "" for none; what else to say) for a name of another trainer; both empty if it is not
    known.

    >>> hint("learner.lr"), hint("actor_rollout_ref.rollout.n")
    (('learner.optimiser.learning_rate', ''), ('rollout.group', ''))
    """
    parts = name.replace("-", "_").split(".")
    for known in (".".join(parts[-2:]), parts[-1]):
        if known in FIELDS:
            return FIELDS[known]
        if known in SENTENCES:
            return "", SENTENCES[known]
    return "", ""
