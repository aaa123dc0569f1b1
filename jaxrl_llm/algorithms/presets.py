"""One ``Algorithm`` per published loss; ``dataclasses.replace`` makes a variant."""

from jaxrl_llm.algorithms.advantages import GroupMean, GroupZScore, LeaveOneOut
from jaxrl_llm.algorithms.kl import K3
from jaxrl_llm.algorithms.loss import Algorithm
from jaxrl_llm.algorithms.ratios import Sequence, SequenceToken, Token
from jaxrl_llm.algorithms.reduce import ConstantLength, SequenceMean, SequenceSum, TokenMean
from jaxrl_llm.algorithms.surrogates import CISPO, Likelihood, PPOClip

REINFORCE = Algorithm(GroupMean(), Token(), Likelihood(), SequenceSum())
"""Group-mean baseline, summed over the sequence: the textbook estimator (up to the scale 1 - 1/G)."""

RLOO = Algorithm(LeaveOneOut(), Token(), Likelihood(), SequenceSum())
"""arXiv 2402.14740, without the KL in the reward."""

GRPO = Algorithm(GroupZScore(), Token(), PPOClip(), SequenceMean(), kl=K3(), kl_coef=0.04)
"""arXiv 2402.03300, eq. 3; the paper states no clip range, 0.2 is PPO's."""

DR_GRPO = Algorithm(GroupMean(), Token(), PPOClip(), ConstantLength(3000))
"""arXiv 2503.20783; the constant is the paper's generation budget, recipes set the run's own."""

DAPO = Algorithm(GroupZScore(), Token(), PPOClip(low=0.2, high=0.28), TokenMean())
"""arXiv 2503.14476, eq. 8, over the whole batch's tokens."""

GSPO = Algorithm(GroupZScore(), Sequence(), PPOClip(low=3e-4, high=4e-4), SequenceMean())
"""arXiv 2507.18071, eq. 5; the ratio is a geometric mean, hence the narrow band."""

GSPO_TOKEN = Algorithm(GroupZScore(), SequenceToken(), PPOClip(low=3e-4, high=4e-4), SequenceMean())
"""arXiv 2507.18071, eq. 13."""

CISPO_LOSS = Algorithm(GroupZScore(), Token(), CISPO(5.0), TokenMean())
"""arXiv 2506.13585, eq. 4."""

PRORL = Algorithm(GroupZScore(), Token(), PPOClip(low=0.2, high=0.4), TokenMean(), kl=K3(), kl_coef=1e-4)
"""arXiv 2505.24864; the paper states no KL coefficient, 1e-4 is that of the second version's open recipes."""

PRESETS: dict[str, Algorithm] = {
    "reinforce": REINFORCE,
    "rloo": RLOO,
    "grpo": GRPO,
    "dr_grpo": DR_GRPO,
    "dapo": DAPO,
    "gspo": GSPO,
    "gspo_token": GSPO_TOKEN,
    "cispo": CISPO_LOSS,
    "prorl": PRORL,
}
"""Every preset by its key."""
