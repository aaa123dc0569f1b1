"""Reinforcement learning: prompts are sampled, answers scored, and the policy learns from their advantages."""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from jaxrl_llm import config as configs
from jaxrl_llm import learner, tasks
from jaxrl_llm.config import Run
from jaxrl_llm.engine import Engine, Sampling
from jaxrl_llm.evaluate import Evaluated, Questions, Tested, evaluate_tasks
from jaxrl_llm.learner import Forward, Sample, Training
from jaxrl_llm.learner.samples import advantage_of, size_of_advantages
from jaxrl_llm.models.config import ModelConfig
from jaxrl_llm.models.decoder import Decoder
from jaxrl_llm.models.lora import model_of
from jaxrl_llm.rewards import Scorer
from jaxrl_llm.rewards.shaping import named
from jaxrl_llm.rollout.admission import AdmissionPolicy
from jaxrl_llm.rollout.collect import Sampler, collect
from jaxrl_llm.rollout.groups import RECORDS, Carryover, GroupSource, RolloutBatch
from jaxrl_llm.rules import (
    BY_HAND,
    OF_ENTROPY,
    ByHand,
    Controlled,
    EntropyControlled,
    Multiplier,
    Rule,
    guards_of,
    rules_of,
)
from jaxrl_llm.sharding import rollout_mesh
from jaxrl_llm.sharding.distributed import Peers
from jaxrl_llm.stages import programs as of_devices
from jaxrl_llm.stages.aims import gated, lagrangian, modelled, separately
from jaxrl_llm.stages.contest import Contest, contest_of
from jaxrl_llm.stages.judges import judges_of
from jaxrl_llm.stages.leaving import same_groups, stream_left, successes_left
from jaxrl_llm.stages.mixture import Mixture, mixture_of
from jaxrl_llm.stages.problems import (
    Problems,
    check_prompts,
    problems_of,
    read_problems,
    sizes_of,
    streams_of,
    thoughts_judged,
)
from jaxrl_llm.stages.programs import build_programs, moved_by_rules
from jaxrl_llm.stages.stage import Stage
from jaxrl_llm.stages.taught import untold
from jaxrl_llm.tasks.template import check_tokenizer
from jaxrl_llm.telemetry.pieces import pieces
from jaxrl_llm.telemetry.progress import Progress
from jaxrl_llm.types import TrainState

groups, outline = of_devices.groups, of_devices.outline


@contextlib.contextmanager
def resources(run: Run, peers: Peers, directory: Path) -> Generator[Scorer]:
    """The run's rewards with their workers; problems that must be generated are begun, to be there with the weights."""
    scoring = run.scoring
    scorer = Scorer(
        configs.rewards(run), scoring.workers, scoring.timeout_s, scoring.on_error, peers, directory,
        configs.watched(run), configs.asked(run),
    )  # fmt: skip
    sources = [task.source for task in configs.tasks_in(run.task, run.evaluation.task)]
    with scorer, tasks.begun(sources):
        yield scorer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reinforcement(Stage):
    """A run of reinforcement learning once its files are read.

    Attributes:
      run: its settings.
      sampler: fills steps with groups.
      transfer: from the policy to weights to sample from.
      evaluation: of such weights, task by task; nothing where there is nothing to test on.
      values: how the critic is run; None where there is none.
      mixture: texts that steps learn from beside their groups; None for none.
      contest: today's answers against the first policy's; None for none.
    """

    run: Run
    sampler: Sampler
    transfer: Callable[[Decoder], Decoder]
    evaluation: Callable[[Decoder], tuple[Evaluated, ...]]
    values: Forward | None = None
    mixture: Mixture | None = None
    contest: Contest | None = None
    records: ClassVar[Sequence[type]] = RECORDS

    def learning(self, step: int) -> Sequence[Training]:
        """All roles; while a critic warms up, it alone."""
        critic = self.run.recipe.critic
        warming = critic is not None and step <= critic.warmup
        return [one for one in self.training if one.role != "policy"] if warming else self.training

    def weights(self, policy: Decoder) -> Decoder:
        """What is sampled from."""
        return self.transfer(policy)

    def test(self, policy: Decoder) -> Tested | None:
        """Answers to the problems to test on, where there is a judge against the first ones, and the loss on texts."""
        found = self.evaluation(self.transfer(policy))
        return tested(self.mixture, policy, found if self.contest is None else self.contest.judged(found))

    def test_first(self, policy: Decoder) -> Tested | None:
        """The same; these answers are the first ones."""
        found = self.evaluation(self.transfer(policy))
        if self.contest is not None:
            self.contest.begin(found)
        return tested(self.mixture, policy, found)

    def followed(self, state: TrainState, samples: list[Sample]) -> list[Sample]:
        """With ``ratio``, of the policy as it is now to what was sampled from, and ``clipped``, 1 where that ratio is
        out of the surrogate's bounds, in algorithms whose ratios are of tokens; NaN where the loss counts no token."""
        algorithm = self.run.recipe.algorithm
        found = []
        for sample, logp in zip(samples, self.forward.by_sample(model_of(state, "policy"), samples), strict=True):
            ratio = np.exp(np.where(sample.mask, logp - sample.arrays["sampler_logp"], np.nan))
            arrays = {"ratio": ratio}
            if algorithm.ratio.level == "token":
                bounds = algorithm.surrogate.clipped(ratio, np.asarray(advantage_of(sample)))
                arrays["clipped"] = np.where(sample.mask, np.logical_or(*bounds), np.nan)
            found.append(dataclasses.replace(sample, arrays=sample.arrays | arrays))
        return found

    def spell(self, tokens: Sequence[int]) -> list[str]:
        """The text of each token."""
        return pieces(tokens, self.sampler.source.tokenizer)

    def next(self, weights: Decoder, version: int, left: Carryover | None) -> RolloutBatch:
        """The groups of one step; those sampled beside them have been counted and are let go."""
        batch = collect(self.sampler, weights, version, left or Carryover())
        drawn = 0 if self.mixture is None else (left or Carryover()).texts + self.mixture.count
        return dataclasses.replace(
            batch,
            sampled=[],
            metrics={"kl": math.nan} | batch.metrics | modelled(self.run, batch.metrics),
            left=dataclasses.replace(batch.left, texts=drawn),
        )

    def let_go(self, left: Carryover | None) -> Carryover | None:
        """What later steps find where the policy goes back: no groups of the policy that it goes back from."""
        return None if left is None else dataclasses.replace(left, carried=(), unfinished=(), good=0.0, seen=0.0)

    def leaves(self, left: Carryover | None, following: Run) -> Carryover | None:
        """All of it where groups are sampled and scored as before; else what was not learned from is let go, and what
        streams and stored successes remember of tasks that are others."""
        run = self.run
        if left is None or same_groups(run, following):
            return left
        stream = stream_left(left.stream, left.cursor, run, following)
        successes = successes_left(left.successes, run, following)
        return dataclasses.replace(self.let_go(left), stream=stream, successes=successes)

    def samples(
        self, state: TrainState, batch: RolloutBatch, coefficients: Mapping[str, float]
    ) -> tuple[list[list[Sample]], dict[str, float]]:
        """Groups as the learner sees them: what each token is worth, and whether the loss counts it."""
        run = self.run
        models = {}
        if state.reference is not None:
            models["ref_logp"] = functools.partial(self.forward.by_sample, model_of(state, "reference"))
        if self.values is not None:
            models["values"] = functools.partial(self.values.by_sample, model_of(state, "critic"), output="values")
        algorithm = run.recipe.algorithm
        rewards = lagrangian(run.scoring.constraints, batch.groups, coefficients)
        if algorithm.advantage.several:
            algorithm, rewards = separately(algorithm, named(configs.rewards(run)), batch.groups)
        samples, measured = learner.to_samples(
            algorithm,
            batch.groups,
            batch.version,
            rewards,
            dropped_endings(run),
            self.forward.layout.completion_tokens,
            models,
            coefficients.get("kl_coef"),
            run.rollout.collect.learn_earlier,
        )
        if run.scoring.gate is not None:
            samples = gated(samples, batch.groups)
        teaching = [bool(np.any(advantage_of(sample))) for group in samples for sample in group]
        size = size_of_advantages(sample for group in samples for sample in group)
        completions = len(batch.groups) * run.rollout.group
        if self.mixture is not None:
            samples = self.mixture.mixed(samples, batch.left.texts)
        found = {"advantage/nonzero_fraction": float(np.mean(teaching)), "advantage/abs_mean": size}
        return samples, measured | found | {"completions": completions}


def tested(mixture: Mixture | None, policy: Decoder, found: tuple[Evaluated, ...]) -> Tested | None:
    """The evaluation, with the loss on texts where there are any."""
    numbers = {} if mixture is None else mixture.numbers(policy)
    return Tested(numbers, found) if numbers or found else None


def prepare(
    run: Run, model: Decoder, tokenizer: Any, mesh: Any, scorer: Scorer, progress: Progress, peers: Peers
) -> Reinforcement:
    """Read the task and build what samples, scores, learns and tests; nothing large is computed yet.

    Raises:
      InputError: data, rewards or prompts that the run cannot work with.
    """
    check_tokenizer(tokenizer, run.model)
    configs.validate_on_model(run, model.config)
    read = read_problems(run, progress.status)
    prints = problems_of(run, read)
    peers.check_same(f"problems of {run.task.label}", " ".join(found["order"] for found in prints.values()))
    prompts = tasks.Prompts(configs.tasks_in(run.task), tokenizer)
    test_prompts = tasks.Prompts(configs.tasks_in(read.tested), tokenizer)
    check_prompts(run, prompts, read.all_train)
    check_prompts(run, test_prompts, read.asked)
    scorer.tokenizer = tokenizer
    progress.status("calling each reward once")
    for problems in read.train:
        scorer.rehearse(problems[0], tokenizer)
    stops = model.config.tokens.eos
    asked = {one.label: known for known in (test_prompts, prompts) for one in known.tasks}
    scorer.models = judges_of(run, rollout_mesh(run.mesh), tokenizer, asked, progress.status)
    programs = build_programs(run, model, mesh, rollout_mesh(run.mesh), tokenizer)
    stream = streams_of(run, read.train)
    names = [objective.name for one in programs.training for objective in one.objectives]
    mixture, texts, dropped = mixture_of(run, tokenizer, stops, programs.forward, names, progress)
    source = GroupSource(tokenizer, prompts, stream, scorer, run.rollout.group, run.seed, run.recipe.shaping)
    answers = answering(run, stops)

    limits = configs.limits_of(configs.parts_of_task(read.tested), run.rollout.max_new_tokens)

    def test(weights: Decoder) -> tuple[Evaluated, ...]:
        if not read.asked:
            return ()
        asked = Questions(test_prompts, read.asked, run.evaluation.samples, run.seed, limits)
        return evaluate_tasks(programs.engine, weights, tokenizer, asked, scorer, answers, progress.status)

    return Reinforcement(
        training=programs.training,
        forward=programs.forward,
        label=run.task.label,
        problems=prints | texts,
        reference=configs.keeps_reference(run),
        coefficients=moved_by_rules(run),
        rules=rules_for(run),
        notes=[*read.notes, *dropped, *thoughts_judged(prompts, read), *about(run, read)],
        ahead=run.rollout.collect.staleness > 0,
        apart=run.mesh.rollout > 0 or mesh.size == 1,
        measures_kl=run.recipe.of_kl is not None,
        run=run,
        sampler=sampler_of(run, programs.engine, source, stops, progress.status),
        transfer=programs.weights,
        evaluation=test,
        values=programs.values,
        mixture=mixture,
        contest=contest_of(run, scorer, test_prompts, answers, peers),
    )


def about(run: Run, read: Problems) -> list[str]:
    """Lines for people: sizes, models that do not say what they were taught, and what the settings come to."""
    return [*sizes_of(run, read), *untold(run), *configs.notes(run)]


def check_ahead(before: Run, run: Run, model: ModelConfig, tokenizer: Any, status: Callable[[str], None]) -> None:
    """Refuse a phase that could not begin after the one before it, as ``prepare`` would, while there is nothing to
    lose: its problems are read, and its rewards called once.

    Raises:
      InputError: as ``prepare``.
    """
    configs.validate_on_model(run, model)
    if same_groups(before, run) and before.evaluation.task == run.evaluation.task:
        return
    read = read_problems(run, status)
    check_prompts(run, tasks.Prompts(configs.tasks_in(run.task), tokenizer), read.all_train)
    check_prompts(run, tasks.Prompts(configs.tasks_in(read.tested), tokenizer), read.asked)
    scoring = run.scoring
    with Scorer(configs.rewards(run), scoring.workers, scoring.timeout_s, watched=configs.watched(run)) as scorer:
        for problems in read.train:
            scorer.rehearse(problems[0], tokenizer)


def sampler_of(
    run: Run, engine: Engine, source: GroupSource, stops: tuple[int, ...], status: Callable[[str], None]
) -> Sampler:
    """What fills the run's steps with groups."""
    rollout = run.rollout
    reads, left_out = run.recipe.filter_groups, dropped_endings(run)
    admission = AdmissionPolicy(
        rollout.prompts, rollout.slots, rollout.max_new_tokens, reads, rollout.collect,
        configs.limits_of(configs.parts_of_task(run.task), rollout.max_new_tokens), left_out,
    )  # fmt: skip
    return Sampler(engine, source, rollout.sampling(stops, run.learner.keep_sampling_mask), admission, status)


def answering(run: Run, stops: tuple[int, ...]) -> Sampling:
    """How answers to the problems to test on are sampled."""
    evaluation = run.evaluation
    return dataclasses.replace(
        run.rollout.sampling(stops),
        temperature=evaluation.temperature,
        top_p=evaluation.top_p,
        top_k=0,
        repetition=None,
    )


def rules_for(run: Run) -> dict[str, Rule]:
    """What decides between this run's steps, by name; of several that stop it the first says why."""
    kl_coef, test = run.recipe.algorithm.kl_coef, configs.evaluation_key(run)
    rules = guards_of(run) | rules_of(run.recipe.resets, run.evaluation.every, kl_coef, test)
    if configs.keeps_reference(run):
        rules[BY_HAND] = ByHand(run.recipe.resets.mix, run.recipe.resets.snapshots)
    for one in run.scoring.constraints:
        rules[one.coefficient] = Multiplier(one.part, one.coefficient, one.limit, one.rate)
    if run.recipe.of_kl is not None:
        rules["controller"] = Controlled(run.recipe.of_kl)
    if run.recipe.of_entropy is not None:
        rules[OF_ENTROPY] = EntropyControlled(run.recipe.of_entropy)
    return rules


def dropped_endings(run: Run) -> tuple[str, ...]:
    """Finish reasons of the completions that the loss leaves out."""
    cut_off = ("length",) if run.recipe.drop_truncated else ()
    return cut_off if run.rollout.repetition.learn else (*cut_off, "repetition")
