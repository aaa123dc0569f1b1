"""Independent answers: published numbers worked out by hand, and the policy loss as plain NumPy loops."""

import json
import math
from pathlib import Path

import numpy as np

FILES = [Path(__file__).parent / "algorithms" / name for name in ("oracles.json", "oracle29.json")]
NUMBERS = {key: value for path in FILES for key, value in json.loads(path.read_text()).items()}
FIXTURE = {name: np.asarray(values, np.float64) for name, values in NUMBERS["F"].items()}
"""Three completions of 2, 3 and 4 tokens under four policies, as probabilities, with mask and rewards."""


def fixture_logp(name):
    """Log-probabilities float64[3, 4] of the fixture's policy ``new``, ``old``, ``ref`` or ``mu``; 0 at padding."""
    return np.log(FIXTURE[f"p_{name}"])


def number(path):
    """The published number or array at ``key/name``, float64."""
    key, _, name = path.partition("/")
    return np.asarray(NUMBERS[key][name], np.float64)


def check(found, path, dtype):
    """Compare with the number at ``path``, which has 8 decimals: 1e-7 in float64, 2e-5 relative in float32."""
    assert found.dtype == dtype, f"{path}: {found.dtype}"
    bounds = {"rtol": 2e-5, "atol": 2e-7} if dtype == np.float32 else {"rtol": 0, "atol": 1e-7}
    np.testing.assert_allclose(found, number(path), **bounds, err_msg=path)


def token_terms(ratio, advantage, low, high):
    """PPO's clipped loss of one token, written as the four cases that it has."""
    if advantage >= 0:
        return -advantage * (ratio if ratio <= 1 + high else 1 + high)
    return -advantage * (ratio if ratio >= 1 - low else 1 - low)


CLIPS = {"reinforce_pp": (0.2, 0.2), "ppo": (0.2, 0.2), "grpo": (0.2, 0.2), "dr_grpo": (0.2, 0.2), "dapo": (0.2, 0.28),
         "gspo": (3e-4, 4e-4), "prorl": (0.2, 0.4), "prorl_v2": (0.2, 0.27), "deepseek_v3_2": (0.2, 0.2),
         "gigpo": (0.2, 0.2), "mt_grpo": (0.2, 0.2)}  # fmt: skip
BETAS = {"grpo": 0.04, "prorl": 1e-4, "prorl_v2": 1e-4, "deepseek_v3_2": 0.001, "gigpo": 0.01}
TOKEN_MEANS = ("ppo", "dapo", "cispo", "prorl", "prorl_v2", "gigpo", "mt_grpo")
SEQUENCE_MEANS = ("reinforce_pp", "grpo", "gspo", "sapo", "deepseek_v3_2")


def policy_terms(name, logp, old_logp, sampler_logp, advantage):
    """The policy losses of one completion's tokens (lists of floats), from the formula of the preset's paper."""
    count = len(logp)
    anchor = sampler_logp if name == "deepseek_v3_2" else old_logp
    ratios = [math.exp(new - before) for new, before in zip(logp, anchor, strict=True)]
    if name == "gspo":
        ratios = [math.exp(sum(new - before for new, before in zip(logp, anchor, strict=True)) / count)] * count
    if name in ("reinforce", "rloo"):
        return [-advantage * new for new in logp]
    if name == "cispo":
        return [-min(r, 5.0) * advantage * new for r, new in zip(ratios, logp, strict=True)]
    if name == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return [-4 / tau / (1 + math.exp(-tau * (r - 1))) * advantage for r in ratios]
    if name == "kimi_k1_5":
        return [(advantage - math.log(math.prod(ratios))) ** 2 / 2 / count] * count
    if name == "minirl":
        cut = [(advantage > 0 and r > 1.27) or (advantage < 0 and r < 0.8) for r in ratios]
        weights = [min(math.exp(new - mu), 5.0) for new, mu in zip(logp, sampler_logp, strict=True)]
        return [0.0 if c else -w * advantage * new for c, w, new in zip(cut, weights, logp, strict=True)]
    terms = [token_terms(r, advantage, *CLIPS[name]) for r in ratios]
    far = sum(mu - new for mu, new in zip(sampler_logp, logp, strict=True)) / count > 0.5
    return [0.0] * count if name == "deepseek_v3_2" and advantage < 0 and far else terms


def kl_terms(name, logp, ref_logp, sampler_logp):
    """The KL estimates of one completion's tokens (lists of floats), times the preset's coefficient."""
    gaps = [ref - new for ref, new in zip(ref_logp, logp, strict=True)]
    if name == "prorl_v2":
        return [BETAS[name] * min(max(d, -10), 10) ** 2 / 2 for d in gaps]
    terms = [BETAS.get(name, 0.0) * (math.exp(d) - d - 1) for d in gaps]
    if name == "deepseek_v3_2":
        return [term * math.exp(new - mu) for term, new, mu in zip(terms, logp, sampler_logp, strict=True)]
    return terms


def loop_loss(name, logp, old_logp, advantages, mask, ref_logp, sampler_logp):
    """The loss of a preset by loops over rows and tokens, from the formulas of the papers.

    logp, old_logp, ref_logp, sampler_logp: float64[B, T]; advantages: float64[B]; mask: bool[B, T].
    """
    rows = []
    for i in range(len(logp)):
        valid = [t for t in range(len(logp[i])) if mask[i][t]]
        new, old, ref, mu = ([float(x[i][t]) for t in valid] for x in (logp, old_logp, ref_logp, sampler_logp))
        if valid:
            policy = policy_terms(name, new, old, mu, float(advantages[i]))
            rows.append([a + b for a, b in zip(policy, kl_terms(name, new, ref, mu), strict=True)])
    if name in TOKEN_MEANS:
        return sum(map(sum, rows)) / sum(map(len, rows))
    if name in SEQUENCE_MEANS:
        return sum(sum(row) / len(row) for row in rows) / len(rows)
    return sum(map(sum, rows)) / len(rows) / (3000 if name == "dr_grpo" else 1)


def kept_tokens(probabilities, top_k=0, top_p=1.0, min_p=0.0):
    """Which tokens top-k, then top-p (of the mass that top-k left), then min-p keep, by walking down the sorted list:
    bool[V].
    """
    order = sorted(range(len(probabilities)), key=lambda v: -probabilities[v])
    order = order[: top_k or None]
    total, mass, kept = sum(probabilities[v] for v in order), 0.0, set()
    for v in order:
        if mass >= top_p * total or probabilities[v] < min_p * max(probabilities):
            break
        kept.add(v)
        mass += probabilities[v]
    return np.array([v in kept for v in range(len(probabilities))])
