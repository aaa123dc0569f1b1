"""Published methods, one value each: the algorithm and the settings around the loss that its paper fixes. Learning
rates, batch sizes and updates per batch are a run's (``configs/``): they depend on model and machine. A run makes one
update per batch unless it sets more; ``config.notes`` reports which pieces of a recipe then have no effect.
"""

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl_llm.algorithms import PRESETS, Algorithm
from jaxrl_llm.algorithms.advantages import GAE
from jaxrl_llm.algorithms.kl import K1, AdaptiveEntropy, AdaptiveKL, ProportionalKL
from jaxrl_llm.algorithms.reduce import ConstantLength
from jaxrl_llm.algorithms.surrogates import TopEntropy
from jaxrl_llm.errors import InputError, require
from jaxrl_llm.learner.settings import Critic
from jaxrl_llm.rewards.shaping import GroupShaping, LengthCycle, RelativeLength, StopProperly
from jaxrl_llm.rollout.settings import Branching
from jaxrl_llm.rules import Resets
from jaxrl_llm.system.setting import FIXED, FREE, Range, Setting, check_fields

Controller = AdaptiveKL | ProportionalKL | AdaptiveEntropy
"""A rule that moves a coefficient of the loss from step to step."""


@dataclasses.dataclass(frozen=True)
class Updates:
    """The updates that a paper makes of a batch; ``learner.minibatches`` and ``learner.epochs`` decide a run's.

    Attributes:
      count: optimiser updates made of each batch.
      completions: in the minibatch of one update; None where it is not published.
    """

    count: int
    completions: int | None = None


@dataclasses.dataclass(frozen=True)
class Overlong(Setting):
    """Handling of completions that come near the length limit, or are cut off there.

    Attributes:
      drop: leave completions cut off at the limit out of the loss (their reward still counts).
      share: the last share of the generation budget, in which a completion is punished the more the longer it is; 0 is
        off.
      weight: the punishment at the end of the budget; None for half the distance from a right answer to a wrong one,
        which is half of ``Accuracy``'s weight; 0 without an ``Accuracy``.
    """

    drop: bool = False
    share: Annotated[float, Range("[0, 1)")] = 0.0
    weight: Annotated[float | None, Range("[0, inf)", words="at least 0")] = None

    def check(self, run: Any, where: str) -> None:
        """Refuse a punishment without a part of the budget."""
        require(
            self.weight is None or self.share > 0,
            f"{where}weight {self.weight} has no part of the budget to act in: set {where}share above 0, or "
            f"{where}weight None",
        )


@dataclasses.dataclass(frozen=True)
class Recipe(Setting):
    """A method of training.

    Attributes:
      name: key of ``RECIPES``, or yours.
      algorithm: the loss.
      temperature: of the sampling and of every log-probability, unless the run sets its own.
      filter_groups: learn only from groups that can teach; sample on until there are enough. It names the measure:
        "accuracy" (some, not all, completions are correct, or some are so in a larger part; of a run without the reward
        ``Accuracy``, the reward), or "reward" (not all are equal, whatever shapes them). False is off.
      overlong: see ``Overlong``.
      shaping: further changes of a group's rewards, in order.
      resets: when reference and optimiser are reset.
      controller: moves the KL coefficient after each step by the KL, or the coefficient of the entropy bonus by the
        step's entropy; or one of each, in a tuple. None leaves both as they are.
      paper: the updates that the paper makes of a batch; None where they are not published.
      critic: of estimators that read values; None for none.
      branch: where episodes of several turns branch; None for nowhere.
      observation_coef: lambda of ECHO (arXiv 2605.24517): adds lambda times the mean negative log-likelihood, nats per
        token, of what environments say to the loss, at the temperature of the sampling; 0 is off. prime-rl takes 0.1.
    """

    name: str
    algorithm: Algorithm
    temperature: float = 1.0
    filter_groups: Literal["accuracy", "reward", False] = False
    overlong: Overlong = Overlong()
    shaping: tuple[GroupShaping, ...] = ()
    resets: Resets = Resets()
    controller: Controller | tuple[Controller, ...] | None = None
    paper: Annotated[Updates | None, FREE] = None
    critic: Annotated[Critic | None, FIXED] = None
    branch: Branching | None = None
    observation_coef: Annotated[float, Range("[0, inf)", words="at least 0")] = 0.0

    @property
    def controllers(self) -> tuple[Controller, ...]:
        """The controllers as a tuple, empty for None."""
        controller = self.controller
        return (
            () if controller is None else tuple(controller) if isinstance(controller, (tuple, list)) else (controller,)
        )

    @property
    def of_entropy(self) -> AdaptiveEntropy | None:
        """The controller of the entropy bonus, or None."""
        return next((c for c in self.controllers if isinstance(c, AdaptiveEntropy)), None)

    @property
    def of_kl(self) -> AdaptiveKL | ProportionalKL | None:
        """The controller of the KL coefficient, or None."""
        return next(
            (controller for controller in self.controllers if not isinstance(controller, AdaptiveEntropy)), None
        )

    def check(self, run: Any, where: str) -> None:
        """Refuse pieces that nothing reads, that have nothing to act on, or that act twice on one thing."""
        algorithm = self.algorithm
        estimator = algorithm.advantage
        filters = self.filter_groups
        group = run.rollout.group if run.scoring.rewards or run.scoring.distillation is None else 2  # no comparison
        lengths = any(isinstance(shape, RelativeLength) for shape in self.shaping)
        for compares, what, remedy in (
            (getattr(estimator, "compares", True), "", f"{self.name} needs at least 2 completions of each prompt"),
            (filters, f"recipe.filter_groups {filters} ", "set it to False, or rollout.group to at least 2"),
            (lengths, "recipe.shaping RelativeLength ", "take it out, or set rollout.group to at least 2"),
        ):
            require(group >= 2 or not compares, f"rollout.group {group} leaves {what}nothing to compare: {remedy}")
        self._check_critic()
        if self.filter_groups not in (False, "accuracy", "reward"):
            raise InputError(f"recipe.filter_groups must be accuracy, reward or False, got {self.filter_groups!r}")
        require(
            not (isinstance(algorithm.kl, K1) and algorithm.kl_in == "loss" and algorithm.kl_coef),
            f"recipe.algorithm.kl K1 with kl_coef {algorithm.kl_coef} in the loss pulls nowhere, since its expected "
            "gradient is 0: take kl.K2() or kl.K3Plus(), set kl_in 'reward', or kl_coef 0",
        )
        weights = getattr(estimator, "weights", ())
        require(
            not weights or len(weights) == run.outcomes,
            f"recipe.algorithm.advantage.weights has {len(weights)} entries for {run.outcomes} rewards: give one for "
            "each",
        )
        require(
            not (estimator.several and self.shaping),
            f"recipe.shaping {', '.join(type(shape).__name__ for shape in self.shaping)} changes the sum of the "
            f"rewards, and {type(estimator).__name__} looks at each alone: set recipe.shaping (), or take another "
            "estimator",
        )
        self._check_controllers()
        require(
            not (run.output.monitor_kl and algorithm.needs_reference),
            f"output.monitor_kl True has nothing to add: recipe.algorithm.kl_coef {algorithm.kl_coef} measures kl in "
            "every step already; leave it out",
        )
        for shape in self.shaping:
            check_fields(shape, f"{type(shape).__name__}.")

    def _check_critic(self) -> None:
        """Refuse an estimator that lacks the critic it reads, and a critic that no estimator reads."""
        estimator = self.algorithm.advantage
        name = type(getattr(estimator, "estimator", estimator)).__name__
        reads = "values" in estimator.needs
        require(
            self.critic is not None or not reads,
            f"recipe.algorithm.advantage {name} needs values, and recipe.critic is None: set recipe.critic Critic(), "
            "or take an estimator of outcome rewards, such as GroupZScore",
        )
        require(
            self.critic is None or reads,
            f"recipe.critic has nothing to do, since recipe.algorithm.advantage {name} reads no values: take GAE(), or "
            "set recipe.critic None",
        )

    def _check_controllers(self) -> None:
        """Refuse controllers without a coefficient to move, or with one that starts above its largest value."""
        algorithm = self.algorithm
        entropy = self.of_entropy
        require(
            self.of_kl is None or algorithm.kl_coef > 0,
            "recipe.controller has no coefficient to move: set recipe.algorithm.kl_coef above 0, or leave it out",
        )
        require(
            len(self.controllers) == (self.of_kl is not None) + (entropy is not None),
            f"recipe.controller {', '.join(type(c).__name__ for c in self.controllers)} moves one coefficient "
            "twice: give at most one for the KL and one for the entropy",
        )
        require(
            entropy is None or algorithm.entropy_coef <= entropy.largest,
            f"recipe.algorithm.entropy_coef {algorithm.entropy_coef} exceeds recipe.controller.largest "
            f"{entropy and entropy.largest}: lower the one, or raise the other",
        )


GRPO = Recipe("grpo", PRESETS["grpo"], paper=Updates(1, 1024))
"""DeepSeekMath (arXiv 2402.03300): GSM8K 82.9 -> 88.2 and MATH 46.8 -> 51.7 with a 7B model, 64 completions per prompt,
one update per batch of 1024, in which no ratio leaves 1: its clip range never binds.
"""

DR_GRPO = Recipe("dr_grpo", dataclasses.replace(PRESETS["dr_grpo"], reduce=ConstantLength(None)), paper=Updates(8, 128))
"""Understanding R1-Zero-like training (arXiv 2503.20783): no division by the standard deviation or the length, so that
wrong answers do not grow. AIME 2024 43.3 with Qwen2.5-Math-7B. The constant is the run's generation budget; the updates
are those of the authors' script.
"""

DAPO = Recipe("dapo", PRESETS["dapo"], filter_groups="accuracy", overlong=Overlong(share=0.2), paper=Updates(16, 512))
"""DAPO (arXiv 2503.14476): AIME 2024 30 -> 50 with Qwen2.5-32B; of these 20 points overlong filtering brought 6,
clip-higher 2, soft punishment 3, the token-level loss 1 and dynamic sampling 8. L_max 20480 and L_cache 4096 are the
share 0.2. Overlong filtering is off, as in the released system: it would remove the punished tokens from the loss.
``overlong.drop`` turns it on.
"""

GSPO = Recipe("gspo", PRESETS["gspo"], paper=Updates(4))
"""Group sequence policy optimisation (arXiv 2507.18071): no KL, a band of 3e-4 / 4e-4 on the sequence ratio, 4 updates
per batch. Better than GRPO at equal compute with Qwen3-30B-A3B, without routing replay; curves, no table.
"""

CISPO = Recipe("cispo", PRESETS["cispo"], filter_groups="accuracy", overlong=Overlong(share=0.2), paper=Updates(16))
"""MiniMax-M1 (arXiv 2506.13585): DAPO's dynamic sampling and length penalty, 16 updates per batch. It reaches DAPO's
AIME 2024 with Qwen2.5-32B in half the steps. Its optimiser (b2 0.95, eps 1e-15) and the end of repetitive completions
(rollout.repetition) are settings of a run. The cap of 5 is that of TRL and ScaleRL: the paper publishes none.
"""

SAPO = Recipe("sapo", PRESETS["sapo"], paper=Updates(4))
"""Soft adaptive policy optimisation (arXiv 2511.20347): a smooth gate in place of the clip, 4 updates per batch. Stable
with Qwen3-30B-A3B where GSPO and GRPO collapse; curves, no table.
"""

PRORL_V1 = Recipe(
    "prorl_v1",
    PRESETS["prorl"],
    temperature=1.2,
    filter_groups="accuracy",
    resets=Resets(on_stall=3, with_optimiser=True),
    paper=Updates(4, 1024),
)
"""ProRL (arXiv 2505.24864): reference and optimiser are reset when validation stagnates; average pass@1 on mathematics
44.45 -> 60.14 with a 1.5B model. The paper gives neither the number of evaluations that make a stall, which is ours,
nor the KL coefficient, which is that of the second version.
"""

PRORL_V2 = Recipe(
    "prorl_v2",
    PRESETS["prorl_v2"],
    filter_groups="accuracy",
    shaping=(StopProperly(), LengthCycle()),
    resets=Resets(reference_every=300),
    paper=Updates(8, 1024),
)
"""ProRL v2 and its open recipes: REINFORCE++-baseline, k2, a reset of the reference every 200 to 500 steps which keeps
the optimiser, a cosine length reward now and then, no reward for truncated answers. 3000 steps at 8k tokens beat the
first version's 2000 at 16k, with completions 17.5 % shorter. Its resets at a jump of the KL, for which it gives no
number, are recipe.resets.on_kl_jump. Its correction for a sampler that is another program than the learner (IcePop,
``MaskedIS(0.5, 5.0)``) is left out: both are one model.
"""

KIMI_K1_5 = Recipe(
    "kimi_k1_5", PRESETS["kimi_k1_5"], shaping=(RelativeLength(warmup=50),), resets=Resets(optimiser_every=1)
)
"""Kimi k1.5 (arXiv 2501.12599): mirror descent around the policy of each iteration, at which the optimiser is reset; a
length reward that is off at first. AIME 2024 77.5 and MATH-500 96.2 with long chains of thought. An iteration is one
step here, and should have many updates (learner.minibatches, learner.epochs): with a single one, a reset AdamW keeps
only the gradient's signs. Their number is not published, nor are tau, the length reward's weight and its warm-up: tau
1, weight 1 and 50 updates are ours. Its partial rollouts and its prioritised prompts, easy ones first, are settings of
a run: rollout.collect.token_budget and rollout.collect.curriculum.
"""

DEEPSEEK_V3_2 = Recipe("deepseek_v3_2", PRESETS["deepseek_v3_2"])
"""DeepSeek-V3.2 (arXiv 2512.02556): GRPO without the standard deviation, ratios against the sampler's distribution, the
unbiased KL, and no learning from unlikely failures. Neither coefficients nor the updates per batch are published: ours
are the clip at 0.2 on both sides, the KL coefficient 0.001 and the bound on unlikely failures, which is TRL's 0.5.
Where rollout.top_p or rollout.top_k truncates, set learner.keep_sampling_mask; with a model of experts,
learner.routing_replay R3 (Keep Routing).
"""

MINIRL = Recipe("minirl", PRESETS["minirl"], paper=Updates(1, 1024))
"""Stabilizing reinforcement learning with LLMs (arXiv 2512.01374): the simplest method that is stable with
Qwen3-30B-A3B. Without the weight against the sampler it collapses on-policy; with 2, 4 or 8 updates per batch, also
tried, it needs clipping as well.
"""

RLOO = Recipe("rloo", PRESETS["rloo"])
"""Back to basics (arXiv 2402.14740): REINFORCE with a leave-one-out baseline, ahead of PPO, DPO and RAFT in win rate on
TL;DR and HH. The paper's KL in the reward has the coefficients 0.03 and 0.1: set recipe.algorithm.kl_coef.
"""

REINFORCE_PP = Recipe("reinforce_pp", dataclasses.replace(PRESETS["reinforce_pp"], kl_coef=0.001))
"""REINFORCE++ (arXiv 2501.03262): the batch as baseline, advantages whitened over its tokens, a KL in the reward of
every token, with the coefficient of the authors' code.
"""

PPO = Recipe(
    "ppo",
    dataclasses.replace(PRESETS["ppo"], advantage=GAE(whiten=True), kl=K1(), kl_in="reward", kl_coef=0.02),
    paper=Updates(8, 64),
    critic=Critic(),
)
"""PPO with a critic (arXiv 1707.06347), as in InstructGPT (arXiv 2203.02155, appendix C.4): a KL of 0.02 in the reward
of every token, no discount, clip 0.2, a critic at 9e-6, one pass in 8 minibatches of 64. Other values are those of
TRL's trainer: lambda 0.95, advantages whitened over the batch, values clipped at 0.2 (TRL's own KL coefficient is 0.05,
and it makes 4 passes). Nothing compares completions of one prompt, so rollout.group may be 1. The paper's critic begins
as its reward model: recipe.critic.model. Its moving average of the weights is left out.
"""

TOP_ENTROPY = Recipe(
    "top_entropy",
    dataclasses.replace(PRESETS["dapo"], token_filter=TopEntropy(0.2)),
    filter_groups="accuracy",
    overlong=Overlong(share=0.2),
)
"""Beyond the 80/20 rule (arXiv 2506.01939): DAPO, of which only the fifth of a step's tokens with the highest entropy
of the current policy has a policy gradient; the loss is still divided by all tokens.
"""

ARPO = Recipe(
    "arpo",
    dataclasses.replace(PRESETS["grpo"], kl=None, kl_coef=0.0),
    paper=Updates(8, 256),
    branch=Branching(),
)
"""Agentic reinforced policy optimisation (arXiv 2507.19849): half of a group's episodes are branches, begun where the
model is less certain after a tool's answer than at first; GRPO's loss without a KL. Ten tasks with tools 58.3 on
average with Qwen2.5-7B (GRPO 56.5), with three fifths of its tool calls. Groups of 16, alpha 0.5, beta 0.2, tau 0.5,
entropies of the first 20 tokens as in the authors' code, 8 updates per batch of 128 prompts; that code takes a mean
over tokens and a dual clip at 3. Advantages are the paper's soft ones, which it prefers; recipe.branch.credit hard has
the others. Its limit of tool calls and its reward for answers that used two tools are a run's.
"""

GIGPO = Recipe("gigpo", PRESETS["gigpo"])
"""Group-in-group policy optimisation (arXiv 2505.10978): turns that begin in equal states are compared by their
discounted returns, in addition to whole episodes. ALFWorld and WebShop with Qwen2.5 of 1.5B and 7B, 8 episodes of each
task. omega 1, gamma 0.95 and the KL of 0.01 are those of the authors' script for ALFWorld; that for WebShop divides by
no deviation (recipe.algorithm.advantage.std False). The state is what the environment calls it: Step.state.
"""

MT_GRPO = Recipe("mt_grpo", PRESETS["mt_grpo"], paper=Updates(2))
"""Multi-turn GRPO (arXiv 2505.11821): the turns before an answer of the environment are compared by their own rewards,
in addition to the outcome. TriviaQA with a search tool and Qwen2.5-7B, 21 episodes of each question. The coefficient 1,
no KL and two updates of each batch are those of the authors' scripts.
"""

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        *(GRPO, DR_GRPO, DAPO, GSPO, CISPO, SAPO, PRORL_V1, PRORL_V2),
        *(KIMI_K1_5, DEEPSEEK_V3_2, MINIRL, RLOO, REINFORCE_PP, PPO, GIGPO, MT_GRPO, ARPO, TOP_ENTROPY),
    )
}
"""Every recipe by name; ``--recipe NAME`` chooses one."""
