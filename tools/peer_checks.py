"""Whether the contestants of compare_peers did the same work."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_llm.models import logits
from jaxrl_llm.models.decoder import Decoder

SCORED_ROWS = 16
LOSS_GAP, NORM_GAP = 1e-5, 1e-3
"""Largest differences of losses (absolute) and of gradient norms (relative): those of rounding."""


def mean_logp(model: Decoder, prompts: list[list[int]], completions: list[list[int]]) -> float:
    """Mean log-probability (nats) that the model gives to the tokens of the longest few completions, in order."""
    longest = sorted(range(len(prompts)), key=lambda i: (-len(completions[i]), i))[:SCORED_ROWS]
    width = max(len(prompts[i]) + len(completions[i]) for i in longest)
    tokens, sampled = np.zeros((len(longest), width), np.int32), np.zeros((len(longest), width), bool)
    for line, i in enumerate(longest):
        end = len(prompts[i]) + len(completions[i])
        tokens[line, :end], sampled[line, len(prompts[i]) : end] = prompts[i] + completions[i], True
    scores = jax.nn.log_softmax(logits(model, tokens))[:, :-1]
    logp = jnp.take_along_axis(scores, jnp.asarray(tokens[:, 1:, None]), axis=-1)[..., 0]
    return float(jnp.mean(logp, where=sampled[:, 1:]))


def agreement(ours: list[int], theirs: list[int]) -> int:
    """How many tokens are the same before the first that differs."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def checked(name: str, answer: dict[str, Any], limits: list[int]) -> dict[str, Any]:
    """The answer, if every completion that was sampled has the length that was asked for."""
    lengths = [len(tokens) for tokens in answer.get("completions", [])]
    if lengths != limits and "completions" in answer:
        counts = f"{sum(lengths)} tokens in wrong lengths; {sum(limits)} were asked for"
        raise SystemExit(f"compare_peers: {name} returned {counts}")
    return answer


def same_updates(name: str, ours: list[list[float]], theirs: list[list[float]]) -> None:
    """SystemExit where another loss or gradient was computed: [loss, gradient norm] of each checked update."""
    for number, (mine, other) in enumerate(zip(ours, theirs, strict=True), start=1):
        close = abs(mine[0] - other[0]) <= LOSS_GAP and math.isclose(mine[1], other[1], rel_tol=NORM_GAP)
        if not close:
            raise SystemExit(
                f"compare_peers: update {number} of {name} has loss and gradient norm {other}, ours {mine}"
            )
