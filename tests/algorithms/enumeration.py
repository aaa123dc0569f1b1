"""A policy small enough to list all it can say: exact objectives, and what the package's losses do in expectation.

The policy is a table of logits [N, 3], one row for each prefix ("node") that a sequence may pass. Exact quantities are
sums over the list of all sequences, or over nodes, and are differentiated as they stand: no score function, no
estimator.
"""

import itertools
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.algorithms import AdvantageContext, Algorithm, PolicyBatch, policy_loss

WORDS = 3
compiled = partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
"""There are many programs, each runs once or twice: most of the time goes into compiling them."""


class Tree(NamedTuple):
    """All sequences.

    Attributes:
      tokens: int[S, T].
      nodes: int[S, T], the prefix before each token: its row of logits.
      mask: bool[S, T].
      visits: float[S, N], 1 where a sequence passes a node.
    """

    tokens: np.ndarray
    nodes: np.ndarray
    mask: np.ndarray
    visits: np.ndarray


def grow(length: int, stop: int | None = None) -> Tree:
    """All sequences of this many tokens; with ``stop``, also those that end earlier, with that token."""
    uncut = itertools.product(range(WORDS), repeat=length)
    sequences = list(dict.fromkeys(s[: s.index(stop) + 1] if stop in s else s for s in uncut))
    prefixes = {s[:t]: None for t in range(length) for s in sequences if t < len(s)}
    number = {prefix: n for n, prefix in enumerate(prefixes)}
    shape = len(sequences), length
    tree = Tree(np.zeros(shape, int), np.zeros(shape, int), np.zeros(shape, bool), np.zeros((shape[0], len(number))))
    for i, s in enumerate(sequences):
        for t, token in enumerate(s):
            n = number[s[:t]]
            tree.tokens[i, t], tree.nodes[i, t], tree.mask[i, t], tree.visits[i, n] = token, n, True, 1
    return tree


def token_logp(logits: Any, tree: Tree) -> jax.Array:
    """What a learner sees: log-probabilities [S, T] of each sequence's tokens; NaN after its end."""
    return jnp.where(tree.mask, jax.nn.log_softmax(logits)[tree.nodes, tree.tokens], jnp.nan)


def probability(logits: Any, tree: Tree) -> jax.Array:
    """Of each sequence, [S]: a product of softmax probabilities."""
    return jnp.prod(jnp.where(tree.mask, jax.nn.softmax(logits)[tree.nodes, tree.tokens], 1), axis=1)


def reached(logits: Any, tree: Tree) -> jax.Array:
    """Probability [N] of passing each node."""
    return probability(logits, tree) @ tree.visits


def node_kl(first: Any, second: Any) -> jax.Array:
    """KL(first || second) [N] of the next token at each node, over the vocabulary."""
    p, q = jax.nn.softmax(first), jax.nn.softmax(second)
    return jnp.sum(p * (jnp.log(p) - jnp.log(q)), axis=1)


def mean_reward(logits: Any, tree: Tree, rewards: Any) -> jax.Array:
    """Expected reward."""
    return probability(logits, tree) @ rewards


def mean_at_nodes(logits: Any, tree: Tree, costs: Any) -> jax.Array:
    """Expected sum of costs [N] over the nodes of a sequence."""
    return reached(logits, tree) @ costs


def sequence_kl(logits: Any, tree: Tree, other: Any) -> jax.Array:
    """KL(policy || other) of whole sequences."""
    p, q = probability(logits, tree), probability(other, tree)
    return jnp.sum(p * (jnp.log(p) - jnp.log(q)))


def sequence_kl_from(logits: Any, tree: Tree, other: Any) -> jax.Array:
    """KL(other || policy) of whole sequences."""
    return sequence_kl(other, tree, logits)


def held_kl(logits: Any, prefixes: Any, other: Any) -> jax.Array:
    """KL(policy || other) of the next token, summed over nodes with fixed weights [N]."""
    return prefixes @ node_kl(logits, other)


def held_kl_from(logits: Any, prefixes: Any, other: Any) -> jax.Array:
    """KL(other || policy) likewise."""
    return prefixes @ node_kl(other, logits)


def local_objective(logits: Any, prefixes: Any, advantages: Any) -> jax.Array:
    """``sum_n P(n) sum_v pi(v | n) A(n, v)`` with fixed P [N] and A [N, 3]."""
    return jnp.sum(prefixes[:, None] * jax.nn.softmax(logits) * advantages)


@partial(compiled, static_argnames="objective")
def slope(objective: Any, logits: Any, *rest: Any) -> jax.Array:
    """Gradient [N, 3] of one of the objectives above."""
    return jax.grad(objective)(logits, *rest)


def worth(logits: Any, tree: Tree, rewards: Any) -> tuple[np.ndarray, np.ndarray]:
    """What a policy expects after a node, [N], and after a node and a token, [N, 3].

    rewards: float[S], or float[S, T] of what is still to come at each token.
    """
    p, state, action = np.asarray(probability(logits, tree)), np.zeros(logits.shape[0]), np.zeros(logits.shape)
    rewards = np.broadcast_to(np.reshape(rewards, (len(p), -1)), tree.mask.shape)
    for n in range(logits.shape[0]):
        passes = p[:, None] * (tree.mask & (tree.nodes == n))
        state[n] = np.average(rewards, weights=passes)
        action[n] = [np.average(rewards, weights=passes * (tree.tokens == word)) for word in range(WORDS)]
    return state, action


class Drawn(NamedTuple):
    """What a step of training has at hand, for all sequences; logits [N, 3] of each policy.

    Attributes:
      sampler: what the sequences are drawn from.
      old: the policy at the start of the updates.
      ref: the reference.
      rewards: float[S].
      values: a critic's, float[N], of each prefix.
    """

    sampler: Any
    old: Any
    ref: Any
    rewards: Any
    values: Any


def expected(algorithm: Algorithm, tree: Tree, live: Any, drawn: Drawn, size: int = 1) -> tuple[jax.Array, jax.Array]:
    """Value and gradient [N, 3] of the loss at ``live``, in expectation over batches of one group of ``size`` draws."""
    groups = np.array(list(itertools.product(range(len(tree.tokens)), repeat=size)))
    return _expected(algorithm, tree, groups, live, drawn)


@partial(compiled, static_argnames="algorithm")
def _expected(algorithm: Algorithm, tree: Tree, groups: Any, live: Any, drawn: Drawn) -> tuple[jax.Array, jax.Array]:
    weights = jnp.prod(probability(drawn.sampler, tree)[groups], axis=1)
    old, ref, sampler = (token_logp(x, tree) for x in (drawn.old, drawn.ref, drawn.sampler))

    def loss(logits: jax.Array) -> jax.Array:
        logp = token_logp(logits, tree)

        def of_batch(rows: jax.Array) -> jax.Array:
            context = AdvantageContext(tree.mask[rows], old[rows], ref[rows], drawn.values[tree.nodes[rows]])
            advantages = algorithm.advantage(drawn.rewards[rows][None], context)
            advantages = advantages[0] if advantages.size == rows.size else advantages
            batch = PolicyBatch(advantages, tree.mask[rows], old[rows], ref[rows], sampler[rows])
            return policy_loss(algorithm, logp[rows], batch)[0]

        return weights @ jax.vmap(of_batch)(groups)

    return jax.value_and_grad(loss)(live)
