"""One value per published method: the algorithm and what its paper fixes around the loss.

Learning rates, batch sizes and updates per batch are a run's (``configs/``): they depend on model and machine. A run
makes one update of each batch unless it says otherwise; ``config.notes`` tells what of a recipe does nothing then.
"""

import dataclasses
from typing import Literal

from jaxrl_llm.algorithms import PRESETS, Algorithm
from jaxrl_llm.algorithms.advantages import GAE
from jaxrl_llm.algorithms.entropy import AdaptiveEntropy
from jaxrl_llm.algorithms.kl import K1, AdaptiveKL, ProportionalKL
from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.learner.settings import Critic
from jaxrl_llm.moved import taking_old_names
from jaxrl_llm.rewards.group_shaping import GroupShaping, LengthCycle, RelativeLength, StopProperly
from jaxrl_llm.rules import Resets

OLD_RESETS = {
    "reference_reset": "reference_every",
    "reset_on_stall": "on_stall",
    "reset_optimiser": "with_optimiser",
    "optimiser_reset": "optimiser_every",
}
"""Fields of ``Recipe`` before it had ``resets``, and their names there: configurations and runs still name them."""


Controller = AdaptiveKL | ProportionalKL | AdaptiveEntropy
"""Moves a coefficient of the loss from step to step."""


@dataclasses.dataclass(frozen=True)
class Updates:
    """How a paper divides what it has sampled; ``learner.minibatches`` and ``learner.epochs`` decide what a run does.

    Attributes:
      count: optimiser updates made of each batch.
      completions: in the minibatch of one update; None where it is not published.
    """

    count: int
    completions: int | None = None


@taking_old_names("resets", Resets, OLD_RESETS)
@dataclasses.dataclass(frozen=True)
class Recipe:
    """A method of training.

    Attributes:
      name: key of ``RECIPES``, or yours.
      algorithm: the loss.
      temperature: of the sampling and of every log-probability, unless the run sets its own.
      filter_groups: learn only from groups that can teach; sample on until there are enough. It names what says so:
        "accuracy" (some, not all, completions are correct, or some are so in a larger part; of a run without the reward
        ``Accuracy``, the reward), or "reward" (not all are equal, whatever shapes them). False is off; True is
        "accuracy".
      drop_truncated: completions cut off at the length limit are left out of the loss (their reward still counts).
      overlong_share: the last share of the generation budget, in which a completion is punished the more the longer it
        is; 0 is off.
      overlong_weight: the punishment at the end of the budget; None for half of what lies between a right answer and a
        wrong one, which is half of ``Accuracy``'s weight, and none without an ``Accuracy``.
      shaping: what else changes a group's rewards, in order.
      resets: when reference and optimiser begin anew.
      controller: moves the KL coefficient after each step, by how far the policy is then, or that of the entropy bonus,
        by the step's entropy; or one of each, in a tuple. None leaves both as they are.
      paper: the updates that the paper makes of a batch; None where they are not published.
      critic: of estimators that read values; None for none.
    """

    name: str
    algorithm: Algorithm
    temperature: float = 1.0
    filter_groups: Literal["accuracy", "reward"] | bool = False
    drop_truncated: bool = False
    overlong_share: float = 0.0
    overlong_weight: float | None = None
    shaping: tuple[GroupShaping, ...] = ()
    resets: Resets = Resets()
    controller: Controller | tuple[Controller, ...] | None = None
    paper: Updates | None = None
    critic: Critic | None = None

    def __post_init__(self):
        if self.filter_groups is True:  # configurations and runs of old say only whether there is a filter
            object.__setattr__(self, "filter_groups", "accuracy")
        elif not self.filter_groups:
            object.__setattr__(self, "filter_groups", False)

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """All of them."""
        found = self.controller
        return () if found is None else tuple(found) if isinstance(found, (tuple, list)) else (found,)

    @property
    def of_entropy(self) -> AdaptiveEntropy | None:
        """The one that moves the entropy bonus, if there is one."""
        return next((one for one in self.controllers if isinstance(one, AdaptiveEntropy)), None)

    @property
    def of_kl(self) -> AdaptiveKL | ProportionalKL | None:
        """The one that moves the KL coefficient, if there is one."""
        return next((one for one in self.controllers if not isinstance(one, AdaptiveEntropy)), None)


GRPO = Recipe("grpo", PRESETS["grpo"], paper=Updates(1, 1024))
"""DeepSeekMath (arXiv 2402.03300): GSM8K 82.9 -> 88.2 and MATH 46.8 -> 51.7 with a 7B model, 64 completions of a
prompt, one update for each batch of 1024, in which no ratio leaves 1: its clip range never binds."""

DR_GRPO = Recipe("dr_grpo", dataclasses.replace(PRESETS["dr_grpo"], reduce=ConstantLength(None)), paper=Updates(8, 128))
"""Understanding R1-Zero-like training (arXiv 2503.20783): no deviation, no length normalisation, so that wrong answers
do not grow. AIME 2024 43.3 with Qwen2.5-Math-7B. The constant is the run's generation budget; the updates are those of
the authors' script."""

DAPO = Recipe("dapo", PRESETS["dapo"], filter_groups="accuracy", overlong_share=0.2, paper=Updates(16, 512))
"""DAPO (arXiv 2503.14476): AIME 2024 30 -> 50 with Qwen2.5-32B; of these 20 points overlong filtering brought 6,
clip-higher 2, soft punishment 3, the token-level loss 1 and dynamic sampling 8. L_max 20480 and L_cache 4096 are the
share 0.2. As in the released system overlong filtering is off: it would leave out of the loss the very tokens that the
punishment is for. ``drop_truncated`` is that step of the ladder."""

GSPO = Recipe("gspo", PRESETS["gspo"], paper=Updates(4))
"""Group sequence policy optimisation (arXiv 2507.18071): no KL, a band of 3e-4 / 4e-4 on the sequence ratio, 4 updates
for each batch. Better than GRPO at equal compute with Qwen3-30B-A3B, without routing replay; curves, no table."""

CISPO = Recipe("cispo", PRESETS["cispo"], filter_groups="accuracy", overlong_share=0.2, paper=Updates(16))
"""MiniMax-M1 (arXiv 2506.13585): DAPO's dynamic sampling and length penalty are kept; 16 updates for each batch. DAPO's
AIME 2024 with Qwen2.5-32B in half of its steps. Its optimiser (b2 0.95, eps 1e-15) and the end of completions that
repeat themselves (rollout.repetition) are a run's. The cap of 5 is that of TRL and ScaleRL: the paper publishes
none."""

SAPO = Recipe("sapo", PRESETS["sapo"], paper=Updates(4))
"""Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate in place of the clip, 4 updates for each batch.
Stable with Qwen3-30B-A3B where GSPO and GRPO collapse; curves, no table."""

PRORL_V1 = Recipe(
    "prorl_v1",
    PRESETS["prorl"],
    temperature=1.2,
    filter_groups="accuracy",
    resets=Resets(on_stall=3, with_optimiser=True),
    paper=Updates(4, 1024),
)
"""ProRL (arXiv 2505.24864): reference and optimiser begin anew when validation stagnates; average pass@1 on mathematics
44.45 -> 60.14 with a 1.5B model. How many evaluations make a stall is ours, and the KL coefficient that of the second
version: the paper gives neither number."""

PRORL_V2 = Recipe(
    "prorl_v2",
    PRESETS["prorl_v2"],
    filter_groups="accuracy",
    shaping=(StopProperly(), LengthCycle()),
    resets=Resets(reference_every=300),
    paper=Updates(8, 1024),
)
"""ProRL v2 and its open recipes: REINFORCE++-baseline, k2, a reset of the reference every 200 to 500 steps which keeps
the optimiser, a cosine of the length now and then, nothing for answers that were cut off. 3000 steps at 8k tokens beat
the first version's 2000 at 16k, with completions 17.5 % shorter. Its resets at a jump of the KL, for
which it gives no number, are recipe.resets.on_kl_jump. Its correction for a sampler that is another program than the
learner (IcePop, ``MaskedIS(0.5, 5.0)``) is not here: both are one model."""

KIMI_K1_5 = Recipe(
    "kimi_k1_5", PRESETS["kimi_k1_5"], shaping=(RelativeLength(warmup=50),), resets=Resets(optimiser_every=1)
)
"""Kimi k1.5 (arXiv 2501.12599): mirror descent around the policy of each iteration, at which the optimiser begins anew;
a length reward that is off at first. AIME 2024 77.5 and MATH-500 96.2 with long chains of thought. An iteration is one
step here, and is meant to have many updates (learner.minibatches, learner.epochs): of a single one, AdamW that begins
anew keeps the gradient's signs alone. How many is not published, nor are tau, the length reward's weight and its
warm-up: tau 1, weight 1 and 50 updates are ours. Its partial rollouts and its prioritised prompts, easy ones first, are
a run's: rollout.collect.token_budget and rollout.collect.curriculum."""

DEEPSEEK_V3_2 = Recipe("deepseek_v3_2", PRESETS["deepseek_v3_2"])
"""DeepSeek-V3.2 (arXiv 2512.02556): GRPO without the deviation, ratios against what the sampler sampled from, the
unbiased KL, and no learning from unlikely failures. Neither coefficients nor the updates of a batch are published:
ours are the clip at 0.2 on both sides, the KL coefficient 0.001 and the bound on unlikely failures, which is TRL's 0.5.
Where rollout.top_p or rollout.top_k truncates, set learner.keep_sampling_mask. Keeping routes is not here: the sampler
is the learner's own model."""

MINIRL = Recipe("minirl", PRESETS["minirl"], paper=Updates(1, 1024))
"""Stabilizing reinforcement learning with LLMs (arXiv 2512.01374): the least that is stable with Qwen3-30B-A3B; without
the weight against the sampler it collapses on-policy; with 2, 4 or 8 updates for each batch, which were tried too,
clipping is needed as well."""

RLOO = Recipe("rloo", PRESETS["rloo"])
"""Back to basics (arXiv 2402.14740): REINFORCE with a leave-one-out baseline, ahead of PPO, DPO and RAFT in win rate on
TL;DR and HH. The paper's KL in the reward has the coefficient 0.03 and 0.1: set recipe.algorithm.kl_coef."""

REINFORCE_PP = Recipe("reinforce_pp", dataclasses.replace(PRESETS["reinforce_pp"], kl_coef=0.001))
"""REINFORCE++ (arXiv 2501.03262): the batch as baseline, advantages whitened over its tokens, a KL in the reward of
every token, with the coefficient of its code."""

PPO = Recipe(
    "ppo",
    dataclasses.replace(PRESETS["ppo"], advantage=GAE(whiten=True), kl=K1(), kl_in="reward", kl_coef=0.02),
    paper=Updates(8, 64),
    critic=Critic(),
)
"""PPO with a critic (arXiv 1707.06347), as InstructGPT has it (arXiv 2203.02155, appendix C.4): a KL of 0.02 in the
reward of every token, no discount, clip 0.2, a critic at 9e-6, one pass in 8 minibatches of 64.
Where the paper is silent, what TRL's trainer does: lambda 0.95, advantages whitened over the batch, values clipped at
0.2; its own coefficient of the KL is 0.05, and it makes 4 passes. Nothing compares completions of one prompt, so that
rollout.group may be 1. The paper's critic begins as its reward model: recipe.critic.model. Its moving average of the
weights is not here."""

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        GRPO,
        DR_GRPO,
        DAPO,
        GSPO,
        CISPO,
        SAPO,
        PRORL_V1,
        PRORL_V2,
        KIMI_K1_5,
        DEEPSEEK_V3_2,
        MINIRL,
        RLOO,
        REINFORCE_PP,
        PPO,
    )
}
"""Every recipe by its name; ``--recipe NAME`` chooses one."""
