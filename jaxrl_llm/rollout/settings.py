"""Settings of a run's rollouts: values without arrays, quick to import."""

import dataclasses
from typing import Annotated, Any, Literal

from jaxrl_llm.data.datasets import Collected, Texts, check_texts
from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.environments.environment import Limits
from jaxrl_llm.errors import require
from jaxrl_llm.system.setting import FREE, RECORDED, Choice, Count, Range, Setting
from jaxrl_llm.tasks.stream import Curriculum


@dataclasses.dataclass(frozen=True)
class Ptx(Setting):
    """Texts that each step learns from in addition to its groups, to retain their lessons: PPO-ptx.

    ``coef`` times their mean negative log-likelihood, at the temperature of the sampling, is added to the loss (arXiv
    2203.02155, eq. 2). InstructGPT's 27.8 belongs to its own reduction. Held-out texts are tested at temperature 1.

    Attributes:
      texts: where they come from; longer plain ones are cut into pieces.
      rows: of each step.
      coef: gamma.
    """

    texts: Texts
    rows: Annotated[int, Range("[1, inf]")] = 8
    coef: Annotated[float, Range("(0, inf)", words="above 0")] = 0.1

    def check(self, run: Any, where: str) -> None:
        """Refuse texts that cannot work, or that a step would have to collect."""
        check_texts(self.texts)
        require(
            not isinstance(self.texts.source, Collected),
            f"{where}texts are collected by no step: write them with jaxrl-llm collect, and give the table",
        )


@dataclasses.dataclass(frozen=True)
class Replay(Setting):
    """Replay of answers that were right: if a whole group of their problem fails, one replaces its first member, with
    its ratio against its sampler: GUI-ARPO (arXiv 2505.16282). A stored token takes about 20 bytes of a checkpoint.

    Attributes:
      per_prompt: answers stored of each problem; the oldest are dropped first.
      prompts: problems with stored answers; the one with the best solved latest group is dropped first.
    """

    per_prompt: Annotated[int, Range("[1, inf]")] = 8
    prompts: Annotated[int, Range("[1, inf]")] = 512

    def check(self, run: Any, where: str) -> None:
        """Refuse a replay if no reward defines a success, or if its ratios would be wrong."""
        name = where.removesuffix(".")
        algorithm = run.recipe.algorithm
        reads_ratio = algorithm.surrogate.reads_ratio or algorithm.corrects_sampler
        for fine, reason in (
            (
                run.has_accuracy,
                "stores answers that are right, and no reward says so: add Accuracy() to scoring.rewards",
            ),
            (
                run.rollout.group >= 2,
                f"puts a success among failures, and rollout.group is {run.rollout.group}: set it to at least 2",
            ),
            (
                run.rollout.collect.learn_earlier,
                "adds tokens that earlier policies sampled, and rollout.collect.learn_earlier False leaves those out "
                "of the loss: set it to True",
            ),
            (
                reads_ratio,
                f"needs a ratio against the policy that sampled, and {type(algorithm.surrogate).__name__} of recipe "
                f"{run.recipe.name} has none: take another recipe, such as grpo, or set "
                "recipe.algorithm.correction TruncatedIS()",
            ),
            (
                not run.learner.keep_sampling_mask,
                "has ratios of whole distributions, and learner.keep_sampling_mask True has those of truncated ones, "
                "whose kept sets would have to be stored: set rollout.top_k 0, rollout.top_p 1 and "
                "learner.keep_sampling_mask False",
            ),
            (
                run.recipe.critic is None,
                "would teach the critic that a prompt is worth what its best answer was: set recipe.critic None",
            ),
            (
                run.learner.target_kl is None,
                "adds tokens that are as far from the policy as it has moved since they were stored, and "
                f"learner.target_kl {run.learner.target_kl} would count them: set it to None",
            ),
        ):
            require(fine, f"{name} {reason}; or set {name} None")


@dataclasses.dataclass(frozen=True)
class Branching(Setting):
    """Branches of episodes where the model became less certain by what the environment said: ARPO (arXiv 2507.19849).

    After each answer of the environment an episode branches if ``alpha + beta dH > tau``, where dH is the rise of the
    entropy of the model's next tokens (``rollout.episodes``).

    Attributes:
      whole: N, members of a group that begin as whole episodes; the others are left for branches. None for half.
      tokens: k, first tokens of a turn whose entropies are added up.
      base: alpha.
      weight: beta.
      threshold: tau.
      credit: advantage of shared tokens: "soft", each member's in its own row; "hard", their mean.
    """

    whole: Annotated[int | None, Range("[1, inf]")] = None
    tokens: Annotated[int, Count(1)] = 20
    base: Annotated[float, Range("[0, 1]")] = 0.5
    weight: Annotated[float, Range("[0, inf)")] = 0.2
    threshold: Annotated[float, Range("[0, inf)")] = 0.5
    credit: Annotated[Literal["soft", "hard"], Choice("soft", "hard")] = "soft"

    def whole_of(self, group: int) -> int:
        """Return the number of members of a group that begin as whole episodes."""
        return max(group // 2, 1) if self.whole is None else self.whole

    def probability(self, entropy_rise: float) -> float:
        """Return P, which is compared with the threshold; no random number is drawn."""
        return self.base + self.weight * entropy_rise

    def branches_at(self, entropy_rise: float) -> bool:
        """Whether an episode branches at a turn of this rise."""
        return self.probability(entropy_rise) > self.threshold

    def check(self, run: Any, where: str) -> None:
        """Refuse branches without episodes, and a group without members for them."""
        name, group = where.removesuffix("."), run.rollout.group
        require(
            self.whole_of(group) < group,
            f"{where}whole {self.whole_of(group)} leaves none of rollout.group {group} for branches: set it below, or "
            f"{name} None",
        )


@dataclasses.dataclass(frozen=True)
class Collect(Setting):
    """Collection of the groups of a step.

    Attributes:
      max_rounds: prompts that a step may begin, as a multiple of those that it needs (dynamic sampling).
      token_budget: tokens that one completion may sample in one step; 0 for no limit. A longer one is resumed in the
        next step, under its policy (partial rollouts: Kimi k1.5, arXiv 2501.12599, section 2.6.2).
      interrupt: stop the groups that still run once the step has enough, and resume them in the next step, so that
        quick groups are learned from first; if not they are finished, and surplus is carried.
      learn_earlier: count tokens of earlier steps in the loss, their ratio against their sampler; a loss without a
        ratio (REINFORCE, RLOO) takes them as they are, unless it is corrected. If not, no finished group is carried.
      staleness: 1 samples the next step's groups while this step's update runs (on one device or with
        ``mesh.rollout``), with the weights before it, and corrects for it, in the last step too; 0 samples the present
        policy.
      max_age: steps after its first in which a group may be resumed before it is dropped, in addition to those that a
        token budget spreads a completion over. 0 for no limit.
      patience: steps in a row that teach nothing (no update, or all advantages 0) after which the run ends; 0 never.
      ptx: texts that each step learns from in addition to its groups; None for none.
      curriculum: which problems are asked, by how often each was solved; None: all of them, in epochs.
      replay: earlier successes for groups that fail as a whole; None for none.
    """

    max_rounds: Annotated[int, Count(1)] = 10
    token_budget: Annotated[int, Count(0)] = 0
    interrupt: bool = False
    learn_earlier: bool = True
    staleness: int = 0
    max_age: Annotated[int, Count(0)] = 16
    patience: Annotated[int, Count(0), RECORDED] = 3
    ptx: Ptx | None = None
    curriculum: Curriculum | None = None
    replay: Replay | None = None

    def check(self, run: Any, where: str) -> None:
        """Refuse sampling too far ahead, and devices that would wait for it."""
        require(self.staleness in (0, 1), f"{where}staleness must be 0 or 1, got {self.staleness}")
        require(
            not run.mesh.rollout or self.staleness > 0,
            f"mesh.rollout {run.mesh.rollout} sets devices aside that would wait for the learner: set "
            f"{where}staleness 1",
        )


USUAL_SLOTS = 64
"""Completions sampled at one time where neither a setting nor a device's memory says otherwise."""


@dataclasses.dataclass(frozen=True)
class EngineOptions(Setting):
    """How the engine samples: speed and memory, and results by rounding only but for ``kv_cache_dtype``.

    Attributes:
      slots: completions sampled at one time. 0 chooses, at each start: 64, or where an accelerator's memory is too
        small for them half, a quarter, ... (``plan.planning.choose_slots``).
      chunk: decode steps in one compiled call.
      strict: read the whole cache at every step: no bit of a completion depends on the length of its neighbours.
      attention: "auto" reads each slot by its length with kernels on TPUs and GPUs; "xla", all to the longest length.
      kv_cache_dtype: "int8" keeps keys and values in 8 bits, with a scale for each head and column: half of bfloat16's
        memory, and a sampler that differs from the learner by ``sampler/logp_abs_diff_mean``; "auto", the compute type.
      router_bits: of a probability's mantissa by which the sampler's routers choose experts, 7 as in bfloat16; 0 for
        all. It shows what another engine's rounding does, and what routing replay does about it.
    """

    slots: Annotated[int, Count(0), FREE] = 0
    chunk: Annotated[int, Count(1)] = 16
    strict: bool = False
    attention: Annotated[str, FREE, Choice("auto", "xla")] = "auto"
    kv_cache_dtype: Annotated[str, Choice("auto", "int8")] = "auto"
    router_bits: Annotated[int, Range("[0, 22]")] = 0


@dataclasses.dataclass(frozen=True)
class Rollout(Setting):
    """Sampling of groups for training.

    Attributes:
      prompts: P, groups that each step learns from.
      group: G, completions of each prompt.
      max_prompt_tokens: longer prompts are refused; those that an environment makes longer end their episodes.
      max_new_tokens: longest completion, the stop token included.
      temperature: of the sampling and of every log-probability; above 0. None takes the recipe's.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens that reaches this mass; 1 keeps all.
      repetition: ends completions that repeat themselves, in training only.
      collect: collection of the groups of a step.
      episode: limits of episodes, for tasks with environments or tools.
    """

    prompts: Annotated[int, Count(1)] = 8
    group: Annotated[int, Count(1)] = 8
    max_prompt_tokens: Annotated[int, Count(1)] = 256
    max_new_tokens: Annotated[int, Count(1)] = 256
    temperature: Annotated[float | None, Range("(0, inf)", words="above 0 to learn from samples, and finite")] = None
    top_k: Annotated[int, Count(0)] = 0
    top_p: Annotated[float, Range("(0, 1]")] = 1.0
    engine: EngineOptions = EngineOptions()
    repetition: Repetition = Repetition()
    collect: Collect = Collect()
    episode: Limits = Limits()

    def check(self, run: Any, where: str) -> None:
        """Refuse a sampler that is another policy than the one that learns."""
        truncates = self.top_k > 0 or self.top_p < 1
        kept = run.learner.keep_sampling_mask
        require(
            kept or not truncates,
            f"{where}top_k {self.top_k} and top_p {self.top_p}: a truncated sampler is another policy than the "
            f"one that learns; set learner.keep_sampling_mask True, or set {where}top_k 0 and {where}top_p 1",
        )
        require(
            truncates or not kept,
            f"learner.keep_sampling_mask True has nothing to keep: set {where}top_k or {where}top_p, or "
            "learner.keep_sampling_mask False",
        )

    @property
    def max_length(self) -> int:
        """Length of prompt and completion together, in tokens."""
        return self.max_prompt_tokens + self.max_new_tokens

    def sampling(self, stop_ids: tuple[int, ...], keep_mask: bool = False) -> Sampling:
        """Return the engine's rules; ``keep_mask`` if the learner is to leave out the same tokens."""
        temperature: Any = self.temperature  # a resolved run has one
        return Sampling(
            temperature,
            self.top_k,
            self.top_p,
            self.max_new_tokens,
            stop_ids,
            repetition=self.repetition,
            keep_mask=keep_mask,
        )
