"""TRL's and verl's names of a recipe's settings, translated where they mean exactly the same, refused otherwise.

docs/dialects.md lists the translations. Names of settings outside the loss only get a hint, not a translation, since
units and meanings differ.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_llm.cli.dialects import trl, verl
from jaxrl_llm.cli.dialects.spelling import Given, Spelling
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.recipes import Recipe

SPELLINGS: dict[str, Spelling] = {
    name: Spelling(name, dialect, tuple(fields.split()), *rest)  # ty: ignore[invalid-argument-type]
    for dialect, table in (("TRL", trl.TABLE), ("verl", verl.TABLE))
    for names, fields, *rest in table
    for name in names.split()
}
"""All spellings that are translated, or refused with a reason, by name."""
HINTS = """
num_generations rollout.n -> rollout.group
max_completion_length max_response_length max_tokens -> rollout.max_new_tokens
max_prompt_length -> rollout.max_prompt_tokens
temperature -> rollout.temperature
top_p -> rollout.top_p
top_k -> rollout.top_k
batch_size -> : --rollout.prompts, each with --rollout.group completions; of data to learn from, --batch.rows
train_batch_size generation_batch_size -> rollout.prompts: prompts, each with rollout.group completions
per_device_train_batch_size -> learner.compute.microbatch_rows: of all devices; a step has rollout.prompts prompts
ppo_micro_batch_size ppo_micro_batch_size_per_gpu -> learner.compute.microbatch_rows: of all devices
gradient_accumulation_steps -> learner.compute.microbatch_rows: as many microbatches as an update needs are accumulated
steps_per_generation -> learner.minibatches: updates of each batch
ppo_mini_batch_size -> learner.minibatches: how many there are, not how large they are
num_iterations ppo_epochs -> learner.epochs
max_steps total_training_steps -> steps
num_train_epochs total_epochs -> steps: each of rollout.prompts prompts
desirable_weight -> loss.desirable
undesirable_weight -> loss.undesirable
simpo_gamma -> loss.gamma
cpo_alpha -> loss.nll_coef
completion_only_loss -> data.learn: completion; all for False, trl for what SFTTrainer learns
assistant_only_loss -> data.learn: completion; trl for what SFTTrainer learns
max_length -> batch.max_tokens: of a prompt with its completion
learning_rate lr -> learner.optimiser.learning_rate
warmup_steps lr_warmup_steps warmup_ratio lr_warmup_steps_ratio -> learner.optimiser.warmup: in updates
lr_scheduler_type -> learner.optimiser.schedule
optim -> learner.optimiser.name
weight_decay -> learner.optimiser.weight_decay
adam_beta1 -> learner.optimiser.moments.b1
adam_beta2 -> learner.optimiser.moments.b2
adam_epsilon -> learner.optimiser.moments.eps
max_grad_norm grad_clip -> learner.optimiser.clip_norm
model_name_or_path model.path -> model
bf16 fp16 -> learner.compute.dtype: bfloat16
torch_dtype -> learner.dtype
gradient_checkpointing enable_gradient_checkpointing -> learner.compute.remat
use_peft lora -> learner.lora.rank: above 0
load_in_4bit load_in_8bit -> : weights are not quantised; --learner.lora.rank 16 --learner.dtype bfloat16 saves memory
lora_r lora_rank -> learner.lora.rank
lora_alpha -> learner.lora.alpha
lora_target_modules target_modules -> learner.lora.targets
tensor_model_parallel_size -> mesh.tensor
sync_ref_model ref_model_sync_steps -> recipe.resets.reference_every: in steps
ref_model_mixup_alpha -> recipe.resets.mix: of the policy
output_dir default_local_dir run_name -> output.run_dir
save_steps save_freq -> output.checkpoint_every: in steps
save_total_limit -> output.keep
eval_steps test_freq -> evaluation.every: in steps
num_generations_eval -> evaluation.samples
log_completions num_completions_to_print -> output.samples: groups of each step
report_to logger -> output.trackers: tensorboard, wandb:PROJECT, trackio:PROJECT
project_name -> output.trackers: tensorboard wandb:PROJECT
use_vllm vllm_mode -> : the sampler is built in; --rollout.engine.slots completions are sampled at a time
logging_steps -> : every step is logged
dataset_name dataset -> : problems are the task of the configuration's file: Task(HubDataset(NAME))
train_files -> : problems are the task of the configuration's file: Task(Table(PATH))
val_files -> : problems to test on are evaluation.task of the configuration's file
reward reward_funcs -> : rewards are scoring.rewards of the configuration's file, functions too
reward_weights -> : each of scoring.rewards has its weight in the configuration's file
recipe.controller kl_ctrl.type -> : a controller is set in the configuration: replace(GRPO, controller=AdaptiveKL())
push_to_hub -> : jaxrl-llm export RUN --out DIR --push USER/NAME writes the model and publishes it
gpus num_gpus n_gpus_per_node -> : all devices are used; CUDA_VISIBLE_DEVICES chooses among GPUs
resume resume_from_checkpoint resume_mode -> : the same command resumes; --from RUN[@STEP] starts one with its weights
"""
"""Names of other trainers; the equivalent field, if any; a further note. They are matched by their last part, or
the last two.
"""
MEANINGS = {
    name: (meaning.partition(": ")[0], meaning.partition(": ")[2])
    for names, _, meaning in (line.partition(" -> ") for line in HINTS.strip().splitlines())
    for name in names.split()
}


def hint(name: str) -> tuple[str, str]:
    """Return (the equivalent field or "", a line about it) for a name of another trainer; both empty if it is unknown.

    >>> hint("actor_rollout_ref.rollout.n")
    ('rollout.group', 'here it is --rollout.group')
    """
    parts = name.replace("-", "_").split(".")
    last = MEANINGS.get(parts[-1], ("", ""))
    field, note = MEANINGS.get(".".join(parts[-2:]), last)
    return (field, f"here it is --{field}{f' ({note})' if note else ''}") if field else ("", note)


def translate(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """Translate spellings into a recipe; other settings stay, whatever the other trainer's default is.

    Args:
      recipe: the recipe to change.
      settings: values as typed, by names of ``SPELLINGS``; their order does not matter.

    Raises:
      InputError: names of both dialects; a value that does not parse; a setting that this library cannot express
        exactly, or a contradictory mix. The message is one line that names the spelling and the remedy.
    """
    if not settings:
        return recipe
    for name in settings:
        require(name in SPELLINGS, f"no spelling {name}: docs/dialects.md lists those that are known")
    first = {SPELLINGS[name].dialect: {name: value} for name, value in reversed(list(settings.items()))}
    if len(first) > 1:
        each = (f"{_typed(first['TRL'])} is TRL's", f"{_typed(first['verl'])} verl's")
        raise InputError(f"{' and '.join(each)}: use one dialect in a command")
    try:
        return _changed(recipe, settings)
    except InputError:
        raise
    except ValueError as error:
        better = "--loss_type grpo" if "TRL" in first else f"{verl.AGGREGATION}=seq-mean-token-mean"
        remedy = f" (SequenceMean is {better})" if "SequenceMean" in str(error) else ""
        raise InputError(f"{_typed(_culprits(recipe, settings, str(error)))}: {error}{remedy}") from error


def explain(recipe: Recipe, settings: Mapping[str, str]) -> list[str]:
    """Return one line for each spelling with its value in the translated recipe."""
    lines = []
    for name, value in settings.items():
        fields = [f for f in SPELLINGS[name].fields if f != "kl_in" or recipe.algorithm.kl is not None]
        found = {f: getattr(recipe if hasattr(recipe, f) else recipe.algorithm, f) for f in fields}
        became = ", ".join(f"{field} {_shown(value)}" for field, value in found.items())
        lines.append(f"{_typed({name: value})}: {became}")
    return lines


def _shown(value: Any) -> str:
    """Return a value as Python code, without the fields that are None."""
    if not dataclasses.is_dataclass(value):
        return str(value)
    fields = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    return f"{type(value).__name__}({', '.join(f'{name}={_shown(x)}' for name, x in fields if x is not None)})"


def _typed(settings: Mapping[str, str]) -> str:
    return " ".join(SPELLINGS[name].typed(value) for name, value in settings.items())


def _changed(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """Return the recipe after the effects of the settings, which come in the order of ``SPELLINGS``.

    Raises:
      InputError: a setting that cannot be expressed here, in one line.
      ValueError: the pieces contradict each other.
    """
    named = [SPELLINGS[name] for name in SPELLINGS if name in settings]
    given = Given({one.name: one for one in named}, settings, recipe)
    for one in named:
        if one.effect is None:
            given.fields |= dict.fromkeys(one.fields, given.get(one.name))
    for effect in dict.fromkeys(one.effect for one in named if one.effect is not None):
        effect(given)
    algorithm = dataclasses.replace(
        recipe.algorithm, **{name: given.fields.pop(name) for name in vars(recipe.algorithm)}
    )
    return dataclasses.replace(recipe, **given.fields | {"algorithm": algorithm})


def _culprits(recipe: Recipe, settings: Mapping[str, str], message: str) -> Mapping[str, str]:
    """Return a minimal set of spellings for which the recipe is refused with this message."""
    for name in settings:
        rest = {other: value for other, value in settings.items() if other != name}
        try:
            _changed(recipe, rest)
        except ValueError as error:
            if str(error) == message:
                return _culprits(recipe, rest, message)
    return settings
