"""What reinforcement learning computes on its devices, made in one place for the trainer and the planner."""

import collections
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import config as configs
from jaxrl_llm.config import Run
from jaxrl_llm.engine import Engine
from jaxrl_llm.engine.weight_transfer import for_sampling, weights_for_sampling
from jaxrl_llm.learner import Forward, PolicyGradient, Sample, Training, make_update
from jaxrl_llm.learner.likelihood import TEXT, NextToken
from jaxrl_llm.learner.objectives import Objective
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import compute_for, layout_for
from jaxrl_llm.learner.samples import to_value
from jaxrl_llm.models.decoder import Decoder, cast, initialise
from jaxrl_llm.models.heads import with_scalar_head
from jaxrl_llm.rules import LR_SCALE
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.stages.critic import Architectures, critic_of
from jaxrl_llm.stages.judges import forward_of, paths_of
from jaxrl_llm.stages.outline import Groups, Outline, Pass, Sampler, state_of
from jaxrl_llm.stages.reading import SCORED_AT_ONCE, scored_sample
from jaxrl_llm.trained import config_of


@dataclasses.dataclass(frozen=True)
class Programs:
    """The device's part of a run.

    Attributes:
      engine: samples.
      weights: from the policy to what the engine samples from.
      training: of each role, the policy first.
      forward: how the learner runs its models.
      values: how it runs the critic, which may be of another architecture; None where there is none.
    """

    engine: Engine
    weights: Callable[[Decoder], Decoder]
    training: tuple[Training, ...]
    forward: Forward
    values: Forward | None = None


def objectives_of(run: Run) -> tuple[Objective, ...]:
    """What the policy is trained towards."""
    policy = PolicyGradient(run.recipe.algorithm, run.learner.updates > 1, run.recipe.of_entropy is not None)
    ptx = run.rollout.collect.ptx
    return (policy,) if ptx is None else (policy, NextToken(ptx.coef, "text/"))


def moved_by_rules(run: Run) -> dict[str, float]:
    """The coefficients of loss and reward that a rule moves from step to step, as before the first step."""
    found = {constraint.coefficient: float(constraint.multiplier) for constraint in run.scoring.constraints}
    if run.rules.guards and run.rules.on_guard == "rollback":
        found[LR_SCALE] = 1.0
    algorithm = run.recipe.algorithm
    if run.recipe.of_kl is not None:
        found["kl_coef"] = algorithm.kl_coef
    if run.recipe.of_entropy is not None:
        found["entropy_coef"] = algorithm.entropy_coef
    return found


def coefficients_of(run: Run) -> dict[str, Any]:
    """What objectives and updates are given beside data, as before the first step."""
    found: dict[str, Any] = {"temperature": run.rollout.temperature} | moved_by_rules(run)
    if run.learner.target_kl is not None:
        found["target_kl"] = run.learner.target_kl
    return found


def minibatch(run: Run, vocab: int, tokens: int | None = None) -> list[Sample]:
    """The samples of one optimiser update: groups with prompts and completions (or ``tokens``) at their longest."""
    rollout = run.rollout
    length = rollout.max_new_tokens if tokens is None else tokens
    groups = -(-rollout.prompts // run.learner.minibatches)
    ids = np.zeros(length, np.int32)
    mask = np.ones(length, bool)
    logp = np.zeros(length, np.float32)
    scalars = {"advantages": 0.0}
    arrays = {"sampler_logp": logp, "fresh": mask}
    if run.learner.keep_sampling_mask:
        arrays["kept"] = np.broadcast_to(np.uint32(0), (length, -(-vocab // 32)))
    if run.recipe.algorithm.advantage.by_token:
        arrays["advantages"] = logp
        scalars = {}
    if run.recipe.critic is not None:
        arrays |= {"returns": logp, "old_values": logp}
    arrays |= {name: logp for name in run.recipe.algorithm.reads}
    prompts = [np.full(rollout.max_prompt_tokens, group, np.int32) for group in range(groups)]
    ptx = rollout.collect.ptx
    texts = 0 if ptx is None else -(-ptx.rows // run.learner.minibatches)
    mixed = [Sample(prompts[0][:1], ids, mask).counting((TEXT,)) for _ in range(texts)]
    return [Sample(prompt, ids, mask, scalars, arrays) for prompt in prompts for _ in range(rollout.group)] + mixed


def build_programs(run: Run, model: Decoder, mesh: Mesh, where: Mesh, tokenizer: Any = None) -> Programs:
    """Nothing is computed yet, and nothing compiled.

    Args:
      run: with its settings resolved.
      model: shapes and dtypes will do.
      mesh: learns; its devices may be described only.
      where: samples.
      tokenizer: the policy's; a critic that begins as another model must have the same.
    """
    rollout = run.rollout
    training, forward, values = learning_of(run, model, mesh, tokenizer)
    dtype = forward.compute.dtype
    sampled = jax.eval_shape(lambda m: for_sampling(cast(m, dtype), platform_of(where)), model)
    engine = Engine(sampled, rollout.slots, rollout.max_length, rollout.chunk, where, rollout.strict, rollout.group)
    return Programs(engine, transfer_of(run, model, dtype, mesh, where), training, forward, values)


def transfer_of(run: Run, model: Decoder, dtype: Any, mesh: Mesh, where: Mesh) -> Callable[[Decoder], Decoder]:
    """From the policy to what is sampled from."""
    return weights_for_sampling(model, dtype, mesh, where, keep=run.rollout.collect.staleness > 0)


def learning_of(
    run: Run, model: Decoder, mesh: Any, tokenizer: Any, find: Architectures = config_of
) -> tuple[tuple[Training, ...], Forward, Forward | None]:
    """How each role is trained, how the learner runs the policy, and how the critic, None where there is none.

    ``mesh`` may be abstract; ``find``: the architecture of a model that is not loaded yet.
    """
    optimiser = run.learner.optimiser
    compute = compute_for(run.learner, model.config, platform_of(mesh))
    objectives = objectives_of(run)
    update = make_update(objectives, build(optimiser), learning_rate(optimiser), compute)
    longest = configs.longest_row(run)
    completion = longest - run.rollout.max_prompt_tokens
    each = run.rollout.max_prompt_tokens + run.rollout.group * completion
    tokens = -(-run.rollout.prompts // run.learner.minibatches) * each
    layout = layout_for(run.learner, compute, longest, completion, mesh, model.config, tokens)
    forward = Forward(layout, compute, run.rollout.temperature, mesh)
    policy = Training(objectives, update)
    if run.recipe.critic is None:
        return (policy,), forward, None
    critic, values = critic_of(run, model.config, forward, tokenizer, find)
    return (policy, critic), forward, values


def groups(run: Run) -> Groups:
    """What a step learns from."""
    rollout = run.rollout
    words = f"prompts x {rollout.group} completions of"
    return Groups("rollout.prompts", rollout.prompts, rollout.group, rollout.max_new_tokens, words)


def outline(run: Run, model: Decoder, mesh: Any, where: Any, find: Architectures) -> Outline:
    """What the run computes where ``mesh`` learns and ``where`` samples, which may be abstract.

    Args:
      run: with its settings resolved.
      model: as shapes.
      mesh: learns.
      where: samples.
      find: the architecture of a critic's or reward model's name.
    """
    training, forward, values = learning_of(run, model, mesh, None, find)
    dtype = forward.compute.dtype
    names = tuple(coefficients_of(run))
    others = tuple(name for name in names if name != "target_kl")
    stops = model.config.tokens.eos
    return Outline(
        state=state_of(run, model, training, configs.keeps_reference(run)),
        training=training,
        forwards={one.role: forward if one.role == "policy" else values for one in training},
        groups=groups(run),
        samples=functools.partial(minibatch, run, model.config.vocab_size),
        coefficients={one.role: names if one.role == "policy" else others for one in training},
        passes=(*judging(run, where, find), *valuing(run, model.config.vocab_size, values)),
        sampler=Sampler(
            run.rollout,
            run.rollout.sampling(stops, run.learner.keep_sampling_mask),
            lambda mesh, where: transfer_of(run, model, dtype, mesh, where),
        ),
    )


def valuing(run: Run, vocab: int, values: Forward) -> list[Pass]:
    """The pass of the critic over a step's completions."""
    if run.recipe.critic is None:
        return []
    one_more = "bootstrap" in run.recipe.algorithm.advantage.needs
    samples = [to_value(sample, one_more) for sample in whole_batch(run, vocab)]
    return [Pass("values", values, samples, "values", 1, role="critic")]


def judging(run: Run, where: Any, find: Architectures) -> list[Pass]:
    """The passes of reward models, some completions at a time; models of one architecture share a program."""
    models = collections.Counter(find(path) for path in paths_of(run))
    if not models:
        return []
    samples = [scored_sample(sample.prompt, sample.tokens, {}) for sample in whole_batch(run, 1)]
    calls = -(-len(samples) // SCORED_AT_ONCE)
    passes = []
    for number, (config, count) in enumerate(models.items(), start=1):
        forward = forward_of(run, config, where)
        dtype = jnp.dtype(run.learner.compute_dtype)
        model = jax.eval_shape(lambda c=config, d=dtype: with_scalar_head(initialise(c, jax.random.key(0), d)))
        name = "judges" if number == 1 else f"judges {number}"
        some = samples[:SCORED_AT_ONCE]
        passes.append(Pass(name, forward, some, "values", calls * count, model=model, copies=count))
    return passes


def whole_batch(run: Run, vocab: int) -> list[Sample]:
    """The samples of a step, at their longest."""
    return minibatch(dataclasses.replace(run, learner=dataclasses.replace(run.learner, minibatches=1)), vocab)
