"""Ingredients: additions to a run's policy gradient, each a value made from the run's settings."""

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_llm import tasks
from jaxrl_llm.algorithms.preference import pretraining_loss
from jaxrl_llm.codec import digest_of_parts
from jaxrl_llm.config import JUDGED, Run, samples_groups, tasks_in
from jaxrl_llm.data import Text, load_texts
from jaxrl_llm.engine import Sampling
from jaxrl_llm.errors import InputError, naming, require
from jaxrl_llm.learner import Critic, Forward, Sample, Training, ValueLoss, make_update
from jaxrl_llm.learner.objectives import DISTILLATION, TEXT, NextToken, Objective, Scalars, Share
from jaxrl_llm.learner.optimiser import build, learning_rate
from jaxrl_llm.learner.platform import ATTENTION_PLATFORMS, compute_for
from jaxrl_llm.learner.samples import advantage_of, clip_positive_advantage, value_sample
from jaxrl_llm.learner.update import NewRole
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder, initialise
from jaxrl_llm.models.heads import ScalarModel, with_scalar_head
from jaxrl_llm.models.lora import create_adapter, model_of
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rewards.rubric import Pairwise
from jaxrl_llm.rewards.shaping import REJECTED, Constraint
from jaxrl_llm.rollout.episodes import common_lengths, shared_credit
from jaxrl_llm.rollout.evaluate import TaskEvaluation
from jaxrl_llm.rollout.groups import RolloutBatch
from jaxrl_llm.rules import Rule, not_a_number
from jaxrl_llm.rules.guards import Decided, Decision, Row, RuleMemory
from jaxrl_llm.runs import load_model
from jaxrl_llm.sharding import platform_of
from jaxrl_llm.sharding.distributed import ALONE, Peers
from jaxrl_llm.stages.dataset import evaluate_texts, text_sample
from jaxrl_llm.stages.stage import Architectures, Fingerprints, Pass
from jaxrl_llm.stages.taught import check_reward_template, reward_format
from jaxrl_llm.system.json_lines import append_rows, read_rows
from jaxrl_llm.system.paths import new_file
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import Completion, Group, Problem, TrainState


@dataclasses.dataclass(frozen=True)
class StageContext:
    """The parts of a run that an ingredient is prepared with, before the first step.

    Attributes:
      tokenizer: the policy's.
      prompts: of the training problems.
      test_prompts: of the evaluation problems.
      stops: tokens at which completions end.
      forwards: how the learner runs the model of each role.
      objectives: names of all objectives of the run.
      answers: how answers to the evaluation problems are sampled.
    """

    tokenizer: Any
    prompts: Prompts
    test_prompts: Prompts
    stops: Sequence[int]
    forwards: Mapping[str, Forward]
    objectives: Sequence[str]
    scorer: Scorer
    answers: Sampling
    peers: Peers
    progress: Progress


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ingredient:
    """An ingredient of a run; a new one overrides the hooks that it needs, and is listed in ``programs.INGREDIENTS``.

    Attributes:
      objectives: added to the policy's.
      coefficients: initial values of numbers that a rule updates from step to step.
    """

    objectives: Sequence[Objective] = ()
    coefficients: Mapping[str, float] = dataclasses.field(default_factory=dict)
    rules: Mapping[str, Rule] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """Return the ingredient for these settings without loading anything; None if the run does not use it."""
        raise NotImplementedError

    def prepared(self, context: StageContext) -> Self:
        """Load its data and models. InputError: the run cannot use them."""
        return self

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add its own data to the samples of a step, at their longest; ``updates``: optimiser updates of the step."""
        return samples

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Change the samples of a step, group by group, before the learner gets them."""
        return samples


@dataclasses.dataclass(frozen=True)
class Constraints(Ingredient):
    """Limits on mean costs, each with a multiplier, and a gate: no completion that it rejects is made likelier."""

    constraints: tuple[Constraint, ...]
    gated: bool = False

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        limits = run.scoring.constraints
        moves = {limit.coefficient: functools.partial(update_multiplier, constraint=limit) for limit in limits}
        begins = {limit.coefficient: float(limit.multiplier) for limit in limits}
        gated = run.scoring.gate is not None
        return cls(limits, gated, coefficients=begins, rules=moves) if limits or gated else None

    def rewards(self, rewards: np.ndarray, groups: Sequence[Group], coefficients: Mapping[str, float]) -> np.ndarray:
        """Return ``r - sum of lam * (cost - limit)``, NaN where a cost is NaN."""
        for constraint in self.constraints:
            cost = np.stack([group.parts[constraint.part] for group in groups])
            rewards = rewards - coefficients[constraint.coefficient] * (cost - constraint.limit)
        return rewards

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Return the samples, with advantages ``min(A, 0)`` for completions that the gate rejects."""
        if not self.gated:
            return samples
        return [
            [
                clip_positive_advantage(sample) if rejected else sample
                for sample, rejected in zip(members, group.parts[REJECTED], strict=True)
            ]
            for members, group in zip(samples, batch.groups, strict=True)
        ]


def update_multiplier(row: Row, rule_memory: RuleMemory, constraint: Constraint) -> Decided:
    """Update a constraint's multiplier by a measured cost, ``lam <- max(0, lam + rate (mean cost - limit))``: a
    ``Rule``.
    """
    cost = row.get(constraint.part, math.nan)
    if math.isnan(cost):
        return Decision(), rule_memory
    multiplier = max(0.0, row[constraint.coefficient] + constraint.rate * (cost - constraint.limit))
    return Decision(coefficients={constraint.coefficient: multiplier}), rule_memory


@dataclasses.dataclass(frozen=True)
class SharedCredit(Ingredient):
    """ARPO's "hard" credit: a shared token has the mean advantage of the members that share it (arXiv 2507.19849)."""

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        rule = run.recipe.branch
        return cls() if rule is not None and rule.credit == "hard" else None

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Return the samples with an advantage for each token."""
        return [sample.with_arrays(advantages=np.zeros(len(sample.tokens), np.float32)) for sample in samples]

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Return the samples with an advantage for each token: the mean over the members that share it."""
        shared_samples = []
        for members, group in zip(samples, batch.groups, strict=True):
            advantages = [np.broadcast_to(np.float32(advantage_of(sample)), sample.tokens.shape) for sample in members]
            shared = shared_credit(advantages, common_lengths(group.completions))
            pairs = zip(members, shared, strict=True)
            shared_samples.append([sample.with_arrays(advantages=credit) for sample, credit in pairs])
        return shared_samples


OBSERVATIONS = "observations"
"""The name of the objective, and of its mask among a sample's arrays."""


@dataclasses.dataclass(frozen=True)
class ObservationLoss(Objective):
    """``-coef mean_t(logp)`` over the tokens that an environment said, nats; 0 where nothing was said.

    They are the contents of its messages, in completions that the policy's loss leaves out too. Their number is the
    divisor, so that the policy gradient is as it is without them.
    """

    coef: float
    name: ClassVar[str] = OBSERVATIONS
    role: ClassVar[str] = "policy"
    outputs: ClassVar[tuple[str, ...]] = ("logp",)

    def __call__(self, outputs: Any, batch: Any, counts: Any, coefficients: Scalars) -> Share:
        """Return the loss, and as metrics the loss, the mean without the coefficient, and the number of tokens."""
        mean = pretraining_loss(outputs["logp"], batch.mask, counts.tokens)
        tokens = jnp.sum(batch.mask, dtype=jnp.float32)
        return self.coef * mean, {
            "loss": self.coef * mean,
            f"{OBSERVATIONS}/loss": mean,
            f"{OBSERVATIONS}/tokens": tokens,
        }

    def finalize(self, metrics: Scalars) -> Scalars:
        """Return the metrics; the mean is NaN where nothing was said."""
        mean = jnp.where(metrics[f"{OBSERVATIONS}/tokens"] > 0, metrics[f"{OBSERVATIONS}/loss"], jnp.nan)
        return metrics | {f"{OBSERVATIONS}/loss": mean}


@dataclasses.dataclass(frozen=True)
class Observations(Ingredient):
    """The likelihood of what environments said, in addition to the policy gradient: ECHO (arXiv 2605.24517)."""

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        coef = run.recipe.observation_coef
        return cls(objectives=(ObservationLoss(coef),)) if coef else None

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add a mask without tokens to the samples."""
        return [sample.with_arrays(**{OBSERVATIONS: np.zeros(len(sample.tokens), bool)}) for sample in samples]

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Add to each sample the mask of what its environment said."""
        return [
            [
                sample.with_arrays(**{OBSERVATIONS: observation_mask(completion)})
                for sample, completion in zip(members, group.completions, strict=True)
            ]
            for members, group in zip(samples, batch.groups, strict=True)
        ]


def observation_mask(completion: Completion) -> np.ndarray:
    """Return bool[T], True on the contents of the messages of an episode's environment, False on the template's."""
    mask = np.zeros(len(completion.tokens), bool)
    for turn in () if completion.episode is None else completion.episode.turns:
        for begin, end in turn.said:
            mask[begin:end] = True
    return mask


@dataclasses.dataclass(frozen=True)
class PretrainingMix(Ingredient):
    """Texts that each step learns from in addition to its groups, in a seeded order, and held-out texts: those of
    PPO-ptx (arXiv 2203.02155), or those whose completions a teacher values (GKD, arXiv 2306.13649).

    Attributes:
      texts: training texts. Only ``count``, ``seed`` and ``ptx`` are set before it is prepared.
      held_out: evaluation texts.
      count: texts of each step.
      alone: nothing is sampled; a step learns from the texts alone.
      seed: of the order: each epoch is a fresh permutation.
      objective: the name of the one that counts texts.
      others: names of the objectives that count completions.
      forward: how the model is run to evaluate it, at temperature 1.
      source: where the texts come from.
      notes: lines for people before the first step.
    """

    texts: Sequence[Text] = ()
    held_out: Sequence[Text] = ()
    count: int = 0
    alone: bool = False
    seed: int = 0
    objective: str = TEXT
    others: tuple[str, ...] = ()
    forward: Any = None
    status: Callable[[str], None] = print
    source: Any = None
    fingerprints: Fingerprints = dataclasses.field(default_factory=dict)
    notes: Sequence[str] = ()

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        ptx, distillation = run.rollout.collect.ptx, run.scoring.distillation
        if distillation is not None and distillation.texts is not None:
            count = distillation.rows_of(run.rollout.prompts * run.rollout.group)
            alone = not samples_groups(run)
            return cls(count=count, alone=alone, seed=run.seed, source=distillation.texts, objective=DISTILLATION)
        if ptx is None:
            return None
        return cls(count=ptx.rows, seed=run.seed, source=ptx.texts, objectives=(NextToken(ptx.coef, "text/"),))

    def prepared(self, context: StageContext) -> Self:
        """Read the texts. InputError: a row that is unusable, or too long for the run's rows."""
        source = self.source
        context.progress.status(f"reading {source.label}")
        forward = context.forwards["policy"]
        size = forward.layout.row_tokens, forward.layout.completion_tokens
        loaded = load_texts(source, context.tokenizer, context.stops, lambda text: max_text_tokens(text, *size))
        train, held_out = (
            [piece for text in texts for piece in split_text(text, *size)] for texts in (loaded.train, loaded.held_out)
        )
        return dataclasses.replace(
            self,
            texts=train,
            held_out=held_out,
            others=tuple(name for name in context.objectives if name != TEXT),  # a teacher values completions too
            forward=dataclasses.replace(forward, temperature=1.0),
            status=context.progress.status,
            fingerprints={"text": tasks.fingerprint(loaded.train), "held-out text": tasks.fingerprint(loaded.held_out)},
            notes=loaded.notes,
        )

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Append the texts of one update to the samples."""
        first = samples[0]
        text = Sample(first.prompt[:1], first.tokens, first.mask).counting((self.objective,))
        return [*([] if self.alone else samples), *[text] * -(-self.count // updates)]

    def drawn(self, batch: RolloutBatch, before: int) -> RolloutBatch:
        """Add the number of texts that the run has drawn to the carryover; ``before``: that before this step."""
        carry = dataclasses.replace(batch.carryover, texts=before + self.count)
        return dataclasses.replace(batch, carryover=carry, texts=self.count if self.alone else 0)

    def samples(self, samples: list[list[Sample]], batch: RolloutBatch) -> list[list[Sample]]:
        """Distribute the step's texts evenly between the groups, so that every minibatch gets its share."""
        counted = [[sample.counting(self.others) for sample in group] for group in samples]
        numbers = range(batch.carryover.texts - self.count, batch.carryover.texts)
        places = [tasks.problem_index(self.seed, number, len(self.texts)) for number in numbers]
        texts = [[text_sample(self.texts[place]).counting((self.objective,))] for place in places]
        # Of equal parts of a line the middles: a group's before a text's where they meet.
        order = [((at + 0.5) / len(counted), 0, group) for at, group in enumerate(counted)]
        order += [((at + 0.5) / len(texts), 1, text) for at, text in enumerate(texts)]
        return [group for _, _, group in sorted(order, key=lambda placed: placed[:2])]

    def evaluate(self, policy: Decoder) -> dict[str, float]:
        """Return ``eval/text/loss`` and its perplexity on the held-out texts; nothing without any."""
        return evaluate_texts(self.forward, policy, self.held_out, self.status) if self.held_out else {}


def max_text_tokens(text: Text, row_tokens: int, tokens: int) -> float:
    """Return the most tokens that a text may have; infinite for one without a prompt, which may be split."""
    return math.inf if len(text.prompt) == 1 else min(row_tokens, len(text.prompt) + tokens)


def split_text(text: Text, row_tokens: int, tokens: int) -> list[Text]:
    """Return a text that fits a row, or pieces of one without a prompt, each after the last token of the one before.
    InputError: a text with a prompt that is longer than a row, or than a completion may be.
    """
    size = min(tokens, row_tokens - 1)
    if len(text.tokens) <= tokens and text.length <= row_tokens:
        return [text]
    if len(text.prompt) > 1:
        raise InputError(
            f"{text.where} has a prompt of {len(text.prompt)} and a completion of {len(text.tokens)} tokens, and rows "
            f"have {row_tokens}, completions {tokens}: raise rollout.max_new_tokens, or leave it out of "
            "rollout.collect.ptx (Texts.overlong drops or truncates such texts)"
        )
    tokens_read, parts = np.concatenate([text.prompt, text.tokens]), []
    for at in range(1, len(tokens_read), size):
        here = slice(at, at + size)
        mask = text.mask[at - 1 : at - 1 + size]
        parts.append(dataclasses.replace(text, prompt=tokens_read[at - 1 : at], tokens=tokens_read[here], mask=mask))
    return parts


FIRST_ANSWERS = "first_answers.jsonl"
"""A file in the run's directory: the first policy's answers to the evaluation problems."""


@dataclasses.dataclass(frozen=True)
class WinRate(Ingredient):
    """The win rate: how often a judge prefers the current policy's answers to the first's; set when prepared.

    Attributes:
      path: of the file with the first policy's answers.
      scorer: asks the judge.
      peers: the run's processes; the first one writes and reads.
      made_from: maps a problem to a digest of its answers' inputs except the weights.
      pairwise: the judge sees both answers at once.
    """

    path: Path = Path(FIRST_ANSWERS)
    scorer: Any = None
    peers: Peers = ALONE
    made_from: Callable[[Problem], str] = str
    pairwise: bool = False

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        judge = run.evaluation.judge
        return None if judge is None else cls(pairwise=isinstance(judge, Pairwise))

    def prepared(self, context: StageContext) -> Self:
        """See ``Ingredient``."""
        prompts = context.test_prompts
        # The length of answers may grow from phase to phase.
        sampling_numbers = np.asarray([context.answers.temperature, context.answers.top_p], np.float64)
        return dataclasses.replace(
            self,
            path=context.scorer.folder / FIRST_ANSWERS,
            scorer=context.scorer,
            peers=context.peers,
            made_from=lambda problem: digest_of_parts([np.asarray(prompts[problem], np.int32), sampling_numbers]),
        )

    def compared(self, answers: tuple[TaskEvaluation, ...], first: bool) -> tuple[TaskEvaluation, ...]:
        """Return the evaluations with ``won``; the first evaluation of the run stores its answers instead."""
        if first:
            self.begin(answers)
            return answers
        rows = self.peers.first(lambda: list(read_rows(self.path)))
        first_answers = {(row["task"], row["problem"], row["sample"]): row for row in rows}
        return tuple(self.against(first_answers, evaluated) for evaluated in answers)

    def begin(self, evaluations: Sequence[TaskEvaluation]) -> None:
        """Store the first policy's answers to each task; they replace those of an earlier attempt."""
        if not self.peers.leads:
            return
        columns = ("task", "problem", "sample", "completion", "finish_reason")
        lines = []
        for evaluation in evaluations:
            digests = {problem.id: self.made_from(problem) for problem in evaluation.problems}
            rows = zip(evaluation.rows(), (answer for row in evaluation.completions for answer in row), strict=True)
            for row, answer in rows:
                more = {"tokens": answer.tokens, "made_from": digests[row["problem"]]}
                lines.append({name: row[name] for name in columns} | more)
        with new_file(self.path) as part, part.open("wb") as file:
            append_rows(file, lines)

    def against(
        self, first_answers: Mapping[tuple[str, str, int], dict[str, Any]], evaluation: TaskEvaluation
    ) -> TaskEvaluation:
        """Add ``won`` to one task's evaluation: each answer against the first policy's of the same number. Equal tokens
        are a tie, without asking the judge. NaN if the first answer is missing (other problems, prompts or sampling, or
        no file), or if one of the two could not be scored.
        """
        first = [
            [first_answers.get((evaluation.task, problem.id, number)) for number in range(len(row))]
            for problem, row in zip(evaluation.problems, evaluation.completions, strict=True)
        ]
        won = np.full((len(first), len(first[0])), np.nan)
        places = []
        items: list[tuple[Problem, Completion]] = []
        for at, row in np.ndenumerate(np.asarray(first, object)):
            answer = evaluation.completions[at[0]][at[1]]
            made_from = self.made_from(evaluation.problems[at[0]])
            if row is None or row["made_from"] != made_from:
                continue
            if row["tokens"] == answer.tokens.tolist():
                won[at] = 0.5
                continue
            places.append(at)
            problem = evaluation.problems[at[0]]
            if self.pairwise:  # it prefers an answer to the reference: here to the first policy's
                before = dataclasses.replace(problem, answer=row["completion"] or " ", verifier="none")
                items.append((before, answer))
                continue
            # As a judge reads it: sampling probabilities and versions are not kept.
            size = len(row["tokens"])
            before = Completion(
                np.asarray(row["tokens"], np.int32), np.zeros(size, np.float32), row["finish_reason"],
                np.ones(size, bool), np.zeros(size, np.int32), text=row["completion"],
            )  # fmt: skip
            items += [(problem, before), (problem, answer)]
        scores = self.scorer.score(items, only=(JUDGED,)).parts[JUDGED] if items else np.zeros(0)
        if not self.pairwise:
            old, new = scores.reshape(-1, 2).T
            scores = np.where(np.isnan(old + new), np.nan, (np.sign(new - old) + 1) / 2)
        for at, score in zip(places, scores, strict=True):
            won[at] = score
        return dataclasses.replace(evaluation, won=won)


CRITIC = ValueLoss.role


@dataclasses.dataclass(frozen=True)
class CriticRole(Ingredient):
    """The critic of a run, with its own settings; ``forward``: how it is run, None before it is prepared."""

    run: Run
    critic: Critic
    forward: Any = None

    @classmethod
    def of(cls, run: Run) -> Self | None:
        """See ``Ingredient``."""
        critic = run.recipe.critic
        if critic is None:
            return None
        rate, field = critic.optimiser.learning_rate, "recipe.critic.optimiser"
        guard = functools.partial(not_a_number, learning_rate=rate, field=field, prefix="critic/")
        return cls(run, critic, rules={"critic_not_a_number": guard})

    def prepared(self, context: StageContext) -> Self:
        """See ``Ingredient``."""
        return dataclasses.replace(self, forward=context.forwards[CRITIC])

    def role(
        self, policy: ModelConfig, forward: Forward, tokenizer: Any, find: Architectures
    ) -> tuple[Training, Forward]:
        """Return the critic's training and how it is run: in rows of the policy's shapes, as ``forward`` runs the
        ``policy``. ``tokenizer``: the policy's; None if nothing will be loaded.

        Raises:
          InputError: ``recipe.critic.model`` cannot be found, or cannot read the policy's texts.
        """
        run, name = self.run, self.critic.model
        optimiser = build(self.critic.optimiser)
        dtype = jnp.dtype(run.learner.dtype)

        def with_head(model: Any) -> Any:
            return jax.tree.map(lambda x: x.astype(dtype), with_value_head(model))

        begins = NewRole(CRITIC, with_head, optimiser)
        if self.critic.adapter:
            key = jax.random.fold_in(jax.random.key(run.seed), 1)  # the policy's adapter takes the seed as it is
            adapter = lambda base: create_adapter(base.config, run.learner.lora, key, jnp.zeros(base.config.width))  # noqa: E731
            begins = begins._replace(first=adapter)
        compute = forward.compute
        if name is not None:
            config = critic_config(name, run, policy, find)
            # Another architecture, in rows laid out for the policy's attention.
            attention = "auto" if ATTENTION_PLATFORMS.get(compute.attention) == "gpu" else compute.attention
            settings = run.learner.computing(attention=attention, row_tokens=forward.layout.row_tokens)
            compute = compute_for(settings, config, platform_of(forward.mesh), compute.compiler)
            begins = begins._replace(
                load=lambda: load_critic(name, run, tokenizer, forward.mesh),
                shapes=jax.eval_shape(lambda: with_value_head(initialise(config, jax.random.key(0), dtype))),
            )
        objectives = (ValueLoss(self.critic.clip),)
        update = make_update(objectives, optimiser, learning_rate(self.critic.optimiser), compute)
        return Training(objectives, update, begins, self.critic.epochs), dataclasses.replace(forward, compute=compute)

    def planned_samples(self, samples: list[Sample], updates: int) -> list[Sample]:
        """Add zero returns and old values to the samples."""
        with_zeros = []
        for sample in samples:
            zeros = np.zeros(len(sample.tokens), np.float32)
            with_zeros.append(sample.with_arrays(returns=zeros, old_values=zeros))
        return with_zeros

    def planned_pass(self, samples: Sequence[Sample], forward: Forward) -> Pass:
        """Return the pass that computes the critic's values of all completions of a step."""
        bootstraps = "bootstrap" in self.run.recipe.algorithm.advantage.needs
        return Pass(
            "values", forward, [value_sample(sample, bootstraps) for sample in samples], "values", 1, role=CRITIC
        )

    def learning(self, step: int, training: Sequence[Training]) -> Sequence[Training]:
        """Exclude the policy while the critic warms up."""
        return [trained for trained in training if trained.role != "policy"] if step <= self.critic.warmup else training

    def values(self, state: TrainState) -> Callable[[Sequence[Sample]], list[np.ndarray]]:
        """Return the function that computes the values of samples."""
        return functools.partial(self.forward.by_sample, model_of(state, CRITIC), output="values")


def with_value_head(model: Decoder | ScalarModel) -> ScalarModel:
    """Return the model with its scalar head; a decoder gets one of zeros."""
    return model if isinstance(model, ScalarModel) else with_scalar_head(model)


def critic_config(name: str, run: Run, policy: ModelConfig, find: Architectures) -> ModelConfig:
    """Return the architecture of a critic's initial model. InputError: it is missing, or has too few positions or
    another vocabulary than the policy.
    """
    with naming("recipe.critic.model"):
        config = find(name)
    positions = config.attention.rope.max_positions
    require(
        run.rollout.max_length <= positions,
        f"recipe.critic.model {name} was made for {positions} positions, and prompts with completions have up to "
        f"{run.rollout.max_length}: lower rollout.max_new_tokens or rollout.max_prompt_tokens, or give another critic",
    )
    require(
        config.vocab_size == policy.vocab_size,
        f"recipe.critic.model {name} has a vocabulary of {config.vocab_size} tokens, and that of {run.model} has "
        f"{policy.vocab_size}: give a critic that reads the policy's tokens",
    )
    return config


def load_critic(name: str, run: Run, tokenizer: Any, mesh: Mesh) -> ScalarModel:
    """Load a critic's initial model, in ``learner.dtype`` on the mesh. InputError: it is unreadable, has other tokens
    than the policy, or was trained with another chat template.
    """
    model, critic_tokenizer = load_model(name, run.learner.dtype, mesh)
    require(
        critic_tokenizer is None or critic_tokenizer.get_vocab() == tokenizer.get_vocab(),
        f"the tokens of recipe.critic.model {name} are not those of {run.model}: give a critic that reads the policy's "
        "tokens",
    )
    prompts = {task.label: Prompts(task, tokenizer) for task in tasks_in(run.task)}
    recorded = reward_format(name, critic_tokenizer or tokenizer)
    check_reward_template(recorded, f"recipe.critic.model {name}", prompts, tokenizer)
    return with_value_head(model)
