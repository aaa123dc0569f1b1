"""Parts of reinforcement learning that trainer and planner share: ingredients, objectives, rules, device programs."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.engine import Sampling
from jaxrl_llm.engine.engine import Backend, backend_for, weights_for_sampling
from jaxrl_llm.learner import Forward, PolicyGradient, Sample, Training, make_update
from jaxrl_llm.learner.forward import planned_routes
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import compute_for, layout_for, rows_for_turns
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import policy_shapes
from jaxrl_llm.rollout.collect import Sampler
from jaxrl_llm.rollout.groups import AdmissionPolicy, GroupSource
from jaxrl_llm.rules import (
    BY_HAND,
    LR_SCALE,
    OF_ENTROPY,
    Rule,
    by_hand,
    decide_by_user_rule,
    entropy_controlled,
    guards_of,
    kl_controlled,
    rules_of,
)
from jaxrl_llm.runs import architecture_of
from jaxrl_llm.sharding import compiler_options, platform_of
from jaxrl_llm.stages.ingredients import (
    CRITIC,
    Constraints,
    CriticRole,
    Ingredient,
    Observations,
    PretrainingMix,
    SharedCredit,
    StageContext,
    WinRate,
)
from jaxrl_llm.stages.judges import judge_passes
from jaxrl_llm.stages.stage import Architectures, Groups, Outline, PlannedSampler, planned_state
from jaxrl_llm.stages.teachers import Teachers

INGREDIENTS: list[type[Ingredient]] = [
    *(SharedCredit, Observations),
]
"""Ingredients with no more than the hooks of ``Ingredient``, in the order of their calls."""


@dataclasses.dataclass(frozen=True)
class Ingredients:
    """The ingredients of a run, in the order of their hooks' calls; None for an unused one. ``others``:
    ``INGREDIENTS``.
    """

    critic: CriticRole | None
    others: tuple[Ingredient, ...]
    constraints: Constraints | None
    texts: PretrainingMix | None
    teachers: Teachers | None
    win_rate: WinRate | None

    def __iter__(self) -> Iterator[Ingredient]:
        """Yield the ingredients that the run uses."""
        everything = (self.critic, *self.others, self.constraints, self.texts, self.teachers, self.win_rate)
        return (ingredient for ingredient in everything if ingredient is not None)

    def prepared(self, context: StageContext) -> "Ingredients":
        """Load the data and models of each."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        ready = {name: part and part.prepared(context) for name, part in fields.items() if name != "others"}
        return Ingredients(others=tuple(ingredient.prepared(context) for ingredient in self.others), **ready)


def ingredients_of(run: configs.Run) -> Ingredients:
    """Return the ingredients of a run, with nothing loaded yet."""
    others = tuple(ingredient for kind in INGREDIENTS if (ingredient := kind.of(run)) is not None)
    texts, teachers, win_rate = PretrainingMix.of(run), Teachers.of(run), WinRate.of(run)
    return Ingredients(CriticRole.of(run), others, Constraints.of(run), texts, teachers, win_rate)


def policy_objectives(run: configs.Run, ingredients: Ingredients) -> tuple[Objective, ...]:
    """Return the training objectives of the policy; its gradient needs completions of its own."""
    algorithm, moves = run.recipe.algorithm, run.recipe.of_entropy is not None
    teacher = run.scoring.distillation
    has_other_terms = algorithm.kl_in_loss or algorithm.entropy_coef or moves
    idle = teacher is not None and configs.without_rewards(run) and not (teacher.by_policy_gradient or has_other_terms)
    policy = PolicyGradient(algorithm, run.learner.updates > 1, moves, idle)
    policies = (policy,) if configs.samples_groups(run) else ()
    return (*policies, *(objective for ingredient in ingredients for objective in ingredient.objectives))


def coefficients_of(run: configs.Run, ingredients: Ingredients) -> dict[str, float]:
    """Return the first values of the coefficients of the terms of loss and reward; rules may change them."""
    coefficients = {name: number for ingredient in ingredients for name, number in ingredient.coefficients.items()}
    if run.rules.guards and run.rules.on_guard == "rollback":
        coefficients[LR_SCALE] = 1.0
    algorithm = run.recipe.algorithm
    if algorithm.kl_coef and configs.samples_groups(run):
        coefficients["kl_coef"] = algorithm.kl_coef
    if (algorithm.entropy_coef or run.recipe.of_entropy is not None) and configs.samples_groups(run):
        coefficients["entropy_coef"] = algorithm.entropy_coef
    return coefficients


def rules_for(run: configs.Run, ingredients: Ingredients) -> dict[str, Rule]:
    """Return the rules between this run's steps, by name; if several stop it, the first gives the reason."""
    of_ingredients = {name: rule for ingredient in ingredients for name, rule in ingredient.rules.items()}
    rules = guards_of(run, of_ingredients, len(policy_objectives(run, ingredients)) > 1)
    rules |= rules_of(run.recipe.resets, run.evaluation.every, configs.evaluation_key(run))
    if configs.keeps_reference(run):
        rules[BY_HAND] = partial(by_hand, resets=run.recipe.resets)
    if run.recipe.of_kl is not None:
        rules["controller"] = partial(kl_controlled, reads=run.recipe.of_kl.reads, controller=run.recipe.of_kl)
    if run.recipe.of_entropy is not None:
        rules[OF_ENTROPY] = partial(entropy_controlled, controller=run.recipe.of_entropy)
    return rules | {f"own/{rule.name}": partial(decide_by_user_rule, rule=rule) for rule in run.rules.own}


def dropped_endings(run: configs.Run) -> tuple[str, ...]:
    """Return the finish reasons of completions that the loss excludes."""
    cut_off = ("length",) if run.recipe.overlong.drop else ()
    return cut_off if run.rollout.repetition.learn else (*cut_off, "repetition")


def planned_minibatch(
    run: configs.Run, ingredients: Ingredients, config: ModelConfig, tokens: int | None = None, updates: int = 0
) -> list[Sample]:
    """Return the samples of one optimiser update: groups with prompts and completions (or ``tokens``) at their longest.
    ``updates``: optimiser updates of a step; 0 takes the learner's setting.
    """
    rollout = run.rollout
    updates = updates or run.learner.minibatches
    length = rollout.max_new_tokens if tokens is None else tokens
    groups = -(-rollout.prompts // updates)
    ids = np.zeros(length, np.int32)
    mask = np.ones(length, bool)
    logp = np.zeros(length, np.float32)
    scalars = {"advantages": 0.0}
    arrays = {"sampler_logp": logp, "fresh": mask}
    if run.learner.keep_sampling_mask:
        arrays["kept"] = np.broadcast_to(np.uint32(0), (length, -(-config.vocab_size // 32)))
    if run.recipe.algorithm.advantage.by_token:
        arrays["advantages"] = logp
        scalars = {}
    arrays |= {name: logp for name in run.recipe.algorithm.reads}
    prompts = [np.full(rollout.max_prompt_tokens, group, np.int32) for group in range(groups)]
    experts, prompt_experts = planned_routes(config, length, rollout.max_prompt_tokens, run.learner.routing_replay)
    arrays |= experts
    samples = [
        Sample(prompt, ids, mask, scalars, arrays, prompt_experts) for prompt in prompts for _ in range(rollout.group)
    ]
    for ingredient in ingredients:
        samples = ingredient.planned_samples(samples, updates)
    return samples


def build_training(
    run: configs.Run,
    ingredients: Ingredients,
    model: Decoder,
    mesh: Any,
    tokenizer: Any,
    find: Architectures = architecture_of,
) -> tuple[tuple[Training, ...], Mapping[str, Forward]]:
    """Return how each role is trained, the policy first, and how the learner runs the model of each. ``mesh`` may be
    abstract; ``tokenizer``: the policy's; ``find``: the architecture of a model that is not loaded yet.
    """
    optimiser = run.learner.optimiser
    compute = compute_for(run.learner, model.config, platform_of(mesh), compiler_options(mesh))
    objectives = policy_objectives(run, ingredients)
    update = make_update(objectives, build(optimiser), learning_rate(optimiser), compute)
    longest = run.longest_row
    completion = longest - run.rollout.max_prompt_tokens
    each = run.rollout.max_prompt_tokens + run.rollout.group * completion
    tokens = -(-run.rollout.prompts // run.learner.minibatches) * each
    layout = layout_for(run.learner, compute, longest, completion, mesh, model.config, tokens)
    if run.rollout.episode.history == "fork" and any(task.plays for task in configs.tasks_in(run.task)):
        layout = rows_for_turns(layout, run.rollout.episode.max_turns, run.learner.compute.microbatch_rows)
    layout = layout.with_room(planned_minibatch(run, ingredients, model.config))
    forward = Forward(layout, compute, run.rollout.temperature, mesh)
    teachers = ingredients.teachers and ingredients.teachers.in_update(forward, find)
    training, forwards = [Training(objectives, update, teachers=teachers)], {"policy": forward}
    if ingredients.critic is not None:
        critic, forwards[CRITIC] = ingredients.critic.role(model.config, forward, tokenizer, find)
        training.append(critic)
    return tuple(training), forwards


def build_engine(
    run: configs.Run, model: Decoder, dtype: Any, mesh: Mesh, sampling_mesh: Mesh
) -> tuple[Backend, Callable[[Any], Any]]:
    """Return the engine of a run, and the function from the policy to sampling weights; nothing is computed yet:
    ``model`` may be shapes, and the devices of ``mesh``, which learns in ``dtype``, described only.
    """
    rollout, engine = run.rollout, run.rollout.engine
    model = policy_shapes(model, run.learner.lora, mesh)
    return backend_for(
        model, dtype, mesh, sampling_mesh, rollout.collect.staleness > 0, slots=engine.slots,
        max_length=rollout.max_length, chunk=engine.chunk, strict=engine.strict, group=rollout.group,
        form="auto" if engine.attention == "auto" else None, router_bits=engine.router_bits,
        kv_cache_dtype=engine.kv_cache_dtype,
    )  # fmt: skip


def build_sampler(
    run: configs.Run, engine: Backend, source: GroupSource, stops: tuple[int, ...], status: Callable[[str], None]
) -> Sampler:
    """Return the sampler that fills the run's steps with groups."""
    rollout = run.rollout
    reads, left_out = run.recipe.filter_groups, dropped_endings(run)
    admission = AdmissionPolicy(
        rollout.prompts, engine.slots, rollout.max_new_tokens, reads, rollout.collect,
        configs.limits_of(configs.parts_of_task(run.task), rollout.max_new_tokens), left_out,
    )  # fmt: skip
    return Sampler(engine, source, rollout.sampling(stops, run.learner.keep_sampling_mask), admission, status)


def evaluation_sampling(run: configs.Run, stops: tuple[int, ...]) -> Sampling:
    """Return how answers to the evaluation problems are sampled."""
    evaluation = run.evaluation
    return dataclasses.replace(
        run.rollout.sampling(stops),
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=0,
        repetition=None,
    )


def groups(run: configs.Run) -> Groups:
    """Return the size of a step's batch."""
    rollout = run.rollout
    words = f"prompts x {rollout.group} completions of"
    return Groups("rollout.prompts", rollout.prompts, rollout.group, rollout.max_new_tokens, words)


def outline(run: configs.Run, model: Decoder, mesh: Any, where: Any, find: Architectures) -> Outline:
    """Outline the run's computation, with ``model`` as shapes; ``mesh`` learns, ``where`` samples, and both may be
    abstract. ``find`` maps the name of another model to its architecture.
    """
    ingredients = ingredients_of(run)
    training, forwards = build_training(run, ingredients, model, mesh, None, find)
    policy, rollout = forwards["policy"], run.rollout
    names = ("temperature", *coefficients_of(run, ingredients))
    of_policy = names if run.learner.target_kl is None else (*names, "target_kl")
    samples = planned_minibatch(run, ingredients, model.config, updates=1)
    passes = judge_passes(run, samples, where, find)
    if ingredients.critic is not None:
        passes.append(ingredients.critic.planned_pass(samples, forwards[CRITIC]))
    if ingredients.teachers is not None:
        passes += ingredients.teachers.passes(samples, policy, find)
    return Outline(
        state=planned_state(run, model, training, configs.keeps_reference(run)),
        training=training,
        forwards=forwards,
        groups=groups(run),
        samples=functools.partial(planned_minibatch, run, ingredients, model.config),
        coefficients={trained.role: of_policy if trained.role == "policy" else names for trained in training},
        passes=passes,
        sampler=PlannedSampler(
            rollout,
            rollout.sampling(model.config.tokens.eos, run.learner.keep_sampling_mask),
            lambda mesh, where: weights_for_sampling(
                policy_shapes(model, run.learner.lora, mesh),
                policy.compute.dtype,
                mesh,
                where,
                rollout.collect.staleness > 0,
                rollout.engine.router_bits,
            ),
        ),
    )
