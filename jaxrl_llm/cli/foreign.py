"""TRL's, verl's and Tunix's names of settings: each is refused with the flag that it has here."""

import itertools
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from jaxrl_llm.errors import InputError

TRL = """
rollout.group = num_generations
rollout.max_new_tokens = max_completion_length
rollout.max_prompt_tokens ~ max_prompt_length
rollout.temperature = temperature
rollout.top_p = top_p
rollout.top_k = top_k
rollout.prompts ~ per_device_train_batch_size generation_batch_size
learner.compute.microbatch_rows ~ gradient_accumulation_steps
learner.minibatches ~ steps_per_generation
learner.epochs = num_iterations
steps ~ max_steps num_train_epochs
learner.optimiser.learning_rate = learning_rate
learner.optimiser.warmup ~ warmup_steps warmup_ratio
learner.optimiser.schedule ~ lr_scheduler_type
learner.optimiser.name ~ optim
learner.optimiser.weight_decay = weight_decay
learner.optimiser.moments.b1 = adam_beta1
learner.optimiser.moments.b2 = adam_beta2
learner.optimiser.moments.eps = adam_epsilon
learner.optimiser.clip_norm = max_grad_norm
model = model_name_or_path
learner.compute.dtype ~ bf16 fp16
learner.dtype ~ torch_dtype
learner.compute.remat ~ gradient_checkpointing
learner.lora.rank = lora_r
learner.lora.rank ~ use_peft load_in_4bit load_in_8bit
learner.lora.alpha = lora_alpha
learner.lora.targets ~ lora_target_modules
recipe.resets.reference_every ~ sync_ref_model ref_model_sync_steps
recipe.resets.mix = ref_model_mixup_alpha
output.run_dir = output_dir
output.checkpoint_every ~ save_steps
output.keep = save_total_limit
evaluation.every ~ eval_steps
evaluation.samples = num_generations_eval
output.samples ~ log_completions num_completions_to_print
output.trackers ~ report_to
recipe.algorithm.surrogate ~ loss_type
recipe.algorithm.ratio ~ importance_sampling_level
recipe.algorithm.surrogate.low ~ epsilon
recipe.algorithm.surrogate.high ~ epsilon_high
recipe.algorithm.surrogate.dual = delta
recipe.algorithm.surrogate.tau_pos = sapo_temperature_pos
recipe.algorithm.surrogate.tau_neg = sapo_temperature_neg
recipe.algorithm.kl_coef = beta
recipe.algorithm.kl ~ use_bias_correction_kl
recipe.algorithm.advantage ~ scale_rewards
recipe.overlong.drop ~ mask_truncated_completions
recipe.algorithm.sequence_filter ~ off_policy_mask_threshold
recipe.algorithm.token_filter ~ top_entropy_quantile
recipe.algorithm.correction ~ vllm_importance_sampling_correction vllm_importance_sampling_mode
recipe.algorithm.correction ~ vllm_importance_sampling_clip_max vllm_importance_sampling_clip_min
recipe.algorithm.entropy_coef ~ entropy_coef
recipe.controller ~ use_adaptive_entropy entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max
loss.beta = beta
loss.desirable = desirable_weight
loss.undesirable = undesirable_weight
loss.gamma = simpo_gamma
loss.nll_coef = cpo_alpha
data.learn ~ completion_only_loss assistant_only_loss
batch.max_tokens ~ max_length
~ use_vllm vllm_mode logging_steps dataset_name reward_funcs reward_weights push_to_hub resume_from_checkpoint
"""
"""Our flags, and TRL's names for them: ``=`` where meaning and unit are equal, ``~`` where they are not."""
VERL = """
rollout.prompts = data.train_batch_size
rollout.group = actor_rollout_ref.rollout.n
rollout.max_new_tokens = data.max_response_length
rollout.max_prompt_tokens ~ data.max_prompt_length
rollout.temperature = actor_rollout_ref.rollout.temperature
rollout.top_p = actor_rollout_ref.rollout.top_p
rollout.top_k ~ actor_rollout_ref.rollout.top_k
learner.minibatches ~ actor_rollout_ref.actor.ppo_mini_batch_size
learner.epochs = actor_rollout_ref.actor.ppo_epochs
learner.compute.microbatch_rows ~ actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu
learner.optimiser.learning_rate = actor_rollout_ref.actor.optim.lr
learner.optimiser.weight_decay = actor_rollout_ref.actor.optim.weight_decay
learner.optimiser.warmup ~ actor_rollout_ref.actor.optim.lr_warmup_steps
learner.optimiser.clip_norm = actor_rollout_ref.actor.grad_clip
model = actor_rollout_ref.model.path
learner.lora.rank = actor_rollout_ref.model.lora_rank
learner.lora.alpha = actor_rollout_ref.model.lora_alpha
learner.compute.remat ~ actor_rollout_ref.model.enable_gradient_checkpointing
mesh.tensor ~ actor_rollout_ref.rollout.tensor_model_parallel_size
steps = trainer.total_training_steps
steps ~ trainer.total_epochs
output.run_dir = trainer.default_local_dir
output.checkpoint_every ~ trainer.save_freq
evaluation.every ~ trainer.test_freq
output.trackers ~ trainer.logger trainer.project_name
recipe.algorithm.advantage ~ algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo
recipe.algorithm.surrogate ~ actor_rollout_ref.actor.policy_loss.loss_mode
recipe.algorithm.reduce ~ actor_rollout_ref.actor.loss_agg_mode
recipe.algorithm.surrogate.low ~ actor_rollout_ref.actor.clip_ratio_low actor_rollout_ref.actor.clip_ratio
recipe.algorithm.surrogate.high ~ actor_rollout_ref.actor.clip_ratio_high
recipe.algorithm.surrogate.dual = actor_rollout_ref.actor.clip_ratio_c
recipe.algorithm.surrogate.tau_pos = actor_rollout_ref.actor.tau_pos
recipe.algorithm.surrogate.tau_neg = actor_rollout_ref.actor.tau_neg
recipe.algorithm.kl ~ actor_rollout_ref.actor.use_kl_loss actor_rollout_ref.actor.kl_loss_type
recipe.algorithm.kl_coef = actor_rollout_ref.actor.kl_loss_coef algorithm.kl_ctrl.kl_coef
recipe.algorithm.kl_in ~ algorithm.use_kl_in_reward
recipe.algorithm.entropy_coef = actor_rollout_ref.actor.entropy_coeff
recipe.algorithm.correction ~ algorithm.rollout_correction.rollout_is
recipe.algorithm.correction ~ algorithm.rollout_correction.rollout_is_threshold
recipe.controller ~ algorithm.kl_ctrl.type
recipe.filter_groups ~ algorithm.filter_groups.enable algorithm.filter_groups.metric
~ data.train_files data.val_files trainer.n_gpus_per_node trainer.nnodes trainer.resume_mode trainer.experiment_name
"""
"""verl's names likewise, whole."""
TUNIX = "rollout.max_new_tokens = max_tokens_to_generate"
"""Tunix's names that TRL does not have."""
NOTES = {
    "batch_size": "--rollout.prompts, each with --rollout.group completions; of data to learn from, --batch.rows",
    "lr": "--learner.optimiser.learning_rate",
    "lora": "--learner.lora.rank, above 0",
    "run_name": "--run_dir",
    "max_tokens": "--rollout.max_new_tokens",
    "use_vllm": "the sampler is built in",
    "logging_steps": "every step is logged",
    "push_to_hub": "jaxrl-llm export RUN --out DIR --push USER/NAME",
    **dict.fromkeys(("gpus", "num_gpus", "n_gpus_per_node"), "all devices are used; CUDA_VISIBLE_DEVICES chooses"),
    **dict.fromkeys(("resume", "resume_from_checkpoint", "resume_mode"), "the same command resumes a run"),
    **dict.fromkeys(("dataset", "dataset_name"), "the configuration's file names the data: HubDataset(NAME)"),
    **dict.fromkeys(("train_files", "val_files"), "the configuration's file names the data: Table(PATH)"),
    **dict.fromkeys(("reward", "reward_funcs", "reward_weights"), "scoring.rewards of the configuration's file"),
}
"""What to do in place of names that have no flag here, or belong to no trainer; by their last part."""
PAGES = {"TRL": "docs/from_trl.md", "verl": "docs/from_verl.md", "Tunix": "docs/from_trl.md"}


def _by_name() -> Mapping[str, tuple[str, tuple[tuple[str, bool], ...]]]:
    """Return, by a foreign name, whose it is, and the flags that it may have here, each with whether they are equal."""
    found: dict[str, tuple[str, tuple[tuple[str, bool], ...]]] = {}
    for owner, table in (("TRL", TRL), ("verl", VERL), ("Tunix", TUNIX)):
        for line in table.strip().splitlines():
            ours, relation, names = re.split(r" ?([=~]) ", line)
            for name in names.split():
                before = found[name][1] if name in found else ()
                found[name] = owner, (*before, (ours, relation == "="))
    return MappingProxyType(found)


NAMES = _by_name()


def refuse_foreign(arguments: Sequence[str], flags: Collection[str]) -> None:
    """Refuse the names of other trainers, all in one line, with the flags and values that are equal here.

    Args:
      arguments: of a command; verl's overrides are without dashes.
      flags: the names of those that the command has.

    Raises:
      InputError: there is such a name.
    """
    equal, unequal = {}, {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        typed, equals, value = argument.partition("=")
        name = typed.removeprefix("--").replace("-", "_") if typed.startswith("--") else typed.lstrip("+")
        if name in flags or name not in NAMES or not (equals or typed.startswith("--")):
            continue
        known = ((one, alike) for flag, alike in NAMES[name][1] for one in (flag, flag.rpartition(".")[2]))
        here = [(flag, alike) for flag, alike in known if not flag or flag in flags]  # of a run, or of a command
        value = following if not equals and not following.startswith("--") else value
        if not here:
            continue
        flag, alike = here[0]
        if alike:
            equal[typed] = f"--{flag} {shlex.quote(value)}" if value else f"--{flag}"
        else:
            note = f"nearest: --{flag}" if flag else NOTES.get(name.rpartition(".")[2], "")
            unequal[typed] = f"{typed} ({note})" if note else typed
    told = []
    if equal:
        told.append(f"{_are(equal)}; here {'they are' if len(equal) > 1 else 'it is'} {' '.join(equal.values())}")
    if unequal:
        pages = dict.fromkeys(PAGES[owner] for owner in _owners(unequal))
        told.append(f"{_are(unequal)}, without an equal here: {' and '.join(pages)}")
    if told:
        raise InputError("; ".join(told))


def _owners(names: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(NAMES[typed.lstrip("-+").replace("-", "_")][0] for typed in names))


def _are(names: Mapping[str, str]) -> str:
    """Return the names, or what is told of them, with whose they are."""
    owners = " and ".join(f"{owner}'s" for owner in _owners(names))
    shown = [told if told.startswith(typed) else typed for typed, told in names.items()]
    return f"{' and '.join(shown)} {'are' if len(shown) > 1 else 'is'} {owners} name{'s' * (len(shown) > 1)}"
