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
    """The published number or array at ``key/name``, float64; rows of different lengths are filled up with 0."""
    key, _, name = path.partition("/")
    found = NUMBERS[key][name]
    if isinstance(found, list) and isinstance(found[0], list):
        width = max(map(len, found))
        found = [row + [0.0] * (width - len(row)) for row in found]
    return np.asarray(found, np.float64)


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
         "gigpo": (0.2, 0.2), "mt_grpo": (0.2, 0.2), "maxrl": (0.2, 0.28), "pass_at_k": (0.2, 0.2),
         "luspo": (2e-3, 2.5e-3)}  # fmt: skip
BETAS = {"grpo": 0.04, "prorl": 1e-4, "prorl_v2": 1e-4, "deepseek_v3_2": 0.001, "gigpo": 0.01}
CHOICES = ("m2po", "m2po_clip", "clip_cov", "kl_cov")
TOKEN_MEANS = ("ppo", "dapo", "cispo", "prorl", "prorl_v2", "gigpo", "mt_grpo", "maxrl", "dppo_tv", "dppo_kl", *CHOICES)
SEQUENCE_MEANS = ("reinforce_pp", "grpo", "gspo", "sapo", "deepseek_v3_2", "gmpo")
TO_SAMPLER = ("deepseek_v3_2", "dppo_tv", "dppo_kl", "vespo", "m2po")


def masked_by_dppo(name, p, q, advantage):
    """Whether DPPO leaves out a token that goes from probability q to p."""
    far, bound = abs(p - q), 0.15
    if name == "dppo_kl":
        p, q = min(p, 1 - 2**-23), min(q, 1 - 2**-23)  # random arrays may have more
        far, bound = q * math.log(q / p) + (1 - q) * math.log((1 - q) / (1 - p)), 0.05
    return far > bound and (p - q) * advantage > 0


def policy_terms(name, logp, old_logp, sampler_logp, advantage):
    """The policy losses of one completion's tokens (lists of floats), from the formula of the preset's paper.

    Of those that choose tokens of the whole step: before the choice.
    """
    count = len(logp)
    anchor = sampler_logp if name in TO_SAMPLER else old_logp
    ratios = [math.exp(new - before) for new, before in zip(logp, anchor, strict=True)]
    if name in ("dppo_tv", "dppo_kl"):
        out = [masked_by_dppo(name, math.exp(new), math.exp(q), advantage) for new, q in zip(logp, anchor, strict=True)]
        return [0.0 if o else -r * advantage * new for o, r, new in zip(out, ratios, logp, strict=True)]
    if name == "vespo":
        whole, (k, lam) = math.prod(ratios), (2, 3) if advantage >= 0 else (3, 2)
        return [-(whole**k) * math.exp(lam * (1 - whole)) * advantage * new for new in logp]
    if name == "gmpo":
        held = [min(math.log(r), 0.4) if advantage > 0 else max(math.log(r), -0.4) for r in ratios]
        return [-advantage * math.exp(sum(held) / count)] * count
    if name in ("gspo", "luspo"):
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
    if name in CHOICES:
        anchor = sampler_logp if name in TO_SAMPLER else old_logp
        return choosing_loss(name, logp, anchor, advantages, mask, sampler_logp)
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


def lot_of(logp, advantage, position):
    """The number by which Clip-Cov's lots are drawn, from the token's float32 bits."""
    bits = [int(np.float32(x).view(np.uint32)) for x in (logp, advantage)]
    mixed = (bits[0] * 0x9E3779B1 ^ bits[1] ^ position * 0x85EBCA77) % 2**32
    for factor in (0x7FEB352D, 0x846CA68B):
        mixed = (mixed ^ mixed >> 16) * factor % 2**32
    return mixed ^ mixed >> 15


def choosing_loss(name, logp, anchor, advantages, mask, sampler_logp):
    """The loss of a preset that chooses tokens of the whole step, by loops over all of them; arguments as above."""
    places = np.argwhere(mask)
    tokens = [(float(logp[i, t]), float(logp[i, t] - anchor[i, t]), float(advantages[i])) for i, t in places]
    count = len(tokens)
    of_logp, of_a = (sum(token[i] for token in tokens) / count for i in (0, 2))
    covs = [(new - of_logp) * (a - of_a) for new, _, a in tokens]
    terms = [-math.exp(u) * a for _, u, a in tokens]
    if name == "m2po":
        kept = sorted(range(count), key=lambda n: abs(tokens[n][1]))
        while kept and sum(tokens[n][1] ** 2 for n in kept) / len(kept) >= 0.04:
            kept.pop()
        terms = [term if n in kept else 0.0 for n, term in enumerate(terms)]
    if name == "kl_cov":
        best = covs.index(max(covs))
        terms[best] += 0.1 * abs(tokens[best][1])
    if name == "m2po_clip":
        harmful = [abs(u) for _, u, a in tokens if u * a > 0]
        fits = [c for c in harmful if sum(min(u, c) ** 2 for u in harmful) / len(harmful) <= 0.04]
        cap = max(fits, default=0)
        terms = [token_terms(math.exp(u), a, 1 - min(math.exp(-cap), 0.7), max(math.exp(cap), 1.5) - 1)
                 for _, u, a in tokens]  # fmt: skip
    if name == "clip_cov":
        terms = [token_terms(math.exp(u), a, 0.2, 0.2) for _, u, a in tokens]
        free = [n for n, (_, u, a) in enumerate(tokens) if 1 < covs[n] < 5 and terms[n] == -math.exp(u) * a]
        lots = {lot_of(sampler_logp[tuple(places[n])], tokens[n][2], int(places[n][1])): n for n in free}
        if lots:
            terms[lots[min(lots)]] = 0.0
    return sum(terms) / count


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
