"""The device programs of reinforcement learning, built in one place for the trainer and the planner."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.engine import Sampling
from jaxrl_llm.engine.engine import Backend, backend_for, weights_for_sampling
from jaxrl_llm.learner import Forward, Sample, Training, make_update
from jaxrl_llm.learner.forward import planned_routes
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import compute_for, layout_for, with_rows
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.rollout.dynamic_sampling import Sampler
from jaxrl_llm.rollout.groups import AdmissionPolicy, GroupSource
from jaxrl_llm.runs.load import config_of
from jaxrl_llm.sharding import compiler_options, platform_of
from jaxrl_llm.stages.rl.ingredients import coefficients_of, dropped_endings, ingredients_of, objectives_of
from jaxrl_llm.stages.stage import Architectures, Groups, Outline, PlannedSampler, state_of


def minibatch(run: configs.Run, config: ModelConfig, tokens: int | None = None, updates: int = 0) -> list[Sample]:
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
    experts, of_prompt = planned_routes(config, length, rollout.max_prompt_tokens, run.learner.routing_replay)
    arrays |= experts
    samples = [
        Sample(prompt, ids, mask, scalars, arrays, of_prompt) for prompt in prompts for _ in range(rollout.group)
    ]
    for one in ingredients_of(run):
        samples = one.planned_samples(samples, updates)
    return samples


def learning_of(
    run: configs.Run, model: Decoder, mesh: Any, tokenizer: Any, find: Architectures = config_of
) -> tuple[tuple[Training, ...], Mapping[str, Forward]]:
    """Return how each role is trained, the policy first, and how the learner runs the model of each.

    ``mesh`` may be abstract; ``tokenizer``: the policy's; ``find``: the architecture of a model that is not loaded yet.
    """
    optimiser = run.learner.optimiser
    compute = compute_for(run.learner, model.config, platform_of(mesh), compiler_options(mesh))
    objectives = objectives_of(run)
    update = make_update(objectives, build(optimiser), learning_rate(optimiser), compute)
    longest = run.longest_row
    completion = longest - run.rollout.max_prompt_tokens
    each = run.rollout.max_prompt_tokens + run.rollout.group * completion
    tokens = -(-run.rollout.prompts // run.learner.minibatches) * each
    layout = layout_for(run.learner, compute, longest, completion, mesh, model.config, tokens)
    if run.rollout.episode.history == "fork" and any(task.plays for task in configs.tasks_in(run.task)):
        layout = with_rows(layout, run.rollout.episode.max_turns, run.learner.compute.microbatch_rows)
    forward = Forward(layout, compute, run.rollout.temperature, mesh)
    teachers = [one.teachers(forward, find) for one in ingredients_of(run)]
    training = [Training(objectives, update, teachers=next(filter(None, teachers), None))]
    forwards = {"policy": forward}
    for one in ingredients_of(run):
        role = one.role(model.config, forward, tokenizer, find)
        if role is not None:
            training.append(role[0])
            forwards[role[0].role] = role[1]
    return tuple(training), forwards


def sampling_of(
    run: configs.Run, model: Decoder, dtype: Any, mesh: Mesh, where: Mesh
) -> tuple[Backend, Callable[[Any], Any]]:
    """Return the engine of a run, and the function from the policy to sampling weights; nothing is computed yet.

    Args:
      run: with its settings resolved.
      model: may be shapes and dtypes.
      dtype: that the learner computes in.
      mesh: learns; its devices may be described only.
      where: samples.
    """
    rollout, engine = run.rollout, run.rollout.engine
    return backend_for(
        model, dtype, mesh, where, rollout.collect.staleness > 0, slots=engine.slots, max_length=rollout.max_length,
        chunk=engine.chunk, strict=engine.strict, group=rollout.group,
        form="auto" if engine.attention == "auto" else None, router_bits=engine.router_bits,
    )  # fmt: skip


def sampler_of(
    run: configs.Run, engine: Backend, source: GroupSource, stops: tuple[int, ...], status: Callable[[str], None]
) -> Sampler:
    """Return the sampler that fills the run's steps with groups."""
    rollout = run.rollout
    reads, left_out = run.recipe.filter_groups, dropped_endings(run)
    admission = AdmissionPolicy(
        rollout.prompts, rollout.engine.slots, rollout.max_new_tokens, reads, rollout.collect,
        configs.limits_of(configs.parts_of_task(run.task), rollout.max_new_tokens), left_out,
    )  # fmt: skip
    return Sampler(engine, source, rollout.sampling(stops, run.learner.keep_sampling_mask), admission, status)


def answering(run: configs.Run, stops: tuple[int, ...]) -> Sampling:
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
    """Outline the run's computation; ``mesh`` and ``where`` may be abstract.

    Args:
      run: with its settings resolved.
      model: as shapes.
      mesh: learns.
      where: samples.
      find: maps the name of a model other than the policy to its architecture.
    """
    training, forwards = learning_of(run, model, mesh, None, find)
    dtype = forwards["policy"].compute.dtype
    keep = run.rollout.collect.staleness > 0
    names = tuple(coefficients_of(run))
    others = tuple(name for name in names if name != "target_kl")
    stops = model.config.tokens.eos
    whole_step = minibatch(run, model.config, updates=1)
    return Outline(
        state=state_of(run, model, training, configs.keeps_reference(run)),
        training=training,
        forwards=forwards,
        groups=groups(run),
        samples=functools.partial(minibatch, run, model.config),
        coefficients={one.role: names if one.role == "policy" else others for one in training},
        passes=tuple(read for one in ingredients_of(run) for read in one.passes(whole_step, forwards, where, find)),
        sampler=PlannedSampler(
            run.rollout,
            run.rollout.sampling(stops, run.learner.keep_sampling_mask),
            lambda mesh, where: weights_for_sampling(model, dtype, mesh, where, keep, run.rollout.engine.router_bits),
        ),
    )
