"""TRL's and verl's names of a recipe's settings, translated where they mean exactly the same, refused otherwise.

docs/dialects.md lists the translations. Names of settings outside the loss only get a hint, not a translation, since
units and meanings differ.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_llm.errors import InputError
from jaxrl_llm.recipes import Recipe

ACTOR = "actor_rollout_ref.actor."
CORRECTION = "algorithm.rollout_correction."
KL = "kl kl_coef kl_in"
TRL = (
    ("loss_type", "surrogate reduce"),
    ("importance_sampling_level", "ratio"),
    ("epsilon epsilon_high delta sapo_temperature_pos sapo_temperature_neg", "surrogate"),
    ("beta", KL),
    ("use_bias_correction_kl", "kl"),
    ("scale_rewards", "advantage"),
    ("mask_truncated_completions", "drop_truncated"),
    ("off_policy_mask_threshold", "sequence_filter"),
    ("vllm_importance_sampling_correction vllm_importance_sampling_mode", "correction"),
    ("vllm_importance_sampling_clip_max vllm_importance_sampling_cap", "correction"),
    ("vllm_importance_sampling_clip_min", "correction"),
    ("entropy_coef", "entropy_coef"),
    ("use_adaptive_entropy entropy_target entropy_coef_delta entropy_coef_min entropy_coef_max", "controller"),
)
VERL = (
    ("algorithm.adv_estimator algorithm.norm_adv_by_std_in_grpo", "advantage"),
    (ACTOR + "policy_loss.loss_mode", "ratio surrogate reduce"),
    (ACTOR + "loss_agg_mode", "reduce"),
    (f"{ACTOR}clip_ratio_low {ACTOR}clip_ratio_high", "surrogate"),
    (ACTOR + "clip_ratio", ""),
    (f"{ACTOR}clip_ratio_c {ACTOR}tau_pos {ACTOR}tau_neg", "surrogate"),
    (ACTOR + "use_kl_loss", KL),
    (f"{ACTOR}kl_loss_coef {ACTOR}kl_loss_type", "kl kl_coef"),
    ("algorithm.use_kl_in_reward", KL),
    ("algorithm.kl_ctrl.kl_coef", "kl kl_coef"),
    ("algorithm.filter_groups.enable algorithm.filter_groups.metric", "filter_groups"),
    (f"{CORRECTION}rollout_is {CORRECTION}rollout_is_threshold", "correction"),
    (ACTOR + "entropy_coeff", "entropy_coef"),
)
"""Names of each dialect, and the fields of ``Recipe`` or ``Algorithm`` that they may change; "" for always refused."""


@dataclasses.dataclass(frozen=True)
class Spelling:
    """One setting's name in another trainer.

    Attributes:
      name: as that trainer has it, without dashes.
      dialect: the trainer.
      fields: fields of ``Recipe`` or ``Algorithm`` that it may change; empty for a spelling that is always refused.
    """

    name: str
    dialect: Literal["TRL", "verl"]
    fields: tuple[str, ...]

    def typed(self, value: str) -> str:
        """Return the spelling and value as its trainer has it: ``--beta 0.04``, ``algorithm.adv_estimator=grpo``."""
        return f"--{self.name} {value}" if self.dialect == "TRL" else f"{self.name}={value}"


SPELLINGS: dict[str, Spelling] = {}
SPELLINGS |= {name: Spelling(name, "TRL", tuple(fields.split())) for names, fields in TRL for name in names.split()}
SPELLINGS |= {name: Spelling(name, "verl", tuple(fields.split())) for names, fields in VERL for name in names.split()}
"""All spellings that are translated, or refused with a reason, by name."""

HINTS = """
num_generations rollout.n -> rollout.group
max_completion_length max_response_length max_tokens -> rollout.max_new_tokens
max_prompt_length -> rollout.max_prompt_tokens
temperature -> rollout.temperature
top_p -> rollout.top_p
top_k -> rollout.top_k
train_batch_size generation_batch_size -> rollout.prompts: prompts, each with rollout.group completions
per_device_train_batch_size -> learner.microbatch_rows: of all devices; rollout.prompts is how many prompts a step has
ppo_micro_batch_size ppo_micro_batch_size_per_gpu -> learner.microbatch_rows: of all devices
gradient_accumulation_steps -> learner.microbatch_rows: as many microbatches as an update needs are accumulated
steps_per_generation -> learner.minibatches: updates of each batch
ppo_mini_batch_size -> learner.minibatches: how many there are, not how large they are
num_iterations ppo_epochs -> learner.epochs
max_steps total_training_steps -> steps
num_train_epochs total_epochs -> steps: each of rollout.prompts prompts
completion_only_loss -> data.learn: completion; all for False, trl for what SFTTrainer learns
assistant_only_loss -> data.learn: completion; trl for what SFTTrainer learns
max_length -> batch.max_tokens: of a prompt with its completion
learning_rate lr -> learner.optimiser.learning_rate
warmup_steps lr_warmup_steps warmup_ratio lr_warmup_steps_ratio -> learner.optimiser.warmup: in updates
lr_scheduler_type -> learner.optimiser.schedule
optim -> learner.optimiser.name
weight_decay -> learner.optimiser.weight_decay
adam_beta1 -> learner.optimiser.b1
adam_beta2 -> learner.optimiser.b2
adam_epsilon -> learner.optimiser.eps
max_grad_norm grad_clip -> learner.optimiser.clip_norm
model_name_or_path model.path -> model
bf16 fp16 -> learner.compute_dtype: bfloat16
torch_dtype -> learner.dtype
gradient_checkpointing enable_gradient_checkpointing -> learner.remat
use_peft -> learner.lora.rank: above 0
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
report_to -> output.wandb: with a project's name; TensorBoard's curves are written anyway
project_name -> output.wandb
recipe.reference_reset -> recipe.resets.reference_every
recipe.reset_on_stall -> recipe.resets.on_stall
recipe.reset_optimiser -> recipe.resets.with_optimiser
recipe.optimiser_reset -> recipe.resets.optimiser_every
use_vllm vllm_mode -> : the sampler is built in; --rollout.slots completions are sampled at a time
logging_steps -> : every step is logged
dataset_name -> : problems are the task of the configuration's file: Task(HubDataset(NAME))
train_files -> : problems are the task of the configuration's file: Task(Table(PATH))
val_files -> : problems to test on are evaluation.task of the configuration's file
reward reward_funcs -> : rewards are scoring.rewards of the configuration's file, functions too
reward_weights -> : each of scoring.rewards has its weight in the configuration's file
recipe.controller -> : a controller is set in the configuration's file: replace(GRPO, controller=AdaptiveKL())
kl_ctrl.type -> : a controller is set in the configuration's file: replace(GRPO, controller=AdaptiveKL())
resume_from_checkpoint -> : the same command goes on; --from RUN[@STEP] begins a new run with another's weights
resume_mode -> : the same command goes on; --from RUN[@STEP] begins a new run with another's weights
"""
"""Names of other trainers, and of older versions of this package; the equivalent field, if any; a further note.
They are matched by their last part, or the last two.
"""
MEANINGS = {
    name: (meaning.partition(": ")[0], meaning.partition(": ")[2])
    for names, _, meaning in (line.partition(" -> ") for line in HINTS.strip().splitlines())
    for name in names.split()
}


def hint(name: str) -> tuple[str, str]:
    """Return (the equivalent field or "", a further note) for a name of another trainer; both empty if it is unknown.


    >>> hint("learner.lr"), hint("actor_rollout_ref.rollout.n")
    (('learner.optimiser.learning_rate', ''), ('rollout.group', ''))
    """
    parts = name.replace("-", "_").split(".")
    last = MEANINGS.get(parts[-1], ("", ""))
    return MEANINGS.get(".".join(parts[-2:]), last)


@dataclasses.dataclass(frozen=True)
class Given:
    """The spellings of one command, parsed as numbers, switches and choices.

    Attributes:
      texts: values by spelling, as typed.
    """

    texts: Mapping[str, str]

    def __contains__(self, name: str) -> bool:
        return name in self.texts

    def refuse(self, name: str | None, reason: str, when: bool = True) -> None:
        """Raise an InputError about a given spelling, unless ``when`` is False or ``name`` is None."""
        if when and name is not None:
            raise InputError(f"{SPELLINGS[name].typed(self.texts[name])}: {reason}")

    def first(self, *names: str) -> str | None:
        """Return the first of these names that was given, or None."""
        return next((name for name in names if name in self.texts), None)

    def number(self, name: str, default: Any = None, optional: bool = False) -> Any:
        """Return a finite number; with ``optional`` also None, where ``none`` or ``null`` is given."""
        if name not in self.texts:
            return default
        if optional and self.texts[name].lower() in ("none", "null"):
            return None
        try:
            value = float(self.texts[name])
        except ValueError:
            value = math.nan
        self.refuse(name, "expected a number", not math.isfinite(value))
        return value

    def switch(self, name: str, default: Any = None) -> Any:
        """Return True or False; the default where it was not given."""
        if name not in self.texts:
            return default
        word = self.texts[name].lower()
        self.refuse(name, "expected True or False", word not in ("true", "false"))
        return word == "true"

    def choice(self, name: str, choices: Mapping[str, Any], refused: Mapping[str, str] | None = None) -> Any:
        """Return the meaning of the given word; None if not given. ``refused``: reasons against other known words."""
        if name not in self.texts:
            return None
        word = self.texts[name]
        self.refuse(name, (refused or {}).get(word, f"expected {', '.join(choices)}"), word not in choices)
        return choices[word]


def translate(recipe: Recipe, settings: Mapping[str, str]) -> Recipe:
    """Translate spellings into a recipe; other settings stay, whatever the other trainer's default is.

    Args:
      recipe: the recipe to change.
      settings: values as typed, by names of ``SPELLINGS``; their order does not matter.

    Raises:
      InputError: names of both dialects; a value that does not parse; a setting that this library cannot express
        exactly, or a contradictory mix. The message is one line that names the spelling and the remedy.
    """
    for name in settings:
        if name not in SPELLINGS:
            raise InputError(f"no spelling {name}: docs/dialects.md lists those that are known")
    first: dict[str, dict[str, str]] = {}
    for name, value in settings.items():
        first.setdefault(SPELLINGS[name].dialect, {name: value})
    if len(first) > 1:
        raise InputError(
            f"{_typed(first['TRL'])} is TRL's and {_typed(first['verl'])} verl's: use one dialect in a command"
        )
    try:
        return _changed(recipe, settings)
    except InputError:
        raise
    except ValueError as error:
        better = "--loss_type grpo" if "TRL" in first else f"{ACTOR}loss_agg_mode=seq-mean-token-mean"
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
    from jaxrl_llm.cli.dialects import trl, verl

    if not settings:
        return recipe
    dialect = SPELLINGS[next(iter(settings))].dialect
    return (trl if dialect == "TRL" else verl).change(recipe, Given(settings))


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
