"""Parsing of flags into values by tyro, with help of their own; any error becomes one line with a suggestion.

TRL's, verl's and Tunix's names of settings are each refused with the flag that it has here.
"""

import argparse
import contextlib
import difflib
import functools
import io
import itertools
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from jaxrl_llm.errors import InputError, did_you_mean, require
from jaxrl_llm.system.paths import local

OUTPUTS = ("--out", "--json", "--plot", "--dump")
"""Flags with a file or folder to write."""
USUAL = (
    "model run_dir steps learner.optimiser.learning_rate rollout.prompts rollout.group rollout.max_new_tokens "
    "rollout.temperature batch.rows batch.max_tokens learner.lora.rank evaluation.every output.checkpoint_every"
).split()
"""Settings that most people change, which help shows first; some are of other kinds of runs."""
SHORT = {"run_dir": "output.run_dir"}
"""Settings with a short name on the command line."""


def parse_flags(kind: type, arguments: list[str], program: str, description: str, default: Any = None) -> Any:
    """Parse flags into a value of the dataclass ``kind``, starting from ``default``; ``--help`` prints and exits.
    ``description``: the text of the help above the settings; one that begins with ``usage:`` is shown as it is.
    InputError: an unknown flag (the nearest one is named) or a value of the wrong type.
    """
    if default is not None and not arguments:
        return default  # tyro, which takes a while, would change nothing
    import tyro

    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        if (name := flag[2:].replace("-", "_")) in SHORT:
            arguments[index] = f"--{SHORT[name]}{equals}{value}"
    pieces = {}
    # Pieces are imported if a flag may be of one, or may be mistaken: as most of the recipe's are, and all that follow.
    by_class = any(
        argument in ("-h", "--help") or argument.startswith(("--recipe", "--rules")) for argument in arguments
    )
    if by_class and hasattr(default, "recipe"):
        from jaxrl_llm.cli.pieces import class_flags, set_by_class, with_pieces

        class_names = {}
        for name in set_by_class():
            while (value := take(arguments, f"--{name}", True)) is not None:
                class_names[name] = value
        default = with_pieces(default, class_names)
        pieces = class_flags(default)
    options: dict[str, Any] = {"config": (tyro.conf.AvoidSubcommands,), "use_underscores": True, "add_help": False}
    options |= {} if default is None else {"default": default}
    captured = io.StringIO()
    with warnings.catch_warnings():
        # A class of one's own stands where the annotation names those that come with the package.
        warnings.filterwarnings("ignore", category=UserWarning, module="tyro")
        parser = tyro.extras.get_parser(kind, **options)  # ty: ignore[deprecated]  nothing else lists the flags
        actions = {flag: action for action in parser._actions for flag in action.option_strings}
        fields = {flag[2:].replace("-", "_") for flag in actions if flag.startswith("--")} | pieces.keys()
        if helps := [index for index, argument in enumerate(arguments) if argument in ("-h", "--help")]:
            topic = "".join(arguments[helps[0] + 1 : helps[0] + 2])
            topic = "" if topic.startswith("-") else topic
            print(help_text([*actions.values(), *pieces.values()], topic, program, description))
            raise SystemExit
        typed = [argument.split("=", 1)[0] for argument in arguments if argument.startswith("--") or "=" in argument]
        if unknown := [name for name in typed if name[2:].replace("-", "_") not in fields]:
            refuse_unknown(arguments, unknown, default, fields, program)
        try:
            with contextlib.redirect_stderr(captured):
                parsed, surplus = tyro.cli(kind, args=arguments, return_unknown_args=True, **options)
        except SystemExit as stop:
            if not stop.code:
                raise
            raise InputError(flatten_error(captured.getvalue()) or f"see {program} --help") from None
    if surplus:
        name = surplus[0]
        raise InputError(
            f"{name} belongs to no option: write --option value; a switch stands alone (--x.name, --x.no_name)"
        )
    return parsed


def help_text(actions: Iterable[Any], topic: str, program: str, description: str) -> str:
    """Return the help of a command: ``description``, then flags. ``actions``: tyro's, one for each flag. ``topic``:
    empty for the usual settings and those that belong to no part, ``all``, or a part, such as ``rollout``.
    """
    flags = {action.option_strings[0].removeprefix("--"): action for action in actions if action.option_strings}
    parts = sorted({name.partition(".")[0] for name in flags if "." in name})
    topics = f"there are all, {', '.join(parts)}"
    require(
        topic in ("", "all", *parts),
        f"no part {topic!r} of the settings: {did_you_mean(topic, ['all', *parts], topics)}",
    )
    names = {name: name for name in flags if topic in ("all", name.partition(".")[0])}
    if not topic:
        usual = {name: SHORT.get(name, name) for name in USUAL}
        names = {name: full_name for name, full_name in usual.items() if full_name in flags}
        names |= {name: name for name in flags if "." not in name and name not in names}
    width = min(120, max(60, shutil.get_terminal_size((80, 24)).columns))
    layout = functools.partial(argparse.HelpFormatter, max_help_position=34, width=width)
    table = argparse.ArgumentParser(usage=argparse.SUPPRESS, add_help=False, formatter_class=layout)
    group = table.add_argument_group("settings" if topic else "usual settings")
    for name, full_name in names.items():
        text = " ".join(str(flags[full_name].help or "").replace("``", "").replace("%", "%%").split())
        if flags[full_name].nargs == 0:
            group.add_argument(*flags[full_name].option_strings, help=text, action="store_true")
        else:
            group.add_argument(f"--{name}", help=text, metavar=str(flags[full_name].metavar).replace("{None}", "None"))
    hint = f"{program} --help all lists all {len(flags)}, --help PART those of one part: {', '.join(parts)}."
    usage = f"usage: {program} [--option value ...]\n\n{textwrap.fill(description, width)}"
    texts = [description if description.startswith("usage:") else usage, table.format_help().strip()]
    return "\n\n".join(texts + [textwrap.fill(hint, width)] * (len(names) < len(flags)))


def refuse_unknown(arguments: list[str], unknown: list[str], default: Any, fields: set[str], program: str) -> None:
    """Refuse options that there are not, with those that may be meant; arguments that only look like one may pass."""
    if hasattr(default, "recipe"):
        from jaxrl_llm.cli.pieces import set_by_class

        fields = fields | set_by_class().keys()
    refuse_foreign(arguments, fields)
    for flag in unknown:
        name = flag[2:].replace("-", "_")
        if not flag.startswith("--") or name in fields:
            continue
        # A field is often named without the part that it belongs to, or with another.
        last = name.rpartition(".")[2]
        close = sorted(field for field in fields if f".{field}".endswith(f".{last}"))
        note = "" if close else NOTES.get(last, "")
        close = close or difflib.get_close_matches(name, sorted(fields), 1, 0.5)
        near = f"did you mean {' or '.join(f'--{field}' for field in close)}?" if close else f"see {program} --help"
        raise InputError(f"no option {flag}: {note or near}")


def flatten_error(box: str) -> str:
    """Shorten the text of one of tyro's boxes to one line: ``--steps: expected INT, got 'x'`` where possible."""
    lines = [re.sub(r"[│╰╯─]+|-{4,}", " ", line).strip() for line in box.splitlines() if not line.startswith("╭")]
    text = " ".join(line for line in lines if line and not line.startswith("For full helptext"))
    if choice := re.search(r"invalid choice ('.*?') for argument '(--\S+)'\. Expected one of \((.*?)\)", text):
        choices = choice[3].replace("'", "")
        return f"{choice[2]}: expected one of {choices}, got {choice[1]}"
    if missing := re.search(r"Missing value for argument '(--\S+)'", text):
        return f"{missing[1]} needs a value"
    if invalid := re.search(r"Error parsing (\w[\w.]*): (.*)", text):
        qualified = re.match(r"[A-Z]\w*\.", invalid[2])  # the class's own name stands before the field
        return invalid[2] if qualified else f"{invalid[1]}.{invalid[2]}"
    value = re.search(r"Error parsing (--\S+?):? (.*?) Argument helptext: .*?(?:\1|^--\S+) (\S+)", text)
    if value is None:
        return re.sub(r" Argument helptext:.*", "", text)
    quoted = re.findall(r"'([^']*)'", value[2])
    return f"{value[1]}: expected {value[3]}{f', got {quoted[-1]!r}' if quoted else f': {value[2]}'}"


def take(arguments: list[str], flag: str, value: bool) -> Any:
    """Remove ``flag`` (and its value) from the arguments; return the value, or whether the flag was given."""
    for index, argument in enumerate(arguments):
        name, equals, inline = argument.partition("=")
        if not name.startswith("--") or name[2:].replace("-", "_") != flag[2:]:
            continue
        del arguments[index]
        if not value:
            require(not equals, f"{argument}: {flag} stands alone, without a value")
            return True
        if inline:
            return local(inline, flag) if flag in OUTPUTS else inline
        has_value = not equals and index < len(arguments) and not arguments[index].startswith("--")
        require(has_value, f"{flag} needs a value")
        following = arguments.pop(index)
        return local(following, flag) if flag in OUTPUTS else following
    return None if value else False


def first(arguments: list[str], usage: str | None, missing: str, whole_help: bool = False) -> str:
    """Remove and return the leading argument; ``--help`` in its place prints ``usage`` and exits. ``whole_help``:
    ``usage`` is all the help that the command has, so it answers ``--help`` in any place.
    """
    if {"-h", "--help"} & set(arguments if whole_help else arguments[:1]):
        print(usage)
        raise SystemExit
    require(bool(arguments) and not arguments[0].startswith("-"), missing)
    return arguments.pop(0)


def status(text: str) -> None:
    """Show the current activity in place of the last one, on a terminal; in a log or a pipe it would only be noise."""
    if sys.stderr.isatty():
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


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
learner.lora.rank ~ use_peft
learner.lora.base ~ load_in_4bit load_in_8bit
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
    by_name: dict[str, tuple[str, tuple[tuple[str, bool], ...]]] = {}
    tunix = "rollout.max_new_tokens = max_tokens_to_generate"  # the only name that TRL does not have
    for owner, table in (("TRL", TRL), ("verl", VERL), ("Tunix", tunix)):
        for line in table.strip().splitlines():
            ours, relation, names = re.split(r" ?([=~]) ", line)
            for name in names.split():
                earlier = by_name[name][1] if name in by_name else ()
                by_name[name] = owner, (*earlier, (ours, relation == "="))
    return MappingProxyType(by_name)


NAMES = _by_name()


def refuse_foreign(arguments: Sequence[str], flags: Collection[str]) -> None:
    """Refuse the names of other trainers, all in one line, with the flags and values that are equal here.
    ``arguments``: of a command; verl's overrides are without dashes. ``flags``: the names of those that it has.
    """
    equal, unequal, owners = {}, {}, {}
    for argument, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="--"):
        typed, equals, value = argument.partition("=")
        name = typed.removeprefix("--").replace("-", "_") if typed.startswith("--") else typed.lstrip("+")
        if name in flags or name not in NAMES or not (equals or typed.startswith("--")):
            continue
        candidates = (
            (flag_name, is_equal) for flag, is_equal in NAMES[name][1] for flag_name in (flag, flag.rpartition(".")[2])
        )
        available = [candidate for candidate in candidates if not candidate[0] or candidate[0] in flags]
        value = following if not equals and not following.startswith("--") else value
        if not available:
            continue
        flag, is_equal = available[0]
        owners[typed] = NAMES[name][0]
        if is_equal:
            equal[typed] = f"--{flag} {shlex.quote(value)}" if value else f"--{flag}"
        else:
            note = f"nearest: --{flag}" if flag else NOTES.get(name.rpartition(".")[2], "")
            unequal[typed] = f"{typed} ({note})" if note else typed
    notes = []
    if equal:
        verb = "they are" if len(equal) > 1 else "it is"
        notes.append(f"{_describe_names(equal, owners)}; here {verb} {' '.join(equal.values())}")
    if unequal:
        pages = dict.fromkeys(PAGES[owners[typed]] for typed in unequal)
        notes.append(f"{_describe_names(unequal, owners)}, without an equal here: {' and '.join(pages)}")
    if notes:
        raise InputError("; ".join(notes))


def _describe_names(names: Mapping[str, str], owners: Mapping[str, str]) -> str:
    """Return the names, or the notes on them, with the trainers that own them."""
    trainers = " and ".join(dict.fromkeys(f"{owners[typed]}'s" for typed in names))
    phrases = [phrase if phrase.startswith(typed) else typed for typed, phrase in names.items()]
    return f"{' and '.join(phrases)} {'are' if len(phrases) > 1 else 'is'} {trainers} name{'s' * (len(phrases) > 1)}"
