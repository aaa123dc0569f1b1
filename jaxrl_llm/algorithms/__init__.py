"""Objectives as values: an algorithm is composed of five small pure functions. ``PRESETS`` has one ``Algorithm`` per
published loss; ``dataclasses.replace`` makes a variant.
"""

from jaxrl_llm.algorithms import advantages, kl, preference, ratios, reduce, surrogates
from jaxrl_llm.algorithms.advantages import (
    GAE,
    MTGRPO,
    GiGPO,
    GroupMean,
    GroupZScore,
    LeaveOneOut,
    MaxRL,
    PassAtK,
    Whitened,
)
from jaxrl_llm.algorithms.kl import K1, K2, K3, UnbiasedK3
from jaxrl_llm.algorithms.loss import Algorithm, policy_loss
from jaxrl_llm.algorithms.ratios import OffPolicySequenceMask, Sequence, SequenceToken, Token
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import (
    CISPO,
    DPPO,
    GMPO,
    LUSPO,
    M2PO,
    SAPO,
    VESPO,
    ClipCov,
    KLCov,
    Likelihood,
    M2POClip,
    MiniRL,
    MirrorDescent,
    PPOClip,
)
from jaxrl_llm.types import AdvantageContext, PolicyBatch

PRESETS: dict[str, Algorithm] = {
    # Williams 1992 with the group's mean as baseline: unbiased up to the scale 1 - 1/G.
    "reinforce": Algorithm(GroupMean(), Token(), Likelihood(), SequenceSum()),
    # arXiv 2402.14740. The paper's KL in the reward has 0.03 (TL;DR) or 0.1 (HH): replace(kl_coef=0.03).
    "rloo": Algorithm(LeaveOneOut(), Token(), Likelihood(), SequenceSum(), kl=K1(), kl_in="reward"),
    # arXiv 2501.03262, eq. 1. KL in the reward: replace(kl_coef=0.001).
    "reinforce_pp": Algorithm(Whitened(), Token(), PPOClip(0.2, 0.2), SequenceMean(), kl=K1(), kl_in="reward"),
    # arXiv 1707.06347, eq. 7 and 11; its value loss is advantages.value_loss.
    "ppo": Algorithm(GAE(), Token(), PPOClip(0.2, 0.2), TokenMean()),
    # arXiv 2402.03300, eq. 3. The paper states no clip range; 0.2 is PPO's.
    "grpo": Algorithm(GroupZScore(), Token(), PPOClip(0.2, 0.2), SequenceMean(), kl=K3(), kl_coef=0.04),
    # arXiv 2503.20783. The constant is the paper's generation budget; the trainer puts the run's in its place.
    "dr_grpo": Algorithm(GroupMean(), Token(), PPOClip(0.2, 0.2), ConstantLength(3000)),
    # arXiv 2503.14476, eq. 8, over the whole batch's tokens.
    "dapo": Algorithm(GroupZScore(), Token(), PPOClip(0.2, 0.28), TokenMean()),
    # arXiv 2507.18071, eq. 5. The ratio is a geometric mean, hence the narrow band.
    "gspo": Algorithm(GroupZScore(), Sequence(), PPOClip(3e-4, 4e-4), SequenceMean()),
    # arXiv 2507.18071, eq. 13.
    "gspo_token": Algorithm(GroupZScore(), SequenceToken(), PPOClip(3e-4, 4e-4), SequenceMean()),
    # arXiv 2506.13585, eq. 4. The paper does not publish its bound; 5.0 is TRL's and ScaleRL's.
    "cispo": Algorithm(GroupZScore(), Token(), CISPO(5.0), TokenMean()),
    # arXiv 2511.20347, eq. 5.
    "sapo": Algorithm(GroupZScore(), Token(), SAPO(1.0, 1.05), SequenceMean()),
    # arXiv 2505.24864. The paper states no KL coefficient; 1e-4 is that of the second version's open recipes.
    "prorl": Algorithm(GroupZScore(), Token(), PPOClip(0.2, 0.4), TokenMean(), kl=K3(), kl_coef=1e-4),
    # ProRL v2's open recipes: REINFORCE++-baseline with the population's deviation, and k2 in the loss.
    "prorl_v2": Algorithm(
        Whitened("group", ddof=0), Token(), PPOClip(0.2, 0.27), TokenMean(), kl=K2(clip=10.0), kl_coef=1e-4
    ),
    # arXiv 2501.12599, eq. 3. The reference of its KL is the policy at the start of each iteration: no kl here.
    "kimi_k1_5": Algorithm(GroupMean(), Token(), MirrorDescent(1.0), SequenceSum()),
    # arXiv 2512.02556, eq. 5 to 9. Both delta and the KL coefficient are ours: the paper publishes neither.
    "deepseek_v3_2": Algorithm(
        GroupMean(),
        Token(anchor="sampler"),
        PPOClip(0.2, 0.2),
        SequenceMean(),
        kl=UnbiasedK3(),
        kl_coef=0.001,
        sequence_filter=OffPolicySequenceMask(0.5),
    ),
    # arXiv 2512.01374, eq. 5 to 7.
    "minirl": Algorithm(GroupMean(), Token(), MiniRL(0.2, 0.27, 5.0), SequenceSum()),
    # arXiv 2505.10978. The KL and the mean over tokens are those of the authors' scripts.
    "gigpo": Algorithm(GiGPO(), Token(), PPOClip(0.2, 0.2), TokenMean(), kl=K3(), kl_coef=0.01),
    # arXiv 2505.11821. The mean over tokens, and no KL, are those of the authors' scripts.
    "mt_grpo": Algorithm(MTGRPO(), Token(), PPOClip(0.2, 0.2), TokenMean()),
    # arXiv 2602.02710, an advantage; the loss around it is DAPO's.
    "maxrl": Algorithm(MaxRL(), Token(), PPOClip(0.2, 0.28), TokenMean()),
    # arXiv 2602.04879. Both bounds are those of verl's example; the policy that sampled is the anchor.
    "dppo_tv": Algorithm(GroupZScore(), Token("sampler"), DPPO(0.15, 0.15, "tv"), TokenMean()),
    "dppo_kl": Algorithm(GroupZScore(), Token("sampler"), DPPO(0.05, 0.05, "kl"), TokenMean()),
    # arXiv 2602.10693. Its sum over tokens; the authors' code and TRL take their mean by default.
    "vespo": Algorithm(GroupZScore(), Token("sampler"), VESPO(), SequenceSum()),
    # arXiv 2507.20673.
    "gmpo": Algorithm(GroupZScore(), Token(), GMPO(0.4, 0.4), SequenceMean()),
    # arXiv 2602.05261.
    "luspo": Algorithm(GroupZScore(), Sequence(), LUSPO(2e-3, 2.5e-3), SequenceMean()),
    # arXiv 2510.01161, as stated, against the policy that sampled; and as in its authors' code.
    "m2po": Algorithm(GroupZScore(), Token("sampler"), M2PO(0.04), TokenMean()),
    "m2po_clip": Algorithm(GroupZScore(), Token(), M2POClip(0.04), TokenMean()),
    # arXiv 2503.19595, with k the group's size; no deviation and a sum, so that it is unbiased. The clip is PPO's.
    "pass_at_k": Algorithm(PassAtK(), Token(), PPOClip(0.2, 0.2), SequenceSum()),
    # arXiv 2505.22617.
    "clip_cov": Algorithm(GroupZScore(), Token(), ClipCov(), TokenMean()),
    "kl_cov": Algorithm(GroupZScore(), Token(), KLCov(), TokenMean()),
}
"""The presets by key."""
