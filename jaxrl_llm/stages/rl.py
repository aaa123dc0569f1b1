"""Reinforcement learning: prompts are sampled, answers scored, and the policy learns from their advantages."""

import contextlib
import dataclasses
import functools
import math
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import jax
import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import tasks
from jaxrl_llm.algorithms import Algorithm
from jaxrl_llm.environments import Factory
from jaxrl_llm.learner import Forward, Sample, to_samples
from jaxrl_llm.learner.samples import advantage_of, mean_abs_advantage, pool_explained_variance
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rewards import Reward, Scorer
from jaxrl_llm.rewards.functions import OF_STEPS, ModelReward
from jaxrl_llm.rewards.shaping import name_rewards
from jaxrl_llm.rollout.collect import Sampler, collect_groups
from jaxrl_llm.rollout.episodes import Episodes, episodes_of
from jaxrl_llm.rollout.evaluate import EvaluationReport, EvaluationSet, TaskEvaluation, evaluate
from jaxrl_llm.rollout.generation import Answerer
from jaxrl_llm.rollout.groups import GROUP_RECORDS, Carryover, GroupSource, RolloutBatch
from jaxrl_llm.sharding import repeated_heads, rollout_mesh
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.ingredients import StageContext
from jaxrl_llm.stages.judges import judge_questions, load_judges
from jaxrl_llm.stages.problems import (
    Problems,
    carry_stream,
    carry_successes,
    data_notes,
    encode_prompts,
    load_problems,
    problem_fingerprints,
    prompt_stream,
    same_groups,
)
from jaxrl_llm.stages.programs import (
    Ingredients,
    build_engine,
    build_sampler,
    build_training,
    coefficients_of,
    dropped_endings,
    evaluation_sampling,
    groups,
    ingredients_of,
    outline,
    planned_minibatch,
    rules_for,
)
from jaxrl_llm.stages.stage import MustStop, Stage, StepOutcome
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.telemetry.records import token_texts
from jaxrl_llm.types import Completion, Group, TrainState

__all__ = ["check_phase", "groups", "outline", "prepare", "resources"]

LOGGED_TOKENS = 4096
"""Most tokens of a step that are written one by one: about 150 KB."""
DIGITS = 4


def shown_places(count: int, most: int, step: int) -> list[int]:
    """Return the places of the groups that a step writes to samples.jsonl, in rotation, so that all tasks are shown."""
    return [(step * most + i) % count for i in range(min(most, count))]


def training_lines(
    groups: Sequence[Group], samples: Sequence[Sample], spell: Callable[[Sequence[int]], list[str]]
) -> list[dict[str, Any]]:
    """Return a line for each completion of the groups; the first ones, up to ``LOGGED_TOKENS`` tokens, have values of
    each token. ``samples`` have their places among these groups; where ``spell`` returns no texts of a completion's
    tokens, they have none.
    """
    sample_by_place = {sample.place: sample for sample in samples}
    tokens_left = LOGGED_TOKENS
    lines = []
    for number, group in enumerate(groups):
        for i, completion in enumerate(group.completions):
            sample = sample_by_place.get((number, i))
            line = {
                "kind": "training",
                "group": number,
                "task": group.problem.task,
                "prompt": group.problem.prompt[-1]["content"],
                "completion": completion.transcript,
                "reward": float(group.rewards[i]),
                "parts": {name: float(part[i]) for name, part in group.parts.items()},
                "finish_reason": completion.finish_reason,
                "tokens": completion.length,
                **completion.played,
            }
            if sample is not None:  # where each token has its own advantage, their mean over those that count
                advantage = np.asarray(advantage_of(sample), np.float64)
                counted = np.broadcast_to(sample.mask, advantage.shape) if advantage.ndim else np.ones(())
                line["advantage"] = float(np.sum(advantage * counted) / max(np.sum(counted), 1))
            tokens_left -= len(completion.tokens)
            if tokens_left >= 0 and (texts := spell(completion.tokens.tolist())):
                line["by_token"] = {"text": texts, **token_numbers(completion, sample)}
            lines.append(line)
    return lines


def token_numbers(completion: Completion, sample: Sample | None) -> dict[str, list[Any]]:
    """Return each token's values by name; with ``mask`` or ``counted`` where not all are sampled or in the loss."""
    arrays = {"sampler_logp": completion.sampler_logp, **completion.extras, **({} if sample is None else sample.arrays)}
    numbers: dict[str, list[Any]] = {}
    for name, array in arrays.items():
        if array.ndim == 1 and np.issubdtype(array.dtype, np.floating):  # sets and marks are no numbers of tokens
            numbers[name] = np.round(array.astype(np.float64), DIGITS).tolist()
    if not completion.mask.all():
        numbers["mask"] = completion.mask.astype(int).tolist()
    if sample is not None and (sample.mask != completion.mask).any():
        numbers["counted"] = sample.mask.astype(int).tolist()
    return numbers


def samples_at(places: Sequence[int], samples: Sequence[Sequence[Sample]]) -> list[Sample]:
    """Return the learner's samples of the groups at these places of a step, with their places renumbered."""
    order = {place: number for number, place in enumerate(places)}
    return [
        dataclasses.replace(sample, place=(order[sample.place[0]], sample.place[1]))
        for group in samples
        for sample in group
        if sample.place is not None and sample.place[0] in order
    ]


def with_ratios(samples: Sequence[Sample], algorithm: Algorithm, forward: Forward, policy: Any) -> list[Sample]:
    """Add ``ratio``, of the current policy to the sampler, and ``clipped``, 1 where the surrogate bounds it, for
    algorithms with bounds on token ratios alone. Both are NaN where the loss does not count a token.
    """
    with_arrays = []
    for sample, logp in zip(samples, forward.by_sample(policy, samples), strict=True):
        ratio = np.exp(np.where(sample.mask, logp - sample.arrays["sampler_logp"], np.nan))
        arrays = {"ratio": ratio}
        if algorithm.ratio.level == "token" and getattr(algorithm.surrogate, "bounds_ratio", True):
            bounds = algorithm.surrogate.clipped(ratio, np.asarray(advantage_of(sample)))
            arrays["clipped"] = np.where(sample.mask, np.logical_or(*bounds), np.nan)
        with_arrays.append(sample.with_arrays(**arrays))
    return with_arrays


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforcement(Stage):
    """A run of reinforcement learning, once its files are read.

    Attributes:
      sampler: fills steps with groups.
      transfer: maps the policy to weights to sample from.
      evaluate_tasks: evaluates such weights, task by task; empty if there is nothing to test on.
      ingredients: prepared.
      samples_ahead: whether the next step's groups are sampled with the weights from before this step's update.
      concurrent: whether sampling and learning may run at the same time.
    """

    run: configs.Run
    tokenizer: Any
    sampler: Sampler
    transfer: Callable[[Any], Any]
    evaluate_tasks: Callable[[Any], tuple[TaskEvaluation, ...]]
    ingredients: Ingredients
    samples_ahead: bool = False
    concurrent: bool = False
    records: ClassVar[Sequence[type]] = GROUP_RECORDS

    def step(
        self,
        state: TrainState,
        carry: Carryover | RolloutBatch | None,
        coefficients: Mapping[str, float],
        number: int,
        must_stop: MustStop,
    ) -> StepOutcome:
        """Sample groups, score them, and learn from them; ``carry`` may be groups that are sampled already."""
        batch, version, weights = carry, int(state.policy.updates), None
        if self.samples_ahead or not isinstance(batch, RolloutBatch):
            weights = self.transfer(model_of(state))
        if not isinstance(batch, RolloutBatch):  # prompts -> completions -> rewards
            batch = self.next_batch(weights, version, batch, must_stop)
        if not isinstance(batch, RolloutBatch) or must_stop(before_update=True):
            return StepOutcome(state, batch)
        if self.samples_ahead:
            return self.learn_and_sample(state, batch, coefficients, number, weights, version)
        del weights  # the update has their memory
        return self.learn(state, batch, coefficients, number)

    def planned_samples(self, state: TrainState) -> list[Sample]:
        """Return the samples of an update at their longest."""
        return planned_minibatch(self.run, self.ingredients, model_of(state).config)

    def learn(
        self, state: TrainState, batch: RolloutBatch, coefficients: Mapping[str, float], number: int
    ) -> StepOutcome:
        """Learn from the groups of a step: rewards -> advantages -> samples -> updates."""
        self.status("updating")  # reference, critic and teachers read the samples first
        began, critic, teachers = time.perf_counter(), self.ingredients.critic, self.ingredients.teachers
        samples, row, training, carry = [], {}, self.training, batch.carryover
        if len(batch):
            with jax.set_mesh(self.forward.mesh):  # of this thread
                rewards = self.net_rewards(batch.groups, coefficients)
                samples, row = self.advantages(state, batch, rewards, coefficients.get("kl_coef"))
                for ingredient in self.ingredients:
                    samples = ingredient.samples(samples, batch)
                if teachers is not None:
                    samples, distances = teachers.scored(state, samples, batch)
                    row, training = row | distances, teachers.learning(training)
            row |= advantage_metrics(samples) | {"completions": len(batch.groups) * self.run.rollout.group}
        if critic is not None:
            training = critic.learning(number, training)
        state, metrics = self.update(state, samples, coefficients, number, began, training)
        if critic is not None:
            explained, steps = pool_explained_variance(row, carry.critic)
            metrics, carry = metrics | explained, dataclasses.replace(carry, critic=steps)
        lines = self.lines(state, batch.groups, samples, number)
        return StepOutcome(state, carry, batch.metrics | row | metrics, batch.groups, lines, [*batch.common])

    def learn_and_sample(
        self,
        state: TrainState,
        batch: RolloutBatch,
        coefficients: Mapping[str, float],
        number: int,
        weights: Any,
        version: int,
    ) -> StepOutcome:
        """Learn from the groups of a step, and sample the next one's with the weights from before the update; after the
        last step too, so that a run that is extended later continues exactly.
        """
        if self.concurrent:
            with ThreadPoolExecutor(1) as thread:
                learning = thread.submit(self.learn, state, batch, coefficients, number)
                following = self.next_batch(weights, version, batch.carryover)
                outcome = learning.result()
        else:  # on shared devices two threads could start programs in different orders per device, and deadlock
            outcome = self.learn(state, batch, coefficients, number)
            following = self.next_batch(weights, version, batch.carryover)
        carryover = dataclasses.replace(following.carryover, critic=outcome.carry.critic)
        return outcome._replace(carry=dataclasses.replace(following, carryover=carryover))

    def next_batch(
        self, weights: Any, version: int, carry: Carryover | None, must_stop: Callable[[], bool] = lambda: False
    ) -> RolloutBatch | Carryover:
        """Return the scored groups of one step, or the progress towards them if the run has to stop. Of the sampled
        groups only those to learn from are kept: the others are counted in the metrics already.
        """
        self.status("sampling")
        run, carry, texts = self.run, carry or Carryover(), self.ingredients.texts
        batch = RolloutBatch(groups=[], sampled=[], carryover=carry, tokens=0, version=version, metrics={})
        if configs.samples_groups(run):
            batch = collect_groups(self.sampler, weights, version, carry, must_stop)
        if not isinstance(batch, RolloutBatch):
            return batch
        batch = dataclasses.replace(batch, sampled=[], metrics=group_row(run, batch.metrics))
        return batch if texts is None else texts.drawn(batch, carry.texts)

    def net_rewards(self, groups: Sequence[Group], coefficients: Mapping[str, float]) -> np.ndarray:
        """Return the rewards float[P, G], less the costs of constraints."""
        rewards = np.asarray([group.rewards for group in groups])
        constraints = self.ingredients.constraints
        return constraints.rewards(rewards, groups, coefficients) if constraints and groups else rewards

    def advantages(
        self, state: TrainState, batch: RolloutBatch, rewards: np.ndarray, kl_coef: float | None
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Return the groups as samples, with each token's advantage and whether the loss counts it, and metrics.
        ``kl_coef``: of the KL penalty in the reward; unused without one.
        """
        run, groups, models = self.run, batch.groups, {}
        if not groups:
            return [], {}
        if state.reference is not None:
            models["ref_logp"] = functools.partial(self.forward.by_sample, model_of(state, "reference"))
        if self.ingredients.critic is not None:
            models["values"] = self.ingredients.critic.values(state)
        algorithm = run.recipe.algorithm
        if algorithm.advantage.several:
            algorithm, rewards = split_rewards(algorithm, name_rewards(configs.rewards(run)), groups)
        return to_samples(
            algorithm,
            groups,
            batch.version,
            rewards,
            dropped_endings(run),
            self.forward.layout.completion_tokens,
            models,
            kl_coef,
            run.rollout.collect.learn_earlier,
        )

    def lines(
        self, state: TrainState, groups: Sequence[Group], samples: Sequence[Sequence[Sample]], number: int
    ) -> list[dict[str, Any]]:
        """Return the lines of samples.jsonl, of some of the step's groups."""
        output = self.run.output
        places = shown_places(len(groups), output.samples, number)
        shown_samples = samples_at(places, samples)
        if output.ratios and shown_samples:
            with jax.set_mesh(self.forward.mesh):
                policy = model_of(state, "policy")
                shown_samples = with_ratios(shown_samples, self.run.recipe.algorithm, self.forward, policy)
        spell = functools.partial(token_texts, tokenizer=self.tokenizer)
        return training_lines([groups[place] for place in places], shown_samples, spell)

    def evaluate(self, policy: Any, first: bool = False) -> EvaluationReport | None:
        """Evaluate on the problems to test on, and on held-out texts; ``first``: before the first step."""
        answers, texts = self.evaluate_tasks(self.transfer(policy)), self.ingredients.texts
        numbers = {} if texts is None else texts.evaluate(policy)
        if self.ingredients.win_rate is not None:
            answers = self.ingredients.win_rate.compared(answers, first)
        return EvaluationReport(numbers, answers) if numbers or answers else None

    def carry_after_rollback(self, carry: Carryover | RolloutBatch | None) -> Carryover | None:
        """Return the carryover without groups of the policy that is undone."""
        carry = carry.carryover if isinstance(carry, RolloutBatch) else carry
        fresh: dict[str, Any] = {"surplus": (), "unfinished": (), "step_progress": {}}
        fresh |= {"recent_informative": 0.0, "recent_scored": 0.0}
        return None if carry is None else dataclasses.replace(carry, critic=[], **fresh)

    def carry_over(
        self,
        carry: Carryover | RolloutBatch | None,
        before: configs.Run,
        after: configs.Run,
        new_run: bool = False,
    ) -> Carryover | None:
        """Return the whole carryover if groups are sampled and scored as before, in the same run. Otherwise groups that
        were not learned from are dropped, and so is the memory of tasks that ``after`` lacks.
        """
        carry = carry.carryover if isinstance(carry, RolloutBatch) else carry
        if carry is None:
            return None
        if same_groups(before, after) and not new_run:
            return dataclasses.replace(carry, critic=[])
        fresh: Any = self.carry_after_rollback(carry)
        stream = carry_stream(carry.stream_memory, carry.cursor, before, after)
        return dataclasses.replace(
            fresh, stream_memory=stream, successes=carry_successes(carry.successes, before, after, new_run)
        )


REWARD_METRICS = {f"reward/{name}" for name in ("mean", "std", "zero_std_fraction", "p10", "p50", "p90")}
"""Metrics that a run without rewards does not measure."""
TASK_METRICS = ("reward", "zero_std_fraction")
"""The same of a task of a mixture."""


def group_row(run: configs.Run, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step's groups, with ``kl`` as NaN until learning measures it, and those of rewards if the
    run has any; ``reward_model/mean`` is of the first ``ModelReward``, NaN if nothing was scored.
    """
    models = [name for name, reward in name_rewards(configs.rewards(run)).items() if isinstance(reward, ModelReward)]
    left_out: set[str] = set()
    if configs.without_rewards(run):
        of_tasks = {f"task/{task.label}/{name}" for task in configs.tasks_in(run.task) for name in TASK_METRICS}
        left_out = REWARD_METRICS | of_tasks
    means = {"reward_model/mean": metrics.get(f"reward/{models[0]}", math.nan)} if models else {}
    return {"kl": math.nan} | {name: metric for name, metric in metrics.items() if name not in left_out} | means


def split_rewards(
    algorithm: Algorithm, rewards: Mapping[str, Reward], groups: Sequence[Group]
) -> tuple[Algorithm, np.ndarray]:
    """Return the algorithm with the rewards' weights, and the rewards float64[P, G, n], without rewards of steps: apart
    for an estimator that takes several, else their weighted sum.
    """
    rewards = {name: reward for name, reward in rewards.items() if not isinstance(reward, OF_STEPS)}
    weights = algorithm.advantage.weights or tuple(float(reward.weight) for reward in rewards.values())
    parts = np.stack([np.stack([group.parts[name] for group in groups]) for name in rewards], axis=-1)
    return dataclasses.replace(algorithm, advantage=dataclasses.replace(algorithm.advantage, weights=weights)), parts


def advantage_metrics(samples: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Return metrics of the samples' advantages; empty if no sample has one."""
    all_samples = [sample for members in samples for sample in members]
    sampled = [sample for sample in all_samples if "advantages" in (*sample.scalars, *sample.arrays)]
    if not sampled:
        return {}
    moving = [bool(np.any(advantage_of(sample))) for sample in sampled]
    return {
        "advantage/nonzero_fraction": float(np.mean(moving)),
        "advantage/abs_mean": mean_abs_advantage(sampled),
    }


@contextlib.contextmanager
def resources(run: configs.Run, peers: Peers, directory: Path) -> Generator[Scorer]:
    """Open the run's rewards with their workers, and begin to generate problems while the weights load."""
    scoring = run.scoring
    scorer = Scorer(
        configs.rewards(run), scoring.workers, scoring.timeout_s, scoring.on_error, peers, directory,
        configs.watched(run), configs.asked(run),
    )  # fmt: skip
    sources = [task.source for task in configs.tasks_in(run.task, run.evaluation.task)]
    with scorer, tasks.generate_ahead(sources):
        yield scorer


def prepare(
    run: configs.Run, model: Any, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> Reinforcement:
    """Read the task and build sampling, scoring, learning and evaluation; nothing large is computed yet. InputError:
    data, rewards or prompts that the run cannot use.
    """
    check_tokenizer(tokenizer, run.model)
    configs.validate_on_model(run, model.config.attention.rope.max_positions)
    problems = load_problems(run, tokenizer, progress.status)
    fingerprints = problem_fingerprints(run, problems)
    peers.check_same(
        f"problems of {run.task.label}", " ".join(fingerprint["order"] for fingerprint in fingerprints.values())
    )
    prompts = encode_prompts(run, run.task, problems.all_train, tokenizer)
    test_prompts = encode_prompts(run, problems.tested, problems.asked, tokenizer)
    scorer.tokenizer = tokenizer
    progress.status("calling each reward once")
    reward_notes = check_rewards(scorer, problems, prompts, configs.verifies(run), progress.note)
    stops, where = model.config.tokens.eos, rollout_mesh(run.mesh)
    ingredients = ingredients_of(run)
    training, forwards = build_training(run, ingredients, model, mesh, tokenizer)
    forward, names = forwards["policy"], [objective.name for role in training for objective in role.objectives]
    test_sampling = evaluation_sampling(run, stops)
    prompts_by_task = {task.label: texts for texts in (test_prompts, prompts) for task in texts.tasks}
    # Instead of an earlier phase's.
    scorer.models = load_judges(run, where, tokenizer, prompts_by_task, progress.status)
    context = StageContext(
        tokenizer, prompts, test_prompts, stops, forwards, names, scorer, test_sampling, peers, progress
    )
    ingredients = ingredients.prepared(context)
    if judge_questions(run):
        scorer.dry_run(problems.all_train[0], tokenizer, judges=True)
    engine, transfer = build_engine(run, model, forward.compute.dtype, mesh, where)
    observed = bool(run.recipe.observation_coef)
    episodes = [
        episodes_of(prompts, run.rollout, stops, peers, run.recipe.branch, observed),
        episodes_of(test_prompts, run.rollout, stops, peers),
    ]
    stream, rollout = prompt_stream(run, problems.train), run.rollout
    source = GroupSource(
        tokenizer, prompts, stream, scorer, rollout.group, run.seed, run.recipe.shaping, episodes[0], stops
    )
    limits = configs.limits_of(configs.parts_of_task(problems.tested), run.rollout.max_new_tokens)

    def evaluate_tasks(weights: Any) -> tuple[TaskEvaluation, ...]:
        if not problems.asked:
            return ()
        questions = EvaluationSet(test_prompts, problems.asked, run.evaluation.samples, run.seed, limits)
        answerer = Answerer(engine, weights, tokenizer, scorer, episodes[1])
        return evaluate(answerer, questions, test_sampling, progress.status)

    head_notes = repeated_heads(model.config.cached_heads, where.shape["tensor"])
    texts = ingredients.texts
    notes = [*problems.notes, *(texts.notes if texts is not None else ()), *rehearse_episodes(episodes, problems)]
    return Reinforcement(
        training=training,
        forward=forward,
        label=run.task.label,
        problems=fingerprints | (texts.fingerprints if texts is not None else {}),
        reference=configs.keeps_reference(run),
        coefficients=coefficients_of(run, ingredients),
        rules=rules_for(run, ingredients),
        notes=[*notes, *reward_notes, *data_notes(run, problems, prompts, stops), *head_notes],
        samples_ahead=run.rollout.collect.staleness > 0,
        concurrent=run.mesh.rollout > 0 or mesh.size == 1,
        measures_kl=run.recipe.of_kl is not None,
        run=run,
        status=progress.status,
        tokenizer=tokenizer,
        sampler=build_sampler(run, engine, source, stops, progress.status),
        transfer=transfer,
        evaluate_tasks=evaluate_tasks,
        ingredients=ingredients,
    )


def check_rewards(
    scorer: Scorer, problems_read: Problems, prompts: Prompts, verifies: bool, note: Callable[[str], None] | None = None
) -> list[str]:
    """Call each reward once for every task, and return notes; ``note`` gets later ones, see ``Scorer.check``."""
    notes = scorer.check([*problems_read.all_train, *problems_read.held_out], verifies, note)
    for problems in problems_read.train:
        task = prompts.task(problems[0].task)
        tools = [*Factory(None, task.tools).functions] if task.plays else None
        scorer.dry_run(problems[0], prompts.tokenizer, tools)
    return notes


def rehearse_episodes(episodes: Sequence[Episodes | None], problems_read: Problems) -> list[str]:
    """Begin a first episode of training and of evaluation, so that one that cannot begin is refused; return notes."""
    notes: list[str] = []
    for task_episodes, problems in zip(episodes, (problems_read.all_train, problems_read.asked), strict=True):
        notes += [] if task_episodes is None else task_episodes.rehearse(problems)
    return list(dict.fromkeys(notes))


def check_phase(
    before: configs.Run, run: configs.Run, model: Any, tokenizer: Any, status: Callable[[str], None]
) -> None:
    """Read a phase's problems and call its rewards once: refuse what ``prepare`` would before earlier phases train."""
    configs.validate_on_model(run, model.attention.rope.max_positions)
    if same_groups(before, run) and before.evaluation.task == run.evaluation.task:
        return
    problems = load_problems(run, tokenizer, status)
    # Refuses those that are too long.
    prompts = encode_prompts(run, run.task, problems.all_train, tokenizer)
    encode_prompts(run, problems.tested, problems.asked, tokenizer)
    scoring = run.scoring
    with Scorer(configs.rewards(run), scoring.workers, scoring.timeout_s, watched=configs.watched(run)) as scorer:
        check_rewards(scorer, problems, prompts, configs.verifies(run))
