"""Types of the values that pass between the packages, and the glossary of axes.

Axes: ``P`` prompts, ``G`` completions per prompt, ``B = P*G`` completions, ``T`` tokens, ``V`` vocabulary,
``D`` model width, ``N`` query heads, ``K`` key/value heads, ``H`` head width, ``F`` MLP width, ``L`` layers,
``R`` packed rows, ``S`` row or cache length, ``M`` microbatches.

Four log-probabilities of one sampled token, never to be mixed up:

================  ==========================================================================  ========
name              distribution                                                                gradient
================  ==========================================================================  ========
``logp``          the live policy, in the learner                                             yes
``old_logp``      the policy at the start of this batch's updates, in the learner             no
``sampler_logp``  the distribution that the engine really sampled from                        no
``ref_logp``      the frozen reference                                                        no
================  ==========================================================================  ========
"""

import dataclasses
import functools
from collections.abc import Hashable, Mapping
from typing import Any, NamedTuple

import numpy as np

Message = dict[str, Any]
"""One chat message: ``{"role": "user", "content": "..."}``; an assistant's may have ``tool_calls`` and reasoning, a
tool's ``name`` and ``tool_call_id``.
"""
CHAT, OPTIONS = "prompt_is_chat", "prompt_options"
"""Keys in a problem's metadata: of a row whose prompt is chat messages rather than text; and ``Problem.options``."""
MEAN_OF_TASKS = "average"
"""The task name in metrics that are means over the tasks of a mixture; no task may have it."""
DISAGREEMENT = "disagreement"
"""Suffix of the part ``<reward>/disagreement``: the standard deviation over the models of an ensemble."""

NOT_FINITE = "not_finite/"
"""Prefix, after a role's, of metrics of a step that name what was not finite in its samples or in a refused update."""


@dataclasses.dataclass(frozen=True, eq=False)
class Prompt:
    """A model's whole input before it answers: ``tokens``, int32[p], and further ``arrays`` by name, [p, ...] each: one
    entry for each token. Two prompts are equal if their keys are.
    """

    tokens: np.ndarray
    arrays: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.tokens)

    @functools.cached_property
    def beside(self) -> Hashable:
        """A key of the further arrays; empty for text alone."""
        return tuple((name, x.dtype.str, x.shape, x.tobytes()) for name, x in sorted(self.arrays.items()))

    @functools.cached_property
    def key(self) -> Hashable:
        """A key that is unique to this prompt, bit for bit."""
        return (self.tokens.tobytes(), self.beside)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A prompt, usually with an answer that can be verified.

    Attributes:
      id: Unique within its task, and the same on every run.
      prompt: The chat so far; most problems hold one user message.
      answer: The reference answer, or an empty string.
      task: Name of the task it came from.
      extractor: cuts the answer out of a completion: ``last_number``, ``boxed``, ``tag:X``, ``after:X`` or ``whole``.
      verifier: How the extracted answer is compared: ``match``, ``integer``, ``math``, ``reasoning_gym``,
        ``instructions``, ``code`` or ``none``.
      metadata: Additions of the source (level, generator parameters); verifiers and rewards may read it.
    """

    id: str
    prompt: tuple[Message, ...]
    answer: str
    task: str
    extractor: str = "last_number"
    verifier: str = "match"
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def options(self) -> dict[str, Any]:
        """What the chat template gets in addition to the messages, such as ``tools``."""
        return self.metadata.get(OPTIONS, {})


@dataclasses.dataclass(frozen=True)
class Turn:
    """One turn of an episode: the model's message, and the environment's answer.

    Attributes:
      end: number of the completion's tokens up to the end of the model's message.
      reply: the model's message, with its tool calls parsed: JSON values.
      messages: the environment's; empty at the end of the episode.
      reward: that the environment gave for this turn.
      calls: tool calls.
      errors: calls that failed: an unknown tool, an error, a time limit, or a call that cannot be parsed.
      metrics: the environment's own numbers.
      entropy_rise: of an episode that may branch: see ``rollout.episodes.entropy_rise``.
      state: name that the environment gave the state after it; empty without one.
      said: ranges ``(begin, end)`` of the completion's tokens with the contents of ``messages``, if a loss reads them.
      fork: ids that the model reads before its next turn in place of all before; empty where its row goes on.
    """

    end: int
    reply: dict[str, Any]
    messages: tuple[dict[str, Any], ...] = ()
    reward: float = 0.0
    calls: int = 0
    errors: int = 0
    metrics: dict[str, float] = dataclasses.field(default_factory=dict, compare=False)
    entropy_rise: float = dataclasses.field(default=0.0, compare=False)
    state: str = ""
    said: tuple[tuple[int, int], ...] = dataclasses.field(default=(), compare=False)
    fork: tuple[int, ...] = dataclasses.field(default=(), compare=False)


@dataclasses.dataclass(frozen=True)
class Episode:
    """The environment's side of a completion of several turns.

    Attributes:
      turns: those that the environment has answered, in order.
      end: reason of its end, one of ``environments.ENDS``; empty while it goes on.
      reward: sum of the rewards of its turns and of the whole episode; NaN if the environment failed.
      error: why the environment failed, in one line; empty if it did not.
      restarts: times that it began anew, since its environment could not be brought back to where it was.
      parent: of a branch: the member of the group that it began as; None for a whole episode.
      shared: number of the first tokens, which a branch has from its parent.
      tools: number of tools that the model was offered.
      unanswered: finish reason of a last turn that has ended and that the environment has not answered; else empty.
    """

    turns: tuple[Turn, ...] = ()
    end: str = ""
    reward: float = 0.0
    error: str = ""
    restarts: int = 0
    parent: int | None = None
    shared: int = 0
    tools: int = 0
    unanswered: str = ""

    @property
    def metrics(self) -> dict[str, float]:
        """The environment's own numbers, summed over the turns."""
        names = dict.fromkeys(name for turn in self.turns for name in turn.metrics)
        return {name: sum(turn.metrics.get(name, 0.0) for turn in self.turns) for name in names}


@dataclasses.dataclass(frozen=True)
class Completion:
    """The tokens that the engine sampled after one prompt, with their data; every array has one entry per token.

    Attributes:
      tokens: int32[T], the stop token included.
      sampler_logp: float32[T], nats, under the distribution that was really sampled, truncated and at its temperature.
      finish_reason: ``stop`` | ``length`` | ``repetition`` | ``aborted``.
      mask: bool[T], True where the policy sampled the token.
      version: int32[T], the policy version (optimiser updates so far) that sampled the token.
      extras: further arrays by name, one row for each token: ``entropy`` float32[T], nats, of the policy at the
        sampling temperature; where they were asked for, ``policy_logp`` float32[T], nats, at temperature 1 with nothing
        cut off, and ``kept`` uint32[T, ceil(V / 32)], the tokens that truncation kept, token v as bit v % 32 of word v
        // 32; ``step_rewards`` float32[T], NaN where no scored step ends; ``experts`` uint8 or uint16[T, L, k], in the
        pass that predicted the token.
      text: what the tokens spell, special ones included, without the stop token; of an episode its last turn; empty
        until they are decoded.
      episode: what the environment said, with mask False among ``tokens``, and decided; None without one.
      prompt_extras: ``experts`` of the prompt, [p, L, k], likewise, so 0 for its first token.
    """

    tokens: np.ndarray
    sampler_logp: np.ndarray
    finish_reason: str
    mask: np.ndarray
    version: np.ndarray
    extras: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)
    text: str = ""
    episode: Episode | None = None
    prompt_extras: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def sampled(self) -> np.ndarray:
        """Tokens without those of an episode's environment."""
        return self.tokens if self.episode is None else self.tokens[self.mask]

    @property
    def length(self) -> int:
        """Number of tokens without those of an episode's environment."""
        return len(self.sampled)

    @property
    def unplayed(self) -> bool:
        """Whether it is an episode that ended before its first token: prompt too long, or environment failed."""
        return self.episode is not None and bool(self.episode.end) and not len(self.tokens)

    @property
    def forks(self) -> dict[int, np.ndarray]:
        """Where new rows begin: by the index of the first token, int32 ids that are read in place of all before it."""
        return {turn.end: np.asarray(turn.fork, np.int32) for turn in (self.episode or Episode()).turns if turn.fork}

    @property
    def last_turn(self) -> int:
        """Index of the first token after the environment's last message; 0 without one."""
        return max(int(np.max(np.flatnonzero(~self.mask), initial=-1)) + 1, *self.forks, 0)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The chat that follows the prompt: the model's messages, and the environment's between them."""
        if self.episode is None:
            return [{"role": "assistant", "content": self.text}]
        return [message for turn in self.episode.turns for message in (turn.reply, *turn.messages)]

    @property
    def transcript(self) -> str:
        """The text, of an episode that of all its messages, each after its role."""
        if self.episode is None:
            return self.text
        return "\n\n".join(f"[{message['role']}] {shown_message(message)}" for message in self.messages)

    @property
    def played(self) -> dict[str, Any]:
        """An episode for people: ``{"episode": {"end": ..., "turns": [...]}}``, with rewards, failed calls; or {}."""
        if self.episode is None:
            return {}
        turns: list[dict[str, Any]] = []
        for turn in self.episode.turns:
            more = {"reward": turn.reward} | ({"errors": turn.errors} if turn.errors else {})
            turns.append({"role": "assistant", "text": shown_message(turn.reply)} | more)
            turns += [{"role": message["role"], "text": shown_message(message)} for message in turn.messages]
        return {"episode": {"end": self.episode.end, "turns": turns}}


def shown_message(message: Mapping[str, Any]) -> str:
    """Return the content of a chat message, and its tool calls as ``name(argument=value)``."""
    written = [str(message.get("content") or "")]
    for call in (call["function"] for call in message.get("tool_calls") or ()):
        written.append(f"{call['name']}({', '.join(f'{name}={value!r}' for name, value in call['arguments'].items())})")
    return "\n".join(filter(None, written))


@dataclasses.dataclass(frozen=True)
class Group:
    """One prompt with its G completions and their scores.

    Attributes:
      prompt: int32 token ids of the templated prompt.
      rewards: float64[G], the input of the advantage; NaN where unscorable.
      accuracy: float64[G], the verifier's; 1 or more is correct, NaN where nothing is verified.
      parts: float64[G] for each reward by name, unweighted, and for the costs of constraints and the gate.
    """

    problem: Problem
    prompt: np.ndarray
    completions: tuple[Completion, ...]
    rewards: np.ndarray
    accuracy: np.ndarray
    parts: dict[str, np.ndarray] = dataclasses.field(default_factory=dict)

    @property
    def credit(self) -> np.ndarray:
        """The correct share of each answer, float64[G] from 0 to 1; NaN where nothing is verified."""
        return np.clip(self.accuracy, 0.0, 1.0)


class PolicyBatch(NamedTuple):
    """The inputs of the policy loss besides the live log-probabilities; one row per completion.

    Attributes:
      advantages: float[B] or float[B, T].
      mask: bool or float [B, T]; 1 where the policy sampled the token and the loss counts it.
      old_logp: float[B, T]; None means stop_gradient(logp): the ratio is exactly 1.
      ref_logp: float[B, T], needed where the algorithm has a KL term.
      sampler_logp: float[B, T], needed by sampler corrections.
      extras: further arrays [B, T] by name, those that the pieces of the algorithm need; None for none.
    """

    advantages: Any
    mask: Any
    old_logp: Any = None
    ref_logp: Any = None
    sampler_logp: Any = None
    extras: dict[str, Any] | None = None


class AdvantageContext(NamedTuple):
    """Inputs of advantage estimators besides the outcome reward, for the global batch; [B, T] unless noted.

    Attributes:
      mask: 1 where the policy sampled the token.
      old_logp, ref_logp: nats.
      values: the critic's value of each state.
      step_rewards: rewards at token positions.
      group_ids: int[B].
      bootstrap: float[B], the critic's value of the state after the last token; 0 where the completion has ended.
      turn_rewards: rewards of an episode's turns at their last tokens, NaN everywhere else, in padding too; they add up
        to the completion's reward.
      states: int[B, T], at a turn's last token the number of the state in which it began, from 0 to below B T: equal
        for equal states of one prompt's group, and for no others.
    """

    mask: Any = None
    old_logp: Any = None
    ref_logp: Any = None
    values: Any = None
    step_rewards: Any = None
    group_ids: Any = None
    bootstrap: Any = None
    turn_rewards: Any = None
    states: Any = None


class Role(NamedTuple):
    """One model in training: "policy", "critic", "reward".

    Attributes:
      params: the trained parameters: of the live model, or of an adapter.
      opt_state: the optimiser's.
      updates: int32[], optimiser updates so far; the policy's are its version.
      base: the frozen model that ``params`` adapt, in ``models.lora.frozen_form``; None if they are a model themselves,
        or adapt the policy's base.
      checksums: of the base as it was read, by weight.
    """

    params: Any
    opt_state: Any
    updates: Any
    base: Any = None
    checksums: Any = None


class TrainState(NamedTuple):
    """All device state that updates read or change, as one pytree; no two parts share a buffer.

    Attributes:
      roles: the models in training, by name.
      frozen: models that are only read, by name: "reference" is an earlier policy, kept if a KL to it is computed or
        monitored. Its parameters have the policy's form: an adapter if that is one.
    """

    roles: dict[str, Role]
    frozen: dict[str, Any]

    @property
    def policy(self) -> Role:
        """The language model in training."""
        return self.roles["policy"]

    @property
    def reference(self) -> Any:
        """The parameters of the frozen reference, or None."""
        return self.frozen.get("reference")

    def with_role(self, name: str, **changes: Any) -> "TrainState":
        """Return the state with some fields of one role replaced."""
        return self._replace(roles=self.roles | {name: self.roles[name]._replace(**changes)})
