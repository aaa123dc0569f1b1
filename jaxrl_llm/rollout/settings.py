"""What a run says about its rollouts: values without arrays, quick to import."""

import dataclasses

from jaxrl_llm.engine.settings import Repetition, Sampling
from jaxrl_llm.tasks.curriculum import Curriculum
from jaxrl_llm.tasks.texts import Texts


@dataclasses.dataclass(frozen=True)
class Ptx:
    """Texts that each step learns from beside its groups, so that what they teach is not unlearned: PPO-ptx.

    ``coef`` times their mean negative log-likelihood is added to the loss (arXiv 2203.02155, eq. 2). InstructGPT's 27.8
    belongs to its own reduction. Like every log-probability of the learner theirs is at the temperature of the
    sampling; held-out texts are tested at 1.

    Attributes:
      texts: where they come from; longer plain ones are cut into pieces.
      rows: of each step.
      coef: gamma.
    """

    texts: Texts
    rows: int = 8
    coef: float = 0.1


@dataclasses.dataclass(frozen=True)
class Replay:
    """Answers that were right are stored, and where a whole group of their problem fails one takes the place of its
    first member: GUI-ARPO (arXiv 2505.16282).

    The loss takes its ratio against the policy that sampled it. A stored token takes about 20 bytes of a checkpoint
    and 2 microseconds each time one is written.

    Attributes:
      per_prompt: answers stored of each problem; the oldest give way.
      prompts: problems of which any are stored; the one whose latest group was solved best gives way.
    """

    per_prompt: int = 8
    prompts: int = 512


@dataclasses.dataclass(frozen=True)
class Collect:
    """How a step comes by its groups.

    Attributes:
      max_rounds: prompts that a step may begin, as a multiple of those that it needs, before it learns from the groups
        it has (dynamic sampling).
      token_budget: tokens that one completion may sample in one step; 0 for no limit. A group with a completion that
        reaches it is gone on with in the next step, under that step's policy (partial rollouts: Kimi k1.5, arXiv
        2501.12599, section 2.6.2).
      interrupt: stop the groups that still run once the step has enough, and go on with them in the next step; if not
        they are finished, and surplus is carried. Groups that finish early are then learned from first.
      learn_earlier: whether the loss counts tokens that were sampled in earlier steps. If not, only those of the
        present policy count, and no finished group is carried. Their ratio is against the policy that sampled them; a
        loss without a ratio (REINFORCE, RLOO) takes them as they are, unless it has a correction.
      staleness: 1 samples the next step's groups with the weights from before this step's update, while that runs;
        every token is then corrected for the one update between. 0 learns from what the present policy sampled. Both
        run at one time on a single device, or where ``mesh.rollout`` gives sampling devices of its own. The last step
        samples ahead too, for a run that is given more steps later.
      max_age: steps after its first in which a group may be gone on with before it is dropped, unfinished; the steps
        that a token budget spreads a completion over come on top. 0 for no limit.
      patience: steps in a row that teach nothing (no update, or all advantages 0) after which the run ends; 0 never.
      ptx: texts that each step learns from beside its groups; None for none.
      curriculum: which problems are asked, by how often each was solved; None: all of them, in epochs.
      replay: successes of before for groups that fail altogether; None for none.
    """

    max_rounds: int = 10
    token_budget: int = 0
    interrupt: bool = False
    learn_earlier: bool = True
    staleness: int = 0
    max_age: int = 16
    patience: int = 3
    ptx: Ptx | None = None
    curriculum: Curriculum | None = None
    replay: Replay | None = None


@dataclasses.dataclass(frozen=True)
class Rollout:
    """How groups are sampled for training.

    Attributes:
      prompts: P, groups that each step learns from.
      group: G, completions of each prompt.
      max_prompt_tokens: longer prompts are refused.
      max_new_tokens: longest completion, the stop token included.
      temperature: of the sampling and of every log-probability; above 0. None takes the recipe's.
      top_k: keep the k most likely tokens; 0 keeps all.
      top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
      slots: completions sampled at one time.
      chunk: decode steps in one compiled call.
      strict: read the whole cache at every step, so that no bit of a completion depends on the length of its
        neighbours.
      repetition: ends completions that repeat themselves, in training only.
      collect: how a step comes by its groups.
    """

    prompts: int = 8
    group: int = 8
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256
    temperature: float | None = None
    top_k: int = 0
    top_p: float = 1.0
    slots: int = 64
    chunk: int = 16
    strict: bool = False
    repetition: Repetition = Repetition()
    collect: Collect = Collect()

    @property
    def max_length(self) -> int:
        """Prompt and completion together, in tokens."""
        return self.max_prompt_tokens + self.max_new_tokens

    def sampling(self, stop_ids: tuple[int, ...], keep_mask: bool = False) -> Sampling:
        """The engine's rules; ``keep_mask`` where the learner is to leave out the same tokens."""
        return Sampling(
            self.temperature,
            self.top_k,
            self.top_p,
            self.max_new_tokens,
            stop_ids,
            repetition=self.repetition,
            keep_mask=keep_mask,
        )
