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
from jaxrl_llm.learner import Sample, to_samples
from jaxrl_llm.learner.samples import advantage_of, pooled, size_of_advantages
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rewards import Reward, Scorer
from jaxrl_llm.rewards.functions import OF_STEPS, ModelReward
from jaxrl_llm.rewards.shaping import named
from jaxrl_llm.rollout.dynamic_sampling import Sampler, collect
from jaxrl_llm.rollout.episodes import Episodes, episodes_of
from jaxrl_llm.rollout.evaluate import Evaluated, Questions, Tested, evaluate
from jaxrl_llm.rollout.groups import RECORDS, Carryover, GroupSource, RolloutBatch
from jaxrl_llm.rollout.respond import Answerer
from jaxrl_llm.sharding import repeated_heads, rollout_mesh
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages.examples import of_examples, shown_places, training_lines, with_ratios
from jaxrl_llm.stages.ingredients import StageContext
from jaxrl_llm.stages.judges import asked_models, judges_of
from jaxrl_llm.stages.problems import (
    Problems,
    about,
    problems_of,
    prompts_of,
    read_problems,
    same_groups,
    stream_left,
    streams_of,
    successes_left,
)
from jaxrl_llm.stages.programs import (
    Ingredients,
    answering,
    coefficients_of,
    dropped_endings,
    groups,
    ingredients_of,
    learning_of,
    outline,
    rules_for,
    sampler_of,
    sampling_of,
)
from jaxrl_llm.stages.stage import Late, Stage, StepOutcome
from jaxrl_llm.tasks import Prompts
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.telemetry.records import token_texts
from jaxrl_llm.types import Group, TrainState

__all__ = ["check_ahead", "groups", "outline", "prepare", "resources"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforcement(Stage):
    """A run of reinforcement learning, once its files are read.

    Attributes:
      run: its settings.
      tokenizer: of the policy.
      sampler: fills steps with groups.
      transfer: maps the policy to weights to sample from.
      answers: evaluates such weights, task by task; empty if there is nothing to test on.
      ingredients: prepared.
      ahead: whether the next step's groups are sampled with the weights from before this step's update.
      apart: whether sampling and learning may run at the same time.
    """

    run: configs.Run
    tokenizer: Any
    sampler: Sampler
    transfer: Callable[[Any], Any]
    answers: Callable[[Any], tuple[Evaluated, ...]]
    ingredients: Ingredients
    ahead: bool = False
    apart: bool = False
    records: ClassVar[Sequence[type]] = RECORDS

    def step(
        self,
        state: TrainState,
        carry: Carryover | RolloutBatch | None,
        coefficients: Mapping[str, float],
        number: int,
        late: Late,
    ) -> StepOutcome:
        """Sample groups, score them, and learn from them; ``carry`` may be groups that are sampled already."""
        if self.ahead:
            return self.step_ahead(state, carry, coefficients, number, late)
        batch = carry
        if not isinstance(batch, RolloutBatch):  # prompts -> completions -> rewards
            batch = self.collect(self.transfer(model_of(state)), int(state.policy.updates), batch, late)
        if not isinstance(batch, RolloutBatch) or late(before_update=True):
            return StepOutcome(state, batch)
        return self.learn(state, batch, coefficients, number)

    def learn(
        self, state: TrainState, batch: RolloutBatch, coefficients: Mapping[str, float], number: int
    ) -> StepOutcome:
        """Learn from the groups of a step: rewards -> advantages -> samples -> updates."""
        began, critic, teachers = time.perf_counter(), self.ingredients.critic, self.ingredients.teachers
        samples, row, training, carry = [], {}, self.training, batch.left
        if len(batch):
            with jax.set_mesh(self.forward.mesh):  # of this thread
                rewards = self.rewards(batch.groups, coefficients)
                samples, row = self.advantages(state, batch, rewards, coefficients.get("kl_coef"))
                for ingredient in self.ingredients:
                    samples = ingredient.samples(samples, batch)
                if teachers is not None:
                    samples, distances = teachers.scored(state, samples, batch)
                    row, training = row | distances, teachers.learning(training)
            row |= sizes(samples) | {"completions": len(batch.groups) * self.run.rollout.group}
        if critic is not None:
            training = critic.learning(number, training)
        state, metrics = self.update(state, samples, coefficients, number, began, training)
        if critic is not None:
            explained, steps = pooled(row, carry.critic)
            metrics, carry = metrics | explained, dataclasses.replace(carry, critic=steps)
        lines = self.lines(state, batch.groups, samples, number)
        return StepOutcome(state, carry, batch.metrics | row | metrics, batch.groups, lines, [*batch.common])

    def step_ahead(
        self,
        state: TrainState,
        carry: Carryover | RolloutBatch | None,
        coefficients: Mapping[str, float],
        number: int,
        late: Late,
    ) -> StepOutcome:
        """Make a step, and sample the next one's groups with the weights from before its update.

        Also in the last step, so that extending the run later is exact; costs one unused rollout otherwise.
        """
        weights, version = self.transfer(model_of(state)), int(state.policy.updates)
        batch = carry if isinstance(carry, RolloutBatch) else self.collect(weights, version, carry, late)
        if not isinstance(batch, RolloutBatch) or late(before_update=True):
            return StepOutcome(state, batch)
        if self.apart:
            with ThreadPoolExecutor(1) as thread:
                learning = thread.submit(self.learn, state, batch, coefficients, number)
                following = self.collect(weights, version, batch.left)
                outcome = learning.result()
        else:  # two threads may start programs in another order on each device that they share, and wait for each other
            outcome = self.learn(state, batch, coefficients, number)
            following = self.collect(weights, version, batch.left)
        left = dataclasses.replace(following.left, critic=outcome.carry.critic)
        return outcome._replace(carry=dataclasses.replace(following, left=left))

    def collect(
        self, weights: Any, version: int, carry: Carryover | None, late: Callable[[], bool] = lambda: False
    ) -> RolloutBatch | Carryover:
        """Return the groups of one step, scored, or the progress towards them if the run has to stop.

        The batch no longer lists all sampled groups, which are counted already.
        """
        self.status("sampling")
        run, carry, texts = self.run, carry or Carryover(), self.ingredients.texts
        batch = RolloutBatch([], [], carry, 0, version, {})
        if configs.samples_groups(run):
            batch = collect(self.sampler, weights, version, carry, late)
        if not isinstance(batch, RolloutBatch):
            return batch
        batch = dataclasses.replace(batch, sampled=[], metrics=metrics_of(run, batch.metrics))
        return batch if texts is None else texts.drawn(batch, carry.texts)

    def rewards(self, groups: Sequence[Group], coefficients: Mapping[str, float]) -> np.ndarray:
        """Return the rewards float[P, G] that advantages are computed from: less the costs of constraints."""
        rewards = np.asarray([group.rewards for group in groups])
        constraints = self.ingredients.constraints
        return constraints.rewards(rewards, groups, coefficients) if constraints and groups else rewards

    def advantages(
        self, state: TrainState, batch: RolloutBatch, rewards: np.ndarray, kl_coef: float | None
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Return the groups as samples, with each token's advantage and whether the loss counts it, and metrics.

        ``kl_coef``: of a KL in the reward.
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
            algorithm, rewards = separately(algorithm, named(configs.rewards(run)), groups)
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
        shown = of_examples(places, samples)
        if output.ratios and shown:
            with jax.set_mesh(self.forward.mesh):
                policy = model_of(state, "policy")
                shown = with_ratios(shown, self.run.recipe.algorithm, self.forward, policy)
        spell = functools.partial(token_texts, tokenizer=self.tokenizer)
        return training_lines([groups[place] for place in places], shown, spell)

    def evaluate(self, policy: Any, first: bool = False) -> Tested | None:
        """Evaluate on the problems to test on, and on held-out texts; ``first``: before the first step."""
        answers, texts = self.answers(self.transfer(policy)), self.ingredients.texts
        numbers = {} if texts is None else texts.evaluate(policy)
        if self.ingredients.win_rate is not None:
            answers = self.ingredients.win_rate.compared(answers, first)
        return Tested(numbers, answers) if numbers or answers else None

    def let_go(self, carry: Carryover | RolloutBatch | None) -> Carryover | None:
        """Return the carryover after a rollback of the policy: without groups of the policy that is undone."""
        carry = carry.left if isinstance(carry, RolloutBatch) else carry
        fresh: dict[str, Any] = {"carried": (), "unfinished": (), "good": 0.0, "seen": 0.0, "underway": {}}
        return None if carry is None else dataclasses.replace(carry, critic=[], **fresh)

    def carry_over(
        self,
        carry: Carryover | RolloutBatch | None,
        before: configs.Run,
        after: configs.Run,
        anew: bool = False,
    ) -> Carryover | None:
        """Return the whole carryover if groups are sampled and scored as before, in the same run.

        Otherwise groups that were not learned from are dropped, and so is the memory of tasks that ``after`` lacks.
        """
        carry = carry.left if isinstance(carry, RolloutBatch) else carry
        if carry is None:
            return None
        if same_groups(before, after) and not anew:
            return dataclasses.replace(carry, critic=[])
        fresh: Any = self.let_go(carry)
        stream = stream_left(carry.stream, carry.cursor, before, after)
        return dataclasses.replace(fresh, stream=stream, successes=successes_left(carry.successes, before, after, anew))


REWARDS = {f"reward/{name}" for name in ("mean", "std", "zero_std_fraction", "p10", "p50", "p90")}
"""Metrics that a run without rewards does not measure."""
BY_TASK = ("reward", "zero_std_fraction")
"""The same of a task of a mixture."""


def metrics_of(run: configs.Run, metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Return the metrics of a step's groups: without those of rewards where the run has none, and with
    ``reward_model/mean`` of the first model reward, if there is one: NaN if nothing was scored."""
    models = [name for name, reward in named(configs.rewards(run)).items() if isinstance(reward, ModelReward)]
    left_out: set[str] = set()
    if configs.without_rewards(run):
        of_tasks = {f"task/{task.label}/{name}" for task in configs.tasks_in(run.task) for name in BY_TASK}
        left_out = REWARDS | of_tasks
    means = {"reward_model/mean": metrics.get(f"reward/{models[0]}", math.nan)} if models else {}
    return {"kl": math.nan} | {name: x for name, x in metrics.items() if name not in left_out} | means


def separately(
    algorithm: Algorithm, rewards: Mapping[str, Reward], groups: Sequence[Group]
) -> tuple[Algorithm, np.ndarray]:
    """Return the algorithm with its weights filled in, and each reward float64[P, G, n], for an estimator of several.

    Step rewards are excluded.
    """
    rewards = {name: reward for name, reward in rewards.items() if not isinstance(reward, OF_STEPS)}
    weights = algorithm.advantage.weights or tuple(float(reward.weight) for reward in rewards.values())
    parts = np.stack([np.stack([group.parts[name] for group in groups]) for name in rewards], axis=-1)
    return dataclasses.replace(algorithm, advantage=dataclasses.replace(algorithm.advantage, weights=weights)), parts


def sizes(samples: Sequence[Sequence[Sample]]) -> dict[str, float]:
    """Return metrics of the advantages of a step's samples; none without any."""
    every = [sample for members in samples for sample in members]
    sampled = [sample for sample in every if "advantages" in (*sample.scalars, *sample.arrays)]
    if not sampled:
        return {}
    moving = [bool(np.any(advantage_of(sample))) for sample in sampled]
    return {
        "advantage/nonzero_fraction": float(np.mean(moving)),
        "advantage/abs_mean": size_of_advantages(sampled),
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
    with scorer, tasks.begun(sources):
        yield scorer


def prepare(
    run: configs.Run, model: Any, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> Reinforcement:
    """Read the task and build sampling, scoring, learning and evaluation; nothing large is computed yet.

    Raises:
      InputError: data, rewards or prompts that the run cannot use.
    """
    check_tokenizer(tokenizer, run.model)
    configs.validate_on_model(run, model.config.attention.rope.max_positions)
    read = read_problems(run, tokenizer, progress.status)
    prints = problems_of(run, read)
    peers.check_same(f"problems of {run.task.label}", " ".join(found["order"] for found in prints.values()))
    prompts = prompts_of(run, run.task, read.all_train, tokenizer)
    test_prompts = prompts_of(run, read.tested, read.asked, tokenizer)
    scorer.tokenizer = tokenizer
    progress.status("calling each reward once")
    sandboxed = rewarded(scorer, read, prompts, configs.verifies(run), progress.note)
    stops, where = model.config.tokens.eos, rollout_mesh(run.mesh)
    ingredients = ingredients_of(run)
    training, forwards = learning_of(run, ingredients, model, mesh, tokenizer)
    forward, names = forwards["policy"], [objective.name for one in training for objective in one.objectives]
    answers = answering(run, stops)
    asked = {task.label: known for known in (test_prompts, prompts) for task in known.tasks}
    scorer.models = judges_of(run, where, tokenizer, asked, progress.status)  # instead of an earlier phase's
    context = StageContext(tokenizer, prompts, test_prompts, stops, forwards, names, scorer, answers, peers, progress)
    ingredients = ingredients.prepared(context)
    if asked_models(run):
        scorer.dry_run(read.all_train[0], tokenizer, judges=True)
    engine, transfer = sampling_of(run, model, forward.compute.dtype, mesh, where)
    played = (prompts, run.recipe.branch, bool(run.recipe.observation_coef)), (test_prompts, None, False)
    episodes = [episodes_of(one, run.rollout, stops, peers, *others) for one, *others in played]
    of_run = run.rollout.group, run.seed, run.recipe.shaping
    source = GroupSource(tokenizer, prompts, streams_of(run, read.train), scorer, *of_run, episodes[0], stops)
    limits = configs.limits_of(configs.parts_of_task(read.tested), run.rollout.max_new_tokens)

    def test(weights: Any) -> tuple[Evaluated, ...]:
        if not read.asked:
            return ()
        asked = Questions(test_prompts, read.asked, run.evaluation.samples, run.seed, limits)
        return evaluate(Answerer(engine, weights, tokenizer, scorer, episodes[1]), asked, answers, progress.status)

    repeated = repeated_heads(model.config.attention.kv_heads, where.shape["tensor"])
    texts = ingredients.texts
    told = [*(texts.notes if texts is not None else ()), *rehearsed(episodes, read)]
    return Reinforcement(
        training=training,
        forward=forward,
        label=run.task.label,
        problems=prints | (texts.fingerprints if texts is not None else {}),
        reference=configs.keeps_reference(run),
        coefficients=coefficients_of(run, ingredients),
        rules=rules_for(run, ingredients),
        notes=[*read.notes, *told, *sandboxed, *about(run, read, prompts, stops), *repeated],
        ahead=run.rollout.collect.staleness > 0,
        apart=run.mesh.rollout > 0 or mesh.size == 1,
        measures_kl=run.recipe.of_kl is not None,
        run=run,
        status=progress.status,
        tokenizer=tokenizer,
        sampler=sampler_of(run, engine, source, stops, progress.status),
        transfer=transfer,
        answers=test,
        ingredients=ingredients,
    )


def rewarded(
    scorer: Scorer, read: Problems, prompts: Prompts, verifies: bool, note: Callable[[str], None] | None = None
) -> list[str]:
    """Check that the rewards can judge all problems, and call each once for every task; return notes. ``note`` gets
    what is found later, see ``Scorer.check``.
    """
    notes = scorer.check([*read.all_train, *read.held_out], verifies, note)
    for problems in read.train:
        task = prompts.task(problems[0].task)
        tools = [*Factory(None, task.tools).functions] if task.plays else None
        scorer.dry_run(problems[0], prompts.tokenizer, tools)
    return notes


def rehearsed(episodes: Sequence[Episodes | None], read: Problems) -> list[str]:
    """Begin a first episode of training and of evaluation, so that one that cannot begin is refused; return notes."""
    notes: list[str] = []
    for one, problems in zip(episodes, (read.all_train, read.asked), strict=True):
        notes += [] if one is None else one.rehearse(problems)
    return list(dict.fromkeys(notes))


def check_ahead(
    before: configs.Run, run: configs.Run, model: Any, tokenizer: Any, status: Callable[[str], None]
) -> None:
    """Refuse a phase that ``prepare`` would refuse later, before the phases ahead of it are trained.

    Its problems are read, and its rewards called once.

    Raises:
      InputError: as ``prepare``.
    """
    configs.validate_on_model(run, model.attention.rope.max_positions)
    if same_groups(before, run) and before.evaluation.task == run.evaluation.task:
        return
    read = read_problems(run, tokenizer, status)
    # Refuses those that are too long.
    prompts = prompts_of(run, run.task, read.all_train, tokenizer)
    prompts_of(run, read.tested, read.asked, tokenizer)
    scoring = run.scoring
    with Scorer(configs.rewards(run), scoring.workers, scoring.timeout_s, watched=configs.watched(run)) as scorer:
        rewarded(scorer, read, prompts, configs.verifies(run))
