"""Independent answers: published numbers worked out by hand, and the policy loss as plain NumPy loops."""

import json
import math
from pathlib import Path

import numpy as np

NUMBERS = json.loads((Path(__file__).parent / "algorithms" / "oracles.json").read_text())
FIXTURE = {name: np.asarray(values, np.float64) for name, values in NUMBERS["F"].items()}
"""Three completions of 2, 3 and 4 tokens under four policies, as probabilities, with mask and rewards."""


def fixture_logp(name):
    """Log-probabilities float64[3, 4] of the fixture's policy ``new``, ``old``, ``ref`` or ``mu``; 0 at padding."""
    return np.log(FIXTURE[f"p_{name}"])


def token_terms(ratio, advantage, low, high):
    """PPO's clipped loss of one token, written as the four cases that it has."""
    if advantage >= 0:
        return -advantage * (ratio if ratio <= 1 + high else 1 + high)
    return -advantage * (ratio if ratio >= 1 - low else 1 - low)


def loop_loss(name, logp, old_logp, advantages, mask, ref_logp=None):
    """The loss of a preset by loops over rows and tokens, from the formulas of the papers.

    logp, old_logp, ref_logp: float64[B, T]; advantages: float64[B]; mask: bool[B, T].
    """
    low, high = {"grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28), "prorl": (0.2, 0.4)}.get(
        name, (3e-4, 4e-4)
    )
    beta = {"grpo": 0.04, "prorl": 1e-4}.get(name, 0.0)
    rows = []
    for i in range(len(logp)):
        valid = [t for t in range(len(logp[i])) if mask[i][t]]
        ratios = {t: math.exp(logp[i][t] - old_logp[i][t]) for t in valid}
        if name == "gspo" and valid:
            ratios = dict.fromkeys(valid, math.exp(sum(logp[i][t] - old_logp[i][t] for t in valid) / len(valid)))
        terms = [token_terms(ratios[t], advantages[i], low, high) for t in valid]
        if name in ("reinforce", "rloo"):
            terms = [-advantages[i] * logp[i][t] for t in valid]
        if name == "cispo":
            terms = [-min(ratios[t], 5.0) * advantages[i] * logp[i][t] for t in valid]
        if beta:
            gaps = [ref_logp[i][t] - logp[i][t] for t in valid]
            terms = [a + beta * (math.exp(d) - d - 1) for a, d in zip(terms, gaps, strict=True)]
        if valid:
            rows.append(terms)
    if name in ("dapo", "cispo", "prorl"):
        return sum(map(sum, rows)) / sum(map(len, rows))
    if name in ("grpo", "gspo"):
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows) / (3000 if name == "dr_grpo" else 1)


def kept_tokens(probabilities, top_k=0, top_p=1.0):
    """Which tokens top-k, then top-p (of the mass that top-k left) keep, by walking down the sorted list: bool[V]."""
    order = sorted(range(len(probabilities)), key=lambda v: -probabilities[v])
    order = order[: top_k or None]
    total, mass, kept = sum(probabilities[v] for v in order), 0.0, set()
    for v in order:
        if mass >= top_p * total:
            break
        kept.add(v)
        mass += probabilities[v]
    return np.array([v in kept for v in range(len(probabilities))])
