"""Everything that is refused before anything is loaded."""

import math

from jaxrl_llm import tasks
from jaxrl_llm.algorithms.kl import K1
from jaxrl_llm.config.answers import check_answers
from jaxrl_llm.config.asking import check_order, check_replay
from jaxrl_llm.config.guards import check_guards
from jaxrl_llm.config.learning import check_critic, check_learner
from jaxrl_llm.config.mixture import holds_out, limits_of, parts_of_task, tasks_in
from jaxrl_llm.config.numbers import check_answers_asked, check_numbers
from jaxrl_llm.config.resets import check_resets
from jaxrl_llm.config.run import Run, overlong_weight, resolved, rewards_of
from jaxrl_llm.config.scored import bases, check_mixture, check_scored, of_steps
from jaxrl_llm.errors import require
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.rewards import group_shaping, shaping
from jaxrl_llm.rewards.by_task import OfTasks
from jaxrl_llm.rewards.shaping import RepetitionPenalty, Reward, SoftOverlong


def check_reinforcement(run: Run) -> None:
    """Refuse what cannot work, before anything is loaded; InputError names the field, its value and the remedy."""
    run = resolved(run)
    _check_counts(run)
    _check_rollout(run)
    _check_staleness(run)
    _check_ptx(run)
    check_order(run)
    check_replay(run)
    check_learner(run.learner, ("rollout.prompts", run.rollout.prompts), longest_row(run))
    check_critic(run.recipe, run.learner)
    _check_recipe(run)
    check_resets(run)
    _check_evaluation(run)
    check_scored(run)
    _check_scoring(run)
    check_answers(run)
    check_guards(run)
    check_mixture(run)
    for task in tasks_in(run.task, run.evaluation.task):
        tasks.check(task)


def longest_row(run: Run) -> int:
    """Tokens of a row at least: a prompt with its completion, and one more where the state after it has a value too."""
    return run.rollout.max_length + int("bootstrap" in run.recipe.algorithm.advantage.needs)


def rewards(run: Run) -> tuple[Reward | OfTasks, ...]:
    """The configured rewards, and the recipe's punishment of completions near the length limit of their task.

    What not all tasks of a mixture have is ``OfTasks``.
    """
    parts = parts_of_task(run.task)
    limits = limits_of(parts, run.rollout.max_new_tokens)
    weight = overlong_weight(run)
    found: list[tuple[Reward, list[str]]] = []
    for part in parts:
        label = part.task.label
        longest = limits[label]
        cache = round(run.recipe.overlong_share * longest)
        punished = (SoftOverlong(longest, cache, weight),) if cache and weight else ()
        for reward in rewards_of(run, part) + punished:
            same = [having for one, having in found if one == reward and label not in having]
            if same:
                same[0].append(label)
            else:
                found.append((reward, [label]))
    every = len(parts)
    return tuple(reward if len(having) == every else OfTasks(reward, tuple(having)) for reward, having in found)


def _check_counts(run: Run) -> None:
    rollout = run.rollout
    counts = {
        "rollout.prompts": rollout.prompts,
        "rollout.group": rollout.group,
        "rollout.slots": rollout.slots,
        "rollout.chunk": rollout.chunk,
        "rollout.collect.max_rounds": rollout.collect.max_rounds,
        "rollout.max_prompt_tokens": rollout.max_prompt_tokens,
        "rollout.max_new_tokens": rollout.max_new_tokens,
        "scoring.workers": run.scoring.workers,
    }
    others = {
        "rollout.top_k": rollout.top_k,
        "rollout.collect.token_budget": rollout.collect.token_budget,
        "rollout.collect.max_age": rollout.collect.max_age,
        "rollout.collect.patience": rollout.collect.patience,
    }
    check_numbers(run, counts, others)


def _check_rollout(run: Run) -> None:
    rollout = run.rollout
    require(
        0 < rollout.temperature < math.inf,
        f"rollout.temperature must be above 0 to learn from samples, and finite, got {rollout.temperature}",
    )
    _check_group(run)
    require(0 < rollout.top_p <= 1, f"rollout.top_p must be above 0 and at most 1, got {rollout.top_p}")
    truncates = rollout.top_k > 0 or rollout.top_p < 1
    kept = run.learner.keep_sampling_mask
    require(
        kept or not truncates,
        f"rollout.top_k {rollout.top_k} and top_p {rollout.top_p}: a truncated sampler is another policy than the "
        "one that learns; set learner.keep_sampling_mask True, or set rollout.top_k 0 and rollout.top_p 1",
    )
    require(
        truncates or not kept,
        "learner.keep_sampling_mask True has nothing to keep: set rollout.top_k or rollout.top_p, or "
        "learner.keep_sampling_mask False",
    )


def _check_group(run: Run) -> None:
    """Refuse a single completion of each prompt where something compares several."""
    recipe = run.recipe
    group = run.rollout.group
    require(
        group >= 2 or not getattr(recipe.algorithm.advantage, "compares", True),
        f"rollout.group {group} leaves nothing to compare: {recipe.name} needs at least 2 completions of each prompt",
    )
    require(
        group >= 2 or not recipe.filter_groups,
        f"rollout.group {group} leaves recipe.filter_groups {recipe.filter_groups} nothing to compare: set it to "
        "False, or rollout.group to at least 2",
    )
    relative = any(isinstance(shape, group_shaping.RelativeLength) for shape in recipe.shaping)
    require(
        group >= 2 or not relative,
        f"rollout.group {group} leaves recipe.shaping RelativeLength nothing to compare: take it out, or set "
        "rollout.group to at least 2",
    )


def _check_ptx(run: Run) -> None:
    ptx = run.rollout.collect.ptx
    if ptx is None:
        return
    tasks.check_texts(ptx.texts)
    require(ptx.rows >= 1, f"rollout.collect.ptx.rows must be at least 1, got {ptx.rows}")
    require(0 < ptx.coef < math.inf, f"rollout.collect.ptx.coef must be above 0, got {ptx.coef}")
    require(
        not isinstance(ptx.texts.source, tasks.Collected),
        "rollout.collect.ptx.texts are collected by no step: write them with jaxrl-llm collect, and give the table",
    )


def _check_staleness(run: Run) -> None:
    staleness = run.rollout.collect.staleness
    require(staleness in (0, 1), f"rollout.collect.staleness must be 0 or 1, got {staleness}")
    require(
        not run.mesh.rollout or staleness,
        f"mesh.rollout {run.mesh.rollout} sets devices aside that would wait for the learner: set "
        "rollout.collect.staleness 1",
    )


def _check_recipe(run: Run) -> None:
    recipe = run.recipe
    require(
        0 <= recipe.overlong_share < 1, f"recipe.overlong_share must be from 0 to below 1, got {recipe.overlong_share}"
    )
    require(
        recipe.filter_groups in (False, "accuracy", "reward"),
        f"recipe.filter_groups must be accuracy, reward or False, got {recipe.filter_groups!r}",
    )
    weight = recipe.overlong_weight
    require(weight is None or 0 <= weight < math.inf, f"recipe.overlong_weight must be at least 0, got {weight}")
    require(
        weight is None or recipe.overlong_share > 0,
        f"recipe.overlong_weight {weight} has no part of the budget to act in: set recipe.overlong_share above 0, or "
        "recipe.overlong_weight None",
    )
    algorithm = recipe.algorithm
    require(
        not (isinstance(algorithm.kl, K1) and algorithm.kl_in == "loss" and algorithm.kl_coef),
        f"recipe.algorithm.kl K1 with kl_coef {algorithm.kl_coef} in the loss pulls nowhere, since its expected "
        "gradient is 0: take kl.K2() or kl.K3Plus(), set kl_in 'reward', or kl_coef 0",
    )
    estimator = algorithm.advantage
    weights = getattr(estimator, "weights", ())
    count = len(rewards(run)) - len(of_steps(rewards(run)))
    require(
        not weights or len(weights) == count,
        f"recipe.algorithm.advantage.weights has {len(weights)} entries for {count} rewards: give one for each",
    )
    require(
        not (estimator.several and recipe.shaping),
        f"recipe.shaping {', '.join(type(shape).__name__ for shape in recipe.shaping)} changes the sum of the "
        f"rewards, and {type(estimator).__name__} looks at each alone: set recipe.shaping (), or take another "
        "estimator",
    )
    require(
        recipe.of_kl is None or recipe.algorithm.kl_coef > 0,
        "recipe.controller has no coefficient to move: set recipe.algorithm.kl_coef above 0, or leave it out",
    )
    require(
        len(recipe.controllers) == (recipe.of_kl is not None) + (recipe.of_entropy is not None),
        f"recipe.controller {', '.join(type(one).__name__ for one in recipe.controllers)} moves one coefficient twice: "
        "give at most one for the KL and one for the entropy",
    )
    entropy = recipe.of_entropy
    require(
        entropy is None or algorithm.entropy_coef <= entropy.largest,
        f"recipe.algorithm.entropy_coef {algorithm.entropy_coef} exceeds recipe.controller.largest "
        f"{entropy and entropy.largest}: lower the one, or raise the other",
    )
    require(
        not (run.output.monitor_kl and algorithm.needs_reference),
        f"output.monitor_kl True has nothing to add: recipe.algorithm.kl_coef {algorithm.kl_coef} measures kl in every "
        "step already; leave it out",
    )
    for shape in recipe.shaping:
        group_shaping.check(shape)


def _check_evaluation(run: Run) -> None:
    evaluation = run.evaluation
    check_answers_asked(evaluation)
    require(
        not evaluation.every or evaluation.task is not None or holds_out(run.task),
        f"evaluation.every {evaluation.every} has nothing to test on: set task.holdout above 0, or evaluation.task",
    )


def _check_scoring(run: Run) -> None:
    scoring = run.scoring
    require(0 < scoring.timeout_s < math.inf, f"scoring.timeout_s must be above 0 seconds, got {scoring.timeout_s}")
    require(
        not math.isinf(scoring.on_error), f"scoring.on_error must be a finite number or nan, got {scoring.on_error}"
    )
    require(bool(scoring.rewards), "scoring.rewards is empty: give at least one, such as Accuracy()")
    for reward in rewards(run):
        shaping.check(reward)
    for base in bases(run):
        require(
            run.rollout.repetition.on or not isinstance(base, RepetitionPenalty),
            "scoring.rewards has RepetitionPenalty, and nothing ends completions that repeat themselves: set "
            "rollout.repetition.longest_period and times, or leave it out",
        )


def validate_on_devices(run: Run, devices: int, processes: int = 1) -> None:
    """Refuse a mesh that the devices or the batch do not fit; before any weight is loaded."""
    require(
        processes == 1 or not run.mesh.rollout,
        f"mesh.rollout {run.mesh.rollout} sets devices aside within one process, and this run has {processes}: set "
        "it to 0",
    )
    data, fsdp, tensor = run.mesh.sizes(devices)
    rows = run.learner.microbatch_rows
    row_tokens = run.learner.row_tokens
    require(
        row_tokens % tensor == 0,
        f"learner.row_tokens {row_tokens} does not divide over mesh tensor {tensor}, so its positions would lie "
        f"whole on each of these devices: make it a multiple of {tensor}, or 0 to choose",
    )
    require(
        rows % (data * fsdp) == 0,
        f"learner.microbatch_rows {rows} does not divide over mesh data x fsdp = {data} x {fsdp}: make "
        f"it a multiple of {data * fsdp}, or 0 to choose",
    )


def validate_on_model(run: Run, model: ModelConfig) -> None:
    """Refuse prompts and completions that are longer than what the model was made for; before anything is compiled."""
    rollout = run.rollout
    positions = model.attention.max_positions
    require(
        rollout.max_length <= positions,
        f"rollout.max_prompt_tokens {rollout.max_prompt_tokens} and rollout.max_new_tokens {rollout.max_new_tokens} "
        f"need {rollout.max_length} positions, and the model was made for {positions}: lower one by "
        f"{rollout.max_length - positions}",
    )
