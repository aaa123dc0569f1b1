"""What reinforcement learning computes on its devices, made in one place for the trainer and the planner."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
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
from jaxrl_llm.models.decoder import Decoder, cast
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.stages.critic import critic_of


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
    policy = PolicyGradient(run.recipe.algorithm, run.learner.updates > 1)
    ptx = run.rollout.collect.ptx
    return (policy,) if ptx is None else (policy, NextToken(ptx.coef, "text/"))


def moved_by_rules(run: Run) -> dict[str, float]:
    """The coefficients of loss and reward that a rule moves from step to step, as before the first step."""
    found = {constraint.coefficient: float(constraint.multiplier) for constraint in run.scoring.constraints}
    return found if run.recipe.controller is None else found | {"kl_coef": run.recipe.algorithm.kl_coef}


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
    mixed = [Sample(prompts[0][:1], ids, mask, counted_by=(TEXT,)) for _ in range(texts)]
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
    optimiser = run.learner.optimiser
    compute = compute_for(run.learner, model.config, platform_of(mesh))
    sampled = jax.eval_shape(lambda m: for_sampling(cast(m, compute.dtype), platform_of(where)), model)
    engine = Engine(sampled, rollout.slots, rollout.max_length, rollout.chunk, where, rollout.strict, rollout.group)
    weights = weights_for_sampling(model, compute.dtype, mesh, where, keep=rollout.collect.staleness > 0)
    objectives = objectives_of(run)
    update = make_update(objectives, build(optimiser), learning_rate(optimiser), compute)
    longest = configs.longest_row(run)
    completion = longest - rollout.max_prompt_tokens
    layout = layout_for(run.learner, compute, longest, completion, mesh)
    forward = Forward(layout, compute, rollout.temperature, mesh)
    policy = Training(objectives, update)
    if run.recipe.critic is None:
        return Programs(engine, weights, (policy,), forward)
    critic, values = critic_of(run, model.config, forward, tokenizer)
    return Programs(engine, weights, (policy, critic), forward, values)
